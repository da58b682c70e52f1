package agent

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// A mode that can't have the nodes of endpoints answer clients says so by its name, and is no reason not to begin.
func TestDirectServerReturnIsRefusedByName(t *testing.T) {
	for _, m := range Modes() {
		c := m.Resolve(resolve.Config{Node: "a", DirectServerReturn: true})
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		problems := resolve.New(c).Problems()
		if m.Name == "ebpf" && ebpf.Packets() {
			if len(problems) > 0 {
				t.Errorf("%s: %v", m.Name, problems)
			}
			continue
		}
		if len(problems) != 1 || problems[0].Reason != resolve.NotDirect || !strings.Contains(problems[0].Message, "data plane "+m.Name) {
			t.Errorf("%s: %v", m.Name, problems)
		}
	}
}

// What Services may take in mode ebpf is what its maps hold, less some room for changes; other modes have resolve's
// own bounds.
func TestLimitsFollowMaps(t *testing.T) {
	m, err := ModeOf("ebpf")
	if err != nil {
		t.Fatal(err)
	}
	small := m.EBPF(ebpf.Options{Sizes: ebpf.Room(8000)}).Resolve(resolve.Config{})
	if l := small.Limits.Total; l.Frontends < 900 || l.Frontends >= 1000 || l.Slots < 7000 || l.Slots >= 8000 {
		t.Errorf("8000 slots: %+v", l)
	}
	given := m.Resolve(resolve.Config{Limits: resolve.Limits{Total: resolve.Bounds{Frontends: 7}}})
	if l := given.Limits.Total; l.Frontends != 7 || l.Slots >= ebpf.DefaultRoom || given.TableEntriesPerSlot < 2 {
		t.Errorf("with a limit: %+v", given)
	}
	m, _ = ModeOf("nftables")
	if l := m.Resolve(resolve.Config{}).Limits.Total; l != resolve.DefaultLimits.Total {
		t.Errorf("nftables: %+v", l)
	}
}
