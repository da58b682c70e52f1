package node

import (
	"bytes"
	"crypto/rand"
	"log/slog"
	"os/exec"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// Settings that keep Services from working are logged, those of bridges where pods are ports of one, and nothing once
// all is as it should be.
func TestConcerns(t *testing.T) {
	pod := "fltest-agt-" + strings.ToLower(rand.Text()[:6])
	ns, err := netns.New(pod)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(pod)
	defer ns.Close()
	netnstest.Do(t, func() {
		log := func(tracked bool) string {
			var b bytes.Buffer
			LogConcerns(slog.New(slog.NewTextHandler(&b, nil)), tracked)
			return b.String()
		}
		set := func(name, value string) {
			if _, _, err := sysctl.Ensure(name, value); err != nil {
				t.Error(err)
			}
		}
		set("net/ipv4/ip_forward", "0")
		set("net/ipv6/conf/all/disable_ipv6", "1")
		for _, want := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.disable_ipv6 is 1"} {
			if said := log(true); !strings.Contains(said, want) || strings.Contains(said, "bridge") {
				t.Errorf("%q is missing, or bridges are named without any: %s", want, said)
			}
		}
		set("net/ipv4/ip_forward", "1")
		set("net/ipv6/conf/all/disable_ipv6", "0")
		if said := log(true); said != "" {
			t.Errorf("nothing is wrong, but it says: %s", said)
		}
		for _, args := range []string{"link add br9 type bridge", "link add v9 type veth peer name p9",
			"link set v9 master br9", "link set p9 netns " + pod} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				t.Errorf("ip %s: %v: %s", args, err, out)
			}
		}
		here, err := value("net/bridge/bridge-nf-call-iptables")
		if said := log(true); (here == "1") == strings.Contains(said, "bridges=br9") {
			t.Errorf("bridge-nf-call-iptables is %q, %v, and it says: %s", here, err, said)
		}
		if here != "" {
			set("net/bridge/bridge-nf-call-iptables", "0")
			set("net/bridge/bridge-nf-call-ip6tables", "1")
			if said := log(true); strings.Count(said, "bridges=br9") != 1 {
				t.Errorf("of two settings one is off, and it says: %s", said)
			}
		}
		if said := log(false); said != "" {
			t.Errorf("nothing is tracked, but it says: %s", said)
		}
	})
}
