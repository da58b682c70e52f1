package names

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/dns"
	"fairlead.dev/fairlead/model"
)

// watched is the pods whose rules name domain names, and the resolvers. The data plane has no resolvers while there are
// no such pods: its hook sees all packets that are forwarded, which keeps the fast path of Services' mode ebpf off.
type watched struct {
	pods      map[netip.Addr][]string // the domain names of policies, sorted
	resolvers map[netip.AddrPort]bool
}

// follow makes a change of subjects true, and returns what of the data plane changes by it.
func (w *watched) follow(c model.Change[model.PolicyPart]) (put, del []dns.Part) {
	had := len(w.pods) > 0
	before, known := map[netip.Addr]bool{}, map[*model.Ruleset][]string{}
	each := func(parts []model.PolicyPart, f func(*model.Subject)) {
		for _, x := range parts {
			if s, ok := x.(*model.Subject); ok {
				if _, there := before[s.Addr]; !there {
					_, before[s.Addr] = w.pods[s.Addr]
				}
				f(s)
			}
		}
	}
	each(c.Del, func(s *model.Subject) { delete(w.pods, s.Addr) })
	each(c.Put, func(s *model.Subject) {
		if domains := domainsOf(s, known); domains != nil {
			w.pods[s.Addr] = domains
		}
	})
	for a, was := range before {
		switch _, is := w.pods[a]; {
		case is && !was:
			put = append(put, dns.Part{Addr: a})
		case was && !is:
			del = append(del, dns.Part{Addr: a})
		}
	}
	switch has := len(w.pods) > 0; {
	case has && !had:
		put = append(put, resolverParts(w.resolvers)...)
	case had && !has:
		del = append(del, resolverParts(w.resolvers)...)
	}
	return put, del
}

func resolverParts(resolvers map[netip.AddrPort]bool) (l []dns.Part) {
	for r := range resolvers {
		l = append(l, dns.Part{Addr: r.Addr(), Port: r.Port()})
	}
	return l
}

// domainsOf returns the domain names in the rules of a subject, sorted; nil for none. Rulesets are known, or will be.
func domainsOf(s *model.Subject, known map[*model.Ruleset][]string) []string {
	all := map[string]bool{}
	for _, r := range s.Out {
		if r == nil {
			continue
		}
		l, there := known[r]
		if !there {
			l = domainsIn(r)
			known[r] = l
		}
		for _, d := range l {
			all[d] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// domainsIn returns the domain names in a ruleset's rules.
func domainsIn(r *model.Ruleset) []string {
	all, seen := map[string]bool{}, map[*model.PeerTable]bool{}
	for _, e := range append(slices.Clone(r.Ports), r.Default) {
		if e.PeerTable == nil || seen[e.PeerTable] {
			continue
		}
		seen[e.PeerTable] = true
		for _, rule := range e.PeerTable.Rules {
			for _, p := range rule.Peers {
				if p.Domain != "" {
					all[p.Domain] = true
				}
			}
		}
	}
	return slices.Collect(maps.Keys(all))
}

// setResolvers replaces the resolvers, and returns what of the data plane changes by it.
func (w *watched) setResolvers(l []netip.AddrPort) (put, del []dns.Part) {
	now, more, gone := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}, maps.Clone(w.resolvers)
	for _, r := range l {
		if now[r] = true; !w.resolvers[r] {
			more[r] = true
		}
		delete(gone, r)
	}
	w.resolvers = now
	if len(w.pods) == 0 {
		return nil, nil
	}
	return resolverParts(more), resolverParts(gone)
}

// domainOf returns the domain name of the pod's rules that matches a name, "" for none.
func (w *watched) domainOf(pod netip.Addr, name string) string {
	domains := w.pods[pod]
	if _, there := slices.BinarySearch(domains, name); there {
		return name
	}
	for rest := name; rest != ""; {
		if _, rest, _ = strings.Cut(rest, "."); rest != "" {
			if _, there := slices.BinarySearch(domains, "*."+rest); there {
				return "*." + rest
			}
		}
	}
	return ""
}
