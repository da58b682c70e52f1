package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"fairlead.dev/fairlead/source"
)

// domainPattern is what a domain name may be once it is in lower case and without a dot at its end.
var domainPattern = regexp.MustCompile(`^(\*\.)?([a-z0-9]([-a-z0-9_]*[a-z0-9])?\.)+[a-z0-9]([-a-z0-9_]*[a-z0-9])?$`)

// domainName reads a domain name of a rule, and returns it in lower case and without a dot at its end.
func domainName(text string) (string, error) {
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	if len(name) > 253 || !domainPattern.MatchString(name) {
		return "", fmt.Errorf("%q is no domain name: use labels with dots between them, '*' as the first alone", text)
	}
	return name, nil
}

// applyName updates the addresses of a domain name.
func (r *Resolver) applyName(name string, o *source.ResolvedName) {
	for _, x := range r.domains[name] {
		x.set().names = slices.DeleteFunc(x.has().names, func(n string) bool { return n == name })
		r.dirty(x)
	}
	delete(r.domains, name)
	if o == nil {
		return
	}
	var now []*address
	for _, a := range o.Addresses {
		now = append(now, r.address(a.Unmap()))
	}
	now = sorted(now)
	for _, x := range now {
		at, _ := slices.BinarySearch(x.has().names, name)
		x.set().names = slices.Insert(x.has().names, at, name)
		r.dirty(x)
	}
	r.domains[name] = now
}

// NamesInUse reports whether a rule for a pod of this node names a domain name.
func (r *Resolver) NamesInUse() bool { return len(r.domainPeers) > 0 }

// markDomain marks the addresses of names that a domain name of a rule matches.
func (r *Resolver) markDomain(domain string) {
	suffix, wild := strings.CutPrefix(domain, "*")
	if !wild {
		r.dirty(r.domains[domain]...)
		return
	}
	for name, l := range r.domains {
		if strings.HasSuffix(name, suffix) {
			r.dirty(l...)
		}
	}
}

// byName returns which domain names in use match x by its names.
func (r *Resolver) byName(x *address) *signature {
	if len(r.domainPeers) == 0 || len(x.has().names) == 0 {
		return r.nothing
	}
	var out []*peer
	for _, name := range x.has().names {
		out = append(out, r.domainPeers[name]...)
		for rest := name; rest != ""; {
			if _, rest, _ = strings.Cut(rest, "."); rest != "" {
				out = append(out, r.domainPeers["*."+rest]...)
			}
		}
	}
	sortPeers(out)
	return r.signatureOf(slices.Compact(out))
}
