package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"fairlead.dev/fairlead/deploy"
)

// archs are those that the image is made for.
var archs = []string{"amd64", "arm64"}

// binaries returns the shipped binaries, which `make image` in the root builds.
func binaries(t *testing.T) map[string]string {
	t.Helper()
	b := map[string]string{}
	for _, a := range archs {
		b[a] = "../../bin/fairlead-linux-" + a
		if _, err := os.Stat(b[a]); err != nil {
			t.Fatalf("%v: run `make test-deploy` in the root, which builds it", err)
		}
	}
	return b
}

// plugins returns the shipped CNI plugins.
func plugins(t *testing.T) map[string]string {
	t.Helper()
	p := map[string]string{}
	for _, a := range archs {
		p[a] = "../../bin/fairlead-cni-linux-" + a
		if _, err := os.Stat(p[a]); err != nil {
			t.Fatalf("%v: run `make test-deploy` in the root, which builds it", err)
		}
	}
	return p
}

func build(t *testing.T, o Options) v1.ImageIndex {
	t.Helper()
	index, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return index
}

// of returns an index's image of an architecture.
func of(t *testing.T, index v1.ImageIndex, arch string) v1.Image {
	t.Helper()
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range m.Manifests {
		if d.Platform != nil && d.Platform.Architecture == arch {
			i, err := index.Image(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			return i
		}
	}
	t.Fatalf("no image for %s in %+v", arch, m)
	return nil
}

// unpack writes a tar file's files to a folder.
func unpack(t *testing.T, r io.Reader, dir string) (names []string) {
	t.Helper()
	for a := tar.NewReader(r); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			return names
		} else if err != nil {
			t.Fatal(err)
		}
		names = append(names, fmt.Sprintf("%s %o", h.Name, h.Mode))
		path := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeSymlink {
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(h.Linkname, path)); err != nil {
				t.Fatal(err)
			}
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		text, err := io.ReadAll(a)
		if err = errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, text, os.FileMode(h.Mode))); err != nil {
			t.Fatal(err)
		}
	}
}

// The tar file is an OCI layout of an image for each architecture, which holds one static program that runs.
func TestFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "image.tar")
	o := Options{Binaries: binaries(t), Plugins: plugins(t), Revision: "abc"}
	if err := Write(build(t, o), "fairlead:test", file); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dir := t.TempDir()
	unpack(t, f, dir)
	l, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	outer, err := l.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	m, err := outer.IndexManifest()
	if err != nil || len(m.Manifests) != 1 || m.Manifests[0].Annotations["io.containerd.image.name"] != "fairlead:test" {
		t.Fatalf("the layout holds %+v, %v", m, err)
	}
	index, err := outer.ImageIndex(m.Manifests[0].Digest)
	if err = errors.Join(err, validate.Index(index)); err != nil {
		t.Fatal(err)
	}
	for _, arch := range archs {
		t.Run(arch, func(t *testing.T) { checkImage(t, of(t, index, arch), arch) })
	}
}

// checkImage checks an image's configuration and files, and runs its program where this machine can.
func checkImage(t *testing.T, i v1.Image, arch string) {
	c, err := i.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c.OS != "linux" || c.Architecture != arch || c.Config.User != "65532:65532" || len(c.Config.Entrypoint) != 1 ||
		c.Config.Entrypoint[0] != program {
		t.Errorf("configuration: %+v", c)
	}
	if l := c.Config.Labels; l["org.opencontainers.image.revision"] != "abc" ||
		l["org.opencontainers.image.licenses"] != "Apache-2.0" {
		t.Errorf("labels: %v", l)
	}
	root := t.TempDir()
	files := mutate.Extract(i)
	defer files.Close()
	if names := unpack(t, files, root); strings.Join(names, ", ") != "usr 755, usr/bin 755, usr/bin/fairlead 755, "+
		"usr/bin/fairlead-cni 755" {
		t.Errorf("files: %q", names)
	}
	at := filepath.Join(root, program)
	if err := errors.Join(static(at, arch), static(filepath.Join(root, plugin), arch)); err != nil {
		t.Error(err)
	}
	if arch != runtime.GOARCH {
		return // static() has looked at it: nothing here runs it
	}
	for _, args := range [][]string{{"--version"}, {"modes"}} {
		// With nothing below it but the image: a program that needs a library, or a file, shows it here.
		out, err := exec.Command("chroot", append([]string{root, program}, args...)...).CombinedOutput()
		if err != nil || len(out) == 0 {
			t.Errorf("fairlead %v: %v: %s: this takes root", args, err, out)
		}
	}
	// Not below chroot: it copies itself by /proc, which every container has and this folder hasn't.
	out, err := exec.Command(filepath.Join(root, plugin), "install", root).CombinedOutput()
	link, failed := os.Readlink(filepath.Join(root, "loopback"))
	if err = errors.Join(err, failed, static(filepath.Join(root, "fairlead-cni"), arch)); err != nil ||
		link != "fairlead-cni" {
		t.Errorf("fairlead-cni install: %v: %s", err, out)
	}
}

// The same input is the same image, and other input another one.
func TestReproducible(t *testing.T) {
	digest := func(o Options) string {
		d, err := build(t, o).Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	o := Options{Binaries: binaries(t), Revision: "abc"}
	first := digest(o)
	if second := digest(o); second != first {
		t.Errorf("%s, then %s", first, second)
	}
	o.Revision = "abd"
	if digest(o) == first {
		t.Error("another revision has the same digest")
	}
}

// What would not run is refused.
func TestRejections(t *testing.T) {
	dynamic, err := exec.LookPath("tar")
	if err != nil {
		t.Fatal(err)
	}
	b := binaries(t)
	for want, o := range map[string]Options{
		"is not static":      {Binaries: map[string]string{runtime.GOARCH: dynamic}},
		"is for EM_X86_64":   {Binaries: map[string]string{"arm64": b["amd64"]}},
		`architecture "z80"`: {Binaries: map[string]string{"z80": b["amd64"]}},
		"no OCI layout":      {Binaries: b, Base: t.TempDir()},
		"no such file":       {Binaries: map[string]string{"amd64": "nowhere"}},
	} {
		if _, err := Build(context.Background(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want one that says %q", err, want)
		}
	}
}

// A base's files stay, from a layout and from a registry; what is pushed is what was built.
func TestBaseAndPush(t *testing.T) {
	index := mutate.AppendManifests(empty.Index)
	for _, arch := range archs {
		i, err := random.Image(100, 2)
		if err != nil {
			t.Fatal(err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: i,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	dir := t.TempDir()
	if _, err := layout.Write(dir, index); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer s.Close()
	at := strings.TrimPrefix(s.URL, "http://")
	if err := Push(t.Context(), index, at+"/base:1"); err != nil {
		t.Fatal(err)
	}
	for _, base := range []string{dir, at + "/base:1"} {
		built := build(t, Options{Binaries: binaries(t), Base: base})
		layers, err := of(t, built, "arm64").Layers()
		if err != nil || len(layers) != 3 {
			t.Errorf("on %s: %d layers, %v", base, len(layers), err)
		}
		if err := Push(t.Context(), built, at+"/fairlead:1"); err != nil {
			t.Fatal(err)
		}
		r, err := name.ParseReference(at + "/fairlead:1")
		if err != nil {
			t.Fatal(err)
		}
		pulled, err := remote.Index(r)
		if err != nil {
			t.Fatal(err)
		}
		is, _ := pulled.Digest()
		if want, _ := built.Digest(); is != want {
			t.Errorf("pulled %s, built %s", is, want)
		}
	}
}

// What is imported from the file is what the chart's pods ask for.
func TestNameIsTheCharts(t *testing.T) {
	text, err := deploy.Render("../chart", deploy.Release{Name: "fairlead", Set: []string{"apiServer.host=192.0.2.10"}})
	if err != nil {
		t.Fatal(err)
	}
	file, err := name.ParseReference(usual)
	if err != nil {
		t.Fatal(err)
	}
	images := regexp.MustCompile(`(?m)^ *image: (.*)$`).FindAllStringSubmatch(text, -1)
	for _, a := range images {
		r, err := name.ParseReference(a[1])
		if err != nil || r.Name() != file.Name() {
			t.Errorf("a pod asks for %s, which is %v, %v; the file has %s", a[1], r, err, usual)
		}
	}
	if len(images) == 0 {
		t.Errorf("no image is asked for:\n%s", text)
	}
}

// TestMakeNamesEachArchitecture reads what `make image` would run.
func TestMakeNamesEachArchitecture(t *testing.T) {
	out, err := exec.Command("make", "-n", "-C", "../..", "image").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"--binary amd64=../bin/fairlead-linux-amd64",
		"--binary arm64=../bin/fairlead-linux-arm64", "--plugin amd64=../bin/fairlead-cni-linux-amd64",
		"--plugin arm64=../bin/fairlead-cni-linux-arm64"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %s in %s", want, out)
		}
	}
}
