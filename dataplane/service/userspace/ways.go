package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
)

// putWays leads packets into the room.
func (p *Plane) putWays(w *writes) error {
	l := p.ways(slices.Concat(w.put[KindRoute], w.put[KindReach], w.put[KindClusterIP]), false)
	l = append(l, blackholes(w.put[KindUnallocated], false)...)
	rules := rules(slices.Concat(w.put[KindRule], w.put[KindNodePort], w.put[KindFragments], w.put[KindUnmatched]),
		false)
	err := p.policy.Apply(append(l, rules...))
	if len(rules) > 0 {
		err = errors.Join(err, p.localLast())
	}
	return err
}

// localLast puts the rule for local addresses behind ours of its priority, as the kernel puts ours behind it: a second one at
// the end, and once that is there, and not before, those ahead of it go. A process that is killed in between leaves two, which
// do what one does. Where somebody has moved it to another priority, it is behind already.
func (p *Plane) localLast() error {
	all, err := p.policy.Rules(0)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	var behind, before []link.Change
	for _, six := range []bool{false, true} {
		at := slices.IndexFunc(all, func(r link.Rule) bool { return isLocal(r) && r.Six == six })
		if at < 0 || !slices.ContainsFunc(all[at:], func(r link.Rule) bool { return ours(r) && r.Six == six }) {
			continue
		}
		again := all[at]
		again.Again = true
		behind = append(behind, link.Change{Rule: &again})
		for i, r := range all {
			if isLocal(r) && r.Six == six {
				before = append(before, link.Change{Rule: &all[i], Gone: true})
			}
		}
	}
	if err := p.policy.Apply(behind); err != nil {
		return fmt.Errorf("userspace: put the rule for local addresses behind others: %w", err)
	}
	return p.policy.Apply(before)
}

// isLocal says whether a rule is the kernel's for local addresses.
func isLocal(r link.Rule) bool {
	return r == link.Rule{Owner: r.Owner, Six: r.Six, Table: unix.RT_TABLE_LOCAL}
}

// ours says whether a rule is one that must come before.
func ours(r link.Rule) bool {
	return (r.Owner == Owner || r.Owner == ownerKept) && r.Priority == priorityPort
}

// way gives the route of an address in a table.
func (p *Plane) way(a netip.Addr, table uint32) *link.Way {
	w := &link.Way{Owner: Owner, Table: table, To: netip.PrefixFrom(a, a.BitLen()), Via: gateway(a.Is6())}
	if p.room != nil {
		w.Dev = p.room.dev
	}
	if p.view.Load().own[a] {
		w.Source = a // as the kernel has it for packets to oneself
	}
	return w
}

// ways gives the changes of routes. The node's own packets leave from the address that they would leave from without us.
func (p *Plane) ways(facts []Fact, gone bool) (l []link.Change) {
	var source [2]netip.Addr
	for _, f := range facts {
		e, table := f.Key.Entry, tables
		switch f.Key.Kind {
		case KindRoute:
			table = tableOf(uint8(e.Protocol), e.Port)
		case KindClusterIP:
			table = tableUnmatched
		}
		w := p.way(e.Addr, table)
		if s := &source[b2i(e.Addr.Is6())]; !gone && !w.Source.IsValid() {
			if !s.IsValid() {
				*s = p.source(e.Addr)
			}
			w.Source = *s
		}
		if gone {
			w.Via, w.Dev, w.Source = netip.Addr{}, 0, netip.Addr{} // wherever it leads
		}
		l = append(l, link.Change{Way: w, Gone: gone})
	}
	return l
}

// source returns the address that the node's packets to a would leave from without us. Where a is dropped as unallocated so
// far, they would take the way of other addresses that nothing on the node has (RFC 5737, RFC 3849).
func (p *Plane) source(a netip.Addr) netip.Addr {
	if from := p.policy.Source(a); from.IsValid() {
		return from
	}
	if a.Is4() {
		return p.policy.Source(netip.AddrFrom4([4]byte{192, 0, 2, 1}))
	}
	return p.policy.Source(netip.AddrFrom16([16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 15: 1}))
}

// blackholes returns the changes of routes that drop packets to unallocated addresses.
func blackholes(facts []Fact, gone bool) (l []link.Change) {
	for _, f := range facts {
		w := &link.Way{Owner: Owner, Table: tableUnmatched, To: f.Key.prefix(), Blackhole: true}
		l = append(l, link.Change{Way: w, Gone: gone})
	}
	return l
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// wayOfNode has the table of the node's addresses hold those that take node ports.
func (p *Plane) wayOfNode() error {
	held, err := p.policy.Ways(Owner)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	takers := p.takers()
	var l []link.Change
	for a := range takers {
		l = append(l, link.Change{Way: p.way(a, tableNode)})
	}
	for i, w := range held {
		if w.Table == tableNode && !takers[w.To.Addr()] {
			l = append(l, link.Change{Way: &held[i], Gone: true})
		}
	}
	if p.room == nil {
		return nil
	}
	return p.policy.Apply(l)
}

// rules gives the changes of rules.
func rules(facts []Fact, gone bool) (l []link.Change) {
	for _, f := range facts {
		e := f.Key.Entry
		r := &link.Rule{Owner: Owner, Priority: priorityPort, Six: e.Addr.Is6(), Protocol: uint8(e.Protocol),
			ToPort: link.PortRange{First: e.Port, Last: e.Port}, Table: tableNode}
		switch f.Key.Kind {
		case KindRule:
			r.Table = tableOf(uint8(e.Protocol), e.Port)
			fallthrough
		case KindNodePort:
			l = append(l, link.Change{Gone: gone, Rule: r})
		case KindUnmatched:
			l = append(l, link.Change{Gone: gone, Rule: &link.Rule{Owner: Owner, Priority: priorityUnmatched,
				Six: e.Addr.Is6(), Table: tableUnmatched}})
		default:
			for _, r := range fragmentRules(e.Addr.Is6()) {
				l = append(l, link.Change{Gone: gone, Rule: &r})
			}
		}
	}
	return l
}

// delWays leads packets past the room again, save those of connections that are open still.
func (p *Plane) delWays(w *writes) error {
	err := p.detain(slices.Concat(w.del[KindRoute], w.del[KindNodePort]))
	l := rules(slices.Concat(w.del[KindRule], w.del[KindNodePort], w.del[KindFragments], w.del[KindUnmatched]), true)
	l = append(l, blackholes(w.del[KindUnallocated], true)...)
	l = append(l, p.ways(slices.Concat(w.del[KindRoute], w.del[KindReach], w.del[KindClusterIP]), true)...)
	return errors.Join(err, p.policy.Apply(l))
}

// detain gives the connections of entries that lose their way a rule each, until they end.
func (p *Plane) detain(ways []Fact) error {
	gone := map[model.Entry]bool{}
	var ends []*socket
	for _, w := range ways {
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
			if gone[c.front.entry] && c.kept == nil {
				c.kept, any = p.detained(c), true
			}
		}
	})
	if any {
		return p.localLast()
	}
	return nil
}

// detained makes a connection's rule and gives what removes it.
func (p *Plane) detained(c *conn) (release func()) {
	r := c.rule()
	apply := func(gone bool) {
		p.keep.Lock()
		defer p.keep.Unlock()
		p.keeper.Apply([]link.Change{{Rule: r, Gone: gone}}) // where the kernel refuses, the connection is lost: nobody to tell
	}
	apply(false)
	return func() { apply(true) }
}

// rule gives the rule that leads a connection's packets into the room, whatever becomes of its frontend.
func (c *conn) rule() *link.Rule {
	whole := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	return &link.Rule{Owner: ownerKept, Priority: priorityPort, Six: c.to.Addr().Is6(), From: whole(c.from.Addr()), To: whole(c.to.Addr()),
		Protocol: uint8(model.TCP), FromPort: c.from.Port(), ToPort: link.PortRange{First: c.to.Port(), Last: c.to.Port()}, Table: tableKept}
}
