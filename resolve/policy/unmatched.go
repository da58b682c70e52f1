package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/source"
)

// MatchesNothing is the reason of the problem that a selector matches no object that is known.
const MatchesNothing = "MatchesNothing"

// Unmatched returns the selectors of policies that match no pod, or no Node, that is known: of policies those that
// select no pod, and of those that do the peers, each once. It is for sources that may not hold all of a cluster.
func (r *Resolver) Unmatched() []source.Problem {
	var out []source.Problem
	peers := map[string]*unmatched{}
	for p := range r.everyPolicy {
		if _, selects := r.selecting[p]; !selects {
			out = append(out, source.Problem{Object: p.key(), Reason: MatchesNothing,
				Message: "the source has no pod that it selects: nothing of it is evaluated"})
			continue
		}
		for _, c := range slices.Concat(p.compiled.clauses[0], p.compiled.clauses[1]) {
			for _, s := range c.peers {
				if (s.kind != pods && s.kind != nodes) || r.matched(s) {
					continue
				}
				at := source.Problem{Object: p.key(), Field: fmt.Sprintf("spec.%s[%d]", c.ref.Direction, c.ref.Index)}
				if peers[s.text] == nil {
					peers[s.text] = &unmatched{spec: s}
				}
				peers[s.text].rules = append(peers[s.text].rules, at)
			}
		}
	}
	for _, text := range slices.Sorted(maps.Keys(peers)) {
		out = append(out, peers[text].problem())
	}
	sortProblems(out)
	return out
}

// unmatched is a peer that matches nothing, and the rules that have it.
type unmatched struct {
	spec  *peerSpec
	rules []source.Problem
}

// problem returns the problem, as the first rule's.
func (u *unmatched) problem() source.Problem {
	p := slices.MinFunc(u.rules, func(a, b source.Problem) int {
		return cmp.Or(strings.Compare(a.Object.String(), b.Object.String()), strings.Compare(a.Field, b.Field))
	})
	also := ""
	if n := len(u.rules) - 1; n > 0 {
		also = fmt.Sprintf(" (further rules with it: %d)", n)
	}
	what := "pod"
	if u.spec.kind == nodes {
		what = "Node"
	}
	p.Reason, p.Message = MatchesNothing, fmt.Sprintf("the source has no %s that matches peer %s%s: connections with it "+
		"are not evaluated", what, u.spec.text, also)
	return p
}

// everyPolicy calls visit for each policy that is known, until visit returns false.
func (r *Resolver) everyPolicy(visit func(*policy) bool) {
	for _, n := range r.namespaces {
		for i := range n.policies {
			if !visit(r.policyAt(n, i)) {
				return
			}
		}
	}
	for _, p := range r.cluster {
		if !visit(p) {
			return
		}
	}
}

// matched reports whether s matches a pod or a Node that is known.
func (r *Resolver) matched(s *peerSpec) bool {
	for _, n := range r.nodes {
		if s.matches(n.class) {
			return true
		}
	}
	for _, n := range r.namespaces {
		if r.known(n) && slices.ContainsFunc(n.classes, s.matches) {
			return true
		}
	}
	return false
}
