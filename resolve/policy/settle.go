package policy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

// put adds a part, and del removes one: nil is none.
func (r *Resolver) put(p model.PolicyPart) { r.pending[p]++ }
func (r *Resolver) del(p model.PolicyPart) { r.pending[p]-- }

// settle works off what is dirty and returns what changes by it. That is done again where plans have to drop everything
// for want of a resource; at most once each where something has to have another ID, and where plans that dropped
// everything needn't any more.
func (r *Resolver) settle() model.Change[model.PolicyPart] {
	r.renumber()
	r.compared, r.lifted = 0, false
	for rebuilt, reopened := false, false; ; {
		switch x := r.work(); {
		case x != nil:
			r.refuse(x)
		case r.ids.clash && !rebuilt:
			rebuilt = true
			r.rebuild()
		case !reopened && r.reopen():
			reopened = true
		default:
			return r.difference()
		}
	}
}

// difference returns what changed since it was called last.
func (r *Resolver) difference() model.Change[model.PolicyPart] {
	var out model.Change[model.PolicyPart]
	for p, n := range r.pending {
		if n > 0 {
			out.Put = append(out.Put, p)
		} else if n < 0 {
			out.Del = append(out.Del, p)
		}
	}
	r.pending = emptied(r.pending)
	slices.SortFunc(out.Put, compareParts)
	slices.SortFunc(out.Del, compareParts)
	return out
}

// emptied returns an empty map: m, or another where m has grown, since clearing takes as long as it is large.
func emptied[K comparable, V any](m map[K]V) map[K]V {
	if len(m) > 64 {
		return map[K]V{}
	}
	clear(m)
	return m
}

// derivation works off what is stale of one kind of derived values.
type derivation struct {
	values string
	from   string // what they follow from: kinds of objects, what Set... replaces, and values of earlier ones
	// update returns a resource of which there is not enough, nil if there is of each.
	update func(*Resolver) *resource
}

// derivations are all that is derived, in the order in which one follows from another. Where a value changes, it marks
// as stale what follows from it. TestDerivations checks that this is what the table says.
var derivations = []derivation{
	{"rulesets", "NetworkPolicy ClusterNetworkPolicy Namespace Pod", (*Resolver).updateLocal},
	{"tables", "rulesets", (*Resolver).removeTables},
	{"peers", "rulesets tables", (*Resolver).updatePeers},
	{"signatures", "Namespace Node Pod peers", (*Resolver).updateSignatures},
	{"pieces", "Node peers", (*Resolver).updatePieces},
	{"addresses", "Namespace Node Pod DomainName interfaces devices rulesets peers signatures pieces",
		(*Resolver).updateAddresses},
	{"verdicts", "rulesets pieces addresses", (*Resolver).updateVerdicts},
	{"node", "NetworkPolicy ClusterNetworkPolicy Node interfaces devices Services addresses", (*Resolver).updateNode},
}

// work works off what is stale. It stops where there is not enough of a resource, and returns that.
func (r *Resolver) work() *resource {
	for _, d := range derivations {
		if x := d.update(r); x != nil {
			return x
		}
	}
	r.tidy()
	return nil
}

// renumber marks the classes whose rulesets depend on the numbers of named ports, where these have changed.
func (r *Resolver) renumber() {
	if !r.renumbered {
		return
	}
	r.renumbered = false
	r.numbering++
	for c := range r.local {
		if c.here.named {
			r.dirtyLocal[c] = struct{}{}
		}
	}
}

// updateLocal sets the rulesets of classes with pods on this node to what their policies come to.
func (r *Resolver) updateLocal() *resource {
	for c := range r.dirtyLocal {
		r.updatePlans(c)
	}
	r.dropPlans()
	r.admit()
	if r.reshow {
		r.reshow = false
		for c := range r.local {
			r.dirtyLocal[c] = struct{}{}
		}
	}
	r.staleProblems = r.staleProblems || len(r.dirtyLocal) > 0
	for c := range r.dirtyLocal {
		r.updateRulesets(c)
	}
	r.dirtyLocal = emptied(r.dirtyLocal)
	r.removeRulesets()
	return nil
}

// updatePeers indexes the peers that came into use, takes out those that went out of it, and marks what these match.
func (r *Resolver) updatePeers() *resource {
	matched, all := 0, false
	mark := func(p *peer) {
		if all {
			return
		}
		if matched += r.markMatches(p); matched > 4*r.classes.len()+1024 { // matching each class anew costs less
			r.markAll()
			all = true
		}
	}
	for _, p := range r.changedPeers {
		used := len(p.groups) > 0
		if !used {
			delete(r.peers, p.text)
		}
		if p.indexed == used {
			continue
		}
		switch p.indexed = used; p.kind {
		case block, unknownPods:
			r.stalePieces = true
		case blockPods:
			setIndexed(r.blockPods, *p.port, p)
			r.markPort(*p.port)
		case domains:
			setIndexed(r.domainPeers, p.domain, p)
			r.markDomain(p.domain)
		default:
			p.buckets(func(b bucket) { setIndexed(r.index, b, p) })
			mark(p)
		}
	}
	r.changedPeers = nil
	return nil
}

// markPort marks the addresses of pods that have the port.
func (r *Resolver) markPort(p port) {
	for _, n := range r.namespaces {
		for _, c := range n.classes {
			if !slices.Contains(c.named(), p) {
				continue
			}
			for pod := range c.all() {
				r.dirty(r.addressesOf(pod)...)
			}
		}
	}
}

// markMatches marks the classes that match p, and returns how many it has tried.
func (r *Resolver) markMatches(p *peer) (tried int) {
	mark := func(l ...*class) {
		tried += len(l)
		for _, c := range l {
			if p.matches(c) {
				r.dirtyClasses[c] = struct{}{}
			}
		}
	}
	if p.kind == nodes {
		for _, n := range r.nodes {
			mark(n.class)
		}
		return tried
	}
	names := []string{p.namespace}
	if p.namespace == "" {
		if names = p.namespaces.values(corev1.LabelMetadataName); r.renamed > 0 {
			names = nil
		}
	}
	for _, name := range names {
		if n := r.namespaces[name]; n != nil {
			mark(n.classes...)
		}
	}
	if names == nil {
		for _, n := range r.namespaces {
			if tried++; p.namespaces.matches(n.labels) {
				mark(n.classes...)
			}
		}
	}
	return tried
}

// markAll marks the classes of all pods.
func (r *Resolver) markAll() {
	for _, n := range r.namespaces {
		for _, c := range n.classes {
			r.dirtyClasses[c] = struct{}{}
		}
	}
}

// updateSignatures matches the classes that are marked, and marks the addresses of those that have changed. It returns
// a resource of which there is not enough, nil if there is of each.
func (r *Resolver) updateSignatures() *resource {
	var buffer []*peer
	all := len(r.dirtyClasses)
	r.shrink()
	for c := range r.dirtyClasses {
		var compared int
		buffer, compared = r.index.of(c, buffer[:0])
		r.compared += compared
		delete(r.dirtyClasses, c)
		if s := r.signatureOf(buffer); s != c.signature {
			c.signature = s
			if c.namespace == nil {
				r.dirty(c.here.node.addresses...)
			}
			for p := range c.all() {
				r.dirty(r.addressesOf(p)...)
			}
		}
		if x := r.beyond(); x != nil {
			r.done = 1 - float64(len(r.dirtyClasses))/float64(all)
			return x
		}
	}
	if all > 64 { // as emptied does
		r.dirtyClasses = map[*class]struct{}{}
	}
	return nil
}

// updateAddresses works out the parts of addresses that are marked. It returns a resource of which there is not enough,
// nil if there is of each.
func (r *Resolver) updateAddresses() *resource {
	for i, x := range r.dirtyAddresses {
		r.updateAddress(x)
		if over := r.beyond(); over != nil {
			r.dirtyAddresses, r.done = r.dirtyAddresses[i+1:], float64(i+1)/float64(len(r.dirtyAddresses))
			return over
		}
	}
	r.dirtyAddresses = nil
	return nil
}

// updateAddress works out what x's parts are.
func (r *Resolver) updateAddress(x *address) {
	x.dirty = false
	pod := r.podAt(x)
	r.updateSubject(x, pod)
	x.piece = r.pieceAt(x.Addr)
	in := r.within(x.piece)
	around, now := in.signature, r.signatureAt(x, pod)
	if in.single { // the piece is no part of its own, but this address's
		if now == nil {
			now = around
		}
		around = r.nothing
	}
	if now == around {
		now = nil
	}
	name := ""
	if now != nil {
		name = r.nameOf(x, pod)
	}
	if x.peer.says() != now || x.peer != nil && x.peer.Name != name {
		r.updatePeer(&x.peer, now, model.Range{First: x.Addr, Last: x.Addr}, name)
	}
	if !x.known(pod) && x.pod == nil && len(x.has().names) == 0 && x.peer == nil && x.has().subject == nil {
		r.addresses.remove(x)
	}
}

// known reports whether x is an address of a pod that counts, or of a node.
func (x *address) known(pod *pod) bool { return pod != nil || len(x.has().nodes) > 0 || x.has().own }

// signatureAt returns what matches x as an address of a pod, nodes or domain names, nil if it is none's.
func (r *Resolver) signatureAt(x *address, pod *pod) *signature {
	named := r.byName(x)
	if !x.known(pod) {
		if named == r.nothing {
			return nil
		}
		return r.union(r.within(x.piece).signature, named)
	}
	s := r.union(r.within(x.piece).known, named)
	if pod != nil {
		s = r.union(s, pod.class.signature)
		s = r.union(s, r.inBlocks(x.Addr, pod.class))
	}
	for _, n := range x.has().nodes {
		s = r.union(s, n.class.signature)
	}
	return s
}

// inBlocks returns which of the CIDRs in use with a named port match an address of a pod of c.
func (r *Resolver) inBlocks(a netip.Addr, c *class) *signature {
	if len(r.blockPods) == 0 {
		return r.nothing
	}
	var out []*peer
	for _, port := range c.named() {
		for _, p := range r.blockPods[port] {
			if p.holds(a) {
				out = append(out, p)
			}
		}
	}
	sortPeers(out)
	return r.signatureOf(out)
}

// nameOf returns what x is called.
func (r *Resolver) nameOf(x *address, pod *pod) string {
	switch {
	case pod != nil:
		return "pod " + pod.String()
	case len(x.has().nodes) > 0:
		return "node " + x.has().nodes[0].name
	case x.has().own:
		return "this node"
	case len(x.has().names) > 0:
		return "name " + x.has().names[0]
	}
	return r.pieceAt(x.Addr).name
}

// updatePeer replaces the part at p by one of the signature now, nil for none.
func (r *Resolver) updatePeer(p **shownPeer, now *signature, of model.Range, name string) {
	was := *p
	if was != nil {
		r.del(&was.Peer)
	}
	if *p = nil; now != nil {
		*p = &shownPeer{model.Peer{Range: of, Identity: r.show(now), Name: name}, now}
		r.put(&(*p).Peer)
	}
	if was != nil {
		r.withdraw(was.signature)
	}
}

// updateSubject works out x's subject: that of a pod of this node.
func (r *Resolver) updateSubject(x *address, pod *pod) {
	var now *model.Subject
	var bridge *Device
	if pod != nil && pod.local {
		bridge = r.bridgeOf(x.Addr)
	}
	bypassed := r.updateBridge(x, bridge)
	if pod != nil && pod.local {
		now = &model.Subject{Pod: pod.String(), Addr: x.Addr, Bridge: bypassed}
		if !r.config.Audit {
			now.Device = r.entries[x.Addr]
		}
		for stage := range model.PolicyStages {
			if rs := pod.class.here.rulesets[model.Egress][stage]; rs != nil {
				now.Out[stage] = rs.model
			}
			if rs := pod.class.here.rulesets[model.Ingress][stage]; rs != nil {
				now.In[stage] = rs.model
			}
		}
	}
	was := x.has().subject
	if was == now || was != nil && now != nil && *was == *now {
		return
	}
	if device := r.entries[x.Addr]; device != "" {
		r.dirtyDevices[device] = struct{}{}
	}
	if x.set().subject = now; was != nil {
		r.del(was)
	}
	if now != nil {
		r.put(now)
	}
}

// updateNode works out the part that holds for the node, and those of its devices.
func (r *Resolver) updateNode() *resource {
	if !r.staleNode && len(r.dirtyDevices) == 0 {
		return nil
	}
	r.staleNode = false
	n := &model.PolicyNode{CutMark: r.config.CutMark, Unknown: model.VerdictAccept}
	n.Addresses = slices.Clone(r.config.Addresses)
	if own := r.nodes[r.config.Node]; own != nil {
		for _, x := range own.addresses {
			n.Addresses = append(n.Addresses, x.Addr)
		}
		n.Pods = slices.Clone(own.podRanges)
	}
	for _, p := range r.config.Pods {
		n.Pods = append(n.Pods, p.Masked())
	}
	if r.config.AllNodes {
		for _, of := range r.nodes {
			n.Pods = append(n.Pods, of.podRanges...)
		}
	}
	slices.SortFunc(n.Pods, netip.Prefix.Compare)
	n.Pods = slices.Compact(n.Pods)
	slices.SortFunc(n.Addresses, netip.Addr.Compare)
	n.Addresses = slices.Compact(n.Addresses)
	n.PreDNAT = others(r.config.PreDNAT, n.Addresses)
	r.updateDevices(n.Pods)
	n.Devices = len(r.parts) > 0
	if r.policies > 0 {
		n.Unknown = model.VerdictDrop
	}
	was := r.node
	if was != nil && slices.Equal(was.Addresses, n.Addresses) && slices.Equal(was.Pods, n.Pods) &&
		was.Unknown == n.Unknown && was.Devices == n.Devices && slices.Equal(was.PreDNAT, n.PreDNAT) {
		return nil
	}
	if r.node = n; was != nil {
		r.del(was)
	}
	r.put(n)
	return nil
}

// tidy forgets what was remembered for the work that is done, and what saves work once it has grown.
func (r *Resolver) tidy() {
	r.ids.reserved = nil
	if len(r.unions) > 2*r.addresses.len()+1024 {
		clear(r.unions)
	}
	if len(r.signatures) > r.signatureLimit || r.matches > r.matchLimit {
		r.collect()
	}
}

// shrink forgets signatures that nothing has where there are many.
func (r *Resolver) shrink() {
	if r.matches > r.limits.Matches {
		r.collect()
	}
}

// collect forgets signatures that nothing has.
func (r *Resolver) collect() {
	used := map[*signature]bool{r.nothing: true}
	for _, n := range r.namespaces {
		for _, c := range n.classes {
			used[c.signature] = true
		}
	}
	for _, n := range r.nodes {
		used[n.class.signature] = true
	}
	for _, p := range r.pieces {
		used[p.signature], used[p.known] = true, true
	}
	for x := range r.addresses.all() {
		used[x.peer.says()] = true
	}
	maps.DeleteFunc(r.signatures, func(_ string, s *signature) bool {
		unused := !used[s] && s.users == 0
		if unused {
			r.matches -= len(s.peers) + identityWeight
		}
		return unused
	})
	clear(r.unions)
	r.signatureLimit, r.matchLimit = 2*len(r.signatures)+1024, 2*r.matches+1<<14
}

// rebuild makes everything anew that objects come to.
func (r *Resolver) rebuild() {
	for _, rs := range r.rulesets {
		rs.gone = true
		r.del(rs.model)
	}
	for _, t := range r.tables {
		r.del(t.model)
		for _, v := range t.verdicts {
			r.del(v)
		}
	}
	for _, p := range r.pieces {
		if p.peer != nil {
			r.del(&p.peer.Peer)
		}
	}
	node, reserved := r.node, r.reservations()
	r.derived = newDerived()
	r.ids.reserved, r.node, r.reshow = reserved, node, true
	for _, p := range r.plans {
		p.built, p.ruleset, p.closed = false, nil, nil
	}
	for c := range r.local {
		c.here.rulesets = [2][model.PolicyStages]*ruleset{}
	}
	for _, n := range r.namespaces {
		for _, c := range n.classes {
			c.signature = r.nothing
		}
	}
	for _, n := range r.nodes {
		n.class.signature = r.nothing
	}
	for x := range r.addresses.all() {
		if x.peer != nil {
			r.del(&x.peer.Peer)
		}
		if s := x.has().subject; s != nil {
			r.del(s)
			x.rare.subject = nil
		}
		x.peer, x.piece = nil, nil
		r.dirty(x)
	}
	r.stalePieces = true
}

// compareParts orders parts by kind and by what they are about.
func compareParts(a, b model.PolicyPart) int {
	kindOf := func(p model.PolicyPart) int {
		switch p.(type) {
		case *model.PolicyNode:
			return 0
		case *model.PeerTable:
			return 1
		case *model.Ruleset:
			return 2
		case *model.Peer:
			return 3
		case *model.PeerVerdict:
			return 4
		case *model.Subject:
			return 5
		}
		return 6
	}
	if c := cmp.Compare(kindOf(a), kindOf(b)); c != 0 {
		return c
	}
	switch a := a.(type) {
	case *model.PeerTable:
		return cmp.Compare(a.ID, b.(*model.PeerTable).ID)
	case *model.Ruleset:
		return cmp.Compare(a.ID, b.(*model.Ruleset).ID)
	case *model.Peer:
		o := b.(*model.Peer)
		return cmp.Or(a.Range.First.Compare(o.Range.First), a.Range.Last.Compare(o.Range.Last),
			strings.Compare(a.Name, o.Name))
	case *model.PeerVerdict:
		o := b.(*model.PeerVerdict)
		return cmp.Or(cmp.Compare(a.PeerTable.ID, o.PeerTable.ID), cmp.Compare(a.Identity.ID, o.Identity.ID))
	case *model.Subject:
		return a.Addr.Compare(b.(*model.Subject).Addr)
	case *model.Device:
		return strings.Compare(a.Name, b.(*model.Device).Name)
	}
	return 0
}

// Policies returns everything that is decided now, as one snapshot of the parts that Apply returned: the same pointers.
func (r *Resolver) Policies() *model.Policies {
	s := model.NewPolicies()
	if r.node != nil {
		s.Node = r.node
	}
	for name, d := range r.parts {
		s.Devices[name] = d
	}
	for x := range r.addresses.all() {
		if subject := x.has().subject; subject != nil {
			s.Subjects[x.Addr] = subject
		}
		if x.peer != nil {
			s.Singles[x.Addr] = &x.peer.Peer
		}
	}
	for _, p := range r.pieces { // sorted; those of one address are that address's
		if p.peer != nil {
			s.Ranges = append(s.Ranges, &p.peer.Peer)
		}
	}
	for _, rs := range r.rulesets {
		s.Rulesets[rs.model.ID] = rs.model
	}
	for _, t := range r.tables {
		s.Tables[t.model.ID] = t.model
		for _, v := range t.verdicts {
			s.Verdicts[v.Key()] = v
		}
	}
	return s
}
