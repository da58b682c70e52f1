package kube

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
	"strings"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
)

// The defaults of Options. Kubernetes supports 150,000 endpoints (resolve.DefaultLimits): as objects, 40 MB in all.
const (
	defaultNamespaceBytes = 64 << 20
	defaultBytes          = 128 << 20
)

// budget records which objects of one kind were delivered, and bounds their weight. Of a namespace beyond the bound
// the oldest objects stay, up to the first that doesn't fit; which those are doesn't depend on the order in which
// objects come. Where all namespaces together are beyond the total, the youngest objects of the heaviest namespace go.
type budget struct {
	each, total int // bytes
	weight      int
	spaces      map[string]*space
	over        map[string]*space // those with objects left out
}

// space is a namespace's part of a budget.
type space struct {
	name   string
	held   objects
	weight int
	beyond *leftOut // nil until one had to go
}

// leftOut is what is left out of a space.
type leftOut struct {
	young youngest // the names held, and some that were; nil until one had to go
	count int      // of the objects left out
	names []string // the first of those
	first mark     // the oldest of those; what is younger is left out too
	stale bool     // what is left out is not known for sure
}

var nothingLeftOut leftOut

// left returns what is left out of s, to be read.
func (s *space) left() *leftOut {
	if s.beyond == nil {
		return &nothingLeftOut
	}
	return s.beyond
}

// leaves returns what is left out of s, to be changed.
func (s *space) leaves() *leftOut {
	if s.beyond == nil {
		s.beyond = &leftOut{}
	}
	return s.beyond
}

// held describes an object that was delivered.
type held struct {
	version uint64 // 0: unknown
	created int64  // in seconds, from 0 to 1<<32 - 1
	weight  int
}

// age orders the objects of a namespace: by creation, then by name.
type age struct {
	created int64
	name    string
}

func (a age) compare(b age) int {
	return cmp.Or(cmp.Compare(a.created, b.created), strings.Compare(a.name, b.name))
}

type mark struct {
	age
	weight int
}

// maxNames is how many objects a problem names.
const maxNames = 10

func newBudget(each, total int) *budget {
	return &budget{each: each, total: total, spaces: map[string]*space{}, over: map[string]*space{}}
}

// empty returns an empty budget with b's bounds.
func (b *budget) empty() *budget { return newBudget(b.each, b.total) }

func (b *budget) get(n types.NamespacedName) (h held, ok bool) {
	if s := b.spaces[n.Namespace]; s != nil {
		h, ok = s.held.get(n.Name)
	}
	return h, ok
}

func (b *budget) space(name string) *space {
	s := b.spaces[name]
	if s == nil {
		s = &space{name: name}
		b.spaces[name] = s
	}
	return s
}

// put adds or updates an object, and returns which objects are left out for it, n perhaps among them. created says that
// the object is new, so that it can't have been left out before.
func (b *budget) put(n types.NamespacedName, h held, created bool) (out []types.NamespacedName) {
	s := b.space(n.Namespace)
	a := age{h.created, n.Name}
	was, there := s.held.get(n.Name)
	if left := s.left(); left.count > 0 && left.first.compare(a) <= 0 {
		b.drop(s, n.Name)
		b.leave(s, mark{a, h.weight}, created || there)
		return []types.NamespacedName{n}
	}
	s.held.set(n.Name, h)
	s.weight += h.weight - was.weight
	b.weight += h.weight - was.weight
	if s.left().young != nil && (!there || was.created != h.created) {
		heap.Push(&s.beyond.young, a)
	}
	for s.weight > b.each {
		out = append(out, b.evict(s))
	}
	for b.weight > b.total {
		out = append(out, b.evict(b.heaviest()))
	}
	return out
}

// remove forgets an object that is gone, and reports whether it was held.
func (b *budget) remove(n types.NamespacedName) bool {
	s := b.spaces[n.Namespace]
	if s == nil {
		return false
	}
	if b.drop(s, n.Name) {
		if s.held.len() == 0 && b.over[s.name] == nil {
			delete(b.spaces, s.name)
		}
		return true
	}
	if b.over[s.name] != nil {
		l := s.leaves()
		l.count = max(0, l.count-1)
		l.names = slices.DeleteFunc(l.names, func(name string) bool { return name == n.Name })
		l.stale = l.stale || l.count == 0 || l.first.name == n.Name
	}
	return false
}

// drop no longer holds an object of s, and reports whether it did.
func (b *budget) drop(s *space, name string) bool {
	h, ok := s.held.remove(name)
	s.weight -= h.weight
	b.weight -= h.weight
	return ok
}

// leave records that an object of s is left out.
func (b *budget) leave(s *space, m mark, count bool) {
	l := s.leaves()
	if l.count == 0 || m.compare(l.first.age) <= 0 {
		l.first = m
	}
	b.over[s.name] = s
	if count || l.count == 0 {
		l.count++
		if len(l.names) < maxNames && !slices.Contains(l.names, m.name) {
			l.names = append(l.names, m.name)
		}
	}
}

// evict leaves out the youngest object of s.
func (b *budget) evict(s *space) types.NamespacedName {
	l := s.leaves()
	if l.young == nil || len(l.young) > 2*s.held.len()+64 {
		l.young = make(youngest, 0, s.held.len())
		for name, h := range s.held.all() {
			l.young = append(l.young, age{h.created, name})
		}
		heap.Init(&l.young)
	}
	for {
		a := heap.Pop(&l.young).(age)
		if h, ok := s.held.get(a.name); ok && h.created == a.created {
			b.drop(s, a.name)
			b.leave(s, mark{a, h.weight}, true)
			return types.NamespacedName{Namespace: s.name, Name: a.name}
		}
	}
}

func (b *budget) heaviest() (most *space) {
	for _, s := range b.spaces {
		if most == nil || s.weight > most.weight || s.weight == most.weight && s.name > most.name {
			most = s
		}
	}
	return most
}

// due reports whether an object that was left out of s may fit by now.
func (b *budget) due(s *space) bool {
	l := s.left()
	return l.stale || s.weight+l.first.weight <= b.each && b.weight+l.first.weight <= b.total
}

// replace takes what from, made of a list of the namespace alone, says of that namespace. live holds what was seen of
// objects since that list was asked for, true where the object is there: of those what is held stays.
func (b *budget) replace(name string, from *budget, live map[string]bool) (out []types.NamespacedName) {
	was, now := b.space(name), from.space(name)
	b.weight -= was.weight
	delete(b.over, name)
	s := &space{name: name}
	b.spaces[name] = s
	if l := now.left(); l.count > 0 {
		s.beyond = &leftOut{count: l.count, names: l.names, first: l.first}
		b.over[name] = s
	}
	for object, there := range live {
		if h, ok := was.held.get(object); ok {
			out = append(out, b.put(types.NamespacedName{Namespace: name, Name: object}, h, true)...)
		} else if there {
			s.leaves().stale, b.over[name] = true, s
		}
	}
	for object, h := range now.held.all() {
		if _, newer := live[object]; !newer {
			out = append(out, b.put(types.NamespacedName{Namespace: name, Name: object}, h, true)...)
		}
	}
	return out
}

// problems returns one for each namespace of which objects are left out.
func (b *budget) problems(r resource) (ps []source.Problem) {
	for name, s := range b.over {
		ps = append(ps, source.Problem{
			Object: source.Key{Kind: source.Namespace, Name: name}, Reason: NamespaceTooLarge,
			Message: fmt.Sprintf("%s of its %s are left out, among them %s: one namespace is bound to %s of them "+
				"and all "+
				"namespaces to %s, oldest first; delete objects of this namespace, or raise limits.namespaceBytes "+
				"and limits.bytes",
				about(s.left().count), r.GroupResource(), cmp.Or(strings.Join(s.left().names, ", "), "some deleted since"),
				size(b.each), size(b.total)),
		})
	}
	slices.SortFunc(ps, func(x, y source.Problem) int { return strings.Compare(x.Object.Name, y.Object.Name) })
	return ps
}

// about rounds a number of objects so that a problem isn't another with each of them.
func about(n int) string {
	for _, bound := range []int{1_000_000, 100_000, 10_000, 1000, 100, maxNames} {
		if n > bound {
			return fmt.Sprintf("more than %d", bound)
		}
	}
	return fmt.Sprint(n)
}

func size(bytes int) string {
	if bytes >= 1<<20 {
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	return fmt.Sprintf("%d bytes", bytes)
}

// youngest is a heap with the youngest on top.
type youngest []age

func (l youngest) Len() int           { return len(l) }
func (l youngest) Less(i, j int) bool { return l[i].compare(l[j]) > 0 }
func (l youngest) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *youngest) Push(a any)        { *l = append(*l, a.(age)) }
func (l *youngest) Pop() any {
	n := len(*l) - 1
	a := (*l)[n]
	(*l)[n] = age{}
	*l = (*l)[:n]
	return a
}

// holding describes o, which has been stripped, of that resource version.
func holding(o source.Object, version uint64) held {
	created := min(max(o.GetCreationTimestamp().Unix(), 0), math.MaxUint32)
	return held{version: version, created: created, weight: weigh(o)}
}

// weigh returns about how many bytes of memory o takes. What many objects share counts with each.
func weigh(o source.Object) int {
	n := len(o.GetName()) + int(unsafe.Sizeof(held{})) + weighMap(o.GetLabels()) + weighMap(o.GetAnnotations())
	switch o := o.(type) {
	case *corev1.Service:
		n += int(unsafe.Sizeof(*o)) + weighMap(o.Spec.Selector)
		n += len(o.Spec.Ports) * int(unsafe.Sizeof(corev1.ServicePort{}))
		for i := range o.Spec.Ports {
			n += len(o.Spec.Ports[i].Name)
		}
		n += weighTexts(o.Spec.ClusterIPs) + weighTexts(o.Spec.ExternalIPs) + weighTexts(o.Spec.LoadBalancerSourceRanges)
		for i := range o.Status.LoadBalancer.Ingress {
			g := &o.Status.LoadBalancer.Ingress[i]
			n += int(unsafe.Sizeof(*g)) + len(g.IP) + len(g.Hostname) + len(g.Ports)*int(unsafe.Sizeof(corev1.PortStatus{}))
		}
	case *discoveryv1.EndpointSlice:
		n += int(unsafe.Sizeof(*o)) + len(o.Ports)*int(unsafe.Sizeof(discoveryv1.EndpointPort{}))
		for i := range o.Endpoints {
			n += weighEndpoint(&o.Endpoints[i])
		}
	case *networkingv1.NetworkPolicy:
		n += int(unsafe.Sizeof(*o)) + 8*o.Spec.Size() // a rule of 20 bytes on the wire takes 140 in memory
	}
	return n
}

func weighEndpoint(e *discoveryv1.Endpoint) int {
	n := int(unsafe.Sizeof(*e)) + weighTexts(e.Addresses)
	if r := e.TargetRef; r != nil {
		n += int(unsafe.Sizeof(*r)) + len(r.Name)
	}
	if h := e.Hints; h != nil {
		n += int(unsafe.Sizeof(*h)) + (len(h.ForZones)+len(h.ForNodes))*int(unsafe.Sizeof(""))
	}
	return n
}

func weighTexts(l []string) (n int) {
	for _, s := range l {
		n += int(unsafe.Sizeof(s)) + len(s)
	}
	return n
}

func weighMap(m map[string]string) (n int) {
	for k, v := range m {
		n += 2*int(unsafe.Sizeof(k)) + len(k) + len(v)
	}
	return n
}

// budget returns an empty budget for a kind. Tenants make no Nodes: those have no bound.
func (o Options) budget(k source.Kind) *budget {
	if !k.Namespaced() {
		return newBudget(math.MaxInt, math.MaxInt)
	}
	return newBudget(cmp.Or(o.NamespaceBytes, defaultNamespaceBytes), cmp.Or(o.Bytes, defaultBytes))
}
