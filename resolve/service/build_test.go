package service

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Objects: a base and edits. svc is Service shop/web with one port, eps its EndpointSlice shop/web-1, node Node n1.

type (
	edit     = func(*corev1.Service)
	editEp   = func(*discoveryv1.Endpoint)
	editEps  = func(*discoveryv1.EndpointSlice)
	editNode = func(*corev1.Node)
)

func svc(edits ...edit) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{
		ClusterIPs: []string{"10.96.0.1"},
		Ports:      []corev1.ServicePort{sport("http", 80)},
	}}
	for _, e := range edits {
		e(s)
	}
	return s
}

func named(name string) edit                { return func(s *corev1.Service) { s.Name = name } }
func spec(e func(*corev1.ServiceSpec)) edit { return func(s *corev1.Service) { e(&s.Spec) } }
func clusterIPs(ips ...string) edit {
	return func(s *corev1.Service) { s.Spec.ClusterIPs = ips }
}
func externalIPs(ips ...string) edit {
	return func(s *corev1.Service) { s.Spec.ExternalIPs = ips }
}
func ports(ps ...corev1.ServicePort) edit {
	return func(s *corev1.Service) { s.Spec.Ports = ps }
}
func ipFamilies(fs ...corev1.IPFamily) edit {
	return func(s *corev1.Service) { s.Spec.IPFamilies = fs }
}
func typed(t corev1.ServiceType) edit { return func(s *corev1.Service) { s.Spec.Type = t } }
func nodePort(n int32) edit {
	return func(s *corev1.Service) { s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, n }
}
func ingress(ips ...string) edit {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
	}
}
func internal(p corev1.ServiceInternalTrafficPolicy) edit {
	return func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = &p }
}
func external(p corev1.ServiceExternalTrafficPolicy) edit {
	return func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = p }
}
func distribute(d string) edit {
	return func(s *corev1.Service) { s.Spec.TrafficDistribution = &d }
}
func sources(rs ...string) edit {
	return func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = rs }
}
func labelled(k, v string) edit {
	return func(s *corev1.Service) { s.Labels = map[string]string{k: v} }
}
func health(n int32) edit { return func(s *corev1.Service) { s.Spec.HealthCheckNodePort = n } }
func sticky(seconds ...int32) edit {
	return func(s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		if len(seconds) > 0 {
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
				ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds[0]}}
		}
	}
}
func born(second int64) edit {
	return func(s *corev1.Service) { s.CreationTimestamp = metav1.Unix(second, 0) }
}

// sport makes a Service's port: name, number, then node port; protocol by name's prefix "udp" or "sctp".
func sport(name string, number int32, onNode ...int32) corev1.ServicePort {
	p := corev1.ServicePort{Name: name, Port: number, Protocol: protocol(name)}
	if len(onNode) > 0 {
		p.NodePort = onNode[0]
	}
	return p
}

func protocol(name string) corev1.Protocol {
	for _, p := range []corev1.Protocol{corev1.ProtocolUDP, corev1.ProtocolSCTP} {
		if strings.HasPrefix(name, strings.ToLower(string(p))) {
			return p
		}
	}
	return corev1.ProtocolTCP
}

// eps makes EndpointSlice shop/web-1 with port http 8080 and these endpoints; its type follows the first address.
func eps(endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{eport("http", 8080)},
	}
	if len(endpoints) > 0 && strings.Contains(endpoints[0].Addresses[0], ":") {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	return s
}

func slice(s *discoveryv1.EndpointSlice, edits ...editEps) *discoveryv1.EndpointSlice {
	for _, e := range edits {
		e(s)
	}
	return s
}
func sliceNamed(name string) editEps { return func(s *discoveryv1.EndpointSlice) { s.Name = name } }
func of(service string) editEps {
	return func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = service }
}
func slicePorts(ps ...discoveryv1.EndpointPort) editEps {
	return func(s *discoveryv1.EndpointSlice) { s.Ports = ps }
}
func eport(name string, number int32) discoveryv1.EndpointPort {
	p := protocol(name)
	return discoveryv1.EndpointPort{Name: &name, Port: &number, Protocol: &p}
}

func ep(addr string, edits ...editEp) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}}
	for _, f := range edits {
		f(&e)
	}
	return e
}
func on(node string) editEp { return func(e *discoveryv1.Endpoint) { e.NodeName = &node } }
func in(zone string) editEp { return func(e *discoveryv1.Endpoint) { e.Zone = &zone } }
func forZones(zones ...string) editEp {
	return func(e *discoveryv1.Endpoint) {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		for _, z := range zones {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: z})
		}
	}
}
func forNodes(nodes ...string) editEp {
	return func(e *discoveryv1.Endpoint) {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		for _, n := range nodes {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: n})
		}
	}
}

// conditions sets ready, serving and terminating: t, f, or - for not said.
func conditions(rst string) editEp {
	word := func(c byte) *bool {
		if c == '-' {
			return nil
		}
		b := c == 't'
		return &b
	}
	return func(e *discoveryv1.Endpoint) {
		e.Conditions = discoveryv1.EndpointConditions{Ready: word(rst[0]), Serving: word(rst[1]), Terminating: word(rst[2])}
	}
}

var (
	notReady = conditions("fff")
	drains   = conditions("ftt")
	gone     = conditions("fft")
)

func node(edits ...editNode) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{}}}
	for _, e := range edits {
		e(n)
	}
	return n
}
func zoned(zone string) editNode {
	return func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = zone }
}
func podCIDRs(ps ...string) editNode { return func(n *corev1.Node) { n.Spec.PodCIDRs = ps } }
func internalIPs(ips ...string) editNode {
	return func(n *corev1.Node) {
		for _, ip := range ips {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
		}
	}
}

func externalIPsOf(ips ...string) editNode {
	return func(n *corev1.Node) {
		for _, ip := range ips {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP,
				Address: ip})
		}
	}
}

// Running: objects in, text out.

func puts(objects ...source.Object) (cs []source.Change) {
	cs = append(cs, source.Put(objects...)...)
	return cs
}

func dels(objects ...source.Object) (cs []source.Change) {
	for _, o := range objects {
		cs = append(cs, source.Change{Key: source.KeyOf(o)})
	}
	return cs
}

func objects(os ...source.Object) []source.Object { return os }

func resolved(c Config, os ...source.Object) *Resolver {
	r := New(c)
	r.Apply(puts(os...))
	return r
}

var n1 = Config{Node: "n1"}

// frontLines shows frontends as "10.96.0.1:80/tcp ClusterIP -> backends", sorted; a backend on this node has a star, an
// outside that differs follows after "| ".
func frontLines(s *model.Snapshot) (lines []string) {
	for _, f := range s.Sorted() {
		l := fmt.Sprintf("%s %s -> %s", f.Entry, f.Via, targetText(f.Internal))
		if f.External != f.Internal {
			l += " | " + targetText(f.External)
		}
		lines = append(lines, l)
	}
	return lines
}

func targetText(t model.Target) string {
	if len(t.Pool.Backends) == 0 {
		return t.Empty.String()
	}
	var l []string
	for _, b := range t.Pool.Backends {
		star := ""
		if b.Local {
			star = "*"
		}
		l = append(l, b.Addr.String()+star)
	}
	return strings.Join(l, " ")
}

// problemLines shows problems as "Service shop/web spec.type UnknownValue", without the Service's own name. That most
// tests' Node has no podCIDRs is left to TestPodsUnknown.
func problemLines(r *Resolver) (lines []string) {
	for _, p := range r.Problems() {
		if p.Reason == PodsUnknown {
			continue
		}
		l := p.Field + " " + p.Reason
		if p.Object != (source.Key{}) && p.Object.String() != "Service shop/web" {
			l = p.Object.String() + " " + l
		}
		lines = append(lines, l)
	}
	return lines
}

func frontend(t *testing.T, r *Resolver, entry string) *model.Frontend {
	t.Helper()
	for e, f := range r.Services().Frontends {
		if e.String() == entry {
			return f
		}
	}
	t.Fatalf("no frontend %s", entry)
	return nil
}

func same[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if d := cmp.Diff(want, got, comparers...); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

var comparers = []cmp.Option{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b time.Duration) bool { return a == b }),
}

func sprint(v any) string { return fmt.Sprint(v) }

func lines(ls ...string) []string { return ls }

// scenario is one line of a table: objects, and what they come to.
type scenario struct {
	name     string
	config   Config // n1 where it names no node
	objects  []source.Object
	fronts   []string
	problems []string
}

func runScenarios(t *testing.T, scenarios []scenario) {
	for _, w := range scenarios {
		t.Run(w.name, func(t *testing.T) {
			if w.config.Node == "" {
				w.config.Node = "n1"
			}
			r := resolved(w.config, w.objects...)
			same(t, "frontends", frontLines(r.Services()), w.fronts)
			same(t, "problems", problemLines(r), w.problems)
		})
	}
}
