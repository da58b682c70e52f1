package attach

import (
	"errors"
	"flag"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/network/route"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

var (
	// internal reports that these tests run in the second kernel, which has netkit and ipvlan.
	internal = flag.Bool("second-kernel", false, "run the tests that need netkit and ipvlan here")
	built    = flag.String("plugin", "", "folder with the built plugin, where this test can't build it")
)

// TestInSecondKernel has pods connected by each kind of device that the host's kernel may lack.
func TestInSecondKernel(t *testing.T) {
	if !*internal {
		vmtest.Run(t, "fairlead.dev/fairlead/agent/attach", "^TestInSecondKernel$", "-second-kernel", "-plugin="+plugin)
		return
	}
	for _, kind := range []model.DeviceKind{model.Netkit, model.IPVLANL2, model.IPVLANL3} {
		t.Run(kind.String(), func(t *testing.T) {
			n, other := newNodeOf(t, kind)
			pods := []*pod{n.newPod("a"), n.newPod("b")}
			n.serve(n.ns)
			n.serve(other)
			for _, p := range pods {
				n.must(n.add("1.1.0", p))
				n.serve(p.ns)
			}
			n.connected(other, pods)
			n.must(n.do(func() error { return n.cni.CheckNetworkList(n.Context(), n.list("1.1.0"), pods[0].conf) }))
			n.kill()
			n.start("boot 1")
			n.connected(other, pods)
			n.must(n.ns.Do(func() error {
				return exec.Command("sh", "-c", "ip route flush proto 251; ip -6 route flush proto 251").Run()
			}))
			n.must(n.agent.loop.Check(n.Context()))
			n.connected(other, pods)
			n.must(n.del(pods[0]))
			n.disconnected(pods[0])
			n.kill()
			n.must(n.del(pods[1]))
			n.disconnected(pods[1])
			n.start("boot 1")
			if left := n.left(); len(left) > 0 {
				n.Errorf("DEL left %v", left)
			}
		})
	}
}

// newNodeOf makes a node that connects pods by a kind of device, and another host on its link.
func newNodeOf(t *testing.T, kind model.DeviceKind) (*node, *netns.Namespace) {
	n, other := prepare(t), netnstest.New(t)
	n.must(n.ns.Do(func() error {
		return exec.Command("sh", "-ec", strings.ReplaceAll(`
			ip link add eth0 type veth peer name eth0 netns OTHER
			ip address add 172.16.0.1/24 dev eth0
			ip address add fd98::1/64 dev eth0 nodad
			ip link set eth0 up
			ip -n OTHER address add 172.16.0.2/24 dev eth0
			ip -n OTHER address add fd98::2/64 dev eth0 nodad
			ip -n OTHER link set eth0 up
			ip -n OTHER route add 10.244.1.0/24 via 172.16.0.1
			ip -n OTHER route add fd00:1::/64 via fd98::1`, "OTHER", other.Name)).Run()
	}))
	n.network.Device, n.network.MTU = kind, 1500
	if kind.IPVLAN() {
		n.network.Child = &model.Child{Uplink: "eth0"}
		for _, r := range ranges {
			n.network.Child.Own = append(n.network.Child.Own, r.Addr().Next())
		}
	}
	n.must(n.ns.Do(func() error {
		p, err := route.New()
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Write(t.Context(), p.Render(&n.network), nil)
	}))
	n.start("boot 1")
	return n, other
}

// connected has pods, their node and another host reach each other, by both families, with the pods' own addresses.
func (n *node) connected(other *netns.Namespace, pods []*pod) {
	n.Helper()
	reach := func(what string, from *netns.Namespace, to, source netip.Addr) {
		if saw, err := n.request(from, to); err != nil || source.IsValid() && saw != source {
			n.Errorf("%s, to %s: from %s, %v", what, to, saw, err)
		}
	}
	for i, p := range pods {
		for family, a := range p.addresses {
			reach("pod to pod", p.ns, pods[1-i].addresses[family], a)
			reach("node to pod", n.ns, a, netip.Addr{})
			reach("another host to pod", other, a, []netip.Addr{netip.MustParseAddr("172.16.0.2"),
				netip.MustParseAddr("fd98::2")}[family])
			for _, to := range [][]string{{"172.16.0.1", "172.16.0.2"}, {"fd98::1", "fd98::2"}}[family] {
				reach("pod to hosts", p.ns, netip.MustParseAddr(to), a)
			}
		}
	}
}

// disconnected has a pod have no interface but its loopback device that carries packets: a pair's end stays until the
// released end goes.
func (n *node) disconnected(p *pod) {
	n.Helper()
	n.must(p.ns.Do(func() error {
		l, err := net.Interfaces()
		if slices.ContainsFunc(l, func(i net.Interface) bool {
			return i.Name == p.conf.IfName && i.Flags&net.FlagRunning != 0
		}) {
			err = errors.New("pod " + p.conf.ContainerID + " has its interface still")
		}
		return err
	}))
}

// TestKernelWithoutNetkitIsNamed is for this machine's kernel, which lacks it.
func TestKernelWithoutNetkitIsNamed(t *testing.T) {
	n, _ := newNodeOf(t, model.Netkit)
	p := n.newPod("a")
	if err := n.add("1.1.0", p); err == nil { // this kernel has it
		n.must(n.del(p))
	} else if !strings.Contains(err.Error(), "this kernel has no netkit") || len(n.left()) > 0 {
		t.Errorf("%v; left: %v", err, n.left())
	}
}
