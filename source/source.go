// Package source says what a source of Kubernetes objects gives: changes, one object each, and problems.
//
// A source decides nothing. It reads objects of the real k8s.io/api types from somewhere (source/manifest: a folder of
// YAML; source/kube: the API) and tells, as told, what came, what changed and what went.
package source

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Kind is a kind of object that Fairlead reads.
type Kind string

// The kinds, by their names in the Kubernetes API.
const (
	Service       Kind = "Service"
	EndpointSlice Kind = "EndpointSlice"
	Node          Kind = "Node"
	Namespace     Kind = "Namespace"
	Pod           Kind = "Pod"
	NetworkPolicy Kind = "NetworkPolicy"
	ServiceCIDR   Kind = "ServiceCIDR"

	ClusterNetworkPolicy Kind = "ClusterNetworkPolicy"

	// DomainName is the kind of *ResolvedName. No API serves it: it is none of Kinds.
	DomainName Kind = "DomainName"
)

// AllowedSourcesAnnotation is the one annotation of Pods that is read: resolve/network says what it means.
const AllowedSourcesAnnotation = "fairlead.dev/allowed-sources"

// Kinds lists every kind that Fairlead reads.
func Kinds() []Kind {
	return []Kind{Service, EndpointSlice, Node, Namespace, Pod, NetworkPolicy, ServiceCIDR, ClusterNetworkPolicy}
}

// Namespaced reports whether objects of this kind live in a namespace.
func (k Kind) Namespaced() bool {
	return k != Node && k != Namespace && k != ServiceCIDR && k != ClusterNetworkPolicy && k != DomainName
}

// ResolvedName is a domain name, in lower case and without a dot at its end, and the addresses that DNS has for it.
type ResolvedName struct {
	metav1.ObjectMeta
	Addresses []netip.Addr
}

// Resolved returns the change that a domain name has these addresses; none: it is not known any more.
func Resolved(name string, addresses []netip.Addr) Change {
	c := Change{Key: Key{Kind: DomainName, Name: name}}
	if len(addresses) > 0 {
		c.Object = &ResolvedName{metav1.ObjectMeta{Name: name}, addresses}
	}
	return c
}

// Object is one of *corev1.Service, *discoveryv1.EndpointSlice, *corev1.Node, *corev1.Namespace, *corev1.Pod,
// *networkingv1.NetworkPolicy, *networkingv1.ServiceCIDR, *cnpv1.ClusterNetworkPolicy and *ResolvedName. Objects are
// never changed once they left their source.
type Object = metav1.Object

// Key names an object.
type Key struct {
	Kind            Kind
	Namespace, Name string
}

// String returns "Service shop/web", or "Node a" for kinds without a namespace.
func (k Key) String() string {
	if k.Namespace == "" {
		return fmt.Sprintf("%s %s", k.Kind, k.Name)
	}
	return fmt.Sprintf("%s %s/%s", k.Kind, k.Namespace, k.Name)
}

// KeyOf names o. It panics on a type that is not an Object's: that is an error in the source, not in its input.
func KeyOf(o Object) Key {
	k := Key{Namespace: o.GetNamespace(), Name: o.GetName()}
	switch o.(type) {
	case *corev1.Service:
		k.Kind = Service
	case *discoveryv1.EndpointSlice:
		k.Kind = EndpointSlice
	case *corev1.Node:
		k.Kind = Node
	case *corev1.Namespace:
		k.Kind = Namespace
	case *corev1.Pod:
		k.Kind = Pod
	case *networkingv1.NetworkPolicy:
		k.Kind = NetworkPolicy
	case *networkingv1.ServiceCIDR:
		k.Kind = ServiceCIDR
	case *cnpv1.ClusterNetworkPolicy:
		k.Kind = ClusterNetworkPolicy
	case *ResolvedName:
		k.Kind = DomainName
	default:
		panic(fmt.Sprintf("source: %T is not an object that Fairlead reads", o))
	}
	return k
}

// Template returns the object whose pod template o stands for, and whether it does. Such Pods have no addresses: no
// cluster runs them. A Pod without a status stands for itself.
func Template(o *corev1.Pod) (Key, bool) {
	for _, owner := range o.OwnerReferences { // which sources drop from others
		return Key{Kind(owner.Kind), o.Namespace, owner.Name}, true
	}
	return Key{}, false
}

// Change reports that an object is now so, or, with a nil Object, that it is gone.
type Change struct {
	Key    Key
	Object Object
}

// Put returns the changes that report that objects are now so.
func Put(objects ...Object) []Change {
	changes := make([]Change, len(objects))
	for i, o := range objects {
		changes[i] = Change{Key: KeyOf(o), Object: o}
	}
	return changes
}

// Problem is something in the input that could not be taken as it stands. It never stops the rest of the input.
type Problem struct {
	Object  Key    `json:"object"`          // zero where the text names none
	File    string `json:"file,omitempty"`  // where a file is the source
	Line    int    `json:"line,omitempty"`  // first line of the document, from 1
	Field   string `json:"field,omitempty"` // path in the object, such as spec.ports[0].port
	Reason  string `json:"reason"`          // one CamelCase word, for programs
	Message string `json:"message"`         // what is wrong, what is done instead, the way out
	// what the object's own namespace may be told, without names of other namespaces; empty: Message
	Public string `json:"-"`
	// the address, port and protocol that are not served for it, such as 10.96.0.1:80/tcp; empty: none
	Entry    string `json:"-"`
	Retained bool   `json:"kept,omitempty"` // the object's last good content stays in force

	Since time.Time `json:"since,omitzero"` // where it lasts and may pass by itself
}

// NoEndpoints is the reason of the problem that a Service and its EndpointSlices don't match. It may stand for a moment
// while both change, one after the other.
const NoEndpoints = "NoEndpoints"

// KindNotRead is the reason of the problem that a document is of a kind that Fairlead has no use for.
const KindNotRead = "KindNotRead"

// Unread splits problems into documents of kinds that Fairlead has no use for, and all others. The first come as one
// sentence, "" where there are none.
func Unread(problems []Problem) (sentence string, remaining []Problem) {
	counts, n, remaining := count(problems, KindNotRead)
	switch n {
	case 0:
		return "", problems
	case 1:
		return "ignored 1 document that Fairlead has no use for: " + counts, remaining
	}
	return fmt.Sprintf("ignored %d documents that Fairlead has no use for: %s", n, counts), remaining
}

// count returns how many problems have a reason, in words by kind and as a number, and the remaining ones.
func count(problems []Problem, reason string) (words string, n int, remaining []Problem) {
	counts := map[Kind]int{}
	for _, p := range problems {
		if p.Reason == reason {
			counts[p.Object.Kind]++
			n++
		} else {
			remaining = append(remaining, p)
		}
	}
	kinds := slices.SortedFunc(maps.Keys(counts), func(a, b Kind) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	var list []string
	for i, k := range kinds {
		if i == 5 {
			list = append(list, fmt.Sprintf("%d other kinds", len(kinds)-i))
			break
		}
		list = append(list, fmt.Sprintf("%d %s", counts[k], k))
	}
	return strings.Join(list, ", "), n, remaining
}

// String returns the problem in one line: place, object, field, reason, message.
func (p Problem) String() string {
	s := ""
	if p.File != "" {
		s = p.File
		if p.Line > 0 {
			s += fmt.Sprintf(":%d", p.Line)
		}
		s += ": "
	}
	if p.Object != (Key{}) {
		s += p.Object.String() + ": "
	}
	if p.Field != "" {
		s += p.Field + ": "
	}
	return s + p.Message + " (" + p.Reason + ")"
}

// Batch is what a source saw at one time. With the first batch that is not Waiting everything there is has come of the
// kinds that are not Unlisted, and once one of these is not Unlisted any more everything there is of it.
type Batch struct {
	Changes  []Change
	Problems []Problem // all that stand now, not only new ones
	Seen     time.Time // when the oldest of the changes came; zero: now
	Waiting  bool      // it is not known yet what there is: what the kernel holds stays
	Unlisted []Kind    // kinds for policies of which that is so
}

// Source is a place where objects come from.
type Source interface {
	// Run calls deliver with a first batch, then with each later change as soon as it is seen, until ctx ends.
	// It returns an error only where it can't go on at all.
	Run(ctx context.Context, deliver func(Batch)) error
}
