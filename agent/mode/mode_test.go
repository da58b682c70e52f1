package mode

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// A mode that can't have the nodes of endpoints answer clients says so by its name, and is no reason not to begin.
func TestUnsupportedDSRIsReported(t *testing.T) {
	for _, m := range All() {
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
		if len(problems) != 1 || problems[0].Reason != resolve.DSRUnavailable ||
			!strings.Contains(problems[0].Message, "data plane "+m.Name) {
			t.Errorf("%s: %v", m.Name, problems)
		}
	}
}

// What Services may take in mode ebpf is what its maps hold, less some room for changes; other modes have resolve's
// own bounds.
func TestLimitsFollowMaps(t *testing.T) {
	m, err := Of("ebpf")
	if err != nil {
		t.Fatal(err)
	}
	small := m.With(Options{MapEntries: 8000}).Resolve(resolve.Config{})
	if l := small.Limits.Total; l.Frontends < 900 || l.Frontends >= 1000 || l.Slots < 7000 || l.Slots >= 8000 {
		t.Errorf("8000 slots: %+v", l)
	}
	withLimits := m.Resolve(resolve.Config{Limits: resolve.Limits{Total: resolve.Bounds{Frontends: 7}}})
	if l := withLimits.Limits.Total; l.Frontends != 7 || l.Slots >= DefaultMapEntries ||
		withLimits.Capabilities.TableEntriesPerSlot < 2 {
		t.Errorf("with a limit: %+v", withLimits)
	}
	m, _ = Of("nftables")
	if l := m.Resolve(resolve.Config{}).Limits.Total; l != resolve.DefaultLimits.Total {
		t.Errorf("nftables: %+v", l)
	}
}

// Only what translates at sockets can serve pods whose packets bypass the node's network stack; no policy engine can.
func TestModesAndEnginesRefuseIPVLAN(t *testing.T) {
	for _, m := range All() {
		for _, k := range []model.DeviceKind{model.Veth, model.Netkit, model.IPVLANL2, model.IPVLANL3} {
			err := m.Serves(k)
			if want := k.IPVLAN() && m.Name != "ebpf"; (err != nil) != want ||
				want && !strings.Contains(err.Error(), "mode "+m.Name+" can't serve pods with network.device "+k.String()) {
				t.Errorf("mode %s, device %s: %v", m.Name, k, err)
			}
			for _, e := range Engines() {
				if err := e.Serves(k); (err != nil) != k.IPVLAN() {
					t.Errorf("engine %s, device %s: %v", e.Name, k, err)
				}
			}
		}
	}
}

// Remarks are found by their IDs: each mode has one of a kind.
func TestRemarksHaveIDs(t *testing.T) {
	for _, m := range All() {
		for _, remarks := range [][]model.Remark{m.Remarks, m.Unserved, m.Long, m.Unmatched} {
			seen := map[string]bool{"": true}
			for _, n := range remarks {
				if seen[n.ID] || n.Text == "" {
					t.Errorf("%s: the ID %q of %q is empty or another's", m.Name, n.ID, n.Text)
				}
				seen[n.ID] = true
			}
		}
	}
}
