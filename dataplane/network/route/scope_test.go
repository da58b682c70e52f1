package route

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// onLink is a plane in a network namespace with a device eth0 that other nodes are behind.
type onLink struct {
	*testing.T
	ns *netns.Namespace
	*Plane
}

func newOnLink(t *testing.T) *onLink {
	o := &onLink{T: t, ns: netnstest.New(t)}
	for _, args := range []string{"link set lo up", "link add eth0 type bridge", "addr add 192.168.0.1/16 dev eth0",
		"link set eth0 up"} {
		o.ip(args)
	}
	err := o.ns.Do(func() (err error) {
		o.Plane, err = New()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return o
}

// ip runs ip-route(8)'s program with arguments and returns what it prints.
func (o *onLink) ip(args string) []byte {
	o.Helper()
	out, err := exec.Command("ip", append([]string{"-n", o.ns.Name}, strings.Fields(args)...)...).CombinedOutput()
	if err != nil {
		o.Fatalf("ip %s: %v: %s", args, err, out)
	}
	return out
}

// routes returns how many IPv4 routes with Protocol there are in each scope.
func (o *onLink) routes() map[string]int {
	o.Helper()
	var routes []struct{ Scope string }
	if err := json.Unmarshal(o.ip(fmt.Sprintf("-json -N route show proto %d", Protocol)), &routes); err != nil {
		o.Fatal(err)
	}
	scopes := map[string]int{}
	for _, r := range routes {
		scopes[r.Scope]++
	}
	return scopes
}

// read returns the facts that the kernel holds.
func (o *onLink) read() map[Key]Value {
	o.Helper()
	l, err := o.Read(o.Context())
	if err != nil {
		o.Fatal(err)
	}
	return byKey(l)
}

// direct returns the fact of a route to range i by the node with an address on the link.
func direct(i int, via string) Fact {
	to := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
	return Fact{Key: Key{Kind: KindRoute, To: netip.PrefixFrom(to, 24)}, Value: Value{Device: "eth0",
		Via: netip.MustParseAddr(via)}}
}

// For each new route, the kernel walks a list of the next hops by that device that are in one scope.
func TestNextHopsAreSpreadOverScopes(t *testing.T) {
	o := newOnLink(t)
	var facts []Fact
	for i := range 1000 {
		facts = append(facts, direct(i, fmt.Sprintf("192.168.%d.%d", 1+i/250, 1+i%250)))
	}
	if err := o.Write(t.Context(), facts, nil); err != nil {
		t.Fatal(err)
	}
	sum := 0
	for scope, n := range o.routes() {
		if sum += n; n > len(facts)/50 {
			t.Errorf("%d of %d routes are in scope %q", n, len(facts), scope)
		}
	}
	held := o.read()
	for _, f := range facts {
		if held[f.Key] != f.Value {
			t.Errorf("%s is %+v, want %+v", f.Key, held[f.Key], f.Value)
		}
	}
	if sum != len(facts) {
		t.Errorf("%d routes, want %d", sum, len(facts))
	}
}

// Of routes as they were before they had scopes, those that are right stay as they are, others are replaced in one
// step, and all are removed.
func TestRoutesWithoutScopeAreAdopted(t *testing.T) {
	o := newOnLink(t)
	right, wrong, moved := direct(1, "192.168.0.2"), direct(2, "192.168.0.3"), direct(2, "192.168.0.4")
	for _, f := range []Fact{right, wrong} {
		o.ip(fmt.Sprintf("route add %s via %s dev eth0 onlink proto %d", f.Key.To, f.Value.Via, Protocol))
	}
	if held := o.read(); held[right.Key] != right.Value || held[wrong.Key] != wrong.Value {
		t.Errorf("read: %v", held)
	}
	var events *netlink.Socket
	err := o.ns.Do(func() (err error) {
		events, err = netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_IPV4_ROUTE)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	if err := o.Write(t.Context(), []Fact{moved}, []Fact{wrong}); err != nil {
		t.Error(err)
	}
	seen := 0
	err = events.Pending(func(m netlink.Message) {
		if seen++; m.Type != unix.RTM_NEWROUTE || m.Flags&unix.NLM_F_REPLACE == 0 {
			t.Errorf("message %d with flags %#x, want the route replaced", m.Type, m.Flags)
		}
	})
	if err != nil || seen != 1 {
		t.Errorf("%d messages, %v, want one", seen, err)
	}
	scopes := o.routes()
	if held := o.read(); held[right.Key] != right.Value || held[moved.Key] != moved.Value ||
		len(scopes) != 2 || scopes[""] != 1 {
		t.Errorf("read: %v; routes by scope: %v", held, scopes)
	}
	if err := o.Clean(t.Context()); err != nil || len(o.routes()) > 0 {
		t.Errorf("%v; left, by scope: %v", err, o.routes())
	}
}
