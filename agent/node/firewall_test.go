package node

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Chains of both variants of iptables and of nf_tables whose policy drops forwarded packets are found, and no others.
func TestFirewallDropping(t *testing.T) {
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))
	netnstest.Do(t, func() {
		f, err := OpenFirewall()
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		expect := func(want ...string) {
			t.Helper()
			slices.Sort(want)
			ended := make(chan struct{})
			go func() { // on a thread of another namespace
				defer close(ended)
				l, err := f.Dropping()
				if slices.Sort(l); err != nil || !slices.Equal(l, want) {
					t.Errorf("%q drop, %v; want %q", l, err, want)
				}
			}()
			<-ended
		}
		run := func(command string) {
			t.Helper()
			args := strings.Fields(command)
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", command, err, out)
			}
		}
		expect()
		var want []string
		for _, c := range []string{"iptables", "ip6tables"} {
			run(c + "-legacy -P INPUT DROP")
			run(c + "-legacy -A FORWARD -j ACCEPT")
			run(c + "-nft -P INPUT DROP")
		}
		expect()
		for _, c := range []struct{ drop, list string }{
			{"iptables-legacy -P FORWARD DROP", "iptables-legacy -S FORWARD"},
			{"ip6tables-legacy -P FORWARD DROP", "ip6tables-legacy -S FORWARD"},
			{"iptables-nft -P FORWARD DROP", "nft list chain ip filter FORWARD"},
			{"ip6tables-nft -P FORWARD DROP", "nft list chain ip6 filter FORWARD"},
			{"nft add table inet mine; add chain inet mine f { type filter hook forward priority 0 ; policy drop ; }",
				"nft list chain inet mine f"},
		} {
			run(c.drop)
			want = append(want, c.list)
			expect(want...)
		}
	})
}
