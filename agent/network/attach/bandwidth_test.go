package attach

import (
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// limit has a runtime pass on a pod's bandwidth, as containerd does: with a burst of half a gigabyte.
func (p *pod) limit(ingress, egress uint64) {
	p.conf.CapabilityArgs = map[string]any{"bandwidth": map[string]uint64{"ingressRate": ingress, "egressRate": egress,
		"ingressBurst": 1<<32 - 1, "egressBurst": 1<<32 - 1}}
}

// stream sends bytes by TCP from one network namespace to another and returns how long they took.
func (n *node) stream(from, to *netns.Namespace, address netip.Addr, bytes int64) time.Duration {
	n.Helper()
	var listener net.Listener
	n.must(to.Do(func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(address.String(), "0"))
		return err
	}))
	defer listener.Close()
	go func() {
		from.Do(func() error {
			c, err := net.Dial("tcp", listener.Addr().String())
			if err == nil {
				c.Write(make([]byte, bytes))
				c.Close()
			}
			return err
		})
	}()
	c, err := listener.Accept()
	n.must(err)
	defer c.Close()
	began := time.Now()
	got, err := io.Copy(io.Discard, c)
	if n.must(err); got != bytes {
		n.Errorf("%d bytes of %d arrived", got, bytes)
	}
	return time.Since(began)
}

// limited has a pod receive and send no more than its limits of 16 and 8 Mbit/s.
func (n *node) limited(p *pod, node netip.Addr, family int) {
	n.Helper()
	const bytes = 1 << 20 // 0.52 s and 1.05 s at these rates
	if d := n.stream(n.ns, p.ns, p.addresses[family], bytes); d < 400*time.Millisecond {
		n.Errorf("the pod received 1 MiB in %s, at 16 Mbit/s", d)
	}
	if d := n.stream(p.ns, n.ns, node, bytes); d < 800*time.Millisecond {
		n.Errorf("the pod sent 1 MiB in %s, at 8 Mbit/s", d)
	}
}

func TestBandwidth(t *testing.T) {
	n := newNode(t)
	nodes := []netip.Addr{netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("fd99::1")}
	p, free := n.newPod("limited"), n.newPod("free")
	p.limit(16_000_000, 8_000_000)
	n.must(n.add("1.1.0", p))
	n.must(n.add("1.1.0", free))
	for family, node := range nodes {
		n.limited(p, node, family)
	}
	if d := n.stream(n.ns, free.ns, free.addresses[0], 64<<20); d > 30*time.Second { // 33 s at 16 Mbit/s
		t.Errorf("a pod without a limit received 64 MiB in %s", d)
	}
	device := cni.Device(cni.Key(p.conf.ContainerID, p.conf.IfName))
	n.must(n.ns.Do(func() error { return exec.Command("tc", "qdisc", "del", "dev", device, "root").Run() }))
	n.must(n.agent.loop.Check(t.Context()))
	n.limited(p, nodes[0], 0)
	n.kill()
	n.start("boot 1")
	n.limited(p, nodes[0], 0)
	check := func() error {
		return n.do(func() error { return n.cni.CheckNetworkList(t.Context(), n.list("1.1.0"), p.conf) })
	}
	n.must(check())
	n.must(p.ns.Do(func() error { return exec.Command("tc", "qdisc", "del", "dev", "eth0", "root").Run() }))
	if err := check(); err == nil || !strings.Contains(err.Error(), "eth0 has no limit of 8000000 bits a second") {
		t.Errorf("CHECK of a pod that removed its limit: %v", err)
	}
	for _, p := range []*pod{p, free} {
		n.must(n.del(p))
	}
	if left := n.left(); len(left) > 0 {
		t.Errorf("DEL left %v", left)
	}
}

// TestBandwidthThatCantBe has ADD say by name what it can't do.
func TestBandwidthThatCantBe(t *testing.T) {
	n := prepare(t)
	n.network.Device = model.IPVLANL3
	n.start("boot 1")
	for why, p := range map[string]*pod{
		"shop/a has an ingress bandwidth, which device ipvlan-l3 can't limit": n.newPod("a"),
		"999 bits a second: use at least 1000":                                n.newPod("b")} {
		if p.limit(1_000_000, 0); strings.HasPrefix(why, "999") {
			p.limit(0, 999)
		}
		if err := n.add("1.1.0", p); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v, want %q", err, why)
		}
	}
	if left := n.left(); len(left) > 0 {
		t.Errorf("ADD left %v", left)
	}
}
