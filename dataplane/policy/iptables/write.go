package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/ipset"
	"fairlead.dev/fairlead/kernel/iptables"
)

// change is what a Write does in one family. A key whose value changes is in put only.
type change struct {
	put, del []Fact
	changes  map[Key]bool // of put: those that were there before, with another value
	created  map[string]bool
	gone     map[string]bool
}

// Write implements dataplane.Plane. No state in between lets a packet pass that neither the old nor the new one does:
//
//  1. New sets, which no rule names yet, come with their elements.
//  2. Elements of other sets change where that lets fewer packets pass.
//  3. All chains change at once, by one restore. In the nft variant many new chains, which nothing leads to, come
//     before.
//  4. Elements change where that lets more packets pass.
//  5. Sets go that no rule names any more.
//
// A family that fails leaves the other be, and is read again before the next Write. Peer tables beyond a bound are
// refused when everything else is written: their chains drop.
func (p *Plane) Write(ctx context.Context, put, del []Fact) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	refused := p.refused(put)
	var errs []error
	for _, f := range p.conn.Families {
		if c := changeOf(f, put, del, refused); len(c.put)+len(c.del) > 0 {
			if err := p.write(ctx, f, c); err != nil {
				delete(p.held, f)
				errs = append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil || len(refused) == 0 {
		return err
	}
	return &dataplane.Refused[Key]{Facts: refused}
}

// refused returns the facts of put that can't be written.
func (p *Plane) refused(put []Fact) map[Key]error {
	out := map[Key]error{}
	var lacking error
	if slices.ContainsFunc(put, func(f Fact) bool { return f.Key.Kind == KindDevice }) {
		lacking = p.hasDevices()
	}
	for _, f := range put {
		switch {
		case lacking != nil && f.Key.isEntry():
			out[f.Key] = fmt.Errorf("sources of pods are not checked: %w", lacking)
		case f.Key.Kind == KindClosed:
			out[f.Key] = fmt.Errorf("%s: drops every packet: use broader selectors or fewer policies", f.Value)
		case isWildcard(f.Key):
			out[f.Key] = fmt.Errorf("device %s: iptables takes a name that ends in + for all that begin so: rename it",
				f.Key.Name)
		case f.Key.Kind == KindSubject && !slices.Contains(p.conn.Families, f.Key.Family):
			out[f.Key] = fmt.Errorf("the commands of iptables for IPv%d are not installed: install the package iptables, "+
				"and start the agent anew", f.Key.Family)
		}
	}
	return out
}

// changeOf returns what is to be done in a family: without facts that are refused, and then nothing is deleted yet.
func changeOf(f iptables.Family, put, del []Fact, refused map[Key]error) *change {
	c := &change{changes: map[Key]bool{}, created: map[string]bool{}, gone: map[string]bool{}}
	goes := make(map[Key]bool, len(del))
	for _, x := range del {
		goes[x.Key] = true
	}
	for _, x := range put {
		if x.Key.Family == f && refused[x.Key] == nil {
			c.put = append(c.put, x)
			if goes[x.Key] {
				c.changes[x.Key] = true
			}
		}
	}
	for _, x := range del {
		if x.Key.Family != f || x.Key.Kind == KindClosed || c.changes[x.Key] || len(refused) > 0 {
			continue
		}
		c.del = append(c.del, x)
		if x.Key.Kind == KindSet {
			c.gone[x.Key.Name] = true
		}
	}
	for _, x := range c.put {
		if x.Key.Kind == KindSet && !c.changes[x.Key] {
			c.created[x.Key.Name] = true
		}
	}
	return c
}

// write does one family's change.
func (p *Plane) write(ctx context.Context, f iptables.Family, c *change) error {
	if p.held[f] == nil {
		if _, err := p.load(ctx, f); err != nil {
			return err
		}
	}
	h := p.held[f]
	for _, x := range c.put {
		if x.Key.Kind == KindSet && c.changes[x.Key] { // of another type: rules that name it are gone, or this fails
			if err := p.sets.Destroy(x.Key.Name); err != nil {
				return err
			}
			c.created[x.Key.Name] = true
		}
	}
	var b ipset.Batch
	c.create(f, &b)
	if err := c.elements(p.sets, &b, true); err != nil {
		return err
	}
	if slices.ContainsFunc(c.put, func(x Fact) bool { return x.Key.Kind == KindHook }) {
		xt.Leading.Lock()
		defer xt.Leading.Unlock()
	}
	next := h.after(c)
	for _, input := range c.inputs(p.Variant(), h, next) {
		if err := p.conn.Restore(ctx, f, input); err != nil {
			return err
		}
	}
	if err := c.elements(p.sets, &ipset.Batch{}, false); err != nil {
		return err
	}
	if len(c.gone) > 0 {
		if err := p.sets.Destroy(slices.Collect(maps.Keys(c.gone))...); err != nil {
			return err
		}
	}
	p.held[f] = next
	return nil
}

// create adds the creation of sets. That of running connections is filled at once, and empties itself.
func (c *change) create(f iptables.Family, b *ipset.Batch) {
	elements := map[string]int{}
	for _, x := range c.put {
		if x.Key.Kind == KindElement {
			elements[x.Key.Name]++
		}
	}
	for name := range c.created {
		s := ipset.Set{Name: name, IPv6: f == iptables.IPv6, Devices: name == setPrefix(f)+setEntry,
			Elements: elements[name]}
		if name != setPrefix(f)+setMidstream {
			b.Create(s)
			continue
		}
		s.Timeout = midstream
		b.Create(s)
		for _, half := range everywhere(f) {
			b.Put(name, ipset.Element{Prefix: half})
		}
	}
}

// atOnce is how many changes of elements are put into one batch: the kernel makes them one by one anyway.
const atOnce = 8192

// elements makes the changes that b has and those of elements, before the chains change, or after. It tries all.
func (c *change) elements(sets *ipset.Conn, b *ipset.Batch, before bool) error {
	var errs []error
	add := func(x Fact, there bool) {
		set, e := x.Key.Name, ipset.Element{Prefix: x.Key.Prefix, Device: x.Key.Device, NoMatch: x.Value == noMatch}
		if before != (c.created[set] || grants(set) == (e.NoMatch == there)) {
			return
		}
		if there {
			b.Put(set, e)
		} else {
			b.Delete(set, e)
		}
		if b.Len() >= atOnce {
			errs = append(errs, sets.Apply(b))
			*b = ipset.Batch{}
		}
	}
	for _, i := range elementsOf(c.put) {
		add(c.put[i], true)
	}
	for _, i := range elementsOf(c.del) {
		if x := c.del[i]; !c.gone[x.Key.Name] {
			add(x, false)
		}
	}
	return errors.Join(append(errs, sets.Apply(b))...)
}

// elementsOf returns the indices of facts that are elements, those of one set together.
func elementsOf(facts []Fact) (out []int32) {
	for i := range facts {
		if facts[i].Key.Kind == KindElement {
			out = append(out, int32(i))
		}
	}
	slices.SortFunc(out, func(a, b int32) int {
		return cmp.Or(strings.Compare(facts[a].Key.Name, facts[b].Key.Name), cmp.Compare(a, b))
	})
	return out
}

// after returns what the kernel holds after a change.
func (h *held) after(c *change) *held {
	next := &held{trees: h.trees, chains: h.chains, leads: maps.Clone(h.leads), counts: maps.Clone(h.counts)}
	next.subjects, next.devices = maps.Clone(h.subjects), maps.Clone(h.devices)
	dirty := false
	for _, x := range c.del {
		switch x.Key.Kind {
		case KindSet:
			delete(next.counts, x.Key.Name)
		case KindElement:
			if !c.gone[x.Key.Name] {
				next.counts[x.Key.Name]--
			}
		case KindTrees:
			next.unknown, dirty = "", true
		case KindSubject:
			delete(next.subjects, x.Key.Prefix.Addr())
			dirty = true
		case KindDevice:
			delete(next.devices, x.Key.Name)
			dirty = true
		case KindHook:
			delete(next.leads, x.Key.Name)
		}
	}
	for _, x := range c.put {
		switch x.Key.Kind {
		case KindSet:
			if _, there := next.counts[x.Key.Name]; !there && x.Key.Name != setPrefix(h.family)+setMidstream {
				next.counts[x.Key.Name] = 0
			}
		case KindElement:
			if !c.changes[x.Key] {
				next.counts[x.Key.Name]++
			}
		case KindTrees:
			next.unknown, dirty = x.Value, true
		case KindSubject:
			next.subjects[x.Key.Prefix.Addr()] = x.Body.(subject)
			dirty = true
		case KindDevice:
			next.devices[x.Key.Name] = true
			dirty = true
		case KindHook:
			next.leads[x.Key.Name] = []string{lead(x.Key.Name)}
		}
	}
	if dirty {
		next.chains = next.build()
	}
	return next
}

// most is how many chains one restore of the nft variant is given: it takes longer than linearly in their number.
const most = 2000

// inputs returns what restores are given, one after the other: the last one changes what packets meet.
func (c *change) inputs(v Variant, h, next *held) (inputs [][]byte) {
	finish := func(r *xt.Restore) {
		var b bytes.Buffer
		if r.Finish(&b, filter); b.Len() > 0 {
			inputs = append(inputs, b.Bytes())
		}
	}
	var chains []Fact
	for _, x := range c.put {
		if x.Key.Kind == KindChain {
			chains = append(chains, x)
		}
	}
	slices.SortFunc(chains, func(a, b Fact) int {
		return cmp.Or(cmp.Compare(a.Key.Rank(), b.Key.Rank()), cmp.Compare(a.Key.Name, b.Key.Name))
	})
	if v == NFT && len(chains) > most {
		for l := range slices.Chunk(c.ahead(chains), most) {
			var r xt.Restore
			for name := range next.chains { // where some of l lead
				if _, there := h.chains[name]; !there {
					r.Body(name, nil)
				}
			}
			for _, x := range l {
				r.Body(x.Key.Name, x.Body.([]string))
			}
			finish(&r)
		}
	}
	var r xt.Restore
	for _, x := range chains {
		r.Body(x.Key.Name, x.Body.([]string))
	}
	writeTrees(&r, h.chains, next.chains)
	for _, x := range c.put {
		if x.Key.Kind == KindHook {
			r.Lead(x.Key.Name, 0, h.leads[x.Key.Name], []string{lead(x.Key.Name)})
		}
	}
	for _, x := range c.del {
		switch x.Key.Kind {
		case KindHook:
			r.Lead(x.Key.Name, 0, h.leads[x.Key.Name], nil)
		case KindChain:
			r.Remove(x.Key.Name)
		}
	}
	finish(&r)
	return inputs
}

// ahead returns those of chains, sorted, that are new and that only new ones lead to: each after those that its rules
// lead to.
func (c *change) ahead(chains []Fact) (l []Fact) {
	waiting := map[string]Fact{}
	for _, x := range chains {
		if !c.changes[x.Key] && x.Key.Rank() <= rulesetRank {
			waiting[x.Key.Name] = x
		}
	}
	var add func(name string)
	add = func(name string) {
		x, ok := waiting[name]
		if !ok {
			return
		}
		delete(waiting, name)
		for _, rule := range x.Body.([]string) {
			add(rule[strings.LastIndexByte(rule, ' ')+1:])
		}
		l = append(l, x)
	}
	for _, x := range chains {
		add(x.Key.Name)
	}
	return l
}

// writeTrees writes the difference between trees.
func writeTrees(r *xt.Restore, is, want map[string][]string) {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if rules, there := is[name]; !there || !slices.Equal(rules, want[name]) {
			r.Body(name, want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if _, stays := want[name]; !stays {
			r.Remove(name)
		}
	}
}
