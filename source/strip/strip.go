// Package strip drops from Kubernetes objects what nothing in Fairlead reads, and shares text that repeats, before a
// source keeps or delivers an object. The manifest package's comment lists what is dropped; the Kubernetes API's
// objects lose the same.
package strip

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// Words holds text that repeats, once. It forgets all of it when it has grown large, so that it needs no counting of
// what still uses it: later text is then shared anew.
type Words struct {
	Node      string // Pods of other nodes lose their UID; "": none do
	Templates bool   // package manifest reads the pod templates of workloads, too

	mu         sync.Mutex
	known      map[string]*string
	labels     map[string]map[string]string
	containers map[string][]corev1.Container
	key        []byte   // of the last set of labels or list of containers
	keys       []string // of the last set of labels
}

// How many words, and how many sets of labels or lists of containers, are remembered at a time. Of a large cluster that
// is the text of most nodes and namespaces, and the sets of the pods that came last.
const maxWords, maxSets = 1 << 14, 1 << 10

// New makes an empty memory of words.
func New() *Words {
	return &Words{known: map[string]*string{}, labels: map[string]map[string]string{},
		containers: map[string][]corev1.Container{}}
}

// share returns a pointer to s that all who have the same text are given.
func (w *Words) share(s string) *string {
	if p, ok := w.known[s]; ok {
		return p
	}
	return once(w.known, s, &s, maxWords)
}

func (w *Words) text(s string) string { return *w.share(s) }

func (w *Words) pointer(s *string) *string {
	if s == nil {
		return nil
	}
	return w.share(*s)
}

// set returns m, or a map with the same labels that was here before.
func (w *Words) set(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	w.key, w.keys = w.key[:0], slices.AppendSeq(w.keys[:0], maps.Keys(m))
	slices.Sort(w.keys)
	for _, k := range w.keys {
		w.key = append(append(append(append(w.key, k...), '='), m[k]...), ',')
	}
	if old, ok := w.labels[string(w.key)]; ok {
		return old
	}
	return once(w.labels, string(w.key), m, maxSets)
}

// once returns what is known under key, which v becomes if nothing is. At most so many are known.
func once[T any](known map[string]T, key string, v T, most int) T {
	if old, ok := known[key]; ok {
		return old
	}
	if len(known) >= most {
		clear(known)
	}
	known[key] = v
	return v
}

// pairs returns m with shared keys.
func (w *Words) pairs(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[w.text(k)] = v
	}
	return out
}

// Strip changes o, which nothing else may hold yet. It may be called from any goroutine, and for any object of the
// kinds that Fairlead reads, valid or not.
func (w *Words) Strip(o source.Object) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch o := o.(type) {
	case *corev1.Service:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		w.service(o)
	case *discoveryv1.EndpointSlice:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		w.slice(o)
	case *corev1.Node:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		s, st := o.Spec, o.Status
		o.Spec = corev1.NodeSpec{PodCIDR: s.PodCIDR, PodCIDRs: s.PodCIDRs, ProviderID: s.ProviderID,
			Unschedulable: s.Unschedulable, Taints: s.Taints}
		o.Status = corev1.NodeStatus{Addresses: st.Addresses, Conditions: st.Conditions}
	case *corev1.Namespace:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		o.Spec, o.Status = corev1.NamespaceSpec{}, corev1.NamespaceStatus{Phase: o.Status.Phase}
	case *corev1.Pod:
		uid := o.UID
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		o.Labels, o.Annotations = w.set(o.Labels), annotationsOf(o)
		if w.pod(o); w.Node == "" || o.Spec.NodeName == w.Node {
			o.UID = uid
		}
	case *networkingv1.NetworkPolicy:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		o.Labels = nil
	case *cnpv1.ClusterNetworkPolicy:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		o.Labels, o.Status = nil, cnpv1.ClusterNetworkPolicyStatus{}
	case *networkingv1.ServiceCIDR:
		w.meta(&o.TypeMeta, &o.ObjectMeta)
		o.Status = networkingv1.ServiceCIDRStatus{}
	}
}

func (w *Words) meta(t *metav1.TypeMeta, m *metav1.ObjectMeta) {
	*t = metav1.TypeMeta{}
	delete(m.Annotations, corev1.LastAppliedConfigAnnotation)
	uid := m.UID
	if m.Namespace != metav1.NamespaceDefault || m.Name != "kubernetes" { // the cluster's identity
		uid = ""
	}
	*m = metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         w.text(m.Namespace),
		Labels:            w.pairs(m.Labels),
		Annotations:       w.pairs(m.Annotations),
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
		UID:               uid,
	}
}

func (w *Words) service(o *corev1.Service) {
	s := &o.Spec
	s.Ports = slices.Clone(s.Ports)
	for i := range s.Ports {
		p := &s.Ports[i]
		p.Name, p.Protocol = w.text(p.Name), corev1.Protocol(w.text(string(p.Protocol)))
		p.AppProtocol = w.pointer(p.AppProtocol)
	}
	if s.Selector = w.pairs(s.Selector); maps.Equal(s.Selector, o.Labels) {
		s.Selector = o.Labels
	}
	if p := s.InternalTrafficPolicy; p != nil {
		if s.InternalTrafficPolicy = &everywhere; *p == nearby {
			s.InternalTrafficPolicy = &nearby
		}
	}
	if len(s.ClusterIPs) > 0 {
		s.ClusterIP = s.ClusterIPs[0]
	}
	if len(s.IPFamilies) == 1 && s.IPFamilies[0] == corev1.IPv4Protocol {
		s.IPFamilies = onlyIPv4
	}
	o.Status.Conditions = nil
}

// Values that many objects point to.
var (
	yes, no            = true, false
	everywhere, nearby = corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal
	onlyIPv4           = []corev1.IPFamily{corev1.IPv4Protocol}
	protocols          = [...]corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
)

func shareBool(b *bool) *bool {
	switch {
	case b == nil:
		return nil
	case *b:
		return &yes
	}
	return &no
}

// shareProtocol returns p itself where it is none that is known: resolve names it.
func shareProtocol(p *corev1.Protocol) *corev1.Protocol {
	if p == nil {
		return nil
	}
	if i := slices.Index(protocols[:], *p); i >= 0 {
		return &protocols[i]
	}
	return p
}

func (w *Words) slice(o *discoveryv1.EndpointSlice) {
	o.AddressType = discoveryv1.AddressType(w.text(string(o.AddressType)))
	o.Endpoints, o.Ports = slices.Clone(o.Endpoints), slices.Clone(o.Ports)
	pack(o.Endpoints)
	for i := range o.Endpoints {
		e := &o.Endpoints[i]
		e.Conditions = discoveryv1.EndpointConditions{Ready: shareBool(e.Conditions.Ready),
			Serving: shareBool(e.Conditions.Serving), Terminating: shareBool(e.Conditions.Terminating)}
		e.NodeName, e.Zone = w.pointer(e.NodeName), w.pointer(e.Zone)
		e.Hostname, e.DeprecatedTopology = nil, nil
		e.TargetRef = w.podRef(e.TargetRef)
		w.hints(e.Hints)
	}
	for i := range o.Ports {
		p := &o.Ports[i]
		p.Name, p.AppProtocol = w.pointer(p.Name), w.pointer(p.AppProtocol)
		p.Protocol = shareProtocol(p.Protocol)
	}
}

// pack lays all addresses of a slice behind one another: one text and one array instead of two for each endpoint.
func pack(es []discoveryv1.Endpoint) {
	n, size := 0, 0
	for i := range es {
		for _, a := range es[i].Addresses {
			n, size = n+1, size+len(a)
		}
	}
	var b strings.Builder
	b.Grow(size)
	for i := range es {
		for _, a := range es[i].Addresses {
			b.WriteString(a)
		}
	}
	all, rest := make([]string, 0, n), b.String()
	for i := range es {
		from := len(all)
		for _, a := range es[i].Addresses {
			all, rest = append(all, rest[:len(a)]), rest[len(a):]
		}
		es[i].Addresses = all[from:len(all):len(all)]
	}
}

func (w *Words) podRef(r *corev1.ObjectReference) *corev1.ObjectReference {
	if r == nil || r.Kind != string(source.Pod) {
		return nil
	}
	return &corev1.ObjectReference{Kind: string(source.Pod), Namespace: w.text(r.Namespace), Name: r.Name}
}

func (w *Words) hints(h *discoveryv1.EndpointHints) {
	if h == nil {
		return
	}
	for i := range h.ForZones {
		h.ForZones[i].Name = w.text(h.ForZones[i].Name)
	}
	for i := range h.ForNodes {
		h.ForNodes[i].Name = w.text(h.ForNodes[i].Name)
	}
}

// annotationsOf returns the annotation of a Pod that is read, nil without it.
func annotationsOf(o *corev1.Pod) map[string]string {
	if text := o.Annotations[source.AllowedSourcesAnnotation]; text != "" {
		return map[string]string{source.AllowedSourcesAnnotation: text}
	}
	return nil
}

func (w *Words) pod(o *corev1.Pod) {
	s, st := o.Spec, o.Status
	o.Spec = corev1.PodSpec{
		NodeName: w.text(s.NodeName), HostNetwork: s.HostNetwork,
		InitContainers: w.ports(s.InitContainers), Containers: w.ports(s.Containers),
	}
	o.Status = corev1.PodStatus{
		Phase: corev1.PodPhase(w.text(string(st.Phase))), PodIP: st.PodIP, PodIPs: slices.Clone(st.PodIPs),
		HostIP: w.text(st.HostIP), HostIPs: slices.Clone(st.HostIPs),
	}
	if len(st.PodIPs) > 0 {
		o.Status.PodIP = st.PodIPs[0].IP
	}
}

// ports keeps the containers' names, ports and restart policies. The type is large, so pods that are alike share them.
func (w *Words) ports(cs []corev1.Container) (out []corev1.Container) {
	w.key = w.key[:0]
	for i := range cs {
		w.key = appendContainer(w.key, &cs[i])
	}
	if old, ok := w.containers[string(w.key)]; ok {
		return old
	}
	for _, c := range cs {
		c = corev1.Container{Name: w.text(c.Name), Ports: slices.Clone(c.Ports), RestartPolicy: c.RestartPolicy}
		for i := range c.Ports {
			c.Ports[i].Name, c.Ports[i].Protocol = w.text(c.Ports[i].Name), corev1.Protocol(w.text(string(c.Ports[i].Protocol)))
		}
		out = append(out, c)
	}
	return once(w.containers, string(w.key), out, maxSets)
}

// appendContainer appends what is kept of a container to a key. Lengths tell texts apart.
func appendContainer(key []byte, c *corev1.Container) []byte {
	text := func(s string) {
		key = append(binary.AppendUvarint(key, uint64(len(s))), s...)
	}
	text(c.Name)
	text(string(restart(c.RestartPolicy)))
	key = binary.AppendUvarint(key, uint64(len(c.Ports)))
	for i := range c.Ports {
		p := &c.Ports[i]
		text(p.Name)
		text(string(p.Protocol))
		text(p.HostIP)
		key = binary.AppendVarint(binary.AppendVarint(key, int64(p.HostPort)), int64(p.ContainerPort))
	}
	return key
}

func restart(p *corev1.ContainerRestartPolicy) corev1.ContainerRestartPolicy {
	if p == nil {
		return ""
	}
	return *p
}
