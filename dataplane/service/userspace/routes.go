package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/model"
)

// putRoutes leads packets into the netns.
func (p *Plane) putRoutes(w *writes) error {
	b := route.NewBatch()
	p.tableRoutes(b, slices.Concat(w.put[KindRoute], w.put[KindReach], w.put[KindClusterIP]), false)
	route.Put(b, blackholes(w.put[KindUnallocated])...)
	rules := rules(slices.Concat(w.put[KindRule], w.put[KindNodePort], w.put[KindFragments], w.put[KindUnmatched]))
	rule.Put(b, rules...)
	err := p.netlink.Apply(b)
	if len(rules) > 0 {
		err = errors.Join(err, p.localLast())
	}
	return err
}

// localLast puts the rule for local addresses behind ours of its priority, as the kernel puts ours behind it: a second
// one at the end, and once that is there, and not before, those ahead of it go. A process that is killed in between
// leaves two, which do what one does. Where another program has moved it to another priority, it is behind already.
func (p *Plane) localLast() error {
	all, err := rule.List(p.netlink, 0)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	appended, before := route.NewBatch(), route.NewBatch()
	for _, six := range []bool{false, true} {
		at := slices.IndexFunc(all, func(r rule.Rule) bool { return isLocal(r) && r.Six == six })
		if at < 0 || !slices.ContainsFunc(all[at:], func(r rule.Rule) bool { return ours(r) && r.Six == six }) {
			continue
		}
		again := all[at]
		again.Again = true
		rule.Put(appended, again)
		for _, r := range all {
			if isLocal(r) && r.Six == six {
				rule.Delete(before, r)
			}
		}
	}
	if err := p.netlink.Apply(appended); err != nil {
		return fmt.Errorf("userspace: put the rule for local addresses behind others: %w", err)
	}
	return p.netlink.Apply(before)
}

// isLocal reports whether a rule is the kernel's for local addresses.
func isLocal(r rule.Rule) bool {
	return r == rule.Rule{Owner: r.Owner, Six: r.Six, Table: unix.RT_TABLE_LOCAL}
}

// ours reports whether a rule is one that must come before.
func ours(r rule.Rule) bool {
	return (r.Owner == Owner || r.Owner == ownerDetained) && r.Priority == priorityPort
}

// routeTo returns the route of an address in a table.
func (p *Plane) routeTo(a netip.Addr, table uint32) route.Route {
	w := route.Route{Owner: Owner, Table: table, To: netip.PrefixFrom(a, a.BitLen()), Via: gateway(a.Is6())}
	if p.privateNetns != nil {
		w.Dev = p.privateNetns.dev
	}
	if p.view.Load().own[a] {
		w.Source = a // as the kernel has it for packets to oneself
	}
	return w
}

// tableRoutes adds the changes of routes. The node's own packets leave from the address that they would leave from
// without us.
func (p *Plane) tableRoutes(b *netlink.Batch, facts []Fact, gone bool) {
	var source [2]netip.Addr
	for _, f := range facts {
		e, table := f.Key.Entry, tables
		switch f.Key.Kind {
		case KindRoute:
			table = tableOf(uint8(e.Protocol), e.Port)
		case KindClusterIP:
			table = tableUnmatched
		}
		w := p.routeTo(e.Addr, table)
		if gone {
			w.Via, w.Dev, w.Source = netip.Addr{}, 0, netip.Addr{} // wherever it leads
			route.Delete(b, w)
			continue
		}
		if s := &source[b2i(e.Addr.Is6())]; !w.Source.IsValid() {
			if !s.IsValid() {
				*s = p.source(e.Addr)
			}
			w.Source = *s
		}
		route.Put(b, w)
	}
}

// source returns the address that the node's packets to a would leave from without us. Where a is dropped as
// unallocated so far, they would take the way of other addresses that nothing on the node has (RFC 5737, RFC 3849).
func (p *Plane) source(a netip.Addr) netip.Addr {
	elsewhere := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	if a.Is6() {
		elsewhere = netip.AddrFrom16([16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 15: 1})
	}
	for _, to := range []netip.Addr{a, elsewhere} {
		if r, _, _ := route.To(p.netlink, to); r.Type == route.Unicast && r.Source.IsValid() {
			return r.Source
		}
	}
	return netip.Addr{}
}

// blackholes returns the routes that drop packets to unallocated addresses.
func blackholes(facts []Fact) (l []route.Route) {
	for _, f := range facts {
		l = append(l, route.Route{Owner: Owner, Table: tableUnmatched, To: f.Key.prefix(), Type: route.Blackhole})
	}
	return l
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// nodeRoutes has the table of the node's addresses hold those that take node ports.
func (p *Plane) nodeRoutes() error {
	held, err := route.List(p.netlink, Owner)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	acceptors := p.acceptors()
	b := route.NewBatch()
	for a := range acceptors {
		route.Put(b, p.routeTo(a, tableNode))
	}
	for _, w := range held {
		if w.Table == tableNode && !acceptors[w.To.Addr()] {
			route.Delete(b, w)
		}
	}
	if p.privateNetns == nil {
		return nil
	}
	return p.netlink.Apply(b)
}

// rules returns the rules of facts.
func rules(facts []Fact) (l []rule.Rule) {
	for _, f := range facts {
		e := f.Key.Entry
		r := rule.Rule{Owner: Owner, Priority: priorityPort, Six: e.Addr.Is6(), Protocol: uint8(e.Protocol),
			ToPort: rule.PortRange{First: e.Port, Last: e.Port}, Table: tableNode}
		switch f.Key.Kind {
		case KindRule:
			r.Table = tableOf(uint8(e.Protocol), e.Port)
			fallthrough
		case KindNodePort:
			l = append(l, r)
		case KindUnmatched:
			l = append(l, rule.Rule{Owner: Owner, Priority: priorityUnmatched, Six: e.Addr.Is6(), Table: tableUnmatched})
		default:
			l = append(l, fragmentRules(e.Addr.Is6())...)
		}
	}
	return l
}

// delRoutes leads packets past the netns again, save those of connections that are open still.
func (p *Plane) delRoutes(w *writes) error {
	err := p.detain(slices.Concat(w.del[KindRoute], w.del[KindNodePort]))
	b := route.NewBatch()
	rule.Delete(b, rules(slices.Concat(w.del[KindRule], w.del[KindNodePort], w.del[KindFragments],
		w.del[KindUnmatched]))...)
	route.Delete(b, blackholes(w.del[KindUnallocated])...)
	p.tableRoutes(b, slices.Concat(w.del[KindRoute], w.del[KindReach], w.del[KindClusterIP]), true)
	return errors.Join(err, p.netlink.Apply(b))
}

// detain returns the connections of entries that lose their way a rule each, until they end.
func (p *Plane) detain(tableRoutes []Fact) error {
	gone := map[model.Entry]bool{}
	var ends []*socket
	for _, w := range tableRoutes {
		gone[w.Key.Entry] = true
		if f := p.fronts[w.Key.Entry]; f != nil {
			ends = append(ends, f.sockets...)
			f.sockets = nil
		}
	}
	p.shut(ends) // no more connections come
	any := false
	p.inLoops(len(gone) > 0, func(l *loop) {
		for c := range l.conns {
			if gone[c.front.entry] && c.undetain == nil {
				c.undetain, any = p.detained(c), true
			}
		}
	})
	if any {
		return p.localLast()
	}
	return nil
}

// detained makes a connection's rule and returns what removes it.
func (p *Plane) detained(c *conn) (release func()) {
	apply := func(change func(*netlink.Batch, ...rule.Rule)) {
		b := route.NewBatch()
		change(b, c.rule())
		p.released.Apply(b) // where the kernel refuses, the connection is lost: no caller waits for that
	}
	apply(rule.Put)
	return func() { apply(rule.Delete) }
}

// rule returns the rule that leads a connection's packets into the netns, whatever becomes of its frontend.
func (c *conn) rule() rule.Rule {
	whole := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	return rule.Rule{Owner: ownerDetained, Priority: priorityPort, Six: c.to.Addr().Is6(), From: whole(c.from.Addr()),
		To:       whole(c.to.Addr()),
		Protocol: uint8(model.TCP), FromPort: c.from.Port(), ToPort: rule.PortRange{First: c.to.Port(), Last: c.to.Port()},
		Table: tableDetained}
}
