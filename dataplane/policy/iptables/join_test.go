package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
)

// cluster draws parts that change: two peer tables of each kind, identities, ranges, and single peers in and beside
// them.
type cluster struct {
	*rand.Rand
	now      *model.Policies
	tables   []*model.PeerTable
	ids      []*model.Identity
	rulesets []*model.Ruleset
}

var verdicts = []model.Verdict{model.VerdictAccept, model.VerdictDrop, model.VerdictNext}

func newCluster(seed uint64) *cluster {
	c := &cluster{Rand: rand.New(rand.NewPCG(seed, 1)), now: model.NewPolicies()}
	for i := range 6 {
		t := &model.PeerTable{ID: uint64(i + 1), Default: verdicts[i%3], Otherwise: model.Decision{Verdict: verdicts[i%3]}}
		for _, v := range verdicts {
			t.Rules = append(t.Rules, model.Rule{Peers: []*model.Peers{{Text: v.String()}}, Verdict: v})
		}
		if i > 2 {
			t.Rules = append(t.Rules, model.Rule{Verdict: model.VerdictDrop, Audit: true})
		}
		c.tables = append(c.tables, t)
	}
	for i := range 8 {
		c.ids = append(c.ids, &model.Identity{ID: uint64(i + 1)})
	}
	for i := range 4 {
		c.rulesets = append(c.rulesets, &model.Ruleset{ID: uint64(i + 1), Ports: []model.PortEntry{{Protocol: model.TCP,
			First: 80, Last: 80, PeerTable: c.tables[i]}}, Default: model.PortEntry{PeerTable: c.tables[i+2]}})
	}
	return c
}

func at(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

// change draws a change and makes it true.
func (c *cluster) change() (d model.Change[model.PolicyPart]) {
	for range 1 + c.IntN(4) {
		switch c.IntN(4) {
		case 0: // a subject
			a := netip.AddrFrom4([4]byte{10, 1, 0, byte(c.IntN(3))})
			if s := c.now.Subjects[a]; s != nil && !slices.Contains(d.Del, model.PolicyPart(s)) {
				d.Del = append(d.Del, s)
				delete(c.now.Subjects, a)
			} else if s == nil {
				s := &model.Subject{Addr: a, Out: [2]*model.Ruleset{c.rulesets[c.IntN(4)], c.rulesets[c.IntN(4)]}}
				d.Put, c.now.Subjects[a] = append(d.Put, s), s
			}
		case 1: // a verdict
			k := model.PeerVerdictKey{PeerTable: uint64(c.IntN(6) + 1), Identity: uint64(c.IntN(8) + 1)}
			t := c.tables[k.PeerTable-1]
			if v := c.now.Verdicts[k]; v != nil {
				d.Del = append(d.Del, v)
				delete(c.now.Verdicts, k)
			}
			l := t.Decisions()
			if n := l[c.IntN(len(l))]; n != t.Otherwise && c.IntN(3) > 0 {
				v := &model.PeerVerdict{PeerTable: t, Identity: c.ids[k.Identity-1], Decision: n}
				d.Put, c.now.Verdicts[k] = append(d.Put, v), v
			}
		case 2: // a single peer
			a := at(c.IntN(32))
			if p := c.now.Singles[a]; p != nil {
				d.Del = append(d.Del, p)
				delete(c.now.Singles, a)
			}
			if c.IntN(3) > 0 {
				p := &model.Peer{Range: model.Range{First: a, Last: a}, Identity: c.ids[c.IntN(8)]}
				d.Put, c.now.Singles[a] = append(d.Put, p), p
			}
		default: // the ranges, cut anew
			var edges []int
			for i := 0; i < 31; i += 2 + c.IntN(9) {
				edges = append(edges, i)
			}
			for _, p := range c.now.Ranges {
				d.Del = append(d.Del, p)
			}
			c.now.Ranges = nil
			for i, first := range edges[1:] {
				if c.IntN(3) == 0 {
					continue
				}
				p := &model.Peer{Range: model.Range{First: at(edges[i]), Last: at(first - 1)}, Identity: c.ids[c.IntN(8)]}
				d.Put, c.now.Ranges = append(d.Put, p), append(c.now.Ranges, p)
			}
		}
	}
	// what was drawn twice in a change is as the model has it: put and del never name the same part
	both := model.Change[model.PolicyPart]{Put: without(d.Put, d.Del), Del: without(d.Del, d.Put)}
	return both
}

// decision returns what sets say about an address, as the kernel matches it.
func decision(facts map[Key]Fact, t *model.PeerTable, a netip.Addr) model.Decision {
	for _, d := range setsOf(t) {
		best, matches := -1, false
		for k, f := range facts {
			if k.Kind == KindElement && k.Name == tableSet(4, t, d) && k.Prefix.Contains(a) && k.Prefix.Bits() > best {
				best, matches = k.Prefix.Bits(), f.Value != noMatch
			}
		}
		if matches {
			return d
		}
	}
	return t.Otherwise
}

func TestJoinSaysWhatThePartsSay(t *testing.T) {
	for seed := range uint64(30) {
		c, j, p := newCluster(seed), &Join{}, &Plane{}
		held := map[model.PolicyPart]bool{}
		for step := range 40 {
			d := j.Apply(c.change())
			for _, part := range d.Del {
				if !held[part] {
					t.Fatalf("%d/%d: %T deleted that was not put", seed, step, part)
				}
				delete(held, part)
			}
			for _, part := range d.Put {
				held[part] = true
			}
			facts := policytest.Facts(t, p, slices.Collect(maps.Keys(held)))
			fresh := policytest.Facts(t, p, joined(c.now.Parts()[1:])) // the node aside
			if x := append(policytest.Difference(facts, fresh), policytest.Difference(fresh, facts)...); len(x) > 0 {
				t.Fatalf("%d/%d: step by step otherwise than at once: %v", seed, step, x)
			}
			for _, table := range c.tables {
				used := false
				for k := range facts {
					used = used || k.Kind == KindSet && strings.Contains(k.Name, fmt.Sprintf("_%016x_", table.ID))
				}
				for i := range 32 {
					want := table.Otherwise
					if peer := c.now.Peer(at(i)); peer != nil {
						k := model.PeerVerdictKey{PeerTable: table.ID, Identity: peer.Identity.ID}
						if v := c.now.Verdicts[k]; v != nil {
							want = v.Decision
						}
					}
					if got := decision(facts, table, at(i)); used && got != want {
						t.Fatalf("%d/%d: table %d says %v of %s, not %v", seed, step, table.ID, got, at(i), want)
					}
				}
			}
		}
	}
}

func TestTablesBeyondABoundDrop(t *testing.T) {
	large := &model.PeerTable{ID: 1, Default: model.VerdictDrop}
	small := &model.PeerTable{ID: 2, Default: model.VerdictDrop}
	var parts []model.PolicyPart
	for i, table := range []*model.PeerTable{large, small} {
		table.Otherwise.Verdict = model.VerdictDrop
		table.Rules = []model.Rule{{Peers: []*model.Peers{{}}, Verdict: model.VerdictAccept}}
		r := &model.Ruleset{ID: table.ID, Name: fmt.Sprint("ruleset ", table.ID), Default: model.PortEntry{PeerTable: table}}
		addr := netip.AddrFrom4([4]byte{10, 1, 0, byte(i)})
		parts = append(parts, &model.Subject{Addr: addr, In: [2]*model.Ruleset{nil, r}})
	}
	ids := []*model.Identity{{ID: 1}, {ID: 2}}
	parts = append(parts, &model.PeerVerdict{PeerTable: large, Identity: ids[0]},
		&model.PeerVerdict{PeerTable: small, Identity: ids[1]})
	var peers []model.PolicyPart
	for i := range 20 {
		id := ids[0]
		if i >= 15 {
			id = ids[1]
		}
		peers = append(peers, &model.Peer{Range: model.Range{First: at(i), Last: at(i)}, Identity: id})
	}
	j, p := &Join{MaxElements: 10}, &Plane{}
	held := map[model.PolicyPart]bool{}
	facts := func(put, del []model.PolicyPart) map[Key]Fact {
		d := j.Apply(model.Change[model.PolicyPart]{Put: put, Del: del})
		for _, x := range d.Del {
			delete(held, x)
		}
		for _, x := range d.Put {
			held[x] = true
		}
		return policytest.Facts(t, p, slices.Collect(maps.Keys(held)))
	}
	closed := func(facts map[Key]Fact) (names []string, elements int) {
		for k := range facts {
			switch k.Kind {
			case KindClosed:
				names = append(names, k.Name)
			case KindElement:
				elements++
			}
		}
		return names, elements
	}
	all := facts(slices.Concat(parts, peers), nil)
	if names, elements := closed(all); !slices.Equal(names, []string{"peer table 0000000000000001"}) || elements != 5 {
		t.Errorf("closed %v, %d elements", names, elements)
	}
	closedTable := Key{Kind: KindClosed, Family: 4, Name: "peer table 0000000000000001"}
	if why := fmt.Sprint(all[closedTable].Value); !strings.HasPrefix(why, "its 15 addresses") {
		t.Errorf("closed since %q", why)
	}
	k := Key{Kind: KindChain, Family: 4, Name: rulesetChain(side{model.Ingress, 1}, 1)}
	if rules, _ := all[k].Body.([]string); !slices.Equal(rules, []string{"-g " + chainDeny}) {
		t.Errorf("a closed table: %q", rules)
	}
	if names, elements := closed(facts(nil, peers[:12])); len(names) > 0 || elements != 8 {
		t.Errorf("after peers went: closed %v, %d elements", names, elements)
	}
	j.MaxSets = 1
	last := &model.Subject{Addr: at(200), Out: [2]*model.Ruleset{nil, parts[0].(*model.Subject).In[1]}}
	if names, _ := closed(facts([]model.PolicyPart{last}, nil)); len(names) != 1 {
		t.Errorf("with one set: closed %v", names)
	}
}
