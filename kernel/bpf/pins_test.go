package bpf

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"
)

// A map that others pinned in the place of one of ours is not used: none of another type, size or number of entries.
func TestPinsOfAnotherFormAreNotOurs(t *testing.T) {
	specs, err := mapSpecs(small)
	if err != nil {
		t.Fatal(err)
	}
	folder, _ := pinnedMaps(t)
	for _, name := range []string{serviceMapPools, serviceMapFrontends, packetsMapChanges, serviceMapNames, packetsMapPorts} {
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
				if o, err := OpenMaps(folder, small); !Absent(err) || !errors.Is(err, ErrForm) {
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
