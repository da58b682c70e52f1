package policy

import (
	"fmt"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/model"
)

// frontends returns frontends at the first n addresses behind one.
func frontends(from string, n int) (l []model.ServicePart) {
	a := netip.MustParseAddr(from)
	for range n {
		a = a.Next()
		l = append(l, &model.Frontend{Entry: model.Entry{Addr: a, Port: 80, Protocol: model.TCP}})
	}
	return l
}

// What is evaluated only after translation doesn't grow with Services of ServiceCIDRs, and is bounded beyond them.
func TestPreDNATIsBounded(t *testing.T) {
	r, s := New(Config{Node: "n1"}), newSum()
	apply := func(want int, problem bool, c model.Change[model.ServicePart]) {
		t.Helper()
		r.ApplyServices(c)
		s.apply(seedDice{T: t}, r.Apply(nil))
		if got := len(s.now.Node.PreDNAT); got != want || (len(r.Problems()) == 1) != problem {
			t.Errorf("%d destinations, problems %v; want %d, %v", got, r.Problems(), want, problem)
		}
	}
	inside, outside := frontends("10.96.0.0", 5000), frontends("198.18.0.0", mostPreDNAT+1)
	anywhere := &model.Frontend{Entry: model.Entry{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: model.TCP}}
	cidr := netip.MustParsePrefix("10.96.0.0/16")
	node := &model.ServiceNode{ServiceRanges: []model.Range{
		{First: cidr.Addr(), Last: netip.MustParseAddr("10.96.255.255")}}}
	apply(1, false, model.Change[model.ServicePart]{Put: append(inside[:1:1], anywhere)})
	apply(1, false, model.Change[model.ServicePart]{Put: append(inside[1:], node)})
	if got := fmt.Sprint(s.now.Node.PreDNAT); got != "[10.96.0.0/16]" {
		t.Error(got)
	}
	apply(1+mostPreDNAT, true, model.Change[model.ServicePart]{Put: outside})
	apply(1+mostPreDNAT, false, model.Change[model.ServicePart]{Del: outside[:1]})
	apply(1, false, model.Change[model.ServicePart]{Del: outside[1:]})
	apply(mostPreDNAT, true, model.Change[model.ServicePart]{Put: []model.ServicePart{&model.ServiceNode{}}})
}

// What a Service has of the node's own addresses is evaluated before its translation, too: so is all else that is sent
// there. A range of Services stays, whichever address of it is the node's.
func TestPreDNATLeavesOutTheNode(t *testing.T) {
	r, s := New(Config{Node: "n1"}), newSum()
	outside := frontends("198.18.0.0", 2)
	own := outside[0].(*model.Frontend).Entry.Addr
	r.ApplyServices(model.Change[model.ServicePart]{Put: append(outside, &model.ServiceNode{ServiceRanges: []model.Range{
		{First: netip.MustParseAddr("10.96.0.0"), Last: netip.MustParseAddr("10.96.255.255")}}})})
	for _, c := range []struct {
		own  []netip.Addr
		want string
	}{{nil, "[10.96.0.0/16 198.18.0.1/32 198.18.0.2/32]"}, {[]netip.Addr{own}, "[10.96.0.0/16 198.18.0.2/32]"},
		{[]netip.Addr{netip.MustParseAddr("10.96.0.0")}, "[10.96.0.0/16 198.18.0.1/32 198.18.0.2/32]"}} {
		r.SetAddresses(c.own)
		s.apply(seedDice{T: t}, r.Apply(nil))
		if got := fmt.Sprint(s.now.Node.PreDNAT); got != c.want {
			t.Errorf("with addresses %v: %s, want %s", c.own, got, c.want)
		}
	}
}
