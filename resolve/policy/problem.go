package policy

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/source"
)

// The reasons of this package's problems.
const (
	Invalid  = "Invalid"  // a value that an API server would refuse
	NotKnown = "NotKnown" // a field or value of another version of the API
	TooLarge = "TooLarge" // beyond a bound
)

// The most problems that are named of one policy, and of one namespace. What is beyond is counted.
const (
	mostOfPolicy    = 10
	mostOfNamespace = 100
)

// problems are the first of what is wrong with a policy, and how many more there are.
type problems struct {
	list []source.Problem
	more int
}

// add adds a problem. The message says what is wrong, what is done instead, and what to do.
func (p *problems) add(field, reason, format string, args ...any) {
	if len(p.list) == mostOfPolicy {
		p.more++
		return
	}
	p.list = append(p.list, source.Problem{Field: field, Reason: reason, Message: fmt.Sprintf(format, args...)})
}

// of returns the problems as those of object, with a last one that counts those left out.
func (p *problems) of(object source.Key) []source.Problem {
	out := slices.Clone(p.list)
	if p.more > 0 {
		out = append(out, source.Problem{Reason: "MoreProblems",
			Message: fmt.Sprintf("%d more problems of %s; correct those that are named first", p.more, object)})
	}
	for i := range out {
		out[i].Object = object
	}
	return out
}

// Problems returns what is wrong now with policies that select a pod of this node, sorted: of each policy at most ten
// and a count, of each namespace at most a hundred. The slice is not changed later, and is the same one until there are
// others.
func (r *Resolver) Problems() []source.Problem {
	if r.staleProblems {
		if l := r.collectProblems(); !slices.Equal(l, r.problemsNow) {
			r.problemsNow = l
		}
		r.staleProblems = false
	}
	return r.problemsNow
}

func (r *Resolver) collectProblems() []source.Problem {
	byNamespace, excess := map[string][]source.Problem{}, r.excess()
	for p := range r.selecting {
		all := problems{slices.Clone(p.compiled.list), p.compiled.more}
		for _, text := range excess[p] {
			all.add("spec", TooLarge, "%s", text)
		}
		if l := all.of(p.key()); len(l) > 0 {
			byNamespace[p.ref.Namespace] = append(byNamespace[p.ref.Namespace], l...)
		}
	}
	var out []source.Problem
	for namespace, l := range byNamespace {
		sortProblems(l)
		if n := len(l); namespace != "" && n > mostOfNamespace {
			l = append(l[:mostOfNamespace], source.Problem{Object: source.Key{Kind: source.Namespace, Name: namespace},
				Reason:  "MoreProblems",
				Message: fmt.Sprintf("%d more problems of its policies; correct those that are named first", n-mostOfNamespace)})
		}
		out = append(out, l...)
	}
	for _, p := range r.unreadable {
		out = append(out, p...)
	}
	out = append(out, r.services.problems(r.config.Node)...)
	out = append(out, r.devices.problems(r.config.Node)...)
	sortProblems(out)
	return out
}

// closedPods are this node's pods of a namespace that have a plan which drops everything.
type closedPods struct {
	first string // by name
	count int
}

// String returns "pod shop/web-1 and 2 more".
func (p closedPods) String() string {
	if p.count == 1 {
		return "pod " + p.first
	}
	return fmt.Sprintf("pod %s and %d more", p.first, p.count-1)
}

// excess returns what is beyond the bounds of plans, by the policies that take part.
func (r *Resolver) excess() map[*policy][]string {
	closed := map[rejectionKey]closedPods{}
	for c := range r.local {
		for _, of := range c.here.plans {
			for _, p := range of {
				k := rejectionKey{p, c.namespace}
				if p == nil || p.excess == "" && r.rejections[k] == nil {
					continue
				}
				l := closed[k]
				for x := range c.all() {
					if !x.local {
						continue
					}
					if l.count++; l.first == "" || x.String() < l.first {
						l.first = x.String()
					}
				}
				closed[k] = l
			}
		}
	}
	r.closedPods = len(closed) > 0
	out := map[*policy][]string{}
	for k, l := range closed {
		why, advice := k.plan.excess, "use fewer or smaller policies for one pod"
		if f := r.rejections[k]; why == "" {
			why = fmt.Sprintf(f.resource.what+", which is beyond the share of namespace %s in the %d of this node", f.cost,
				k.namespace.name, f.resource.limit(r))
			advice = f.resource.advice
		}
		text := fmt.Sprintf("%s at %s: %s: it drops everything; %s", k.plan.name(), l, why, advice)
		for _, p := range k.plan.policies[:min(len(k.plan.policies), mostNamed)] {
			out[p] = append(out[p], text)
		}
	}
	for _, l := range out {
		slices.Sort(l)
	}
	return out
}

// sortProblems orders problems by object, field, reason and message.
func sortProblems(ps []source.Problem) {
	slices.SortFunc(ps, func(a, b source.Problem) int {
		return cmp.Or(cmp.Compare(a.Object.Kind, b.Object.Kind), cmp.Compare(a.Object.Namespace, b.Object.Namespace),
			cmp.Compare(a.Object.Name, b.Object.Name), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.Message, b.Message))
	})
}
