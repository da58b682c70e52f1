package policy

import (
	"cmp"
	"hash/maphash"
	"iter"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// AuditAnnotation on a policy has it report what it would drop, and drop nothing.
const AuditAnnotation = "fairlead.dev/audit"

// UnknownPods is what Deny and Pass rules by selector of pods mean to addresses of pods that aren't known yet.
type UnknownPods string

// The values of UnknownPods. "" is DenyUnknownPods.
const (
	DenyUnknownPods  UnknownPods = "Deny"  // the rules match them
	AllowUnknownPods UnknownPods = "Allow" // the rules don't match them
)

// Config is what a Resolver needs to know beside objects.
type Config struct {
	Node        string         // this node's name
	AllNodes    bool           // the pods of every node count as this node's
	Addresses   []netip.Addr   // of this node's interfaces, in addition to those of its Node
	Pods        []netip.Prefix // addresses of this node's pods, in addition to its Node's podCIDRs
	PodRanges   []netip.Prefix // addresses of the cluster's pods, in addition to the Nodes' podCIDRs
	Audit       bool           // every policy is audited
	UnknownPods UnknownPods
	// ImpliedNamespaces has pods of a Namespace that isn't declared count as if it had no label but its name: for sources
	// without an API server.
	ImpliedNamespaces bool
	// Devices are those by which pods are reached: a pod's address that one of them leads to comes in by that alone, and
	// by a device that is one pod's alone comes in nothing else. nil, or with Audit: no source is checked.
	Devices []Device
	PreDNAT []netip.Prefix // as in model.PolicyNode
	CutMark uint32         // as in model.PolicyNode
	Key     string         // of the IDs, so that tenants can't search for equal ones
	Limits  Limits
}

// Resolver holds what is known of the cluster, and what its policies come to on this node. It is not safe for use by
// several goroutines at once; the parts that it returns are.
type Resolver struct {
	config Config
	limits Limits
	hash   func(string) uint64
	seed   maphash.Seed

	observed
	selected
	usage
	derived
	dirt
	services destinations
	attachments
	devices

	problemsNow   []source.Problem // what Problems returned last
	staleProblems bool             // that is out of date
	closedPods    bool             // it names pods that drop everything
}

// observed is what is known of the cluster.
type observed struct {
	namespaces map[string]*namespace
	renamed    int // namespaces whose label has another name
	nodes      map[string]*node
	classes    set[class] // of pods
	addresses  set[address]
	cluster    map[string]*policy // ClusterNetworkPolicies
	tiers      [3][]*policy       // of those, in the order of evaluation; of tiers Admin and Baseline
	policies   int                // of the cluster that are not audited
	sequence   uint64             // of policies
	numbers    map[portName]map[uint16]map[*namespace]int
	numbering  uint64
	unreadable map[source.Key][]source.Problem
	domains    map[string][]*address // of domain names
	portLists  [256]*[]port          // some of those that classes have
	further    map[*pod][]*address   // all of pods with more than two
}

// selected is the classes with pods on this node, and the policies that select them.
type selected struct {
	local      map[*class]struct{}
	selecting  map[*policy]struct{}
	selections map[digest]*selection
	last       *selection // the one that was found last
	buffer     []*policy
	plans      map[digest]*plan
	idlePlans  []*plan
	spans      [len(protocols)][]portRange // those that were counted last
}

// usage is what plans want and use, against the limits.
type usage struct {
	wanted     int // what all plans cost
	compared   int // comparisons of this change
	rejections map[rejectionKey]*rejection
	refusedAt  int                // how many classes there were when comparisons were beyond the limit
	freed      map[*resource]bool // a plan is gone that was refused for that
	reshow     bool               // the rulesets of classes may be others
	lifted     bool               // nothing of what is beyond a limit is a policy's
	done       float64            // of the work that was interrupted by a limit
	turn       uint64             // of counting shares
}

// dirt is what may be out of date.
type dirt struct {
	dirtyClasses   map[*class]struct{} // their signatures
	dirtyLocal     map[*class]struct{} // their rulesets
	dirtyAddresses []*address
	stalePieces    bool // the CIDRs in use or the pod ranges have changed
	staleNode      bool // what holds for the whole node has changed
	renumbered     bool // the numbers of some name have changed
	pending        map[model.PolicyPart]int
}

// New returns a Resolver that knows no object yet.
func New(c Config) *Resolver {
	r := &Resolver{
		config: c, limits: c.Limits.or(DefaultLimits), hash: hashText(c.Key), seed: maphash.MakeSeed(),
		observed: observed{
			namespaces: map[string]*namespace{}, nodes: map[string]*node{},
			cluster: map[string]*policy{}, further: map[*pod][]*address{},
			numbers: map[portName]map[uint16]map[*namespace]int{}, unreadable: map[source.Key][]source.Problem{},
			domains: map[string][]*address{},
		},
		selected: selected{local: map[*class]struct{}{}, selecting: map[*policy]struct{}{},
			selections: map[digest]*selection{}, plans: map[digest]*plan{}},
		usage:   usage{rejections: map[rejectionKey]*rejection{}, freed: map[*resource]bool{}},
		derived: newDerived(),
		dirt: dirt{dirtyClasses: map[*class]struct{}{}, dirtyLocal: map[*class]struct{}{},
			pending: map[model.PolicyPart]int{}},
		services:    destinations{frontends: map[netip.Addr]int{}},
		attachments: attachments{map[source.Key]*corev1.Pod{}, source.Attached{}},
		devices:     newDevices(),
	}
	r.classes.hash, r.addresses.hash = r.hashClass, r.hashAddress
	r.SetAddresses(c.Addresses)
	r.SetDevices(c.Devices)
	return r
}

// namespace is a Namespace, or what is known of one that isn't declared.
type namespace struct {
	name     string
	labels   labelSet
	classes  []*class
	pods     []*pod   // sorted by name
	policies []stored // sorted by name
	size     Bounds   // of the policies
	over     bool     // they are beyond a bound
	declared bool
}

// impliedLabels are those of a Namespace that isn't declared.
func impliedLabels(name string) labelSet {
	return newLabels(map[string]string{corev1.LabelMetadataName: name})
}

func (r *Resolver) namespace(name string) *namespace {
	n := r.namespaces[name]
	if n == nil {
		n = &namespace{name: name}
		if r.config.ImpliedNamespaces {
			n.labels = impliedLabels(name)
		}
		r.namespaces[name] = n
	}
	return n
}

// renamed reports whether the label that has n's name says another, as no API server lets it.
func (n *namespace) renamed() bool {
	v, there := n.labels.get(corev1.LabelMetadataName)
	return there && v != n.name
}

// known reports whether pods of n count.
func (r *Resolver) known(n *namespace) bool { return n.declared || r.config.ImpliedNamespaces }

// drop forgets n if nothing is known of it.
func (r *Resolver) drop(n *namespace) {
	if !n.declared && len(n.classes) == 0 && len(n.policies) == 0 {
		delete(r.namespaces, n.name)
	}
}

// SetAddresses replaces Config.Addresses. The next change has what follows from it.
func (r *Resolver) SetAddresses(addresses []netip.Addr) {
	for _, a := range r.config.Addresses {
		x := r.address(a)
		x.set().own = false
		r.dirty(x)
	}
	r.config.Addresses, r.staleNode = slices.Clone(addresses), true
	for _, a := range addresses {
		x := r.address(a)
		x.set().own = true
		r.dirty(x)
	}
}

// Apply makes changes true and returns what changes on the node by them, in a settled order. Its cost follows what the
// changes touch. Kinds that mean nothing to policies are ignored.
func (r *Resolver) Apply(changes []source.Change) model.Change[model.PolicyPart] {
	r.Observe(changes)
	return r.settle()
}

// Observe makes changes true. What follows from them the next Apply decides.
func (r *Resolver) Observe(changes []source.Change) {
	for _, c := range changes {
		switch c.Key.Kind {
		case source.Namespace:
			o, _ := c.Object.(*corev1.Namespace)
			r.applyNamespace(c.Key.Name, o)
		case source.Node:
			o, _ := c.Object.(*corev1.Node)
			r.applyNode(c.Key.Name, o)
		case source.Pod:
			o, _ := c.Object.(*corev1.Pod)
			r.applyPod(c.Key, o)
		case source.NetworkPolicy:
			o, _ := c.Object.(*networkingv1.NetworkPolicy)
			r.applyPolicy(c.Key, o)
		case source.ClusterNetworkPolicy:
			o, _ := c.Object.(*cnpv1.ClusterNetworkPolicy)
			r.applyCluster(c.Key, o)
		case source.DomainName:
			o, _ := c.Object.(*source.ResolvedName)
			r.applyName(c.Key.Name, o)
		}
	}
}

func (r *Resolver) applyNamespace(name string, o *corev1.Namespace) {
	n := r.namespace(name)
	declared, labels := o != nil, labelSet("")
	if declared {
		labels = newLabels(o.Labels)
	} else if r.config.ImpliedNamespaces {
		labels = impliedLabels(name)
	}
	known := r.known(n)
	if n.declared == declared && n.labels == labels {
		r.drop(n)
		return
	}
	if n.renamed() {
		r.renamed--
	}
	n.declared, n.labels = declared, labels
	if n.renamed() {
		r.renamed++
	}
	for _, c := range n.classes {
		r.dirtyClasses[c] = struct{}{}
		r.reselect(c)
		if known != r.known(n) {
			for p := range c.all() {
				r.dirty(r.addressesOf(p)...)
			}
		}
	}
	r.drop(n)
}

// dirty marks addresses as having other parts, perhaps.
func (r *Resolver) dirty(l ...*address) {
	for _, x := range l {
		if !x.dirty {
			x.dirty = true
			r.dirtyAddresses = append(r.dirtyAddresses, x)
		}
	}
}

// node is a Node.
type node struct {
	name      string
	class     *class
	addresses []*address // sorted
	podRanges []netip.Prefix
}

func (r *Resolver) applyNode(name string, o *corev1.Node) {
	was := r.nodes[name]
	var now *node
	if o != nil {
		now = r.readNode(o)
	}
	if was != nil && now != nil && was.class.labels == now.class.labels &&
		slices.Equal(was.addresses, now.addresses) && slices.Equal(was.podRanges, now.podRanges) {
		return
	}
	r.staleNode = true
	if was == nil || now == nil || !slices.Equal(was.podRanges, now.podRanges) {
		r.stalePieces = true
	}
	if was != nil {
		for _, x := range was.addresses {
			x.set().nodes = slices.DeleteFunc(x.has().nodes, func(n *node) bool { return n == was })
		}
		r.dirty(was.addresses...)
		delete(r.nodes, name)
		delete(r.dirtyClasses, was.class)
	}
	if now != nil {
		now.class.signature = r.nothing
		r.nodes[name] = now
		r.dirtyClasses[now.class] = struct{}{}
		for _, x := range now.addresses {
			x.set().nodes = append(x.has().nodes, now)
			slices.SortFunc(x.has().nodes, func(a, b *node) int { return strings.Compare(a.name, b.name) })
		}
		r.dirty(now.addresses...)
	}
}

func (r *Resolver) readNode(o *corev1.Node) *node {
	n := &node{name: o.Name, class: &class{labels: newLabels(o.Labels)}}
	n.class.here = &here{node: n}
	for _, a := range o.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && ip.Zone() == "" {
			n.addresses = append(n.addresses, r.address(ip.Unmap()))
		}
	}
	n.addresses = sorted(n.addresses)
	for _, s := range o.Spec.PodCIDRs {
		if p, err := readPrefix(s); err == nil {
			n.podRanges = append(n.podRanges, p)
		}
	}
	slices.SortFunc(n.podRanges, netip.Prefix.Compare)
	n.podRanges = slices.Compact(n.podRanges)
	return n
}

// podOf returns the pod of a Pod, nil if that doesn't count.
func (r *Resolver) podOf(key source.Key) *pod {
	if n := r.namespaces[key.Namespace]; n != nil {
		if at, there := n.pod(key.Name); there {
			return n.pods[at]
		}
	}
	return nil
}

// pod returns where the pod of a name is, or would be.
func (n *namespace) pod(name string) (at int, there bool) {
	return slices.BinarySearchFunc(n.pods, name, func(p *pod, name string) int { return strings.Compare(p.name, name) })
}

// setPod has the pod of a name be p, nil: there is none.
func (n *namespace) setPod(name string, p *pod) {
	switch at, there := n.pod(name); {
	case p == nil:
		n.pods = slices.Delete(n.pods, at, at+1)
	case there:
		n.pods[at] = p
	default:
		n.pods = slices.Insert(n.pods, at, p)
	}
}

// pod is a Pod that counts: it has an address, has not ended and is not in the host's network.
type pod struct {
	name           string
	class          *class
	addresses      [2]*address // the first ones, sorted; nil: no more
	before, behind *pod        // of the same class
	created        uint32      // in seconds
	local          bool
	terminating    bool
	more           bool // further has all of its addresses
}

// setAddresses has p, which is new, have l.
func (r *Resolver) setAddresses(p *pod, l []*address) {
	if copy(p.addresses[:], l); len(l) > len(p.addresses) {
		p.more, r.further[p] = true, l
	}
}

// addressesOf returns p's addresses, sorted.
func (r *Resolver) addressesOf(p *pod) []*address {
	switch {
	case p.more:
		return r.further[p]
	case p.addresses[1] == nil:
		return p.addresses[:1]
	}
	return p.addresses[:]
}

// String returns "namespace/name".
func (p *pod) String() string { return p.class.namespace.name + "/" + p.name }

// class is pods of one namespace with the same labels and named ports, or a node.
type class struct {
	namespace *namespace // nil: a node's
	labels    labelSet
	ports     *[]port // sorted; nil: none
	pods      *pod    // one of them
	here      *here   // nil: no pods on this node
	signature *signature
	at        int32 // in the namespace
}

// all returns c's pods.
func (c *class) all() iter.Seq[*pod] {
	return func(yield func(*pod) bool) {
		for p := c.pods; p != nil && yield(p); p = p.behind {
		}
	}
}

// add adds a pod to c.
func (c *class) add(p *pod) {
	if p.behind = c.pods; p.behind != nil {
		p.behind.before = p
	}
	c.pods = p
}

// remove removes one of c's pods.
func (c *class) remove(p *pod) {
	if p.behind != nil {
		p.behind.before = p.before
	}
	if p.before != nil {
		p.before.behind = p.behind
	} else {
		c.pods = p.behind
	}
}

// named returns the ports, sorted.
func (c *class) named() []port {
	if c.ports == nil {
		return nil
	}
	return *c.ports
}

// here is what policies come to for the pods of a class that are on this node. That of a node's class has the node
// alone.
type here struct {
	node      *node
	pods      int // 0: they have just gone
	selection *selection
	named     bool                            // the rulesets of egress depend on numbers of named ports
	plans     [2][model.PolicyStages]*plan    // by direction
	rulesets  [2][model.PolicyStages]*ruleset // that the plans come to
}

type portName struct {
	name     string
	protocol model.Protocol
}

func (r *Resolver) applyPod(key source.Key, o *corev1.Pod) {
	r.follow(key, o)
	r.setPod(key, o)
}

// setPod takes a Pod in as it counts now.
func (r *Resolver) setPod(key source.Key, o *corev1.Pod) {
	was := r.podOf(key)
	var now *pod
	if o != nil {
		now = r.readPod(key, o)
	}
	if was != nil && now != nil && was.class == now.class && was.local == now.local &&
		was.terminating == now.terminating && was.created == now.created &&
		slices.Equal(r.addressesOf(was), r.addressesOf(now)) {
		delete(r.further, now)
		r.discard(now.class)
		return
	}
	if now != nil {
		now.class.add(now)
		if now.local {
			r.countLocal(now.class, 1)
		}
		for _, x := range r.addressesOf(now) {
			x.addPod(now)
		}
		r.dirty(r.addressesOf(now)...)
		now.class.namespace.setPod(now.name, now)
	}
	if was == nil {
		return
	}
	for _, x := range r.addressesOf(was) {
		x.removePod(was)
	}
	r.dirty(r.addressesOf(was)...)
	delete(r.further, was)
	if was.local {
		r.countLocal(was.class, -1)
	}
	was.class.remove(was)
	if now == nil {
		was.class.namespace.setPod(was.name, nil)
	}
	r.discard(was.class)
}

// countLocal adds n pods of this node to c.
func (r *Resolver) countLocal(c *class, n int) {
	r.staleProblems = r.staleProblems || r.closedPods
	if c.here == nil {
		c.here = &here{}
	}
	if c.here.pods += n; c.here.pods > 0 {
		if _, there := r.local[c]; !there {
			r.local[c] = struct{}{}
			r.dirtyLocal[c] = struct{}{}
		}
		return
	}
	delete(r.local, c)
	r.dirtyLocal[c] = struct{}{}
}

// readPod returns what counts of a Pod, nil if it doesn't. Its class may be new, without pods.
func (r *Resolver) readPod(key source.Key, o *corev1.Pod) *pod {
	if o.Spec.HostNetwork || o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
		return nil
	}
	p := &pod{name: key.Name, local: r.config.AllNodes || o.Spec.NodeName == r.config.Node && r.config.Node != "",
		terminating: o.DeletionTimestamp != nil,
		created:     seconds(o.CreationTimestamp)}
	var addresses []*address
	add := func(s string) {
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" && !a.Is4In6() {
			addresses = append(addresses, r.address(a))
		}
	}
	var attached bool
	if r.here[key] == o {
		var l []netip.Addr
		l, attached = r.attached.Of(key, o)
		for _, a := range l {
			addresses = append(addresses, r.address(a))
		}
	}
	if !attached {
		for _, ip := range o.Status.PodIPs {
			add(ip.IP)
		}
		if len(o.Status.PodIPs) == 0 && o.Status.PodIP != "" {
			add(o.Status.PodIP)
		}
	}
	if len(addresses) == 0 {
		return nil
	}
	r.setAddresses(p, sorted(addresses))
	p.class = r.classOf(key.Namespace, newLabels(o.Labels), namedPorts(&o.Spec))
	return p
}

// seconds returns a time of the API, in less.
func seconds(t metav1.Time) uint32 { return uint32(min(max(t.Unix(), 0), math.MaxUint32)) }

// namedPorts returns the ports of all containers that have a name, sorted.
func namedPorts(s *corev1.PodSpec) (out []port) {
	for _, cs := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range cs {
			for _, p := range cs[i].Ports {
				protocol, err := protocolOf(p.Protocol)
				if err == nil && p.Name != "" && p.ContainerPort >= 1 && p.ContainerPort <= 65535 {
					out = append(out, port{p.Name, protocol, uint16(p.ContainerPort)})
				}
			}
		}
	}
	slices.SortFunc(out, comparePorts)
	return slices.Compact(out)
}

func comparePorts(a, b port) int {
	return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.number, b.number))
}

// classOf returns the class with these labels and ports, a new one if there is none.
func (r *Resolver) classOf(ns string, l labelSet, ports []port) *class {
	n := r.namespace(ns)
	if c := r.classes.find(r.hashOf(ns, l, ports), func(c *class) bool {
		return c.namespace == n && c.labels == l && slices.Equal(c.named(), ports)
	}); c != nil {
		return c
	}
	c := &class{namespace: n, labels: l, ports: r.sharePorts(ports), at: int32(len(n.classes)), signature: r.nothing}
	r.classes.add(c)
	n.classes = append(n.classes, c)
	r.dirtyClasses[c] = struct{}{}
	r.countNumbers(c, 1)
	return c
}

// hashOf returns the hash of a class.
func (r *Resolver) hashOf(namespace string, l labelSet, ports []port) uint64 {
	return maphash.Comparable(r.seed, [2]string{namespace, string(l)}) + r.hashPorts(ports)
}

func (r *Resolver) hashClass(c *class) uint64 { return r.hashOf(c.namespace.name, c.labels, c.named()) }

func (r *Resolver) hashAddress(x *address) uint64 { return maphash.Comparable(r.seed, x.Addr) }

func (r *Resolver) hashPorts(l []port) (sum uint64) {
	for _, p := range l {
		sum += maphash.Comparable(r.seed, p)
	}
	return sum
}

// sharePorts returns l, or an equal list that has come before.
func (r *Resolver) sharePorts(l []port) *[]port {
	if len(l) == 0 {
		return nil
	}
	recent := &r.portLists[r.hashPorts(l)%uint64(len(r.portLists))]
	if *recent == nil || !slices.Equal(**recent, l) {
		*recent = &l
	}
	return *recent
}

// discard forgets c if it has no pods.
func (r *Resolver) discard(c *class) {
	if c.pods != nil {
		return
	}
	r.classes.remove(c)
	n := c.namespace
	last := n.classes[len(n.classes)-1]
	n.classes[c.at], last.at = last, c.at
	n.classes = slices.Delete(n.classes, len(n.classes)-1, len(n.classes))
	delete(r.dirtyClasses, c)
	r.countNumbers(c, -1)
	r.drop(n)
}

// countNumbers counts the numbers of c's named ports.
func (r *Resolver) countNumbers(c *class, n int) {
	for _, p := range c.named() {
		name := portName{p.name, p.protocol}
		numbers := r.numbers[name]
		if numbers == nil {
			numbers = map[uint16]map[*namespace]int{}
			r.numbers[name] = numbers
		}
		uses := numbers[p.number]
		if uses == nil {
			uses = map[*namespace]int{}
			numbers[p.number] = uses
		}
		before := len(uses)
		if uses[c.namespace] += n; uses[c.namespace] == 0 {
			delete(uses, c.namespace)
		}
		if (before == 0) != (len(uses) == 0) || before != len(uses) && len(numbers) > maxNumbers {
			r.renumbered = true
		}
		if len(uses) == 0 {
			delete(numbers, p.number)
		}
		if len(numbers) == 0 {
			delete(r.numbers, name)
		}
	}
}

// address is what is known of an address. Most are one pod's elsewhere, so that it has little.
type address struct {
	netip.Addr
	pod   *pod // one that has it, nil: none
	piece *piece
	peer  *shownPeer // nil: none
	rare  *rare      // nil: it is zero
	dirty bool
}

// shownPeer is a part, and the signature that it says.
type shownPeer struct {
	model.Peer
	signature *signature
}

// says returns the signature that p says, nil where there is no part.
func (p *shownPeer) says() *signature {
	if p == nil {
		return nil
	}
	return p.signature
}

// rare is what is known of few addresses.
type rare struct {
	pods    []*pod // further ones that have it
	nodes   []*node
	own     bool     // by Config.Addresses
	names   []string // of DNS, sorted
	subject *model.Subject
	bridge  string // by which the subject is reached, "" if by none
}

var nothingRare rare

// has returns what is rare about x, to be read.
func (x *address) has() *rare {
	if x.rare == nil {
		return &nothingRare
	}
	return x.rare
}

// set returns what is rare about x, to be changed.
func (x *address) set() *rare {
	if x.rare == nil {
		x.rare = &rare{}
	}
	return x.rare
}

// addPod adds a pod that has x.
func (x *address) addPod(p *pod) {
	if x.pod == nil {
		x.pod = p
	} else {
		x.set().pods = append(x.has().pods, p)
	}
}

// removePod removes one that had x.
func (x *address) removePod(p *pod) {
	l := x.has().pods
	if x.pod != p {
		x.rare.pods = slices.DeleteFunc(l, func(o *pod) bool { return o == p })
		return
	}
	if x.pod = nil; len(l) > 0 {
		x.pod = l[0]
		x.rare.pods = slices.Delete(l, 0, 1)
	}
}

// addressAt returns what is known of a, nil if nothing is.
func (r *Resolver) addressAt(a netip.Addr) *address {
	return r.addresses.find(maphash.Comparable(r.seed, a), func(x *address) bool { return x.Addr == a })
}

// address returns what is known of a, new if nothing was. It is forgotten when settled.
func (r *Resolver) address(a netip.Addr) *address {
	x := r.addressAt(a)
	if x == nil {
		x = &address{Addr: a}
		r.addresses.add(x)
		r.dirty(x)
	}
	return x
}

// sorted returns addresses in order, each once.
func sorted(l []*address) []*address {
	if len(l) > 1 {
		slices.SortFunc(l, func(a, b *address) int { return a.Compare(b.Addr) })
	}
	return slices.Compact(l)
}

// podAt returns the pod that has the address, nil if none does that counts.
func (r *Resolver) podAt(x *address) (best *pod) {
	if x.pod != nil && r.known(x.pod.class.namespace) {
		best = x.pod
	}
	for _, p := range x.has().pods {
		if r.known(p.class.namespace) && (best == nil || p.precedes(best)) {
			best = p
		}
	}
	return best
}

// precedes reports whether p rather than o has the address of both.
func (p *pod) precedes(o *pod) bool {
	if p.terminating != o.terminating {
		return o.terminating
	}
	return cmp.Or(cmp.Compare(p.created, o.created), strings.Compare(p.class.namespace.name, o.class.namespace.name),
		strings.Compare(p.name, o.name)) > 0
}
