package device

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// pinnedMaps makes maps in a folder of the test's own.
func pinnedMaps(t *testing.T) (folder string, m *Maps) {
	t.Helper()
	above := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	folder = filepath.Join(above, "maps")
	m, err := CreateMaps(folder, small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), os.RemoveAll(above)); err != nil {
			t.Error(err)
		}
	})
	return folder, m
}

// A map that others pinned in the place of one of ours is not used: none of another type, size or number of entries.
func TestPinsOfAnotherFormAreNotOurs(t *testing.T) {
	specs, err := mapSpecs(small)
	if err != nil {
		t.Fatal(err)
	}
	folder, _ := pinnedMaps(t)
	for _, name := range []string{deviceMapFlPools, deviceMapFlServices, deviceMapFlChanges, "fl_peer_names",
		deviceMapFlPortBits} {
		for what, change := range map[string]func(*ebpf.MapSpec){
			"fewer entries": func(m *ebpf.MapSpec) { m.MaxEntries = (m.MaxEntries + 1) / 2 },
			"more entries":  func(m *ebpf.MapSpec) { m.MaxEntries++ },
			"longer values": func(m *ebpf.MapSpec) { m.ValueSize += 8 },
			"another type":  func(m *ebpf.MapSpec) { m.Type, m.KeySize, m.Flags = ebpf.Hash, 4, 0 },
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				path, other := pin(folder, specs[name]), specs[name].Copy()
				other.Key, other.Value = nil, nil
				if change(other); other.MaxEntries == specs[name].MaxEntries && what == "fewer entries" {
					return // of one entry there are none fewer
				}
				m, err := ebpf.NewMap(other)
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				if err := errors.Join(os.Remove(path), m.Pin(path)); err != nil {
					t.Fatal(err)
				}
				if o, err := OpenMaps(folder, small); !bpf.Absent(err) || !errors.Is(err, bpf.ErrForm) {
					t.Errorf("opened: %v", err)
					if err == nil {
						o.Close()
					}
				}
				made, err := CreateMaps(folder, small)
				if err != nil {
					t.Fatal(err)
				}
				defer made.Close()
				again, err := OpenMaps(folder, small)
				if err != nil {
					t.Fatalf("made anew: %v", err)
				}
				again.Close()
			})
		}
	}
}

// A folder that others own or may write to is not used.
func TestFoldersOfOthersAreRefused(t *testing.T) {
	for what, change := range map[string]func(path string) error{
		"owner":      func(path string) error { return os.Chown(path, 65534, -1) },
		"mode":       func(path string) error { return os.Chmod(path, 0o777) },
		"group mode": func(path string) error { return os.Chmod(path, 0o720) },
	} {
		folder, _ := pinnedMaps(t)
		for _, path := range []string{folder, filepath.Dir(folder), filepath.Join(filepath.Dir(folder), bpf.StateFolder)} {
			if err := change(path); err != nil {
				t.Fatal(err)
			}
			if m, err := OpenMaps(folder, small); err == nil || bpf.Absent(err) || !strings.Contains(err.Error(), path) {
				t.Errorf("%s of %s: opened, %v", what, path, err)
				m.Close()
			}
			if m, err := CreateMaps(folder, small); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%s of %s: made, %v", what, path, err)
				m.Close()
			}
			if err := errors.Join(os.Chown(path, 0, 0), os.Chmod(path, 0o700)); err != nil {
				t.Fatal(err)
			}
		}
		if m, err := OpenMaps(folder, small); err != nil {
			t.Errorf("after %s was corrected: %v", what, err)
		} else {
			m.Close()
		}
	}
}
