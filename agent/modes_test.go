package agent

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/resolve"
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
		if len(problems) != 1 || problems[0].Reason != resolve.NotDirect || !strings.Contains(problems[0].Message, "the data plane "+m.Name) {
			t.Errorf("%s: %v", m.Name, problems)
		}
	}
}
