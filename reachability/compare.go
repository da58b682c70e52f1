package reachability

import (
	"fmt"
	"slices"
	"strings"
)

// Difference is what a change of the objects newly allows or denies between two groups.
type Difference struct {
	From        string   `json:"from"`
	To          string   `json:"to"`
	FromMembers []string `json:"fromMembers"` // pods, nodes or addresses
	ToMembers   []string `json:"toMembers"`
	Now         Fate     `json:"now"` // Allowed or Denied
	Ports       []string `json:"ports"`
	Summary     string   `json:"summary"` // of Ports
	Before      string   `json:"before"`  // why it was not so
	Reason      string   `json:"reason"`  // why it is
}

// Comparison is what a change of the objects comes to for all that stand before and after it.
type Comparison struct {
	Allowed  []Difference `json:"newlyAllowed"`
	Denied   []Difference `json:"newlyDenied"`
	Compared int          `json:"pairsCompared"` // pairs of groups
	Apart    int          `json:"podsNotCompared"`
}

// Compare returns what becomes newly allowed or denied where before becomes after. Pods that are in one of them only
// are counted and not compared. Services are not evaluated.
func Compare(before, after *Cluster) (*Comparison, error) {
	gs := groups(after, before)
	if n := len(gs) * len(gs); n > maxCells {
		return nil, fmt.Errorf("%d workloads, nodes and CIDRs come to %d pairs, %d are the limit", len(gs), n, maxCells)
	}
	out := &Comparison{Allowed: []Difference{}, Denied: []Difference{}}
	was, is := before.podNames(), after.podNames()
	for name := range is {
		if !was[name] {
			out.Apart++
		}
	}
	for name := range was {
		if !is[name] {
			out.Apart++
		}
	}
	for _, a := range gs {
		for _, b := range gs {
			src, dst, now := between(a, b, 0)
			if old, oldTo, then := between(a, b, 1); now && then {
				out.Compared++
				out.pair(a, b, before.families(old, oldTo), after.families(src, dst))
			}
		}
	}
	return out, nil
}

// podNames returns the names of all pods, and of workloads with a pod template, that count.
func (c *Cluster) podNames() map[string]bool {
	out := map[string]bool{}
	for _, v := range c.pods {
		out[memberName(v)] = true
	}
	return out
}

// pair adds where the spans of two groups differ, over each family that they have before and after.
func (o *Comparison) pair(from, to *Group, before, after [][]Span) {
	for n, into := range []*[]Difference{&o.Allowed, &o.Denied} {
		d := Difference{From: from.Name, To: to.Name, FromMembers: from.Members, ToMembers: to.Members, Now: Allowed}
		if n == 1 {
			d.Now = Denied
		}
		var families [][2][]string // the ports that differ, and those that don't
		for family := range after {
			if was, is := cut(before[family], after[family]); len(is) > 0 {
				families = append(families, d.family(was, is))
			}
		}
		if d.Reason == "" {
			continue
		}
		alike := len(families) < 2 || slices.Equal(families[0][0], families[1][0])
		var short []string
		for i, f := range families {
			over := ""
			if !alike {
				over = " over IPv" + string("46"[i])
			}
			for _, p := range f[0] {
				d.Ports = append(d.Ports, p+over)
			}
			if len(f[0]) > 0 {
				short = append(short, summary(f[0], f[1])+over)
			}
			if alike {
				break
			}
		}
		d.Summary = strings.Join(short, "; ")
		*into = append(*into, d)
	}
}

// family returns the ports that are newly as d.Now says, and the others. It sets the reasons of d by the first.
func (d *Difference) family(was, is []Span) (ports [2][]string) {
	for i, s := range is {
		n := 1
		if was[i].allowed() != s.allowed() && s.allowed() == (d.Now == Allowed) {
			n = 0
			if d.Reason == "" {
				d.Before, d.Reason = was[i].Policy.Reason, s.Policy.Reason
			}
		}
		ports[n] = append(ports[n], s.String())
	}
	return ports
}

// summary returns the shorter of a list of ports, and all but the others.
func summary(ports, others []string) string {
	switch {
	case len(others) == 0:
		return "everything"
	case len(others) < len(ports):
		return "everything but " + strings.Join(others, ", ")
	}
	return strings.Join(ports, ", ")
}

// cut returns both lists, cut so that their spans are the same, and joined where the verdicts of neighbours are.
func cut(a, b []Span) (x, y []Span) {
	for i, j := 0, 0; i < len(a) && j < len(b); {
		s, t := a[i], b[j]
		first, last := max(s.First, t.First), min(s.Last, t.Last)
		if s.Last == last {
			i++
		}
		if t.Last == last {
			j++
		}
		s.First, s.Last, t.First, t.Last = first, last, first, last
		if n := len(x) - 1; n >= 0 && x[n].Protocol == s.Protocol && s.Protocol != other && x[n].Last == first-1 &&
			x[n].allowed() == s.allowed() && y[n].allowed() == t.allowed() {
			x[n].Last, y[n].Last = last, last
			continue
		}
		x, y = append(x, s), append(y, t)
	}
	return x, y
}
