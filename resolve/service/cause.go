package service

import (
	"fmt"
	"slices"
	"strings"
	"unique"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// usable reports whether the endpoint takes traffic, where no other is preferred.
func (e *endpoint) usable() bool { return e.is().has(ready) || e.is().draining() }

// mismatch returns why a group of s matches no port of an EndpointSlice although endpoints are there that would take
// its traffic, and the way out; "" where there are none.
func (s *service) mismatch(g *group, strays []string) string {
	var names []string
	ours, others := false, false
	for _, e := range s.slices {
		if !slices.ContainsFunc(e.endpoints, func(e endpoint) bool { return e.usable() }) {
			continue
		}
		ours, others = ours || e.family == g.family, others || e.family != g.family
		for _, p := range e.ports {
			name := nameOf(p.name)
			switch {
			case e.family != g.family || slices.Contains(names, name):
			case p.name == g.port:
				return fmt.Sprintf("port %q of EndpointSlice %s has protocol %s, not %s; use one protocol in both",
					name, e.name, p.protocol, g.protocol)
			case len(names) < 5:
				names = append(names, name)
			}
		}
	}
	switch {
	case ours && len(names) == 0:
		return "its EndpointSlices with endpoints have no ports; name the port there too"
	case ours:
		return fmt.Sprintf("no port of its EndpointSlices is named %q, but %q; use one name in both", nameOf(g.port),
			names)
	case others:
		return fmt.Sprintf("its EndpointSlices with endpoints are all of the other family; give endpoints of %s, "+
			"or take the family from spec.ipFamilies", g.family)
	case len(s.slices) == 0 && len(strays) > 0:
		return fmt.Sprintf("EndpointSlice %s belongs to no Service; give it the label %s: %s",
			strays[0], discoveryv1.LabelServiceName, s.key.Name)
	}
	return ""
}

// warnMismatches records the ports of s that match no EndpointSlice's although endpoints are there. A Service without
// endpoints, or with none that is ready, is no mistake.
func (w *decider) warnMismatches(s *service) {
	rep := report{w.key, w.out.problems}
	for i, recorded := 0, map[int32]bool{}; i < len(s.entries) && len(recorded) < mostOfObject; i++ {
		e := &s.entries[i]
		if recorded[e.group] || w.matched[e.group] {
			continue
		}
		recorded[e.group] = true
		if why := s.mismatch(&s.groups[e.group], w.strays[w.key]); why != "" {
			g := &s.groups[e.group]
			rep.add(fmt.Sprintf("spec.ports[%d]", e.port), source.NoEndpoints, "%s (%s, %s) has no endpoint: %s",
				g.label, g.protocol, g.family, why)
		}
	}
	w.out.problems = rep.problems
}

// WhyEmpty returns a function that returns why the frontend at an entry has no backend for some clients. It counts the
// endpoints of a Service once, and is of use until the next change.
func (r *Resolver) WhyEmpty() func(e model.Entry) string {
	counted := map[*service]map[int32]endpointCount{}
	return func(e model.Entry) string {
		x, ok := r.entries.holder[e]
		if !ok {
			return ""
		}
		if counted[x.by] == nil {
			counted[x.by] = countEndpoints(x.by)
		}
		g := x.entry().group
		switch n := counted[x.by][g]; {
		case n.usable > 0:
			return "no endpoint that is ready is on this node, and the traffic policy is Local"
		case n.all > 0:
			return fmt.Sprintf("none of its %d endpoints is ready", n.all)
		}
		if why := x.by.mismatch(&x.by.groups[g], r.strays[x.by.key]); why != "" {
			return why
		}
		return "it has no endpoints"
	}
}

// endpointCount counts the endpoints of a group.
type endpointCount struct{ all, usable int }

// countEndpoints returns the endpointCount of each group of a Service.
func countEndpoints(s *service) map[int32]endpointCount {
	out, usable := map[int32]endpointCount{}, map[*endpointSlice]int{}
	for _, h := range match(nil, s.declared, s.slices) {
		if _, counted := usable[h.slice]; !counted {
			usable[h.slice] = 0
			for i := range h.slice.endpoints {
				if h.slice.endpoints[i].usable() {
					usable[h.slice]++
				}
			}
		}
		n := out[h.group]
		out[h.group] = endpointCount{n.all + len(h.slice.endpoints), n.usable + usable[h.slice]}
	}
	return out
}

// stray records an EndpointSlice that is no Service's, or that it is gone, with the Services that its name speaks of.
func (r *Resolver) stray(key source.Key, is bool) {
	names := []string{key.Name}
	if i := strings.LastIndexByte(key.Name, '-'); i > 0 {
		names = append(names, key.Name[:i])
	}
	for _, name := range names {
		of := source.Key{Kind: source.Service, Namespace: key.Namespace, Name: name}
		list := r.strays[of]
		if i, found := slices.BinarySearch(list, key.Name); found == is {
			continue
		} else if is {
			list = slices.Insert(list, i, key.Name)
		} else {
			list = slices.Delete(list, i, i+1)
		}
		if r.strays[of] = list; len(list) == 0 {
			delete(r.strays, of)
		}
		r.touch(r.services[of], true)
	}
}

// nameOf returns the text of a handle, "" for the zero handle.
func nameOf(h unique.Handle[string]) string {
	if h == (unique.Handle[string]{}) {
		return ""
	}
	return h.Value()
}
