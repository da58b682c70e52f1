package reachability

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/model"
)

// The bounds of what is suggested.
const (
	maxBlocks   = 16 // CIDRs of one rule: more addresses are joined
	maxWildcard = 64 // ports of a protocol between two ends: more are every port of it
)

// identityLabels are labels that tell workloads apart: the selectors of suggested policies have those of them that a
// pod has, else all of its labels but those of a revision.
var identityLabels = append([]string{"app.kubernetes.io/instance", "app.kubernetes.io/component", "component", "tier"},
	nameLabels...)

// Workload is pods of a namespace that a selector of suggested policies stands for.
type Workload struct {
	Namespace string
	Name      string // for people, unique in its namespace, and valid in names of objects
	labels    map[string]string
	without   []string // labels of workloads that labels alone would match too
}

// key returns a text that names a workload.
func (w *Workload) key() string { return w.Namespace + "/" + fmt.Sprint(w.labels) }

// identity returns the workload of a pod, nil of one without labels: no selector stands for it alone.
func identity(name string, labels map[string]string) *Workload {
	namespace, pod, _ := strings.Cut(name, "/")
	w := &Workload{Namespace: namespace, labels: map[string]string{}}
	for _, l := range identityLabels {
		if labels[l] != "" {
			w.labels[l] = labels[l]
		}
	}
	if len(w.labels) == 0 {
		w.labels = workload(labels)
	}
	if len(w.labels) == 0 {
		return nil
	}
	w.Name = objectName(called(w.labels, pod))
	return w
}

// objectName returns a text as a part of an object's name.
func objectName(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(s))
	return strings.Trim(s[:min(len(s), 200)], "-")
}

// workloads are the workloads of recorded pods, and of those that a cluster has now.
type workloads struct {
	byPod map[string]*Workload // by namespace/name
	byKey map[string]*Workload
	bare  map[string]bool // pods without labels
}

func newWorkloads(c *Cluster, l *flowlog.Log) *workloads {
	w := &workloads{map[string]*Workload{}, map[string]*Workload{}, map[string]bool{}}
	for name, p := range l.Pods {
		w.add(name, p.Labels)
	}
	for _, v := range c.pods {
		if name := v.Namespace + "/" + v.Name; w.byPod[name] == nil {
			w.add(name, v.Labels)
		}
	}
	all, named := slices.Sorted(maps.Keys(w.byKey)), map[string]int{}
	for _, key := range all {
		a := w.byKey[key]
		name := a.Namespace + "/" + a.Name
		if named[name]++; named[name] > 1 {
			a.Name += fmt.Sprint("-", named[name])
		}
		for _, other := range all {
			if extra := a.extra(w.byKey[other]); extra != "" && !slices.Contains(a.without, extra) {
				a.without = append(a.without, extra)
			}
		}
	}
	return w
}

// add adds a pod.
func (w *workloads) add(pod string, labels map[string]string) {
	of := identity(pod, labels)
	if of == nil {
		w.bare[pod] = true
		return
	}
	if known := w.byKey[of.key()]; known != nil {
		of = known
	}
	w.byKey[of.key()], w.byPod[pod] = of, of
}

// extra returns a label that pods of b have and those of w lack, if w's labels alone match b's pods too.
func (w *Workload) extra(b *Workload) string {
	if w.Namespace != b.Namespace || len(b.labels) <= len(w.labels) {
		return ""
	}
	for k, v := range w.labels {
		if b.labels[k] != v {
			return ""
		}
	}
	for _, k := range slices.Sorted(maps.Keys(b.labels)) {
		if _, has := w.labels[k]; !has {
			return k
		}
	}
	return ""
}

// Selector returns the selector of the workload's pods.
func (w *Workload) Selector() *metav1.LabelSelector {
	s := &metav1.LabelSelector{MatchLabels: w.labels}
	for _, l := range w.without {
		s.MatchExpressions = append(s.MatchExpressions, metav1.LabelSelectorRequirement{Key: l,
			Operator: metav1.LabelSelectorOpDoesNotExist})
	}
	return s
}

// Peer is the other end of a suggested rule: a workload, else addresses.
type Peer struct {
	*Workload
	Block netip.Prefix
}

// compare orders workloads before addresses.
func (p Peer) compare(o Peer) int {
	switch {
	case p.Workload != nil && o.Workload != nil:
		return strings.Compare(p.key(), o.key())
	case p.Workload != nil:
		return -1
	case o.Workload != nil:
		return 1
	}
	return cmp.Or(p.Block.Addr().Compare(o.Block.Addr()), cmp.Compare(p.Block.Bits(), o.Block.Bits()))
}

// portKey is a port of suggested rules; the number 0 is every port of the protocol.
type portKey struct {
	protocol model.Protocol
	number   uint16
}

func (p portKey) compare(o portKey) int {
	return cmp.Or(cmp.Compare(p.number, o.number), cmp.Compare(p.protocol, o.protocol))
}

// observed is what was seen at one workload in one direction: connections by peer and port.
type observed map[Peer]map[portKey]uint64

// count returns how many connections a peer had.
func (o observed) count(p Peer) (n uint64) {
	for _, c := range o[p] {
		n += c
	}
	return n
}

func (o observed) add(p Peer, k portKey, count uint64) {
	if o[p] == nil {
		o[p] = map[portKey]uint64{}
	}
	o[p][k] += count
}

// Suggestion is policies that allow what was recorded, and what they leave out.
type Suggestion struct {
	Log      *flowlog.Log
	Policies []Suggested
	Remarks  []string // for people: what is missing
}

// Suggested is the policy of one workload.
type Suggested struct {
	*Workload
	Ingress, Egress []SuggestedRule
	Nodes           []SuggestedRule // of a ClusterNetworkPolicy: egress to every node, which these have no peers for
}

// SuggestedRule allows ports of some peers.
type SuggestedRule struct {
	Peers    []Peer // none: every pod of the cluster
	Ports    []portKey
	Count    uint64 // connections that were recorded
	External int    // addresses that CIDRs of Peers stand for
	Comments []string
	Blocks   map[netip.Prefix]string // comments of CIDRs
}

// suggester collects what was recorded.
type suggester struct {
	*Cluster
	log       *flowlog.Log
	workloads *workloads
	in, out   map[*Workload]observed
	dns       map[*Workload]map[portKey]bool // ports of workloads that serve DNS
	left      map[string]uint64              // connections left out, by reason
	// workloads that connect to all nodes on one port, where no policy can have nodes as peers
	onAllNodes []string
}

// Suggest returns a policy for each workload of a log, in a stable order: it allows the connections that were recorded,
// and DNS, and no others. With namespaces, those of workloads in one of them.
func (c *Cluster) Suggest(l *flowlog.Log, namespaces []string) *Suggestion {
	s := &suggester{c, l, newWorkloads(c, l), map[*Workload]observed{}, map[*Workload]observed{},
		map[*Workload]map[portKey]bool{}, map[string]uint64{}, nil}
	for _, f := range l.Flows {
		s.flow(f)
	}
	s.servers()
	out := &Suggestion{Log: l}
	for _, key := range slices.Sorted(maps.Keys(s.workloads.byKey)) {
		w := s.workloads.byKey[key]
		seen := s.in[w] != nil || s.out[w] != nil
		if seen && (len(namespaces) == 0 || slices.Contains(namespaces, w.Namespace)) {
			out.Policies = append(out.Policies, s.policy(w))
		}
	}
	out.Remarks = s.remarks()
	return out
}

// halves returns which of a flow's policies were passed where it was recorded: those of the client's node, which it
// leaves, and of the server's, which has accepted it only if that node has seen it. A node without a file is believed
// to have seen what others have.
func halves(l *flowlog.Log, f flowlog.Seen, node func(flowlog.End) string) (egress, ingress bool) {
	recorded := l.Nodes()
	seen := func(e flowlog.End) bool {
		n := node(e)
		return f.SeenBy(n) || !slices.Contains(recorded, n)
	}
	return f.Client.Pod != "" && seen(f.Client), f.Server.Pod != "" && seen(f.Server)
}

// nodeOf returns the node of an end as it was recorded, else as it is now.
func (c *Cluster) nodeOf(l *flowlog.Log) func(flowlog.End) string {
	return func(e flowlog.End) string {
		if p, ok := l.Pods[e.Pod]; ok {
			return p.Node
		}
		return c.NodeOf(e.Addr)
	}
}

// flow adds a flow to the workloads of its ends.
func (s *suggester) flow(f flowlog.Seen) {
	f.Client, f.Server = s.named(f.Client), s.named(f.Server)
	client, server := s.workloads.byPod[f.Client.Pod], s.workloads.byPod[f.Server.Pod]
	if why := s.leaves(f, client, server); why != "" {
		s.left[why] += f.Count
		return
	}
	k := portKey{f.Protocol, f.Port}
	add := func(all map[*Workload]observed, w, other *Workload, a netip.Addr) {
		if all[w] == nil {
			all[w] = observed{}
		}
		p := Peer{Workload: other}
		if other == nil {
			p.Block = netip.PrefixFrom(a, a.BitLen())
		}
		all[w].add(p, k, f.Count)
	}
	egress, ingress := halves(s.log, f, s.nodeOf(s.log))
	if egress {
		add(s.out, client, server, f.Server.Addr)
	}
	if ingress {
		add(s.in, server, client, f.Client.Addr)
	}
	if server != nil && f.Port == dnsPort {
		s.serves(server, f.Port)
	}
}

// named returns an end with the name of the pod that has its address now, unless it was recorded with one.
func (c *Cluster) named(e flowlog.End) flowlog.End {
	if v := c.pods[e.Addr]; v != nil && e.Pod == "" {
		e.Pod = v.Namespace + "/" + v.Name
	}
	return e
}

// leaves returns why no policy is suggested for a flow, "" if one is.
func (s *suggester) leaves(f flowlog.Seen, client, server *Workload) string {
	unknown := func(e flowlog.End) bool {
		node, _ := s.nodeAt(e.Addr)
		inRange := func(r podRange) bool { return r.pods.Contains(e.Addr) }
		return e.Pod == "" && node == "" && slices.ContainsFunc(s.ranges, inRange)
	}
	switch {
	case f.Client.Pod != "" && client == nil, f.Server.Pod != "" && server == nil:
		return "of pods without labels that outlive them, which no selector stands for"
	case !flowlog.HasPorts(f.Protocol):
		return "of protocols other than TCP, UDP and SCTP, such as ping, which NetworkPolicies can't allow alone"
	case unknown(f.Client), unknown(f.Server):
		return "of addresses of pods that are not known"
	case f.Client.Pod == "" && !f.SeenBy(s.nodeOf(s.log)(f.Server)):
		return "of clients outside, seen by another node than the server's"
	}
	return ""
}

// dnsPort is the port of DNS.
const dnsPort = 53

// serves records that a workload serves DNS at a port.
func (s *suggester) serves(w *Workload, port uint16) {
	if s.dns[w] == nil {
		s.dns[w] = map[portKey]bool{}
	}
	s.dns[w][portKey{model.UDP, port}], s.dns[w][portKey{model.TCP, port}] = true, true
}

// servers adds the workloads behind Services with the port of DNS to those that were seen to serve it.
func (s *suggester) servers() {
	for _, o := range s.Names {
		v, ok := o.(*corev1.Service)
		if !ok {
			continue
		}
		for _, p := range v.Spec.Ports {
			if p.Port != dnsPort {
				continue
			}
			l, port := s.endpoints(v, dnsPort, protocolOf(p.Protocol))
			for _, e := range l {
				if e.pod == nil {
					continue
				}
				if w := s.workloads.byPod[e.pod.Namespace+"/"+e.pod.Name]; w != nil {
					s.serves(w, port)
				}
			}
		}
	}
}

// policy returns the policy of a workload. DNS is a rule apart: a server of it serves every pod.
func (s *suggester) policy(w *Workload) Suggested {
	in, egress := s.in[w], s.out[w]
	var rule SuggestedRule
	if ports := s.dns[w]; ports != nil {
		rule = SuggestedRule{Ports: slices.SortedFunc(maps.Keys(ports), portKey.compare)}
		for p := range in {
			if p.Workload != nil {
				rule.Count += in.without(p, ports)
			}
		}
	}
	p := Suggested{Workload: w, Ingress: s.rules(in, false)}
	if rule.Ports != nil {
		p.Ingress = append(p.Ingress, rule)
	}
	lookups := observed{}
	for server, ports := range s.dns {
		to := Peer{Workload: server}
		for k := range ports {
			lookups.add(to, k, egress[to][k])
		}
		egress.without(to, ports)
	}
	p.Nodes = s.promote(w, egress)
	p.Egress = s.rules(egress, true)
	if s.dns[w] == nil || len(lookups) > 1 {
		p.Egress = append(p.Egress, s.rules(lookups, true)...)
	}
	return p
}

// without removes ports of a peer, and returns how many connections they had.
func (o observed) without(p Peer, ports map[portKey]bool) (count uint64) {
	for k := range ports {
		count += o[p][k]
		delete(o[p], k)
	}
	if len(o[p]) == 0 {
		delete(o, p)
	}
	return count
}

// rules returns rules that allow what was observed: peers with the same ports share one.
func (s *suggester) rules(o observed, egress bool) (out []SuggestedRule) {
	byPorts := map[string]*SuggestedRule{}
	for p := range o {
		ports := joinPorts(o[p])
		key := fmt.Sprint(ports)
		r := byPorts[key]
		if r == nil {
			r = &SuggestedRule{Ports: ports}
			byPorts[key] = r
		}
		r.Peers = append(r.Peers, p)
		r.Count += o.count(p)
	}
	for _, r := range byPorts {
		addrs := r.joinBlocks()
		slices.SortFunc(r.Peers, Peer.compare)
		s.describe(r, addrs, egress)
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b SuggestedRule) int { return slices.CompareFunc(a.Ports, b.Ports, portKey.compare) })
	return out
}

// joinPorts returns sorted ports, and in place of very many of a protocol all of it.
func joinPorts(counts map[portKey]uint64) []portKey {
	of := map[model.Protocol]int{}
	for k := range counts {
		of[k.protocol]++
	}
	joined := map[portKey]bool{}
	for k := range counts {
		if of[k.protocol] > maxWildcard {
			k.number = 0
		}
		joined[k] = true
	}
	return slices.SortedFunc(maps.Keys(joined), portKey.compare)
}

// joinBlocks widens CIDRs, those of both families alike, until there are few enough. It returns the addresses that they
// were.
func (r *SuggestedRule) joinBlocks() (addrs []netip.Addr) {
	blocks := map[netip.Prefix]bool{}
	r.Peers = slices.DeleteFunc(r.Peers, func(p Peer) bool {
		if p.Workload == nil {
			blocks[p.Block], addrs = true, append(addrs, p.Block.Addr())
		}
		return p.Workload == nil
	})
	r.External = len(blocks)
	for _, bits := range [][2]int{{24, 64}, {16, 48}, {8, 32}, {0, 0}} {
		if len(blocks) <= maxBlocks {
			break
		}
		wider := map[netip.Prefix]bool{}
		for b := range blocks {
			n := bits[1]
			if b.Addr().Is4() {
				n = bits[0]
			}
			wider[netip.PrefixFrom(b.Addr(), n).Masked()] = true
		}
		blocks = wider
	}
	for b := range blocks {
		r.Peers = append(r.Peers, Peer{Block: b})
	}
	return addrs
}

// remarks returns what the suggestion lacks, a sentence each.
func (s *suggester) remarks() (out []string) {
	for _, why := range slices.Sorted(maps.Keys(s.left)) {
		out = append(out, fmt.Sprintf("Left out: connections %s: %d", why, s.left[why]))
	}
	if lost, beyond, unclear := s.log.Missing(); lost+beyond+unclear > 0 {
		out = append(out, fmt.Sprintf("Missing in the files: %d connections that were lost, %d beyond a limit, %d of "+
			"unclear direction; their flows may be missing", lost, beyond, unclear))
	}
	if len(s.dns) == 0 {
		out = append(out, "No DNS server was seen, and no Service has port 53: pods may resolve names only if a rule below "+
			"allows it")
	}
	if s.onAllNodes != nil {
		out = append(out, fmt.Sprintf("To all nodes on one port connect %s: the kind ClusterNetworkPolicy with nodes as "+
			"peers (its experimental channel), which the cluster lacks, would allow nodes that come later",
			shortList(s.onAllNodes)))
	}
	recorded := s.log.Nodes()
	var missing []string
	for _, n := range s.names {
		if !slices.Contains(recorded, n) {
			missing = append(missing, n)
		}
	}
	if missing != nil {
		out = append(out, fmt.Sprintf("Nodes without a file, their pods were seen by others alone: %d, such as %s",
			len(missing), missing[0]))
	}
	return out
}
