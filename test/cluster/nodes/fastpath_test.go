package nodes

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// Packets between pods take the fast path on nodes with a kubelet, also where rules are listed by iptables.
func TestFastPath(t *testing.T) {
	name := fmt.Sprintf("fast%d", os.Getpid())
	a := up(t, name, "--", "--mode", "ebpf")
	a.serve(t)
	for _, node := range []string{"a", "b"} {
		if rules := a.on(t, node, "iptables-save"); !strings.Contains(rules, "-A INPUT -j KUBE-FIREWALL") {
			t.Errorf("kubelet on node %s has no rules: %s", node, rules)
		}
		a.redirects(t, node)
		for _, program := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
			for _, table := range []string{"filter", "mangle"} {
				a.on(t, node, program, "-t", table, "-L", "-n")
			}
		}
		a.redirects(t, node)
	}
}

// redirects waits until a node redirects packets to its pods, and would those of both families.
func (a api) redirects(t *testing.T, node string) {
	t.Helper()
	self, err := os.Executable()
	check(t, err)
	const redirected = `fairlead_packets_total{outcome="handed_over"}`
	read := func() map[string]float64 {
		series := map[string]float64{}
		for line := range strings.Lines(a.on(t, node, self, "page", "http://127.0.0.1:10249/metrics")) {
			if name, value, found := strings.Cut(strings.TrimSpace(line), " "); found && name != "#" {
				series[name], _ = strconv.ParseFloat(value, 64)
			}
		}
		return series
	}
	before := read()[redirected]
	until(t, "node "+node+" redirects packets", func(context.Context) error {
		now := read()
		if now[redirected] <= before || now[`fairlead_fast_path_enabled{ip_family="IPv4"}`] != 1 ||
			now[`fairlead_fast_path_enabled{ip_family="IPv6"}`] != 1 {
			return fmt.Errorf("%v packets were redirected, then %v: %v", before, now[redirected], hooks(now))
		}
		return nil
	})
}

// hooks returns the series that say what keeps packets off the fast path.
func hooks(series map[string]float64) (l []string) {
	for name, value := range series {
		if strings.HasPrefix(name, "fairlead_fast_path_") && value == 1 {
			l = append(l, name)
		}
	}
	return l
}
