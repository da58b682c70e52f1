package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// subject is an address in the trees: where each leads, "" for nowhere, and the device that its packets come in by.
type subject struct {
	addr   netip.Addr
	to     [4]string // by the index in sides: a chain of a ruleset
	device string
}

// subjectOf returns where a subject's packets go. In the tree of the first stage they go to the second one's ruleset
// where the first has none.
func subjectOf(v *model.Subject) subject {
	s := subject{addr: v.Addr, device: v.Device}
	for i, at := range sides {
		rulesets := [...][model.PolicyStages]*model.Ruleset{model.Egress: v.Out, model.Ingress: v.In}[at.direction]
		r, of := rulesets[at.stage], at
		if at.stage == 0 && r == nil {
			of.stage = 1
			r = rulesets[1]
		} else if at.stage == 1 && rulesets[0] == nil {
			r = nil // the first tree leads there
		}
		if r == model.Closed {
			s.to[i] = chainDeny
		} else if r != nil {
			s.to[i] = rulesetChain(of, r.ID)
		}
	}
	return s
}

func (s subject) key() Key {
	return Key{Kind: KindSubject, Family: iptables.FamilyOf(s.addr), Prefix: netip.PrefixFrom(s.addr, s.addr.BitLen())}
}

// String returns the value of the subject's fact.
func (s subject) String() string {
	return strings.Join(append(slices.Clone(s.to[:]), s.device), " ")
}

// trees are what leads to the subjects and the devices of a family.
type trees struct {
	family   iptables.Family
	unknown  string // what becomes of addresses of pods that are no subject's; "": there are no trees
	subjects map[netip.Addr]subject
	devices  map[string]bool // by name
}

// build returns the chains of all trees.
//
// A tree has a rule for each of some prefixes, which leads to a chain with a rule for each of the prefix's subjects.
// What is no subject's comes to the end of a chain.
func (t *trees) build() map[string][]string {
	if t.unknown == "" {
		return map[string][]string{}
	}
	all := slices.SortedFunc(maps.Values(t.subjects), func(a, b subject) int { return a.addr.Compare(b.addr) })
	b := builder{chains: map[string][]string{}}
	for i, at := range sides {
		of := all
		b.own, b.end = at.own(), ""
		if at.stage > 0 {
			of = slices.DeleteFunc(slices.Clone(all), func(s subject) bool { return s.to[i] == "" })
		} else if t.unknown == drops {
			where := [...]string{model.Egress: "src", model.Ingress: "dst"}[at.direction]
			b.end = fmt.Sprintf("-m set --match-set %s%s %s -g %s", setPrefix(t.family), setPods, where, chainDeny)
		}
		b.leaf = func(s subject) string {
			if s.to[i] == "" {
				return "-j RETURN"
			}
			return "-g " + s.to[i]
		}
		b.grow(at.root(), of)
	}
	b.own, b.end = "-s", ""
	b.leaf = func(s subject) string { return fmt.Sprintf("! -i %s -g %s", s.device, chainForged) }
	b.grow(chainDevice, slices.DeleteFunc(all, func(s subject) bool { return s.device == "" }))
	b.growDevices(t.family, t.names())
	return b.chains
}

// builder builds a tree.
type builder struct {
	own    string // the option that matches a subject's address
	end    string // the rule at the end of each chain; "": none
	leaf   func(subject) string
	chains map[string][]string
}

// grow adds to a tree what leads to subjects, which are sorted: where there are many by branches of about as many
// prefixes as each has subjects.
func (b *builder) grow(root string, of []subject) {
	b.chains[root] = []string{}
	add := func(chain string, parts ...string) {
		b.chains[chain] = append(b.chains[chain], strings.Join(parts, " "))
	}
	leaf := func(chain string, s subject) { add(chain, b.own, s.key().Prefix.String(), b.leaf(s)) }
	end := func(chain string) {
		if b.end != "" {
			add(chain, b.end)
		}
	}
	most := 1
	if len(of) > bucket {
		most = share(len(of), 1)
	}
	for _, group := range groups(of, most) {
		if len(group.Items) == 1 {
			leaf(root, group.Items[0])
			continue
		}
		p := group.Shared()
		branch := root + "-" + hashed(p)
		add(root, b.own, p.String(), "-g", branch)
		for _, s := range group.Items {
			leaf(branch, s)
		}
		end(branch)
	}
	end(root)
}

// groups divides subjects, which are sorted, by prefixes that hold at most so many of them.
func groups(of []subject, most int) []xt.Halves[subject] {
	h := xt.Halves[subject]{Items: of, Addr: func(s subject) netip.Addr { return s.addr }}
	switch {
	case len(of) == 0:
		return nil
	case len(of) <= most:
		return []xt.Halves[subject]{h}
	}
	n := h.Cut(0, len(of))
	return append(groups(of[:n], most), groups(of[n:], most)...)
}

// read finds the subjects of trees that were built, and reports what is not as it would be built from them, or "".
func (t *trees) read(chains map[string][]string) (altered string) {
	t.subjects, t.devices = map[netip.Addr]subject{}, map[string]bool{}
	if len(chains) == 0 {
		return ""
	}
	t.unknown = passes
	for name, rules := range chains {
		for _, rule := range rules {
			if strings.HasPrefix(name, chainPods) {
				t.readDevice(strings.Fields(rule))
				continue
			}
			if strings.HasPrefix(rule, "-m set") {
				t.unknown = drops
			}
			t.leaf(name, strings.Fields(rule))
		}
	}
	should := t.build()
	for name := range should {
		if _, there := chains[name]; !there {
			return "lacks chain " + name
		}
	}
	for name, rules := range chains {
		if want, there := should[name]; !there || !slices.Equal(want, rules) {
			return "chain " + name + " is altered"
		}
	}
	return ""
}

// leaf takes in a rule of a chain if it is a subject's.
func (t *trees) leaf(chain string, words []string) {
	if len(words) < 4 {
		return
	}
	p, err := netip.ParsePrefix(words[1])
	target := words[len(words)-1]
	if err != nil || !p.IsSingleIP() || iptables.FamilyOf(p.Addr()) != t.family || isTree(target) {
		return
	}
	s, known := t.subjects[p.Addr()]
	if !known {
		s.addr = p.Addr()
	}
	if strings.HasPrefix(chain, chainDevice) {
		if len(words) > 4 {
			s.device = words[4]
		}
	} else if target != "RETURN" {
		for i, at := range sides {
			if strings.HasPrefix(chain, at.root()) {
				s.to[i] = target
			}
		}
	}
	t.subjects[p.Addr()] = s
}
