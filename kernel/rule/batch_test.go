package rule_test

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
)

func check(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// space makes a namespace with its loopback up, and a socket in it, that go with the test.
func space(t *testing.T) (*netns.Namespace, *netlink.Socket) {
	t.Helper()
	ns := netnstest.New(t)
	c, err := link.Dial(ns)
	check(t, err)
	defer c.Close()
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	check(t, err, c.Up(1))
	t.Cleanup(func() { s.Close() })
	return ns, s
}

// apply applies what add adds to a batch.
func apply(s *netlink.Socket, add func(b *netlink.Batch)) error {
	b := route.NewBatch()
	add(b)
	return s.Apply(b)
}

func TestKernelHoldsWhatIsApplied(t *testing.T) {
	_, s := space(t)
	const owner, table = 0xee, 0xfa000123
	var routes []route.Route
	var rules []rule.Rule
	for i := range 300 { // more than one portion
		a := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
		kind := [...]route.Type{route.Unicast, route.Local, route.Blackhole}[i%3]
		r := route.Route{Owner: owner, Table: table, To: netip.PrefixFrom(a, 32), Type: kind}
		if kind != route.Blackhole {
			r.Dev = 1
		}
		routes = append(routes, r)
	}
	routes = append(routes, route.Route{Owner: owner, Table: table + 1, To: netip.MustParsePrefix("fd00:9::/64"), Dev: 1,
		Type: route.Local})
	for _, six := range []bool{false, true} {
		from, to := netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.8.0.1/32")
		if six {
			from, to = netip.MustParsePrefix("fd00:9::/64"), netip.MustParsePrefix("fd00:8::1/128")
		}
		rules = append(rules,
			rule.Rule{Owner: owner, Priority: 50, Six: six, Protocol: 6, ToPort: rule.PortRange{First: 80, Last: 80},
				Table: table},
			rule.Rule{Owner: owner, Priority: 51, Six: six, Protocol: 17, From: from, To: to, FromPort: 7,
				ToPort: rule.PortRange{First: 1, Last: 65534}, Table: 7},
			rule.Rule{Owner: owner, Priority: 52, Six: six, Input: "lo", Goto: 53},
			rule.Rule{Owner: owner, Priority: 53, Six: six},
			rule.Rule{Owner: owner, Priority: 54, Six: six, Mark: 0x10, Mask: 0xff, Table: 7})
	}
	put := func(b *netlink.Batch) { route.Put(b, routes...); rule.Put(b, rules...) }
	remove := func(b *netlink.Batch) {
		for _, r := range routes {
			route.Delete(b, route.Route{Owner: owner, Table: r.Table, To: r.To})
		}
		rule.Delete(b, rules...)
	}
	check(t, apply(s, put), apply(s, put))
	heldRoutes, err := route.List(s, owner)
	heldRules, err2 := rule.List(s, owner)
	check(t, err, err2)
	if len(heldRoutes) != len(routes) || fmt.Sprint(heldRules) != fmt.Sprint(rules) {
		t.Errorf("%d of %d routes, rules\n%v, want\n%v", len(heldRoutes), len(routes), heldRules, rules)
	}
	want := map[route.Route]bool{}
	for _, r := range routes {
		want[r] = true
	}
	for _, r := range heldRoutes {
		if !want[r] {
			t.Errorf("route %+v is none of ours", r)
		}
	}
	check(t, apply(s, remove), apply(s, remove))
	heldRoutes, err = route.List(s, owner)
	heldRules, err2 = rule.List(s, owner)
	if check(t, err, err2); len(heldRoutes)+len(heldRules) != 0 {
		t.Errorf("left: %v %v", heldRoutes, heldRules)
	}
	bad := rule.Rule{Owner: owner, Priority: 50, ToPort: rule.PortRange{First: 1, Last: 65535}, Table: 7}
	err = apply(s, func(b *netlink.Batch) { rule.Put(b, bad); route.Put(b, routes[0]) })
	if err == nil || !strings.Contains(err.Error(), "rule 50") {
		t.Errorf("a rule that the kernel refuses: %v", err)
	}
	if heldRoutes, _ = route.List(s, owner); len(heldRoutes) != 1 {
		t.Error("a refusal keeps what comes after it from being applied")
	}
}

func TestNotificationsOfOthersChanges(t *testing.T) {
	ns, s := space(t)
	const owner = 0xee
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var main atomic.Bool
	concerns := func(m netlink.Message) bool {
		if r, ok := route.Of(m); ok {
			return r.Owner == owner || main.Load() && r.IsMain()
		}
		r, ok := rule.Of(m)
		return ok && r.Owner == owner || link.IsAddress(m) || link.NameIn(m) == "lo"
	}
	events, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	check(t, err)
	defer events.Close()
	check(t, events.Ignore(s.Port()), events.Join(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE))
	signals, err := events.Watch(ctx, false, concerns)
	check(t, err)
	run := func(command string) {
		t.Helper()
		words := strings.Fields(command)
		check(t, ns.Do(func() error { return exec.Command(words[0], words[1:]...).Run() }))
	}
	quiet := func(what string) {
		t.Helper()
		select {
		case <-signals:
			t.Errorf("%s is told", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
	signalled := func(what string) {
		t.Helper()
		select {
		case <-signals:
		case <-time.After(10 * time.Second):
			t.Errorf("%s is not told", what)
		}
	}
	quiet("nothing")
	check(t, apply(s, func(b *netlink.Batch) { rule.Put(b, rule.Rule{Owner: owner, Priority: 50, Table: 7}) }))
	quiet("a change of its own")
	run("ip route add 10.8.0.0/16 dev lo")
	quiet("a route of the main table that is not listed")
	main.Store(true)
	for _, command := range []string{"ip rule del pref 50", "ip route add 10.9.0.0/16 dev lo table 7 proto 0xee",
		"ip addr add 10.9.9.9/32 dev lo", "ip route add 10.8.7.0/24 dev lo", "ip route del 10.8.7.0/24 dev lo",
		"ip -6 route add fd00:8::/64 dev lo", "ip route add 10.8.7.6/32 dev lo", "ip link set lo mtu 1500"} {
		run(command)
		signalled(command)
	}
	reached, err := route.Reached(s)
	var to []string
	for _, r := range reached {
		if !r.To.Addr().IsLoopback() {
			to = append(to, r.To.String()+" "+r.Interface)
		}
	}
	if want := "fd00:8::/64 lo,10.8.7.6/32 lo,10.8.0.0/16 lo"; err != nil || strings.Join(to, ",") != want {
		t.Errorf("the main table's routes are %s, %v; want %s", strings.Join(to, ","), err, want)
	}
	own, err := link.Own(s)
	if check(t, err); !own[netip.MustParseAddr("10.9.9.9")] {
		t.Errorf("addresses are %v", own)
	}
	if r, ok, err := route.To(s, netip.MustParseAddr("10.8.7.6")); err != nil || !ok || r.Dev != 1 {
		t.Errorf("route to 10.8.7.6: %+v, %t, %v", r, ok, err)
	}
	if r, ok, err := route.To(s, netip.MustParseAddr("192.0.2.1")); err != nil || ok {
		t.Errorf("route to 192.0.2.1: %+v, %v", r, err)
	}
	stop()
	for range signals {
	}
}
