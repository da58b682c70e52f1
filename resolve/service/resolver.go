package service

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Resolver holds what is known of the cluster, as far as this node needs it, and what that comes to. It is not safe for
// use by several goroutines at once; what it returns is.
type Resolver struct {
	config Config
	set    *settings
	hash   func(string) uint64
	locality
	services map[source.Key]*service
	owners   map[source.Key]*service // by EndpointSlice
	claimed
	admission
	addressUse
	hostPorts
	unpublished
	strays map[source.Key][]string // EndpointSlices of no Service, by the Service in their names
	hits   []hit                   // scratch of match

	problemsNow   []source.Problem // what Problems returned last
	staleProblems bool             // that is out of date

	decider decider
}

// locality is where this node is, and the others.
type locality struct {
	object    *corev1.Node // this node's; nil: not there
	deleted   bool         // it was there
	nodeState *nodeState
	nodes     map[string]peer // all Nodes that were seen
}

// claimed is which Service has what only one can have.
type claimed struct {
	entries claims[model.Entry]
	health  claims[uint16]
	ids     claims[uint64]
}

// admission bounds what Services and their namespaces come to.
type admission struct {
	namespaces   map[string]*namespace
	wanted       cost                  // of all Services
	scarce       bool                  // they want more than there is
	oldestFirst  []*service            // those that are declared; nil: not known
	costsChanged bool                  // since the last admission
	excluded     map[*service]struct{} // Services that are not served for that
}

// addressUse is what addresses of the cluster are used for.
type addressUse struct {
	clusterIPs   map[netip.Addr][]*service            // by owner
	foreign      map[netip.Addr]int                   // ClusterIPs of Services that another proxy serves
	serviceCIDRs map[string][]string                  // spec.cidrs of ServiceCIDRs
	external     map[netip.Addr]map[*service]struct{} // Services with entries at addresses that they choose
	api          map[netip.AddrPort]struct{}          // the API server's
	podRanges    []netip.Prefix                       // sorted, none inside another
	nodeIPs      map[netip.Addr]int                   // addresses of Nodes, how often each
	remotes      int                                  // node ports that are served at other nodes' addresses, too
	blocks       map[netip.Prefix]int                 // of addresses with endpoints, how many slices have some there
}

// unpublished is what changed since the last Delta, and what that came to.
type unpublished struct {
	published         *model.ServiceNode              // the node of the last Delta; nil before the first
	changed           []*service                      // since then
	triggered         []time.Time                     // likewise: see model.Delta
	changedClusterIPs map[netip.Addr]struct{}         // that may have come or gone
	shownClusterIPs   map[netip.Addr]*model.ClusterIP // what the Deltas so far come to
	changedEntries    map[model.Entry]struct{}        // entries with another holder
	changedNodePorts  map[*namespace]struct{}         // namespaces with other node ports
	staleRanges       bool                            // Nodes have other addresses or pods
	staleNode         bool                            // this node may be another, or addresses be others' than before
	uid               string                          // of the Service default/kubernetes
}

// service is what is known of one Service, or of a pod's host ports, and what it comes to.
type service struct {
	key         source.Key
	namespace   *namespace
	*declared                    // nil while only slices are known
	claimed     bool             // it is expanded, and has claimed what it wants
	refused     map[int]string   // entries that would capture what is others', and why
	slices      []*endpointSlice // by name
	size        size
	problemsNow []source.Problem
	decision    decision
	shown       decision // what the Deltas so far come to: of the decision, what no other Service has
	stale       bool     // decision is out of date
	listed      bool     // in Resolver.changed
}

// ServedCount returns how many Services have an address that is served.
func (r *Resolver) ServedCount() (n int) {
	for _, s := range r.services {
		if s.claimed && s.key.Kind == source.Service {
			n++
		}
	}
	return n
}

// New makes a Resolver that knows no object yet. What Config.Validate complains of is left out and stands as a Problem.
func New(c Config) *Resolver {
	set := c.read()
	r := &Resolver{
		config:   c,
		set:      set,
		hash:     hashName,
		locality: locality{nodeState: locate(set, nil, nil, false, nil, nil), nodes: map[string]peer{}},
		services: map[source.Key]*service{},
		owners:   map[source.Key]*service{},
		claimed: claimed{newClaims[model.Entry](entryBefore), newClaims[uint16](older),
			newClaims[uint64](older)},
		admission: admission{namespaces: map[string]*namespace{}, excluded: map[*service]struct{}{}},
		addressUse: addressUse{
			clusterIPs:   map[netip.Addr][]*service{},
			foreign:      map[netip.Addr]int{},
			serviceCIDRs: map[string][]string{},
			external:     map[netip.Addr]map[*service]struct{}{},
			nodeIPs:      map[netip.Addr]int{},
			blocks:       map[netip.Prefix]int{},
		},
		hostPorts: hostPorts{map[source.Key]*corev1.Pod{}, source.Attached{}},
		unpublished: unpublished{
			changedClusterIPs: map[netip.Addr]struct{}{},
			shownClusterIPs:   map[netip.Addr]*model.ClusterIP{},
			changedEntries:    map[model.Entry]struct{}{},
			changedNodePorts:  map[*namespace]struct{}{},
		},
		strays:        map[source.Key][]string{},
		staleProblems: true,
	}
	r.decider.nodes, r.decider.strays = r.nodeIPs, r.strays
	r.decider.at = func(e model.Entry) (x claim, ok bool) { x, ok = r.entries.holder[e]; return x, ok }
	r.updateAPIServers()
	r.updatePodRanges()
	return r
}

// hashName returns the first 8 bytes of the name's SHA-256, big endian.
func hashName(name string) uint64 {
	sum := sha256.Sum256([]byte(name))
	return binary.BigEndian.Uint64(sum[:8])
}

// keyIDs has pools' IDs depend on the cluster, by the UID of the Service default/kubernetes: without knowing that, a
// tenant can't search for names with the same IDs as others'. Files without a UID give no key.
func (r *Resolver) keyIDs() {
	if hash, uid := r.hash, r.uid; uid != "" {
		r.hash = func(name string) uint64 { return hash(uid + " " + name) }
	}
}

// Apply takes changes in and returns what changes on the node by them, in a settled order: the node, pools and
// frontends. Its cost follows the Services that the changes touch. Kinds that mean nothing to Services are ignored.
func (r *Resolver) Apply(changes []source.Change) model.Delta {
	r.Observe(changes)
	if r.published == nil {
		r.keyIDs()
	}
	if r.staleRanges {
		r.updatePodRanges()
	}
	if r.staleRanges || r.staleNode {
		r.locate()
	}
	r.staleRanges, r.staleNode = false, false
	return r.settle()
}

// Observe takes changes in. What follows from them the next Apply decides.
func (r *Resolver) Observe(changes []source.Change) {
	for _, c := range changes {
		switch c.Key.Kind {
		case source.Service:
			svc, _ := c.Object.(*corev1.Service)
			r.staleNode = r.applyService(c.Key, svc) || r.staleNode
			if c.Key == apiServer && svc != nil {
				r.uid = string(svc.UID)
			}
		case source.EndpointSlice:
			obj, _ := c.Object.(*discoveryv1.EndpointSlice)
			r.applySlice(c.Key, obj)
		case source.Pod:
			obj, _ := c.Object.(*corev1.Pod)
			r.applyPod(c.Key, obj)
		case source.ServiceCIDR:
			obj, _ := c.Object.(*networkingv1.ServiceCIDR)
			r.applyServiceCIDR(c.Key.Name, obj)
			r.staleNode = true
		case source.Node:
			obj, _ := c.Object.(*corev1.Node)
			r.staleRanges = r.meet(c.Key.Name, obj) || r.staleRanges
			if c.Key.Name == r.set.Node {
				r.object, r.deleted, r.staleNode = obj, obj == nil, true
			}
		}
	}
}

// meet records a Node, or, without an object, that it is gone. It reports whether the addresses of nodes or pods
// change.
func (r *Resolver) meet(name string, obj *corev1.Node) bool {
	was, known := r.nodes[name]
	now := peer{}
	if obj == nil {
		delete(r.nodes, name)
	} else {
		now = readPeer(obj)
		r.nodes[name] = now
	}
	r.staleProblems = r.staleProblems || known != (obj != nil)
	if was.equal(now) {
		return false
	}
	for _, a := range was.addresses {
		if r.nodeIPs[a]--; r.nodeIPs[a] == 0 {
			delete(r.nodeIPs, a)
		}
		r.recheck(a)
		r.guardAt(a)
	}
	for _, a := range now.addresses {
		r.nodeIPs[a]++
		r.recheck(a)
		r.guardAt(a)
	}
	return true
}

// applyService takes a Service in, and reports whether it is or was one that another proxy serves.
func (r *Resolver) applyService(key source.Key, obj *corev1.Service) (foreign bool) {
	s := r.service(key)
	if s.claimed {
		r.withdraw(s)
	}
	foreign = r.countForeign(s.declared, -1)
	s.declared = nil
	if obj != nil {
		s.declared = declare(obj, r.set)
	}
	r.oldestFirst, r.costsChanged = nil, true
	r.touch(s, true)
	return r.countForeign(s.declared, 1) || foreign
}

func (r *Resolver) applySlice(key source.Key, obj *discoveryv1.EndpointSlice) {
	var owner *service
	if obj != nil {
		if name := ownerOf(obj); name != "" {
			owner = r.service(source.Key{Kind: source.Service, Namespace: key.Namespace, Name: name})
		}
	}
	if old := r.owners[key]; old != nil && old != owner {
		i, _ := old.findSlice(key.Name)
		r.indexBlocks(old.slices[i], -1)
		old.slices = slices.Delete(old.slices, i, i+1)
		delete(r.owners, key)
		r.touch(old, true)
		if old.key == apiServer {
			r.updateAPIServers()
		}
	}
	r.stray(key, obj != nil && obj.Labels[discoveryv1.LabelServiceName] == "")
	if owner == nil {
		return
	}
	read := readSlice(obj, r.set.Node)
	i, found := owner.findSlice(key.Name)
	if read.triggered != 0 && !(found && owner.slices[i].triggered == read.triggered) {
		r.triggered = append(r.triggered, time.Unix(0, read.triggered))
	}
	if found {
		r.indexBlocks(owner.slices[i], -1)
		owner.slices[i] = read
	} else {
		owner.slices = slices.Insert(owner.slices, i, read)
		r.owners[key] = owner
	}
	r.indexBlocks(read, 1)
	r.touch(owner, true)
	if owner.key == apiServer {
		r.updateAPIServers()
	}
}

// SetAddresses takes the addresses of this node's interfaces in, in place of Config.Addresses. The next Delta has what
// changes by them.
func (r *Resolver) SetAddresses(addresses []netip.Addr) {
	r.config.Addresses = addresses
	r.set, r.staleProblems = r.config.read(), true
	r.locate()
}

// locate inspects what is known of this node again, and marks every Service if that changes. Other nodes' addresses and
// ServiceCIDRs decide nothing of a Service.
func (r *Resolver) locate() {
	was := r.nodeState
	r.staleProblems = true
	r.nodeState = locate(r.set, r.object, r.nodes, was.remote, r.serviceRanges, was.model)
	before := *was.model
	now := r.nodeState.model
	before.Nodes, before.RemoteNodePorts, before.ServiceRanges = now.Nodes, now.RemoteNodePorts, now.ServiceRanges
	if equalServiceNode(&before, now) && r.nodeState.zone == was.zone && r.nodeState.podsHere == was.podsHere {
		return
	}
	for _, a := range slices.Concat(before.Addresses, now.Addresses) {
		if len(r.clusterIPs[a]) > 0 {
			r.changedClusterIPs[a] = struct{}{}
		}
	}
	r.declarePods()
	r.guardAll()
	for _, s := range r.services {
		r.touch(s, true)
	}
}

// service returns the Service of that key, a new one if nothing was known of it.
func (r *Resolver) service(key source.Key) *service {
	s := r.services[key]
	if s == nil {
		s = &service{key: key, namespace: r.namespaceOf(key.Namespace)}
		r.services[key] = s
		s.namespace.services[s] = struct{}{}
	}
	return s
}

func (s *service) findSlice(name string) (int, bool) {
	return slices.BinarySearchFunc(s.slices, name, func(e *endpointSlice,
		name string) int {
		return strings.Compare(e.name, name)
	})
}

// touch marks s as to be looked at again, and its decision as out of date if stale.
func (r *Resolver) touch(s *service, stale bool) {
	if s == nil {
		return
	}
	s.stale = s.stale || stale
	if !s.listed {
		s.listed = true
		r.changed = append(r.changed, s)
	}
}

// syncClaims has s claim what it wants, or give that back, as it is to be served or not.
func (r *Resolver) syncClaims(s *service) {
	_, excluded := r.excluded[s]
	switch wants := s.declared != nil && !excluded; {
	case wants && !s.claimed:
		s.expand(r.set.limits.Service.Frontends, r.hash)
		r.indexAddresses(s, true)
		s.refused = r.rejections(s)
		s.claimed = true
		r.claim(s, true)
	case !wants && s.claimed:
		r.withdraw(s)
	}
}

// withdraw has s, which has claims, give them back.
func (r *Resolver) withdraw(s *service) {
	r.claim(s, false)
	r.indexAddresses(s, false)
	s.refused, s.claimed = nil, false
	s.collapse()
}

// claim adds or drops everything that s declares to want.
func (r *Resolver) claim(s *service, add bool) {
	for i := range s.entries {
		if s.refused[i] == "" {
			r.moveEntry(s, i, add)
		}
		switch {
		case s.entries[i].via != viaNodePort || s.external:
		case add:
			r.remotes++
		default:
			r.remotes--
		}
	}
	for i := range s.groups {
		for scope, p := range s.groups[i].pools {
			if p.name != "" {
				r.touch(move(&r.ids, add, p.id, claim{s, i*scopes + scope}), false)
			}
		}
	}
	if s.declared.health != 0 {
		r.touch(move(&r.health, add, s.declared.health, claim{s, 0}), false)
	}
}

// moveEntry adds or drops the claim for s's i-th entry. Its rivals are touched if the holder changes.
func (r *Resolver) moveEntry(s *service, i int, add bool) {
	k := s.entries[i].Entry
	if r.published == nil { // every Service is decided anyway
		move(&r.entries, add, k, claim{s, i})
		return
	}
	was := r.entries.holder[k].by
	r.touch(move(&r.entries, add, k, claim{s, i}), false)
	now := r.entries.holder[k].by
	if now == was {
		return
	}
	for _, x := range r.entries.rivals[k] {
		r.touch(x.by, false)
	}
	r.changedEntries[k] = struct{}{}
	if k.AnyAddr() {
		r.changedNodePorts[s.namespace] = struct{}{}
		if was != nil {
			r.changedNodePorts[was.namespace] = struct{}{}
		}
		if hasKind(was, source.Pod) || hasKind(now, source.Pod) {
			for _, a := range r.entryAddresses(k) {
				r.recheck(a)
			}
		}
	}
}

// hasKind reports whether s, if there is one, is of a kind.
func hasKind(s *service, k source.Kind) bool { return s != nil && s.key.Kind == k }

// move adds or drops one claim and returns the Service that loses or wins by it.
func move[K comparable](c *claims[K], add bool, k K, x claim) *service {
	if add {
		return c.add(k, x)
	}
	return c.drop(k, x)
}

// settle decides what is out of date and returns the difference from what was shown before.
func (r *Resolver) settle() model.Delta {
	for _, s := range r.changed {
		if s.stale {
			r.weigh(s)
		}
	}
	r.admit()
	for i := 0; i < len(r.changed); i++ { // more may come
		r.syncClaims(r.changed[i])
	}
	if remote := r.remotes > 0; remote != r.nodeState.remote {
		r.nodeState.remote = remote
		r.locate()
	}
	r.findLoops()
	slices.SortFunc(r.changed, func(a, b *service) int {
		return cmp.Or(strings.Compare(a.key.Namespace, b.key.Namespace), strings.Compare(a.key.Name, b.key.Name),
			cmp.Compare(a.key.Kind, b.key.Kind))
	})
	var d difference
	r.showClusterIPs(&d)
	if r.published != r.nodeState.model {
		d.node(r.published, r.nodeState.model)
		r.published = r.nodeState.model
	}
	for _, s := range r.changed {
		if s.stale {
			r.decide(s)
		}
		shown := r.visible(s)
		d.between(&s.shown, &shown)
		s.shown, s.stale, s.listed = shown, false, false
		r.updateProblems(s)
		if s.declared == nil && len(s.slices) == 0 {
			r.drop(s)
		}
	}
	clear(r.changed)
	r.changed = r.changed[:0]
	delta := d.delta()
	delta.Triggered, r.triggered = r.triggered, nil
	return delta
}

// Leaving returns why load balancers should send nothing new to this node, or "" (KEP-3836). As for kube-proxy, a node
// of which no object was ever seen is not fit for them (pkg/proxy/healthcheck), unless the cluster may do without Nodes
// and has none.
func (r *Resolver) Leaving() string {
	switch {
	case r.object != nil:
		return leaving(r.object)
	case r.deleted:
		return "the Node was deleted"
	case r.config.Nodeless && len(r.nodes) == 0:
		return ""
	}
	return "no Node of this name was seen"
}

// drop forgets a Service of which nothing is known.
func (r *Resolver) drop(s *service) {
	delete(r.services, s.key)
	delete(r.excluded, s)
	n := s.namespace
	if delete(n.services, s); len(n.services) == 0 {
		delete(r.namespaces, n.name)
	}
}

func (r *Resolver) decide(s *service) {
	if _, excluded := r.excluded[s]; excluded || s.declared == nil {
		s.decision = decision{}
		return
	}
	s.decision = r.decider.decide(r.nodeState, s)
}

// visible returns the part of a Service's decision that no other Service has a better claim to.
func (r *Resolver) visible(s *service) decision {
	if r.unrivalled(s) {
		return s.decision
	}
	v := decision{pools: make([]*model.Pool, len(s.decision.pools))}
	for i, f := range s.decision.fronts {
		if r.holds(s, i) {
			v.fronts = append(v.fronts, f)
			for _, at := range s.poolsOf(i) {
				v.pools[at] = s.decision.pools[at]
			}
		}
	}
	if h := s.decision.health; h != nil && r.health.has(h.Port, claim{s, 0}) {
		v.health = h
	}
	return v
}

// unrivalled reports whether s has all that it wants.
func (r *Resolver) unrivalled(s *service) bool {
	for i := range s.decision.fronts {
		if !r.holds(s, i) {
			return false
		}
	}
	h := s.decision.health
	return h == nil || r.health.has(h.Port, claim{s, 0})
}

// holds reports whether s has its i-th entry, and the IDs of the pools that the entry needs, and is served there.
func (r *Resolver) holds(s *service, i int) bool {
	if r.set.refuses(s.decision.fronts[i]) != "" {
		return false
	}
	for _, at := range s.poolsOf(i) {
		if !r.ids.has(s.decision.pools[at].ID, claim{s, at}) {
			return false
		}
	}
	return r.entries.has(s.entries[i].Entry, claim{s, i})
}

// poolsOf returns the places in decision.pools of the pools that the i-th entry needs: both sides', also where they are
// one.
func (s *service) poolsOf(i int) [2]int {
	f, at := s.decision.fronts[i], int(s.entries[i].group)*scopes
	index := func(p *model.Pool) int {
		if s.decision.pools[at+cluster] == p {
			return at + cluster
		}
		return at + onlyLocal
	}
	return [2]int{index(f.Internal.Pool), index(f.External.Pool)}
}

// unknownNode reports whether Nodes are known and this one isn't among them. Without any, Services alone were given.
func (r *Resolver) unknownNode() []source.Problem {
	if _, known := r.nodes[r.set.Node]; known || len(r.nodes) == 0 {
		return nil
	}
	names := slices.Sorted(maps.Keys(r.nodes))
	if len(names) > 5 {
		names = append(names[:5], "…")
	}
	rep := report{object: source.Key{Kind: source.Node, Name: r.set.Node}}
	rep.add("", "NodeUnknown", "no Node has this name, but %s: Services are served without its addresses, pod ranges and "+
		"zone, and no endpoint is local; set --node to the name of the Node object",
		strings.Join(names, ", "))
	return rep.list
}

// Services returns the whole decided node as it stands: what all Deltas so far come to, with the same pointers.
func (r *Resolver) Services() *model.Snapshot {
	out := &model.Snapshot{Node: r.nodeState.model.Node, ServiceNode: r.nodeState.model,
		Frontends:  make(map[model.Entry]*model.Frontend, len(r.entries.holder)),
		ClusterIPs: maps.Clone(r.shownClusterIPs)}
	for _, s := range r.services {
		for _, f := range s.shown.fronts {
			out.Frontends[f.Entry] = f
		}
		if s.shown.health != nil {
			out.HealthChecks = append(out.HealthChecks, s.shown.health)
		}
	}
	slices.SortFunc(out.HealthChecks, func(a, b *model.HealthCheck) int { return a.Owner.Compare(b.Owner) })
	return out
}
