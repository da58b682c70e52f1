package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// devicesOf returns the facts of a device of one pod alone: what may come in by it, and that nothing else may.
func devicesOf(v *model.Device) (facts []Fact) {
	for _, f := range []iptables.Family{iptables.IPv4, iptables.IPv6} {
		set := setPrefix(f) + setEntry
		facts = append(facts, setFact(f, set), Fact{Key: Key{Kind: KindDevice, Family: f, Name: v.Name}})
		for _, p := range v.Sources {
			if iptables.FamilyOf(p.Addr()) == f {
				facts = append(facts, Fact{Key: Key{Kind: KindElement, Family: f, Name: set, Prefix: p, Device: v.Name}})
			}
		}
	}
	return facts
}

// deviceLevels is how many chains there are at most below the root of the tree of devices.
const deviceLevels = 6

// growDevices adds the tree of devices, given their names in order. What comes in by a device whose name begins as no
// pod's does meets one rule, or one for each character that they begin with.
func (b *builder) growDevices(f iptables.Family, names []string) {
	b.chains[chainPods] = []string{}
	for _, group := range alike(names, 0) {
		branch := b.branch(chainPods, group)
		b.chains[branch] = []string{fmt.Sprintf("-m set --match-set %s%s src,src -j RETURN", setPrefix(f), setEntry)}
		b.names(branch, group, deviceLevels)
	}
}

// names adds to a chain what leads to devices: a rule for each, or for those whose names have more characters in common
// than all have.
func (b *builder) names(chain string, of []string, levels int) {
	groups := alike(of, shared(of))
	if len(of) <= bucket || levels == 0 {
		groups = slices.Collect(slices.Chunk(of, 1))
	}
	for _, group := range groups {
		if len(group) == 1 {
			b.chains[chain] = append(b.chains[chain], fmt.Sprintf("-i %s -g %s", group[0], chainForeign))
		} else {
			b.names(b.branch(chain, group), group, levels-1)
		}
	}
}

// branch adds to a chain what leads to a chain of its own for names, by what they have in common.
func (b *builder) branch(chain string, names []string) string {
	const most = 14 // beside the + there is space for
	prefix := names[0][:min(shared(names), most)]
	to := chainPods + "-" + hashed(prefix)
	b.chains[chain] = append(b.chains[chain], fmt.Sprintf("-i %s+ -g %s", prefix, to))
	return to
}

// shared returns how many characters names, which are sorted, have in common.
func shared(names []string) (n int) {
	a, z := names[0], names[len(names)-1]
	for n < min(len(a), len(z)) && a[n] == z[n] {
		n++
	}
	return n
}

// alike divides names, which are sorted, into those with the same character at an index. The first may be as long as
// that: it is by itself.
func alike(names []string, at int) (groups [][]string) {
	for len(names) > 0 {
		n := 1
		for n < len(names) && len(names[0]) > at && names[n][at] == names[0][at] {
			n++
		}
		groups, names = append(groups, names[:n]), names[n:]
	}
	return groups
}

// readDevice takes in a rule of a chain if it is a device's.
func (t *trees) readDevice(words []string) {
	if len(words) == 4 && words[0] == "-i" && words[3] == chainForeign {
		t.devices[words[1]] = true
	}
}

// names returns the names of the trees' devices, sorted.
func (t *trees) names() []string { return slices.Sorted(maps.Keys(t.devices)) }

// isEntry reports whether k is of what pods' devices admit.
func (k Key) isEntry() bool {
	return k.Kind == KindDevice || (k.Kind == KindSet || k.Kind == KindElement) && k.Name == setPrefix(k.Family)+setEntry
}

// isWildcard reports whether k is a device that iptables takes for others, too.
func isWildcard(k Key) bool { return k.Kind == KindDevice && strings.HasSuffix(k.Name, "+") }
