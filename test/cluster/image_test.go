package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// imageDir is where shipped puts the image.
var imageDir string

// shipped returns the container image that `make image` builds, unpacked.
var shipped = sync.OnceValues(func() (image, error) { return unpack(os.Getenv("FAIRLEAD_IMAGE"), imageDir) })

// built returns the path of a program that the Makefile builds, from the environment.
func built(t testing.TB, variable string) string {
	t.Helper()
	path := os.Getenv(variable)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s must be the path of a file: %v: run `make -C test/cluster test`, which builds it", variable, err)
	}
	return path
}

// image is an image's files, and how they are run.
type image struct {
	root            string
	Env, Entrypoint []string
}

// descriptor names a blob of an OCI layout.
type descriptor struct{ Digest string }

// unpack writes the files of an image to a folder: of an OCI layout in a tar file, with one image for one architecture.
// Layers are only added, as deploy/image makes them.
func unpack(file, dir string) (i image, err error) {
	i.root = filepath.Join(dir, "root")
	if err := untar(file, filepath.Join(dir, "layout")); err != nil {
		return i, err
	}
	blob := func(d descriptor) string {
		return filepath.Join(dir, "layout/blobs", strings.Replace(d.Digest, ":", "/", 1))
	}
	read := func(path string, into any) {
		var text []byte
		if err == nil {
			text, err = os.ReadFile(path)
		}
		if err == nil {
			err = json.Unmarshal(text, into)
		}
	}
	var index struct{ Manifests [1]descriptor }
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	var config struct{ Config *image }
	config.Config = &i
	read(filepath.Join(dir, "layout/index.json"), &index)
	read(blob(index.Manifests[0]), &index) // of architectures
	read(blob(index.Manifests[0]), &manifest)
	read(blob(manifest.Config), &config)
	for _, l := range manifest.Layers {
		if err == nil {
			err = untar(blob(l), i.root)
		}
	}
	return i, err
}

// untar unpacks a tar file, which may be compressed.
func untar(file, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if out, err := exec.Command("tar", "-C", dir, "-xf", file).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", file, err, out)
	}
	return nil
}
