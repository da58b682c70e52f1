package policytest

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// Own makes known which devices are one pod's alone, with what may come in by them.
func (d *Decided) Own(ranges ...netip.Prefix) {
	node := *d.Now.Node
	node.Devices = true
	d.Now.Node = &node
	for _, l := range Behind[:4] {
		o := &model.Device{Name: Device(l[0])}
		for _, a := range l {
			if s := d.Now.Subjects[a]; s != nil {
				known := *s
				known.Device, o.Pod = o.Name, s.Pod
				d.Now.Subjects[a] = &known
			}
			o.Sources = append(o.Sources, netip.PrefixFrom(a, a.BitLen()))
		}
		if l[0] == Behind[2][0] {
			o.Sources = append(o.Sources, ranges...)
		}
		slices.SortFunc(o.Sources, netip.Prefix.Compare)
		d.Now.Devices[o.Name] = o
	}
}

// granted are ranges that a pod may send from besides.
var granted = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/25"), netip.MustParsePrefix("2001:db8:9::/64")}

// claim is a source that a pod sends from, to destinations.
type claim struct {
	src    string
	dst    []string
	admits bool // it may
	silent bool // it is dropped without a report
}

// claims are those of the pod client.
var claims = []claim{
	{"10.0.1.4", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, true, false},
	{"fd00:1::4", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, true, false},
	{"203.0.113.9", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, true, false},
	{"2001:db8:9::9", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, true, false},
	{"203.0.113.129", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, false, false},
	{"10.0.2.2", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, false, false}, // a pod of another node
	{"10.0.1.3", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, false, false}, // another of this node
	{"10.0.1.77", []string{"10.0.1.2", "10.0.2.4", "192.168.0.1"}, false, false},
	{"0.0.0.0", []string{"255.255.255.255"}, false, false},
	{"fd00:2::4", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, false, false},
	{"fd00:1::3", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, false, false},
	{"2001:db8:8::9", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, false, false},
	{"fd99::2", []string{"fd00:1::2", "fd00:2::4", "fd99::1"}, false, false},
	{"fe80::5", []string{"fe80::1", "fd99::1"}, false, false}, // the node's address on each device
	{"fe80::5", []string{"ff02::1"}, false, true},             // what listens at every address has it
}

// listeners returns what receives at the destinations of sources.
func (n *Network) listeners(port uint16) map[string]*Listener {
	node, web, remote := n.Listen(Own[0], port), n.Listen(Behind[0][0], port), n.Listen(Behind[4][0], port)
	return map[string]*Listener{"10.0.1.2": web, "fd00:1::2": web, "10.0.2.4": remote, "fd00:2::4": remote,
		"192.168.0.1": node, "fd99::1": node, "fe80::1": node, "ff02::1": node, "255.255.255.255": node}
}

// Sources has a pod send from addresses of others, of none and of its link, to another pod, another node's and the
// node: while its device isn't known as its own they arrive, and from then on those alone that may come in by it.
func (s Suite[K]) Sources(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	const port = 9000
	listeners := e.listeners(port)
	since, await := s.log(e)
	d := Decide(objects["none.yaml"])
	for _, known := range []bool{false, true} {
		if known {
			d.Own(granted...)
			e.flushNeighbours() // discovery goes on
		}
		e.hold(d)
		since()
		for _, x := range claims {
			for _, to := range x.dst {
				if !known && x.src == "10.0.2.2" && to == "10.0.2.4" {
					continue // which has both addresses
				}
				arrives, want := x.admits || !known, []string(nil)
				e.inject(listeners[to], x.src, to, arrives)
				got := since()
				if !arrives && !x.silent {
					if want = []string{s.PrefixForged}; len(got) == 0 {
						got = await()
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("known %v: %s to %s: logged %q, want %q", known, x.src, to, got, want)
				}
			}
		}
	}
}

// Injections has a pod send as one end of a connection of others: nothing arrives at the other end.
func (s Suite[K]) Injections(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	d := Decide(objects["none.yaml"])
	d.Own()
	e.hold(d)
	since, _ := s.log(e)
	web, remote := e.Listen(Behind[0][0], 9001), e.Listen(Behind[4][0], 9001)
	for i, of := range Behind[0] {
		far, six := Addresses("10.0.2.2", "fd00:2::4")[i], of.Is6()
		remote.Send(of, "question")
		web.Before(six, "", "question")
		web.Send(far, "answer")
		remote.Before(six, "", "answer")
		since()
		e.Inject(Behind[2][0], netip.AddrPortFrom(far, 9001), netip.AddrPortFrom(of, 9001), "forged")
		remote.Send(of, "another")
		if web.Before(six, "forged", "another") {
			t.Errorf("a datagram from %s by another pod's device arrived in its connection", far)
		}
		if got := since(); !slices.Equal(got, []string{s.PrefixForged}) {
			t.Errorf("from %s: logged %q", far, got)
		}
	}
	e.hold(Decide(objects["none.yaml"])) // no device is known any more
}

// flushNeighbours has all ends find each other's link-layer addresses anew.
func (n *Network) flushNeighbours() {
	for _, ns := range []string{n.Node.Name, n.Of[Behind[2][0]].Name, n.Of[Behind[0][0]].Name} {
		out, err := exec.Command("ip", "-n", ns, "neighbour", "flush", "all").CombinedOutput()
		if err != nil {
			n.Fatalf("%v: %s", err, out)
		}
	}
}

// inject sends a datagram from a source by client's device, then one from client's own, and compares whether the first
// arrives.
func (n *Network) inject(at *Listener, src, to string, arrives bool) {
	n.Helper()
	client, dst := Behind[2], netip.AddrPortFrom(netip.MustParseAddr(to), at.port)
	own, six := client[0], dst.Addr().Is6()
	if six {
		own = client[1]
	}
	number := n.port.Add(1)
	text, last := fmt.Sprint("forged ", number), fmt.Sprint("honest ", number)
	n.Inject(client[0], netip.AddrPortFrom(netip.MustParseAddr(src), uint16(number)), dst, text)
	n.Inject(client[0], netip.AddrPortFrom(own, uint16(number)), dst, last)
	if at.Before(six, text, last) != arrives {
		n.Errorf("%s to %s: want arrival %v", src, to, arrives)
	}
}
