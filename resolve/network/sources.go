package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// AllowedSourcesAnnotation on a Pod is the list of ranges, separated by commas, that it may send from beside its own
// addresses.
const AllowedSourcesAnnotation = source.AllowedSourcesAnnotation

// Grant is a range that Pods of a namespace may name in AllowedSourcesAnnotation.
type Grant struct {
	Namespace string
	Range     netip.Prefix
}

// Bounds on what the annotations come to.
const (
	mostSources        = 16 // ranges of a Pod
	mostSourceProblems = 20 // that are told; others are counted
)

// sources is which further ranges this node's Pods may send from.
type sources struct {
	requests map[source.Key]string     // the annotations
	allowed  map[string][]netip.Prefix // by "namespace/name"; sorted and disjoint
	changed  bool                      // requests have
}

// Sources returns the ranges that pods of this node may send from beside their addresses, by "namespace/name"; sorted
// and disjoint. The map is not changed later.
func (r *Resolver) Sources() map[string][]netip.Prefix { return r.sources.allowed }

// applyPod takes a Pod's annotation in.
func (r *Resolver) applyPod(key source.Key, o *corev1.Pod) {
	text := ""
	if o != nil && o.Spec.NodeName == r.config.Node && !o.Spec.HostNetwork {
		text = o.Annotations[AllowedSourcesAnnotation]
	}
	if r.sources.requests[key] == text {
		return
	}
	r.sources.changed = true
	if r.sources.requests[key] = text; text == "" {
		delete(r.sources.requests, key)
	}
}

// decideSources decides all Pods' ranges anew, and returns what is wrong with them.
func (r *Resolver) decideSources() (problems []source.Problem) {
	r.sources.changed = false
	r.sources.allowed = make(map[string][]netip.Prefix, len(r.sources.requests))
	for key, text := range r.sources.requests {
		l, err := r.sourcesOf(key.Namespace, text)
		if err == nil {
			r.sources.allowed[key.Namespace+"/"+key.Name] = l
			continue
		}
		problems = append(problems, source.Problem{Object: key, Reason: "AllowedSources",
			Field:   "metadata.annotations[" + AllowedSourcesAnnotation + "]",
			Message: err.Error() + ": the pod may send from its own addresses alone"})
	}
	slices.SortFunc(problems, func(a, b source.Problem) int {
		return cmp.Or(strings.Compare(a.Object.Namespace, b.Object.Namespace), strings.Compare(a.Object.Name, b.Object.Name))
	})
	if more := len(problems) - mostSourceProblems; more > 0 {
		problems = append(problems[:mostSourceProblems:mostSourceProblems], source.Problem{Reason: "MoreProblems",
			Message: fmt.Sprintf("%d more Pods have wrong annotations %s", more, AllowedSourcesAnnotation)})
	}
	return problems
}

// sourcesOf returns the ranges that an annotation names, or why its Pod may not send from them: one that is wrong
// counts for all.
func (r *Resolver) sourcesOf(namespace, text string) (l []netip.Prefix, err error) {
	words := strings.Split(text, ",")
	if len(words) > mostSources {
		return nil, fmt.Errorf("names %d ranges: use at most %d", len(words), mostSources)
	}
	for _, word := range words {
		p, err := ParseRange(word)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(r.config.AllowedSources, func(g Grant) bool {
			return g.Namespace == namespace && g.Range.Bits() <= p.Bits() && g.Range.Contains(p.Addr())
		}) {
			return nil, fmt.Errorf("names %s, which network.allowedSources doesn't grant to namespace %s", p, namespace)
		}
		if owner := r.holder(p); owner != "" {
			return nil, fmt.Errorf("names %s, which overlaps %s", p, owner)
		}
		l = append(l, p)
	}
	slices.SortFunc(l, netip.Prefix.Compare) // of nested ones, the widest comes first
	disjoint := l[:0]
	for _, p := range l {
		if n := len(disjoint); n == 0 || !disjoint[n-1].Overlaps(p) {
			disjoint = append(disjoint, p)
		}
	}
	return disjoint, nil
}

// ParseRange reads a range such as 192.0.2.0/24, or an address. The error names what it is not.
func ParseRange(text string) (netip.Prefix, error) {
	text = strings.TrimSpace(text)
	p, err := netip.ParsePrefix(text)
	if err != nil {
		var a netip.Addr
		if a, err = netip.ParseAddr(text); err == nil && a.Zone() == "" {
			p = netip.PrefixFrom(a, a.BitLen())
		}
	}
	if err != nil || !p.IsValid() || p.Addr().Is4In6() {
		return p, fmt.Errorf("has %.60q: use ranges such as 192.0.2.0/24", text)
	}
	return p.Masked(), nil
}

// local are ranges that mean something on each link alone, and multicast.
var local = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"), netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8")}

// holder returns what else has addresses of a range, "" where nothing that is known has: a pod must not pass for
// another one, a node or a Service, whatever is granted.
func (r *Resolver) holder(p netip.Prefix) string {
	overlaps := func(o netip.Prefix) bool { return o.Overlaps(p) }
	if slices.ContainsFunc(local, overlaps) {
		return "loopback, link-local or multicast addresses"
	}
	if slices.ContainsFunc(r.config.ServiceCIDRs, overlaps) {
		return "a range of Services"
	}
	for _, l := range r.services {
		if slices.ContainsFunc(l, overlaps) {
			return "a range of Services"
		}
	}
	for _, n := range r.byAge {
		if slices.ContainsFunc(n.ranges, func(o podRange) bool { return overlaps(o.prefix) }) {
			return "podCIDRs of Node " + n.name
		}
		if slices.ContainsFunc(n.all, p.Contains) {
			return "an address of Node " + n.name
		}
	}
	return ""
}
