package device

import (
	"path/filepath"
	"slices"
	"testing"

	"fairlead.dev/fairlead/bpf/service"
)

// Maps of other sizes have another layout.
func TestLayout(t *testing.T) {
	a, err := Layout(small)
	if err != nil {
		t.Fatal(err)
	}
	more := small
	more.Slots++
	if b, err := Layout(more); a == b || err != nil {
		t.Errorf("layouts %q and %q, %v", a, b, err)
	}
}

// Pins of state maps have the names that the version before gave them, when maps and structs had other names: an
// upgrade and a downgrade find each other's flows, sockets and clients.
func TestPinsAsBeforeRenames(t *testing.T) {
	want := []string{
		"addresses-2bcf1e1d", "affinity-aa63c25f", "connected-2ad3b5b6", "counted-559f83cf", "destinations-c9c3be56",
		"fl_masq_ranges-b09f9c16", "fl_node_udp-6bc23b51", "fl_policy_calls-5783482c", "fragments-e9696609", "homes-e68c635e",
		"lanes-b738c6e5", "loads-d3ddd5ee",
		"named-9ecf113e", "names-226f40b0", "packets-fc2e380d", "peers-c628e9a2", "ports-2bcf1e1d",
		"question-a7e19267", "sources-c9c3be56",
	}
	specs, err := mapSpecs(service.Sizes{Frontends: 16, Pools: 16, Slots: 64})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for name, m := range specs {
		path := pin("/fs/maps-0", m)
		if path == "/fs/maps-0" {
			t.Errorf("map %s has no name for its pin", name)
		}
		if len(name) > 15 {
			t.Errorf("the kernel cuts the name %s", name)
		}
		if filepath.Dir(path) == "/fs/state" {
			got = append(got, filepath.Base(path))
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("pins are\n%q, not\n%q", got, want)
	}
}
