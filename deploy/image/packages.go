package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ulikunitz/xz"
)

// Debian is where packages come from unless another mirror is named.
const Debian = "https://deb.debian.org/debian"

//go:embed packages.lock
var lock string

// Package is a Debian package, pinned by its digest.
type Package struct{ Arch, Name, Version, SHA256, Path string }

// Packages returns those of an architecture, as packages.lock has them.
func Packages(arch string) (l []Package, err error) {
	for line := range strings.Lines(lock) {
		f := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "#"):
		case len(f) != 5:
			return nil, fmt.Errorf("packages.lock: %q: write architecture, name, version, SHA-256 and path", line)
		case f[0] == arch:
			l = append(l, Package{f[0], f[1], f[2], f[3], f[4]})
		}
	}
	return l, nil
}

// fetch returns a package's file, from a folder of files that were fetched before or from a mirror, and checks its
// digest.
func (p Package) fetch(ctx context.Context, mirror, cache string) ([]byte, error) {
	file := filepath.Join(cache, path.Base(p.Path))
	if text, err := os.ReadFile(file); err == nil && p.is(text) {
		return text, nil
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, mirror+"/"+p.Path, nil)
	if err != nil {
		return nil, err
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("fetch %s %s: %w", p.Name, p.Version, err)
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("fetch %s: %s: a mirror drops a version that has a newer one: name one that keeps it "+
			"by --mirror, or bring packages.lock up to date", request.URL, reply.Status)
	}
	text, err := io.ReadAll(io.LimitReader(reply.Body, 64<<20))
	if err != nil {
		return nil, fmt.Errorf("fetch %s: %w", request.URL, err)
	}
	if !p.is(text) {
		return nil, fmt.Errorf("%s: its SHA-256 is not that of packages.lock, %s", request.URL, p.SHA256)
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	return text, os.WriteFile(file, text, 0o644)
}

// is reports whether text is the package's file.
func (p Package) is(text []byte) bool {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]) == p.SHA256
}

// Tools returns a layer of the packages of an architecture: programs, libraries and licences, without times.
func (o Options) tools(ctx context.Context, arch string) ([]byte, error) {
	l, err := Packages(arch)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	folders := map[string]bool{}
	for _, p := range l {
		text, err := p.fetch(ctx, o.Mirror, o.Cache)
		if err != nil {
			return nil, err
		}
		data, err := contents(text)
		if err == nil {
			err = copyFiles(w, data, folders)
		}
		if err != nil {
			return nil, fmt.Errorf("unpack %s %s: %w", p.Name, p.Version, err)
		}
	}
	err = w.Close() // writes the archive's end
	return b.Bytes(), err
}

// contents returns the tar file of a Debian package's files (deb(5): an ar archive with a member data.tar.xz).
func contents(deb []byte) (io.Reader, error) {
	const magic, header = "!<arch>\n", 60
	if !bytes.HasPrefix(deb, []byte(magic)) {
		return nil, errors.New("not an ar archive")
	}
	for at := len(magic); at+header <= len(deb); {
		name := strings.TrimRight(string(deb[at:at+16]), " /")
		size, err := strconv.Atoi(strings.TrimSpace(string(deb[at+48 : at+58])))
		if at += header; err != nil || size < 0 || at+size > len(deb) {
			return nil, fmt.Errorf("member %q: invalid size", name)
		}
		if name == "data.tar.xz" {
			return xz.NewReader(bufio.NewReader(bytes.NewReader(deb[at : at+size])))
		}
		at += size + size%2
	}
	return nil, errors.New("no member data.tar.xz")
}

// copyFiles writes the files of a package that the image needs, and the folders above them once.
func copyFiles(to *tar.Writer, from io.Reader, folders map[string]bool) error {
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if h.Typeflag == tar.TypeDir || !wanted(name) {
			continue
		}
		if h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeSymlink {
			return fmt.Errorf("%s: a file of type %q", name, h.Typeflag)
		}
		if err := makeFolders(to, path.Dir(name), folders); err != nil {
			return err
		}
		mode := h.Mode & 0o755 // nothing is setuid or writable by all
		if err := to.WriteHeader(&tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: mode,
			Size: h.Size}); err != nil {
			return err
		}
		if _, err := io.Copy(to, r); err != nil {
			return err
		}
	}
}

// wanted reports whether the image needs a file: programs of iptables, libraries, and licences.
func wanted(name string) bool {
	switch {
	case strings.Contains(name, "/gconv/"), strings.Contains(name, "/audit/"):
		return false
	case strings.HasPrefix(name, "usr/share/doc/"):
		return path.Base(name) == "copyright"
	}
	for _, begin := range []string{"lib/", "lib64/", "usr/lib/", "usr/sbin/"} {
		if strings.HasPrefix(name, begin) {
			return true
		}
	}
	return false
}

// makeFolders writes a folder and those above it that are not there yet.
func makeFolders(to *tar.Writer, dir string, made map[string]bool) error {
	if dir == "." || made[dir] {
		return nil
	}
	if err := makeFolders(to, path.Dir(dir), made); err != nil {
		return err
	}
	made[dir] = true
	return to.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755})
}
