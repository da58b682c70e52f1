package route

import (
	"net/netip"

	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/rule"
)

// podTable is the table of routes that this node's pods alone take. Its rules come behind the kernel's own for local
// addresses and those of Services' modes, and before the main table's.
const (
	podTable     = 0xfa<<24 | uint32(Protocol)
	rulePriority = uint32(Protocol)
)

// tableOf returns the table of a kind of routes, 0: the main table.
func tableOf(k Kind) uint32 {
	if k == KindPodRoute {
		return podTable
	}
	return 0
}

// ruleFrom returns the rule by which packets of a range of pods take routes of podTable.
func ruleFrom(pods netip.Prefix) rule.Rule {
	return rule.Rule{Owner: Protocol, Priority: rulePriority, Six: pods.Addr().Is6(), From: pods,
		Mask: network.UnderlayMark, Table: podTable}
}

// readRules reads the rules. Of a range that has others than the one that ruleFrom returns, the fact is altered.
func (p *Plane) readRules() (l []Fact, err error) {
	rules, err := rule.List(p.s, Protocol)
	held := map[netip.Prefix][]rule.Rule{}
	for _, r := range rules {
		held[r.From] = append(held[r.From], r)
	}
	for pods, rules := range held {
		altered := len(rules) > 1 || rules[0] != ruleFrom(pods)
		l = append(l, Fact{Key: Key{Kind: KindRule, To: pods}, Value: Value{Altered: altered}})
	}
	return l, err
}

// makeRule adds the requests that make a rule the only one of its range.
func (w *writer) makeRule(k Key) error {
	others, err := w.rulesFrom(k.To)
	w.Add(k, func(b *netlink.Batch) {
		rule.Delete(b, others...)
		rule.Put(b, ruleFrom(k.To))
	})
	return err
}

// removeRule adds the requests that remove all rules of a range.
func (w *writer) removeRule(k Key) {
	rules, err := w.rulesFrom(k.To)
	if err != nil {
		w.Refuse(k, err)
		return
	}
	w.Add(k, func(b *netlink.Batch) { rule.Delete(b, rules...) })
}

// rulesFrom returns this plane's rules of a range.
func (w *writer) rulesFrom(pods netip.Prefix) (l []rule.Rule, err error) {
	rules, err := rule.List(w.s, Protocol)
	for _, r := range rules {
		if r.From == pods {
			l = append(l, r)
		}
	}
	return l, err
}
