package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// shell runs a script in a network namespace and returns what it prints.
func (n *node) shell(ns *netns.Namespace, script string) (out string) {
	n.Helper()
	n.must(ns.Do(func() error {
		b, err := exec.Command("sh", "-ec", script).CombinedOutput()
		if out = string(b); err != nil {
			return fmt.Errorf("%w: %s", err, b)
		}
		return nil
	}))
	return out
}

// count returns how many packets a counter of table x has counted.
func (n *node) count(ns *netns.Namespace, counter string) int {
	n.Helper()
	m := regexp.MustCompile(`packets (\d+)`).FindStringSubmatch(n.shell(ns, "nft list counter inet x "+counter))
	if m == nil {
		n.Fatalf("no counter %s", counter)
	}
	packets, err := strconv.Atoi(m[1])
	n.must(err)
	return packets
}

// The ports of flows: a server replies at one, and none accepts connections at the other.
const (
	portServed = 53
	portSilent = 81
)

// oldFlows are flows that a pod leaves behind.
type oldFlows struct {
	*node
	client, outside *netns.Namespace
	datagrams       []net.Conn // of the client, to the Service
	opening         context.CancelFunc
	servers         []net.PacketConn // outside, with a datagram of the pod's
	peers           []net.Addr       // where that came from
}

var outsides = []string{"192.0.2.1", "2001:db8::1"}

// leave has flows to and from a pod: from a client, by a Service, datagrams that were replied to and connections that
// are still opening, and datagrams to outside that the node masquerades.
func (o *oldFlows) leave(p *pod) {
	o.Helper()
	o.shell(p.ns, fmt.Sprintf("nft 'table inet x { chain c { type filter hook input priority 0; tcp dport %d drop; }; }'",
		portSilent))
	o.must(p.ns.Do(func() error {
		_, err := echo.Serve("shop/web", []echo.Port{{Number: portServed, Protocol: model.UDP}}) // ends with the process
		return err
	}))
	o.shell(o.ns, fmt.Sprintf(`nft 'table inet x { counter opened { }
		chain pre { type nat hook prerouting priority -100;
			ip daddr 10.96.0.10 dnat ip to %s; ip6 daddr fd00:96::10 dnat ip6 to %s; }
		chain post { type nat hook postrouting priority 100; oifname wire masquerade; }
		chain raw { type filter hook prerouting priority -300; tcp dport %d counter name opened; }; }'`,
		p.addresses[0], p.addresses[1], portSilent))
	ctx, stop := context.WithCancel(o.Context())
	o.opening = stop
	for i, service := range []string{"10.96.0.10", "fd00:96::10"} {
		at := netip.AddrPortFrom(netip.MustParseAddr(service), portServed)
		o.must(o.client.Do(func() error {
			c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at))
			o.datagrams = append(o.datagrams, c)
			if err == nil {
				_, err = c.Write([]byte("x\n"))
			}
			c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if err == nil {
				_, err = c.Read(make([]byte, 2048))
			}
			return err
		}))
		go o.client.Do(func() error {
			_, err := (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(at.Addr(), portSilent).String())
			return err
		})
		o.sendOut(p, i)
	}
	for end := time.Now().Add(time.Minute); o.count(o.ns, "opened") < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			o.Fatal("no connection is opening")
		}
	}
}

// sendOut has the pod send a datagram of a family to outside.
func (o *oldFlows) sendOut(p *pod, family int) {
	o.Helper()
	at := net.JoinHostPort(outsides[family], strconv.Itoa(portServed))
	o.must(o.outside.Do(func() error {
		s, err := net.ListenPacket("udp", at)
		o.servers = append(o.servers, s)
		return err
	}))
	o.must(p.ns.Do(func() error {
		c, err := net.Dial("udp", at)
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		return errors.Join(err, c.Close())
	}))
	s := o.servers[family]
	s.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, from, err := s.ReadFrom(make([]byte, 10))
	o.must(err)
	o.peers = append(o.peers, from)
}

// send has the old flows' other ends send again, and returns once all have.
func (o *oldFlows) send() {
	o.Helper()
	opened := o.count(o.ns, "opened")
	for _, c := range o.datagrams {
		_, err := c.Write([]byte("x\n"))
		o.must(err)
	}
	for i, s := range o.servers {
		_, err := s.WriteTo([]byte("x"), o.peers[i])
		o.must(err)
	}
	for end := time.Now().Add(time.Minute); o.count(o.ns, "opened") < opened+2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			o.Fatal("the client gave its connections up")
		}
	}
}

// goOn is send for the last time.
func (o *oldFlows) goOn() {
	o.Helper()
	o.send()
	o.opening()
	for _, c := range append(o.datagrams, o.servers[0].(net.Conn), o.servers[1].(net.Conn)) {
		c.Close()
	}
}

// forgotten waits until connection tracking has no flow to or from a pod.
func (o *oldFlows) forgotten(p *pod) {
	o.Helper()
	o.must(o.do(func() error {
		c, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			left := 0
			if _, err := c.Cut(func(f conntrack.Flow) bool {
				of := func(a netip.AddrPort) bool { return slices.Contains(p.addresses, a.Addr()) }
				if of(f.Source) || of(f.ReplySource) {
					left++
				}
				return false
			}); err != nil {
				return err
			}
			if left == 0 {
				return nil
			}
			if time.Now().After(end) {
				return fmt.Errorf("%d flows of a pod that has gone are still there", left)
			}
		}
	}))
}

// TestOldFlowsDoNotReachNewPod has a pod go while others still send to it: with the agent there, without, and long
// before another one gets its addresses. None of the old flows' packets reaches that.
func TestOldFlowsDoNotReachNewPod(t *testing.T) {
	n := newNode(t)
	n.agent.server.SetNetwork(&model.Network{Ranges: ranges, MTU: 1450})
	outside := netnstest.New(t)
	n.shell(n.ns, fmt.Sprintf(`ip link add wire type veth peer name eth0 netns %s
		ip address add 192.0.2.9/24 dev wire; ip address add 2001:db8::9/64 dev wire nodad; ip link set wire up`,
		outside.Name))
	n.shell(outside, `ip address add 192.0.2.1/24 dev eth0; ip address add 2001:db8::1/64 dev eth0 nodad
		ip link set eth0 up`)
	client := n.newPod("client")
	n.must(n.add("1.1.0", client))
	n.shell(client.ns, `nft 'table inet x { chain c { type filter hook input priority 0;
		icmp type destination-unreachable drop; icmpv6 type destination-unreachable drop; }; }'`) // else it gives up
	// as the plane of routes
	n.shell(n.ns, "ip route add unreachable 10.244.1.0/24; ip route add unreachable fd00:1::/64")
	for _, when := range []string{"at once", "agent away", "later"} {
		t.Run(when, func(t *testing.T) {
			away := when == "agent away"
			p, q := n.newPod("old"), n.newPod("new")
			n.must(n.add("1.1.0", p))
			o := &oldFlows{node: n, client: client.ns, outside: outside}
			o.leave(p)
			if away {
				n.kill()
			}
			n.must(n.del(p))
			if away {
				n.start("boot 1")
			}
			if when == "later" { // what the Service still sends to the pod makes no flow again
				o.forgotten(p)
				o.send()
				o.forgotten(p)
			}
			n.shell(n.ns, "nft flush chain inet x pre") // the Service's endpoint has gone
			if !away {                                  // else it is the first one that is free, as far as the agent knows
				q.conf.CapabilityArgs = map[string]any{"ips": []string{p.addresses[0].String(), p.addresses[1].String()}}
			}
			n.must(n.add("1.1.0", q))
			if fmt.Sprint(q.addresses) != fmt.Sprint(p.addresses) {
				t.Fatalf("%v after %v", q.addresses, p.addresses)
			}
			n.shell(q.ns, `nft 'table inet x { counter came { }
				chain c { type filter hook input priority -300; meta l4proto { tcp, udp } counter name came; }; }'`)
			o.goOn()
			if came := n.count(q.ns, "came"); came > 0 {
				t.Errorf("%d packets of old flows reach the new pod", came)
			}
			n.shell(n.ns, "nft delete table inet x")
			n.must(n.del(q))
		})
	}
}

// TestPodWithoutIPv6 attaches a pod with IPv6 switched off in its network namespace, as some runtimes do: it has it, at
// once.
func TestPodWithoutIPv6(t *testing.T) {
	n := newNode(t)
	p := n.newPod("web")
	n.must(sysctl.Set(p.ns, sysctl.Setting{Name: "net/ipv6/conf/all/disable_ipv6", Value: "1"}))
	n.must(n.add("1.1.0", p))
	n.serve(p.ns)
	for _, from := range []*netns.Namespace{n.ns, p.ns} {
		for _, a := range p.addresses {
			if _, err := n.request(from, a); err != nil {
				t.Errorf("%s: %v", a, err)
			}
		}
	}
}
