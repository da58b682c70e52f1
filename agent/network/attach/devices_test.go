package attach

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
		vmtest.Run(t, "fairlead.dev/fairlead/agent/network/attach", "^TestInSecondKernel$", "-second-kernel",
			"-plugin="+plugin)
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

// TestFirstPacketsPass sends a datagram to each pod that was just attached, and one from it, while others keep the
// kernel's lock of devices: what it does about a new device in the background waits for that.
func TestFirstPacketsPass(t *testing.T) {
	n := newNode(t)
	atNode := n.datagrams(n.ns)
	ctx, stop := context.WithCancel(t.Context())
	var others sync.WaitGroup
	other := netnstest.New(t)
	others.Go(func() { // to delete a device the kernel waits for all processors, with that lock
		for ctx.Err() == nil {
			other.Do(func() error {
				exec.Command("ip", "link", "add", "x", "type", "veth", "peer", "name", "y").Run()
				return exec.Command("ip", "link", "delete", "x").Run()
			})
		}
	})
	defer others.Wait()
	defer stop()
	for i := range 10 {
		p := n.newPod(fmt.Sprint("web-", i))
		atPod := n.datagrams(p.ns)
		n.must(n.add("1.1.0", p))
		for i, a := range p.addresses {
			n.datagram(n.ns, a)
			n.datagram(p.ns, netip.MustParseAddr([]string{"192.168.0.1", "fd99::1"}[i]))
			for _, got := range []<-chan netip.AddrPort{atPod, atNode} {
				select {
				case <-got:
				case <-time.After(5 * time.Second):
					t.Fatalf("%s: the first datagram to or from %s was lost", p.conf.ContainerID, a)
				}
			}
		}
	}
}

// datagrams returns the senders of what comes to UDP port 9 of a namespace.
func (n *node) datagrams(ns *netns.Namespace) <-chan netip.AddrPort {
	n.Helper()
	var c *net.UDPConn
	n.must(ns.Do(func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{Port: 9})
		return err
	}))
	n.Cleanup(func() { c.Close() })
	got := make(chan netip.AddrPort, 10)
	go func() {
		for {
			_, from, err := c.ReadFromUDPAddrPort(make([]byte, 1))
			if err != nil {
				return
			}
			got <- from
		}
	}()
	return got
}

// datagram sends one to UDP port 9.
func (n *node) datagram(from *netns.Namespace, to netip.Addr) {
	n.Helper()
	n.must(from.Do(func() error {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		return errors.Join(err, c.Close())
	}))
}
