package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// TestPodsOutliveTheirRange has a node's podCIDR change: its pods still reach each other and are named in a problem,
// and a new one gets an address of the new range.
func TestPodsOutliveTheirRange(t *testing.T) {
	node, socket := netnstest.New(t), filepath.Join(t.TempDir(), "cni.sock")
	n, err := rangeNetwork(t, node, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	var pods []*netns.Namespace
	attach := func(name string) {
		t.Helper()
		pods = append(pods, netnstest.New(t))
		if err := attachPodAs(t.Context(), socket, "c-"+name, name, pods[len(pods)-1]); err != nil {
			t.Fatal(err)
		}
	}
	attach("a")
	attach("b")
	n.decide()
	if l := n.Problems().Node; len(l) > 0 {
		t.Errorf("problems before: %v", l)
	}
	changed := networkNode("a", "192.168.0.1", "10.244.9.0/24")
	n.decide(changed)
	attach("c")
	addresses := []string{"10.244.1.2", "10.244.1.3", "10.244.9.2"}
	for i, from := range pods {
		for k, to := range addresses {
			want := addresses[i]
			if i == 2 && k < 2 { // the old range is outside the cluster
				want = "192.168.0.1"
			}
			saw, err := awaitReply(t, from, netip.MustParseAddr(to))
			for end := time.Now().Add(20 * time.Second); err == nil && saw.String() != want && time.Now().Before(end); {
				saw, err = awaitReply(t, from, netip.MustParseAddr(to)) // what follows from the range is being written
			}
			if err != nil || saw.String() != want {
				t.Errorf("%s to %s: from %s, want %s, %v", addresses[i], to, saw, want, err)
			}
		}
	}
	for _, want := range []string{"shop/a (10.244.1.2), shop/b (10.244.1.3), which", "shop/b (10.244.1.3), which", ""} {
		n.decide()
		l := n.Problems().Node
		text := fmt.Sprint(l)
		if want == "" && len(l) > 0 || !strings.Contains(text, "addresses of "+want) && want != "" {
			t.Errorf("problems %s, want %q", text, want)
		}
		if len(l) > 0 && &l[0] != &n.Problems().Node[0] {
			t.Error("problems that stay the same are another slice")
		}
		container := map[bool]string{true: "c-a", false: "c-b"}[strings.Contains(want, "shop/a")]
		r := cni.Request{Command: cni.Del, Network: "fairlead",
			Attachment: cni.Attachment{Container: container, Interface: "eth0"}}
		if _, err := cni.Send(socket, r, nil, 20*time.Second); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNodeWithoutIPv6 has a dual-stack node with IPv6 switched off: its pods get IPv4 alone, and a problem says so.
// Once it is on, new ones have both.
func TestNodeWithoutIPv6(t *testing.T) {
	node, socket := netnstest.New(t), filepath.Join(t.TempDir(), "cni.sock")
	off := sysctl.Setting{Name: "net/ipv6/conf/all/disable_ipv6", Value: "1"}
	if err := sysctl.Set(node, off); err != nil {
		t.Fatal(err)
	}
	n, err := rangeNetwork(t, node, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	dual := networkNode("a", "192.168.0.1", "10.244.1.0/24")
	dual.Spec.PodCIDRs = append(dual.Spec.PodCIDRs, "fd00:1::/64")
	other := networkNode("b", "172.16.0.2", "10.244.2.0/24")
	other.Spec.PodCIDRs = append(other.Spec.PodCIDRs, "fd00:2::/64")
	for i, want := range [][]string{{"10.244.1.2"}, {"10.244.1.3", "fd00:1::2"}} {
		err := node.Do(func() error { return n.learn(t.Context(), []source.Object{dual, other}) })
		if err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprint(n.Problems().Node); strings.Contains(text, "IPv6 is off") != (i == 0) {
			t.Errorf("problems: %s", text)
		}
		pod := netnstest.New(t)
		if err := attachPodAs(t.Context(), socket, fmt.Sprint("c-", i), fmt.Sprint(i), pod); err != nil {
			t.Fatal(err)
		}
		a := n.Attached()[0]
		for _, b := range n.Attached() {
			if b.Pod == fmt.Sprint("shop/", i) {
				a = b
			}
		}
		if got := strings.Fields(strings.Trim(fmt.Sprint(a.Addresses), "[]")); !slices.Equal(got, want) {
			t.Errorf("pod has %v, want %v", got, want)
		}
		for _, to := range a.Addresses {
			if _, err := awaitReply(t, node, to); err != nil {
				t.Errorf("%s: %v", to, err)
			}
		}
		for plane, l := range n.Loops() {
			if l.Error != "" || len(l.Failing) > 0 {
				t.Errorf("data plane %s: %s %v", plane, l.Error, l.Failing)
			}
		}
		off.Value = "0"
		if err := sysctl.Set(node, off); err != nil {
			t.Fatal(err)
		}
	}
}

// rangeNetwork runs the pod network of node a in a network namespace.
func rangeNetwork(t *testing.T, node *netns.Namespace, socket string) (n *runningNetwork, err error) {
	err = node.Do(func() error {
		out, err := exec.Command("sh", "-ec", `ip link add eth0 type veth peer name x
			ip address add 192.168.0.1/24 dev eth0
			ip link set x up
			ip link set eth0 up`).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		n, err = openNetwork(NetworkOptions{Socket: socket, Boot: "x", Resolve: network.Config{Node: "a"},
			Records: filepath.Join(filepath.Dir(socket), "records")}, false,
			slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err != nil {
			return err
		}
		if err := n.learn(t.Context(), []source.Object{networkNode("a", "192.168.0.1", "10.244.1.0/24")}); err != nil {
			return errors.Join(err, n.Close())
		}
		return nil
	})
	return n, err
}
