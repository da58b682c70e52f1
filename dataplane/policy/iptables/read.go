package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/iptables"
)

// held is what the kernel holds of ours in a family, as far as a Write depends on it.
type held struct {
	trees
	chains map[string][]string // those of the trees
	leads  map[string][]string // the rules of built-in chains that lead to ours
	counts map[string]int      // elements by set
}

// load learns what the kernel holds of a family, and returns its facts.
func (p *Plane) load(ctx context.Context, f iptables.Family) ([]Fact, error) {
	delete(p.held, f)
	read, err := p.conn.Save(ctx, f, filter)
	if err != nil {
		return nil, err
	}
	h := &held{trees: trees{family: f}, chains: map[string][]string{}, leads: map[string][]string{},
		counts: map[string]int{}}
	facts := h.table(read[filter])
	sets, err := p.readSets(h)
	if err != nil {
		return nil, err
	}
	p.held[f] = h
	return append(facts, sets...), nil
}

// table returns the facts that a table stands for.
func (h *held) table(t *iptables.Table) (facts []Fact) {
	for _, name := range t.Chains {
		rules := make([]string, len(t.Rules[name]))
		for i, r := range t.Rules[name] {
			rules[i] = strings.Clone(r) // what is kept must not keep all that was read
		}
		name = strings.Clone(name)
		switch {
		case isTree(name):
			h.chains[name] = rules
		case strings.HasPrefix(name, Prefix):
			f := chain(h.family, name, rules)
			f.Body = nil
			facts = append(facts, f)
		default:
			facts = append(facts, h.hook(name, rules)...)
		}
	}
	altered := h.trees.read(h.chains)
	if len(h.chains) > 0 {
		value := h.unknown
		if altered != "" {
			value = altered
		}
		facts = append(facts, Fact{Key: Key{Kind: KindTrees, Family: h.family}, Value: value})
	}
	for _, s := range h.subjects {
		facts = append(facts, Fact{Key: s.key(), Value: s.String()})
	}
	for name := range h.devices {
		facts = append(facts, Fact{Key: Key{Kind: KindDevice, Family: h.family, Name: name}})
	}
	return facts
}

// hook returns the fact of a built-in chain that leads to ours, if it does.
func (h *held) hook(name string, rules []string) []Fact {
	at := -1
	for i, r := range rules {
		if xt.Leads(r, Prefix) {
			h.leads[name] = append(h.leads[name], r)
			if at < 0 {
				at = i
			}
		}
	}
	l := h.leads[name]
	if len(l) == 0 {
		return nil
	}
	value := first
	if at > 0 || len(l) > 1 || l[0] != lead(name) {
		value = fmt.Sprintf("rule %d: %s", at+1, strings.Join(l, "; "))
	}
	return []Fact{{Key: Key{Kind: KindHook, Family: h.family, Name: name}, Value: value}}
}

// lead returns the rule that leads from a built-in chain to ours.
func lead(hook string) string { return "-j " + Prefix + hook }

// readSets returns the facts of a family's sets, and counts their elements.
func (p *Plane) readSets(h *held) (facts []Fact, err error) {
	names, err := p.sets.Names(setPrefix(h.family))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		set, elements, ours, err := p.sets.Read(name)
		if err != nil {
			return nil, err
		}
		f := setFact(h.family, name)
		if !ours || set.IPv6 != (h.family == iptables.IPv6) || set.Devices != (f.Value == devValue) {
			f.Value = "of another type or revision"
		}
		facts = append(facts, f)
		if set.Timeout > 0 {
			continue
		}
		h.counts[name] = len(elements)
		facts = slices.Grow(facts, len(elements))
		for _, e := range elements {
			value := ""
			if e.NoMatch {
				value = noMatch
			}
			k := Key{Kind: KindElement, Family: h.family, Name: name, Prefix: e.Prefix, Device: e.Device}
			facts = append(facts, Fact{Key: k, Value: value})
		}
	}
	return facts, nil
}

// everywhere are two prefixes that hold every address of a family.
func everywhere(f iptables.Family) []netip.Prefix {
	any := netip.IPv4Unspecified()
	if f == iptables.IPv6 {
		any = netip.IPv6Unspecified()
	}
	return storable(netip.PrefixFrom(any, 0))
}
