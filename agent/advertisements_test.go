package agent

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/ipv6"

	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/resolve/network"
)

// wired is a node with a router on each of its wires, which sends router advertisements (RFC 4861).
type wired struct {
	*testing.T
	node, router *netns.Namespace
}

func newWired(t *testing.T) wired {
	w := wired{t, netnstest.New(t), netnstest.New(t)}
	if err := sysctl.Set(w.node, sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "0"},
		sysctl.Setting{Name: "net/ipv6/conf/default/accept_ra", Value: "1"}); err != nil {
		t.Fatal(err)
	}
	return w
}

// wire adds a device to the node, with a router behind it that sends router advertisements until the test ends.
func (w wired) wire(device, address string) {
	w.Helper()
	w.run(w.node, strings.NewReplacer("DEV", device, "ROUTER", w.router.Name, "ADDRESS", address).Replace(`
		ip link add DEV type veth peer name to-DEV netns ROUTER
		sysctl -qw net.ipv6.conf.DEV.accept_dad=0
		ip -n ROUTER link set to-DEV up
		ip -n ROUTER address add fe80::1/64 dev to-DEV nodad
		ip address add ADDRESS dev DEV
		ip link set DEV up`))
	var c net.PacketConn
	err := w.router.Do(func() (err error) {
		if c, err = net.ListenPacket("ip6:ipv6-icmp", "fe80::1%to-"+device); err != nil {
			return err
		}
		return ipv6.NewPacketConn(c).SetMulticastHopLimit(255) // else they are ignored
	})
	if err != nil {
		w.Fatal(err)
	}
	ended := make(chan struct{})
	w.Cleanup(func() { c.Close(); <-ended })
	go func() {
		defer close(ended)
		to := &net.IPAddr{IP: net.IPv6linklocalallnodes, Zone: "to-" + device}
		for { // until it is closed
			if _, err := c.WriteTo(advertisement, to); err != nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
}

// advertisement is one of a router for 30 s, with prefix 2001:db8:aa::/64 for 60 s. The kernel adds its checksum.
var advertisement = append([]byte{134, 0, 0, 0, 64, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0, 0,
	3, 4, 64, 0xc0, 0, 0, 0, 60, 0, 0, 0, 60, 0, 0, 0, 0}, net.ParseIP("2001:db8:aa::")...)

func (w wired) run(ns *netns.Namespace, script string) string {
	w.Helper()
	var out []byte
	err := ns.Do(func() (err error) {
		out, err = exec.Command("sh", "-ec", script).CombinedOutput()
		return err
	})
	if err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// routed waits until the node has a default route and an address by the router advertisements of a device, of which it
// had none.
func (w wired) routed(when, device string) {
	w.Helper()
	w.run(w.node, fmt.Sprintf("ip -6 route flush proto ra dev %s; ip -6 address flush dev %[1]s dynamic", device))
	for end := time.Now().Add(20 * time.Second); !w.has(device); {
		if time.Now().After(end) {
			w.Fatalf("%s: no default route and address by router advertisements of %s: %s", when, device,
				w.run(w.node, "ip -6 route; ip -6 address; grep . /proc/sys/net/ipv6/conf/*/accept_ra"))
		}
	}
}

// has reports whether the node has a default route and an address by the router advertisements of a device.
func (w wired) has(device string) bool {
	return strings.Contains(w.run(w.node, "ip -6 route show default dev "+device), "via fe80::1 proto ra") &&
		strings.Contains(w.run(w.node, "ip -6 address show dynamic dev "+device), "2001:db8:aa:")
}

func (w wired) setting(name, want string) {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		v, err := sysctl.Get(w.node, "net/ipv6/conf/"+name)
		if v == want {
			return
		}
		if time.Now().After(end) {
			w.Fatalf("%s is %q, want %s, %v", name, v, want, err)
		}
	}
}

// dualNode is a node with ranges of both families.
func dualNode() sourceOf {
	o := networkNode("a", "192.168.0.1", "10.244.1.0/24")
	o.Spec.PodCIDRs = append(o.Spec.PodCIDRs, "fd00:1::/64")
	return sourceOf{o}
}

// TestRouterAdvertisementsAreAccepted has a node have its default route and addresses by router advertisements: before
// the agent has it forward IPv6, then, and once that was removed.
func TestRouterAdvertisementsAreAccepted(t *testing.T) {
	w := newWired(t)
	w.wire("eth0", "192.168.0.1/24")
	w.wire("eth1", "192.168.1.1/24")
	w.wire("off", "192.168.2.1/24")
	w.run(w.node, "sysctl -qw net.ipv6.conf.off.accept_ra=0")
	w.routed("before", "eth0")
	w.routed("before", "eth1")
	file := filepath.Join(t.TempDir(), node.AdvertisementsFile)
	t.Run("agent", func(t *testing.T) {
		w := wired{t, w.node, w.router}
		startAgentWith(t, w.node, "nftables", dualNode(), NetworkOptions{Resolve: network.Config{Node: "a"},
			AdvertisementsFile: file})
		w.setting("all/forwarding", "1")
		if !w.has("eth0") || !w.has("eth1") {
			t.Error("routes and addresses by router advertisements went as the node began to forward")
		}
		w.routed("forwarding", "eth0")
		w.routed("forwarding", "eth1")
		w.wire("later", "192.168.3.1/24")
		w.routed("a device that came later", "later")
		w.setting("off/accept_ra", "0")
	})
	w.run(w.node, "ip link delete eth1")
	for range 2 {
		if err := w.node.Do(func() error { return node.RestoreAdvertisements(file) }); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"all/forwarding": "0", "eth0/accept_ra": "1", "later/accept_ra": "1",
		"off/accept_ra": "0"} {
		w.setting(name, want)
	}
	w.routed("put back", "eth0")
}

// TestRouterAdvertisementsAreIgnored has an agent that can't record what it changes: a problem says which devices lose
// what they have by router advertisements, and goes once it can.
func TestRouterAdvertisementsAreIgnored(t *testing.T) {
	w := newWired(t)
	w.wire("eth0", "192.168.0.1/24")
	w.run(w.node, `ip link add idle type veth peer name other
		ip address add 192.168.9.1/24 dev idle
		ip link set idle up`)
	w.routed("before", "eth0")
	file := filepath.Join(t.TempDir(), node.AdvertisementsFile)
	if err := os.Mkdir(file+".new", 0o700); err != nil { // so that it can't be written
		t.Fatal(err)
	}
	err := w.node.Do(func() error {
		n, err := openNetwork(NetworkOptions{Socket: filepath.Join(t.TempDir(), "cni.sock"), Boot: "x",
			Resolve: network.Config{Node: "a"}, Records: t.TempDir(),
			AdvertisementsFile: file}, false, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		defer n.Close()
		if err := n.learn(t.Context(), dualNode()); err != nil {
			return err
		}
		if text := fmt.Sprint(n.Problems().Node); !strings.Contains(text, "RouterAdvertisements") ||
			!strings.Contains(text, "net.ipv6.conf.eth0.accept_ra") || strings.Contains(text, "idle") {
			t.Errorf("problems: %s", text)
		}
		if err := os.Remove(file + ".new"); err != nil {
			return err
		}
		if n.decide(); len(n.Problems().Node) > 0 {
			t.Errorf("problems: %v", n.Problems())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.routed("recorded", "eth0")
}
