package service

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// The most problems that are told of one object, and of one namespace. What is beyond is counted.
const (
	mostOfObject    = 10
	mostOfNamespace = 100
)

// problems are the first of what is wrong, and how many more there are.
type problems struct {
	list []source.Problem
	more int
}

// report gathers what is wrong with one object.
type report struct {
	object source.Key
	problems
}

// add records a problem. The message says what is wrong, what is done instead, and the way out.
func (r *report) add(field, reason, format string, args ...any) {
	if r.full() {
		return
	}
	r.list = append(r.list, source.Problem{
		Object: r.object, Field: field, Reason: reason, Message: fmt.Sprintf(format, args...),
	})
}

// addAt is add for a problem for which an entry is not served.
func (r *report) addAt(e model.Entry, field, reason, format string, args ...any) {
	n := len(r.list)
	if r.add(field, reason, format, args...); len(r.list) > n {
		r.list[n].Entry = e.String()
	}
}

// against has the problem that was added last, about something that the Service o has, not name o to other namespaces.
func (r *report) against(o *service, format string, args ...any) {
	if o.key.Namespace != r.object.Namespace {
		r.list[len(r.list)-1].Public = fmt.Sprintf(format, args...)
	}
}

// full reports whether as many problems are noted as are told of. The problem at hand is then counted.
func (r *report) full() bool {
	if len(r.list) < mostOfObject {
		return false
	}
	r.more++
	return true
}

// flawed records a flaw, with what is done instead and the way out.
func (r *report) flawed(field string, f *flaw, instead string) {
	r.add(field, f.reason, "%s: %s", f.text, instead)
}

// with returns the problems of both.
func (p problems) with(o problems) problems {
	return problems{append(p.list[:len(p.list):len(p.list)], o.list...), p.more + o.more}
}

// most returns the first n, sorted, with the rest counted as more.
func (p problems) most(n int) problems {
	sortProblems(p.list)
	if len(p.list) > n {
		p.more += len(p.list) - n
		p.list = p.list[:n:n]
	}
	return p
}

// counted returns the list with a last problem that says how many more there are of the object, if any.
func (p problems) counted(object source.Key, of string) []source.Problem {
	if p.more == 0 {
		return p.list
	}
	return append(p.list[:len(p.list):len(p.list)], source.Problem{Object: object, Reason: "MoreProblems",
		Message: fmt.Sprintf("%d more problems of %s; correct those that are named first", p.more, of)})
}

// sortProblems orders problems by object, field, reason and message.
func sortProblems(ps []source.Problem) {
	slices.SortFunc(ps, func(a, b source.Problem) int {
		return cmp.Or(
			cmp.Compare(a.Object.Kind, b.Object.Kind),
			cmp.Compare(a.Object.Namespace, b.Object.Namespace),
			cmp.Compare(a.Object.Name, b.Object.Name),
			cmp.Compare(a.Field, b.Field),
			cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.Message, b.Message))
	})
}

// updateProblems records which problems s has now.
func (r *Resolver) updateProblems(s *service) {
	list := r.problemsOf(s)
	if len(list) == 0 && len(s.problemsNow) == 0 || slices.Equal(list, s.problemsNow) {
		return
	}
	s.problemsNow = list
	if len(list) > 0 {
		s.namespace.troubled[s] = struct{}{}
	} else {
		delete(s.namespace.troubled, s)
	}
	s.namespace.stale = true
	r.staleProblems = true
}

// problemsOf returns the problems of s and, if it is served, of its slices: the first of each, and counts.
func (r *Resolver) problemsOf(s *service) []source.Problem {
	if s.declared == nil {
		return nil
	}
	own := s.declared.problems.with(s.decision.problems).with(r.conflicts(s))
	var of problems
	for _, e := range s.slices {
		switch {
		case s.frontends == 0:
		case len(of.list) < mostOfObject:
			of = of.with(e.problems)
		default:
			of.more += e.problems.more + len(e.problems.list)
		}
	}
	if len(own.list)+len(of.list) == 0 {
		return nil
	}
	list := own.most(mostOfObject).counted(s.key, s.key.String())
	return append(list, of.most(mostOfObject).counted(s.key, "its EndpointSlices")...)
}

// Problems returns everything that is wrong now, sorted: of each Service at most ten problems and a count, of its
// slices as many, and of each namespace at most a hundred. Slices of Services that are not served have none. The slice
// is not changed later, and is the same one until there are others.
func (r *Resolver) Problems() []source.Problem {
	if !r.staleProblems {
		return r.problemsNow
	}
	ps := slices.Concat(r.set.problems, r.set.instead, r.nodeState.problems, r.unknownNode())
	for name, n := range r.namespaces {
		if n.stale {
			n.list()
		}
		ps = append(ps, n.listed.counted(source.Key{Kind: source.Namespace, Name: name},
			"Services of this namespace")...)
	}
	sortProblems(ps)
	r.problemsNow, r.staleProblems = ps, false
	return ps
}

// list finds the first problems of the namespace's Services, by their names.
func (n *namespace) list() {
	n.stale, n.listed = false, problems{}
	names := make([]*service, 0, len(n.troubled))
	for s := range n.troubled {
		names = append(names, s)
	}
	slices.SortFunc(names, func(a, b *service) int { return cmp.Compare(a.key.Name, b.key.Name) })
	for _, s := range names {
		spare := mostOfNamespace - len(n.listed.list)
		n.listed.list = append(n.listed.list, s.problemsNow[:min(spare, len(s.problemsNow))]...)
		n.listed.more += max(0, len(s.problemsNow)-spare)
	}
}
