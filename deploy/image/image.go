package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// program is where the binary is in the image.
const program = "/usr/bin/fairlead"

// plugin is where the CNI plugin is in the image.
const plugin = "/usr/bin/fairlead-cni"

// unprivileged is the image's user: what gives an agent rights says so. The chart does.
const unprivileged = "65532:65532"

// Options say what an image is made of.
type Options struct {
	Binaries map[string]string // paths by architecture, as Go names it
	Plugins  map[string]string // likewise, of the CNI plugin; an architecture without one has none
	Base     string            // a reference or an OCI layout's folder; "": an empty one
	Name     string            // in the file
	Revision string
	Tools    bool   // put iptables of both variants into it
	Mirror   string // where packages come from
	Cache    string // a folder of packages that were fetched before
}

// machines are the architectures that an image can be for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// Build makes the image's index, with one image for each binary. The same binaries and base give the same digest.
func Build(ctx context.Context, o Options) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range slices.Sorted(maps.Keys(o.Binaries)) {
		platform := v1.Platform{OS: "linux", Architecture: arch}
		image, err := one(ctx, o, platform)
		if err != nil {
			return nil, fmt.Errorf("image for %s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image,
			Descriptor: v1.Descriptor{Platform: &platform}})
	}
	return index, nil
}

// one makes the image of one architecture.
func one(ctx context.Context, o Options, p v1.Platform) (v1.Image, error) {
	binary := o.Binaries[p.Architecture]
	files := []file{{program, binary}}
	if p := o.Plugins[p.Architecture]; p != "" {
		files = append(files, file{plugin, p})
	}
	for _, f := range files {
		if err := static(f.from, p.Architecture); err != nil {
			return nil, err
		}
	}
	below, err := base(ctx, o.Base, p)
	if err != nil {
		return nil, err
	}
	text, err := layer(files)
	if err != nil {
		return nil, err
	}
	texts := [][]byte{text}
	if o.Tools {
		tools, err := o.tools(ctx, p.Architecture)
		if err != nil {
			return nil, err
		}
		texts = [][]byte{tools, text}
	}
	image := below
	for _, text := range texts {
		added, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(text)), nil
		}, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, err
		}
		if image, err = mutate.AppendLayers(image, added); err != nil {
			return nil, err
		}
	}
	f, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	f = f.DeepCopy()
	f.OS, f.Architecture = p.OS, p.Architecture
	f.Config.Entrypoint, f.Config.Cmd, f.Config.User, f.Config.WorkingDir = []string{program}, nil, unprivileged, "/"
	if o.Tools && len(f.Config.Env) == 0 {
		f.Config.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	}
	if f.Config.Labels == nil {
		f.Config.Labels = map[string]string{}
	}
	maps.Copy(f.Config.Labels, o.labels())
	return mutate.ConfigFile(image, f)
}

// labels say what the image is (github.com/opencontainers/image-spec, annotations.md).
func (o Options) labels() map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       "fairlead",
		"org.opencontainers.image.description": "The node network for Kubernetes",
		"org.opencontainers.image.licenses":    "Apache-2.0",
		"org.opencontainers.image.revision":    o.Revision,
	}
}

// static returns what is wrong with a binary that must run on nothing but a kernel of that architecture.
func static(file, arch string) error {
	want, ok := machines[arch]
	if !ok {
		return fmt.Errorf("architecture %q: choose of %q", arch, slices.Sorted(maps.Keys(machines)))
	}
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	defer f.Close()
	if f.Machine != want {
		return fmt.Errorf("%s is for %v, not %v", file, f.Machine, want)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			return fmt.Errorf("%s is not static: build it with CGO_ENABLED=0", file)
		}
	}
	return nil
}

// base returns what the binary is put on.
func base(ctx context.Context, ref string, p v1.Platform) (v1.Image, error) {
	if ref == "" {
		return mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), nil
	}
	if l, err := layout.FromPath(ref); err == nil {
		return fromLayout(l, ref, p)
	} else if _, there := os.Stat(ref); !errors.Is(there, fs.ErrNotExist) {
		return nil, fmt.Errorf("base %s is no OCI layout: %w", ref, err)
	}
	r, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("base: %w", err)
	}
	return remote.Image(r, remote.WithContext(ctx), remote.WithPlatform(p),
		remote.WithAuthFromKeychain(authn.DefaultKeychain))
}

// fromLayout finds the image of a platform in a layout, whose index may hold it itself or in one below.
func fromLayout(l layout.Path, ref string, p v1.Platform) (v1.Image, error) {
	index, err := l.ImageIndex()
	if err != nil {
		return nil, err
	}
	for {
		m, err := index.IndexManifest()
		if err != nil {
			return nil, err
		}
		for _, d := range m.Manifests {
			if d.MediaType.IsImage() && d.Platform != nil && d.Platform.Satisfies(p) {
				return index.Image(d.Digest)
			}
		}
		if len(m.Manifests) != 1 || !m.Manifests[0].MediaType.IsIndex() {
			return nil, fmt.Errorf("base %s has no image for %s", ref, p)
		}
		if index, err = index.ImageIndex(m.Manifests[0].Digest); err != nil {
			return nil, err
		}
	}
}

// file is a program in the image.
type file struct{ to, from string }

// layer returns the tar file of programs and the folders above them, without times: the same programs are the same
// layer.
func layer(files []file) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, dir := range []string{"usr/", "usr/bin/"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}); err != nil {
			return nil, err
		}
	}
	for _, f := range files {
		text, err := os.ReadFile(f.from)
		if err == nil {
			err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.to[1:], Mode: 0o755, Size: int64(len(text))})
		}
		if err == nil {
			_, err = w.Write(text)
		}
		if err != nil {
			return nil, err
		}
	}
	err := w.Close() // writes the archive's end
	return b.Bytes(), err
}

// Write writes an index as a tar file of an OCI layout, which containerd, podman and skopeo read, and Docker from 25
// on.
func Write(index v1.ImageIndex, reference, file string) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(file), ".image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	names := map[string]string{"org.opencontainers.image.ref.name": reference, "io.containerd.image.name": reference}
	if err := l.AppendIndex(index, layout.WithAnnotations(names)); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".tar-")
	if err != nil {
		return err
	}
	defer f.Close()
	if err := pack(f, dir, filepath.Base(f.Name())); err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o644), os.Rename(f.Name(), file))
}

// pack writes a folder's files but one as a tar file.
func pack(to io.Writer, dir, but string) error {
	w := tar.NewWriter(to)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, path)
		if err != nil || e.IsDir() || rel == but {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: filepath.ToSlash(rel), Mode: 0o644,
			Size: int64(len(text))}); err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	})
	return errors.Join(err, w.Close())
}

// Push sends an index to a registry.
func Push(ctx context.Context, index v1.ImageIndex, reference string) error {
	r, err := name.ParseReference(reference)
	if err != nil {
		return fmt.Errorf("push: %w", err)
	}
	return remote.WriteIndex(r, index, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
}
