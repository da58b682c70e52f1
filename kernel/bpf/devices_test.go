package bpf

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
)

// Every program for packets passes this kernel's verifier.
func TestLoadForDevices(t *testing.T) {
	folder := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	m, err := CreateMaps(filepath.Join(folder, "maps"), small)
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	defer m.Close()
	p, err := m.LoadForDevices()
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) {
		err = fmt.Errorf("%+v", refused) // the whole log
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
}
