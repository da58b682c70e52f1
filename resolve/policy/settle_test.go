package policy

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// stale counts what is out of date of each kind of derived values.
var stale = map[string]func(*Resolver) int{
	"rulesets": func(r *Resolver) int {
		return len(r.dirtyLocal) + len(r.idlePlans) + len(r.idleRulesets) + one(r.reshow) + one(r.renumbered)
	},
	"tables":     func(r *Resolver) int { return len(r.idleTables) },
	"peers":      func(r *Resolver) int { return len(r.changedPeers) },
	"signatures": func(r *Resolver) int { return len(r.dirtyClasses) },
	"pieces":     func(r *Resolver) int { return one(r.stalePieces) },
	"addresses":  func(r *Resolver) int { return len(r.dirtyAddresses) },
	"verdicts":   func(r *Resolver) int { return len(r.idle) + len(r.newIdentities) + len(r.newTables) },
	"node":       func(r *Resolver) int { return len(r.dirtyDevices) + one(r.staleNode) },
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// watch has derivations say in seen what marked which values as stale, and checks that none leaves its own so. What is
// stale before the first of them was marked by cause.
func watch(t *testing.T, cause *string, seen map[[2]string]bool) {
	was := derivations
	t.Cleanup(func() { derivations = was })
	derivations = slices.Clone(was)
	for i, d := range was {
		derivations[i].update = func(r *Resolver) *resource {
			before := map[string]int{}
			for values, count := range stale {
				if before[values] = count(r); i == 0 && *cause != "" && before[values] > 0 {
					seen[[2]string{values, *cause}] = true
				}
			}
			*cause = ""
			x := d.update(r)
			for values, count := range stale {
				if count(r) > before[values] {
					seen[[2]string{values, d.values}] = true
				}
			}
			if n := stale[d.values](r); n > 0 && x == nil {
				t.Errorf("%d of %s are left stale", n, d.values)
			}
			return x
		}
	}
}

// What the table says follows from what, each after that, is what marks what as stale, and nothing is left so.
func TestDerivations(t *testing.T) {
	cause, seen := "", map[[2]string]bool{}
	watch(t, &cause, seen)
	d := seedDice{t, rand.New(rand.NewPCG(1, 0))}
	for range 40 {
		w := newWalk(d)
		w.apply(nil)
		for range 150 {
			var batch []source.Change
			switch d.roll("what", 12) {
			case 0:
				cause, w.config.Addresses = "interfaces", []netip.Addr{draw(d, "address", drawAddresses...)}
				w.resolver.SetAddresses(w.config.Addresses)
			case 1:
				cause = "devices"
				w.resolver.SetDevices([]Device{{Name: draw(d, "name", "a", "b"), Peer: true,
					Hosts: []netip.Addr{draw(d, "address", drawAddresses...)}}})
			case 2:
				cause = "Services"
				w.resolver.ApplyServices(model.Change[model.ServicePart]{Put: []model.ServicePart{
					&model.Frontend{Entry: model.Entry{Addr: draw(d, "address", drawAddresses...)}}}})
			case 3, 4:
				if len(w.there) > 0 {
					k := draw(d, "deleted", keysOf(w.there)...)
					cause, batch = string(k.Kind), []source.Change{{Key: k}}
				}
			default:
				o := drawObject(d)
				k := source.KeyOf(o)
				cause, batch = string(k.Kind), []source.Change{{Key: k, Object: o}}
			}
			w.apply(batch)
			for values, count := range stale {
				if n := count(w.resolver); n > 0 {
					t.Fatalf("%d of %s are left stale", n, values)
				}
			}
		}
	}
	said, earlier := map[[2]string]bool{}, ""
	for _, x := range derivations {
		for _, from := range strings.Fields(x.from) {
			said[[2]string{x.values, from}] = true
			if stale[from] != nil && !strings.Contains(earlier, from) {
				t.Errorf("%s follow from %s, which come later", x.values, from)
			}
		}
		earlier += " " + x.values
	}
	for edge := range seen {
		if !said[edge] {
			t.Errorf("%s follow from %s, which the table doesn't say", edge[0], edge[1])
		}
	}
	for edge := range said {
		if !seen[edge] {
			t.Errorf("%s never follow from %s, as the table says", edge[0], edge[1])
		}
	}
}

var drawAddresses = []netip.Addr{netip.MustParseAddr("10.0.1.1"), netip.MustParseAddr("10.0.1.2"),
	netip.MustParseAddr("10.0.1.3"), netip.MustParseAddr("192.168.0.1")}
