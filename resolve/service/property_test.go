package service

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// dice draw a world: rapid's, which shrink what fails, or the bytes of a fuzzer.
type dice interface {
	roll(what string, sides int) int // from 0
	text(what string) string
	Fatalf(format string, args ...any)
}

type rapidDice struct{ *rapid.T }

func (d rapidDice) roll(what string, sides int) int {
	return rapid.IntRange(0, sides-1).Draw(d.T, what)
}
func (d rapidDice) text(what string) string { return rapid.String().Draw(d.T, what) }

// byteDice takes a byte for each roll, and rolls 0 once there is none left.
type byteDice struct {
	*testing.T
	bytes []byte
}

func (d *byteDice) roll(_ string, sides int) int {
	if len(d.bytes) == 0 {
		return 0
	}
	b := d.bytes[0]
	d.bytes = d.bytes[1:]
	return int(b) % sides
}

func (d *byteDice) text(what string) string {
	n := min(d.roll(what, 64), len(d.bytes))
	s := string(d.bytes[:n])
	d.bytes = d.bytes[n:]
	return s
}

// A small world, so that objects meet: few names, few addresses, good and bad ones.

func random[T any](t dice, what string, from ...T) T { return from[t.roll(what, len(from))] }

// maybe draws one of from, or nil.
func maybe[T any](t dice, what string, from ...T) *T {
	if t.roll(what+"?", 2) == 0 {
		return nil
	}
	v := random(t, what, from...)
	return &v
}

// randomText mostly draws one of from, and any text now and then.
func randomText(t dice, what string, from ...string) string {
	if t.roll("odd "+what, 20) == 19 {
		return t.text(what)
	}
	return random(t, what, from...)
}

func several(t dice, what string, most int, one func()) {
	for range t.roll("number of "+what, most+1) {
		one()
	}
}

var addressTexts = []string{"10.96.0.1", "10.96.0.2", "192.0.2.1", "192.0.2.2", "fd96::1", "2001:db8::1", "172.18.0.2",
	"127.0.0.1", "::1", "0.0.0.0", "::", "169.254.0.1", "224.0.0.1", "::ffff:10.96.0.1", "fe80::1%eth0", "x", ""}

func randomService(t dice) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: randomText(t, "namespace", "a", "b"),
		Name: randomText(t, "name", "x", "y")}}
	if age := maybe[int64](t, "age", 1, 2, 3); age != nil {
		s.CreationTimestamp = metav1.Unix(*age, 0)
	}
	p := &s.Spec
	p.Type = random[corev1.ServiceType](t, "type", "", "ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer",
		"ExternalName", "Odd")
	p.ClusterIP = randomText(t, "clusterIP", "", "", "", "10.96.0.1", "None")
	several(t, "clusterIPs", 2, func() {
		p.ClusterIPs = append(p.ClusterIPs, randomText(t, "clusterIPs", addressTexts...))
	})
	several(t, "ipFamilies", 2, func() {
		p.IPFamilies = append(p.IPFamilies, random[corev1.IPFamily](t, "family", "IPv4", "IPv6", "Odd"))
	})
	several(t, "externalIPs", 2, func() {
		p.ExternalIPs = append(p.ExternalIPs, randomText(t, "externalIP", append(addressTexts, "10.0.0.1",
			"10.0.0.2")...))
	})
	several(t, "ingress", 2, func() {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
			IP: randomText(t, "ingress", addressTexts...), IPMode: maybe[corev1.LoadBalancerIPMode](t, "ipMode", "VIP", "Proxy",
				"Odd")})
	})
	several(t, "ranges", 2, func() {
		p.LoadBalancerSourceRanges = append(p.LoadBalancerSourceRanges,
			randomText(t, "range", "172.18.0.0/16", "172.0.0.0/8", "0.0.0.0/0", "2001:db8::/32", "x"))
	})
	several(t, "ports", 3, func() {
		p.Ports = append(p.Ports, corev1.ServicePort{Name: randomText(t, "port name", "", "h", "g"),
			Protocol: random[corev1.Protocol](t, "protocol", "TCP", "UDP", "SCTP", "", "ICMP"),
			Port:     random[int32](t, "port", 80, 80, 81, 0, 65536, -1),
			NodePort: random[int32](t, "node port", 0, 30080, 30081, 65536)})
	})
	p.InternalTrafficPolicy = maybe[corev1.ServiceInternalTrafficPolicy](t, "internal", "Cluster", "Local", "Odd")
	p.ExternalTrafficPolicy = random[corev1.ServiceExternalTrafficPolicy](t, "external", "", "Cluster", "Local", "Local",
		"Odd")
	p.TrafficDistribution = maybe(t, "distribution", "PreferClose", "PreferSameZone", "PreferSameNode", "Odd")
	p.SessionAffinity = random[corev1.ServiceAffinity](t, "affinity", "", "None", "ClientIP", "Odd")
	if seconds := maybe[int32](t, "timeout", 10, 0, 86401); seconds != nil {
		p.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: seconds}}
	}
	p.HealthCheckNodePort = random[int32](t, "health", 0, 30900, 30901, 65536)
	s.Labels = randomLabels(t, proxyNameLabel, corev1.IsHeadlessService)
	return s
}

// randomLabels mostly draws none.
func randomLabels(t dice, keys ...string) map[string]string {
	if t.roll("labels?", 10) < 9 {
		return map[string]string{}
	}
	return map[string]string{random(t, "label", keys...): random(t, "label's value", "", "mine", "other")}
}

func randomSlice(t dice) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: randomText(t, "namespace", "a", "b",
		"default"), Name: randomText(t, "name", "s1", "s2", "s3"),
		Labels: randomLabels(t, proxyNameLabel, corev1.IsHeadlessService)}}
	s.Labels[discoveryv1.LabelServiceName] = randomText(t, "service", "x", "x", "y", "none", "", "kubernetes")
	s.AddressType = random[discoveryv1.AddressType](t, "address type", "IPv4", "IPv4", "IPv4", "IPv6", "FQDN", "Odd")
	several(t, "ports", 2, func() {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: maybe(t, "port name", "", "h", "g"),
			Port:     maybe[int32](t, "port", 8080, 80, 30080, 0, 65536),
			Protocol: maybe[corev1.Protocol](t, "protocol", "TCP", "UDP", "ICMP")})
	})
	several(t, "endpoints", 4, func() { s.Endpoints = append(s.Endpoints, randomEndpoint(t)) })
	return s
}

func randomEndpoint(t dice) (e discoveryv1.Endpoint) {
	several(t, "addresses", 2, func() {
		e.Addresses = append(e.Addresses, randomText(t, "endpoint", "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3",
			"fd00::1", "127.0.0.1", "x",
			"10.96.0.1", "192.0.2.1", "172.18.0.2", "fd96::1"))
	})
	e.Conditions = discoveryv1.EndpointConditions{Ready: maybe(t, "ready", true, false),
		Serving: maybe(t, "serving", true, false), Terminating: maybe(t, "terminating", true, false)}
	e.NodeName, e.Zone = maybe(t, "node", "n1", "n2", ""), maybe(t, "zone", "z1", "z2", "")
	if t.roll("hints?", 2) == 1 {
		e.Hints = &discoveryv1.EndpointHints{}
		several(t, "zones", 2, func() {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: randomText(t, "zone", "z1", "z2")})
		})
		several(t, "nodes", 2, func() {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: randomText(t, "node", "n1", "n2")})
		})
	}
	return e
}

func randomNode(t dice) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: random(t, "name", "n1", "n1", "n2")}}
	if z := maybe(t, "zone", "z1", "z2", ""); z != nil {
		n.Labels = map[string]string{corev1.LabelTopologyZone: *z}
	}
	several(t, "podCIDRs", 2, func() {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, randomText(t, "podCIDR", "10.0.0.0/24", "10.0.0.0/16", "fd00::/64", "x"))
	})
	several(t, "addresses", 2, func() {
		n.Status.Addresses = append(n.Status.Addresses,
			corev1.NodeAddress{Type: random(t, "type", corev1.NodeInternalIP, corev1.NodeExternalIP),
				Address: randomText(t, "address", addressTexts...)})
	})
	return n
}

func randomObject(t dice) source.Object {
	switch t.roll("kind", 12) {
	case 0, 1, 2:
		return randomService(t)
	case 3, 4, 5:
		return randomSlice(t)
	case 7:
		return randomHostileService(t)
	case 8:
		return randomHostileSlice(t)
	case 9:
		return randomAPIServer(t)
	case 10:
		return randomServiceCIDR(t)
	case 11:
		return randomPod(t)
	}
	return randomNode(t)
}

// randomPod draws one with a host port.
func randomPod(t dice) *corev1.Pod {
	port := corev1.ContainerPort{ContainerPort: random[int32](t, "port", 80, 8080),
		HostPort: random[int32](t, "host port", 80, 8080, 30080), Protocol: random(t, "protocol", corev1.ProtocolTCP,
			corev1.ProtocolUDP), HostIP: random(t, "hostIP", "", "", "172.18.0.2", "192.0.2.2", "127.0.0.1")}
	p := hostPortPod(random(t, "node", "n1", "n1", "n2"), port)
	p.Namespace, p.Name = random(t, "namespace", "a", "b"), random(t, "name", "x", "p")
	p.Status.PodIPs[0].IP = random(t, "podIP", "10.0.0.1", "10.0.0.2")
	if age := maybe[int64](t, "age", 1, 2, 3); age != nil {
		p.CreationTimestamp = metav1.Unix(*age, 0)
	}
	return p
}

func randomServiceCIDR(t dice) *networkingv1.ServiceCIDR {
	c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: random(t, "name", "c1", "c2")}}
	several(t, "cidrs", 2, func() {
		c.Spec.CIDRs = append(c.Spec.CIDRs, randomText(t, "cidr", "10.96.0.0/12", "10.96.0.0/31", "10.0.0.0/16", "fd96::/108",
			"172.18.0.0/16", "0.0.0.0/0", "224.0.0.0/8"))
	})
	return c
}

// productSide is the most addresses and ports of a hostile object: enough for products beyond small bounds.
const productSide = 6

// randomHostileService draws one that asks for a product of addresses and ports, at addresses that are others': of
// pods, nodes, the API server and other Services.
func randomHostileService(t dice) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: random(t, "namespace", "a", "b"),
		Name: random(t, "name", "x", "y")}}
	if age := maybe[int64](t, "age", 1, 2, 3); age != nil {
		s.CreationTimestamp = metav1.Unix(*age, 0)
	}
	s.Spec.ClusterIPs = []string{random(t, "clusterIP", "10.96.0.1", "10.96.0.2", "10.96.0.3")}
	several(t, "externalIPs", productSide, func() {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, random(t, "externalIP", "10.0.0.1", "10.0.0.2", "172.18.0.2",
			"172.18.0.9",
			"10.96.0.1", "10.96.0.2", "192.0.2.1", "192.0.2.2", "192.0.2.3"))
	})
	for i := range 1 + t.roll("ports", productSide) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: string(rune('a' + i)),
			Protocol: corev1.ProtocolTCP,
			Port:     random[int32](t, "port", 80, 81, 82, 6443) + int32(10_000*i*t.roll("own port", 2))})
	}
	s.Annotations = map[string]string{SchedulerAnnotation: random(t, "scheduler", "random", "maglev", "wrr",
		"source-hash,port")}
	return s
}

// randomHostileSlice draws one that asks for a product of endpoints and ports, or names Services as endpoints.
func randomHostileSlice(t dice) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: random(t, "namespace", "a", "b"),
		Name:   random(t, "name", "s1", "s2", "s3"),
		Labels: map[string]string{discoveryv1.LabelServiceName: random(t, "service", "x", "y")},
		Annotations: map[string]string{WeightAnnotation: random(t, "weight", "1", "256", "255",
			"7")}}, AddressType: discoveryv1.AddressTypeIPv4}
	for i := range 1 + t.roll("ports", productSide) {
		name, number := string(rune('a'+i)), random[int32](t, "port", 80, 81, 6443, 8080)
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Port: &number})
	}
	several(t, "endpoints", productSide, func() {
		ready := true
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			Addresses: []string{random(t, "endpoint", "10.96.0.1", "10.96.0.2", "10.96.0.3", "192.0.2.1", "172.18.0.9",
				"10.0.0.1", "10.0.0.2", "10.0.0.3")}})
	})
	return s
}

// randomAPIServer draws the Service of the API server, or its endpoint.
func randomAPIServer(t dice) source.Object {
	meta, name, port := metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}, "https", int32(6443)
	if t.roll("slice?", 2) == 0 {
		return &corev1.Service{ObjectMeta: meta,
			Spec: corev1.ServiceSpec{ClusterIPs: []string{random(t, "clusterIP", "10.96.0.9", "10.96.0.1")},
				Ports: []corev1.ServicePort{{Name: name, Port: 443}}}}
	}
	meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
	return &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Ports:     []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{random(t, "endpoint", "172.18.0.9", "172.18.0.2")}}}}
}

func randomConfig(t dice) Config {
	c := Config{Node: random(t, "this node", "n1", "n1", "n1", ""), MasqueradeAll: t.roll("masqueradeAll", 2) == 1,
		ProxyName: random(t, "proxy", "", "", "", "mine")}
	several(t, "node port addresses", 2, func() {
		c.NodePortAddresses = append(c.NodePortAddresses,
			randomText(t, "node ports", "all", "primary", "localhost", "172.18.0.0/16", "::/0"))
	})
	several(t, "clusterCIDRs", 1, func() { c.ClusterCIDRs = append(c.ClusterCIDRs, prefixes("10.0.0.0/8")...) })
	several(t, "addresses", 1, func() { c.Addresses = append(c.Addresses, addrs("192.0.2.2", "172.18.0.2")...) })
	c.DirectServerReturn = t.roll("direct server return", 2) == 1
	c.ExternalIPs = random(t, "external IPs", SafeExternalIPs, "", RefuseExternalIPs, AnyExternalIPs)
	several(t, "API servers", 1, func() { c.APIServers = append(c.APIServers, netip.MustParseAddrPort("172.18.0.2:80")) })
	if t.roll("limits?", 2) == 1 {
		c.Limits = Limits{Service: randomBounds(t), Total: randomBounds(t), NamespacePercent: random(t, "percent", 0, 30,
			100)}
	}
	c.Scheduler = random(t, "scheduler", model.Random, model.Maglev)
	c.HostPorts = t.roll("host ports", 2) == 1
	return c
}

func randomBounds(t dice) Bounds {
	return Bounds{Frontends: t.roll("frontends", 8), Slots: t.roll("slots", 12), TableEntries: random(t, "entries", 0, 1,
		2018)}
}

// randomChange puts a new object, or takes away one that is there.
func randomChange(t dice, there map[source.Key]source.Object) source.Change {
	if len(there) > 0 && t.roll("delete?", 4) == 3 {
		keys := slices.SortedFunc(maps.Keys(there), func(a,
			b source.Key) int {
			return strings.Compare(a.String(), b.String())
		})
		return source.Change{Key: random(t, "deleted", keys...)}
	}
	return puts(randomObject(t))[0]
}

// Objects that come and go in any order come to what they come to at once; Deltas tell each step, no more and no less.
func steps(t dice) {
	config := randomConfig(t)
	r, there, sum := New(config), map[source.Key]source.Object{}, parts{}
	for range 1 + t.roll("steps", 12) {
		var batch []source.Change
		for range 1 + t.roll("changes", 3) {
			c := randomChange(t, there)
			batch = append(batch, c)
			if there[c.Key] = c.Object; c.Object == nil {
				delete(there, c.Key)
			}
		}
		before := r.Services()
		sum.apply(t, r.Apply(batch))
		sum.mustBe(t, r.Services())
		sound(t, r.Services())
		bounded(t, r)
		mustRetainPointers(t, before, r.Services())
	}
	for _, order := range orders(t, there) {
		fresh, later := New(config), New(config)
		for _, batch := range order {
			fresh.Apply(batch)
			later.Observe(batch)
		}
		mustEqual(t, fresh, r)
		later.Apply(nil)
		mustEqual(t, later, r)
	}
	sum.apply(t, r.Apply(deepCopies(there)))
	if !sum.unchanged {
		t.Fatalf("the same objects again change something")
	}
	for len(there) > 0 { // also half-way, as if what went had never been
		keys := slices.SortedFunc(maps.Keys(there),
			func(a, b source.Key) int { return strings.Compare(a.String(), b.String()) })
		key := random(t, "deleted", keys...)
		delete(there, key)
		sum.apply(t, r.Apply([]source.Change{{Key: key}}))
		fresh := New(config)
		fresh.Apply(deepCopies(there))
		mustEqual(t, fresh, r)
	}
	mustBeEmpty(t, r)
}

// mustBeEmpty checks that a resolver of which all objects are gone keeps nothing of them.
func mustBeEmpty(t interface{ Fatalf(string, ...any) }, r *Resolver) {
	for what, n := range map[string]int{"services": len(r.services), "slices": len(r.owners),
		"entries": len(r.entries.holder) + len(r.entries.rivals),
		"IDs":     len(r.ids.holder) + len(r.ids.rivals), "health " +
			"checks": len(r.health.holder) + len(r.health.rivals), "namespaces": len(r.namespaces),
		"excluded": len(r.excluded), "ClusterIPs": len(r.clusterIPs), "external " +
			"addresses": len(r.external), "blocks": len(r.blocks),
		"shown ClusterIPs": len(r.shownClusterIPs) + len(r.changedClusterIPs),
		"ServiceCIDRs":     len(r.serviceCIDRs) + len(r.foreign),
		"Nodes":            len(r.nodes) + len(r.nodeIPs), "moved": len(r.changedEntries) + len(r.changedNodePorts)} {
		if n != 0 {
			t.Fatalf("%d %s are left", n, what)
		}
	}
	if r.wanted != (cost{}) {
		t.Fatalf("%v are left", r.wanted)
	}
}

// bounded checks that what is served is within the limits and captures nothing.
func bounded(t dice, r *Resolver) {
	all, limits := cost{}, r.set.limits
	for _, s := range r.services {
		c, endpoints := cost{frontends: len(s.shown.fronts)}, 0
		for _, f := range s.shown.fronts {
			c.ranges += len(f.Sources)
			external, lb := f.Via == viaExternalIP.String(), f.Via == viaLoadBalancer.String()
			if external && (r.set.ExternalIPs == RefuseExternalIPs || r.set.ExternalIPs == SafeExternalIPs &&
				r.isPod(f.Entry.Addr)) {
				t.Fatalf("%s is served", f.Entry)
			}
			if _, api := r.api[netip.AddrPortFrom(f.Entry.Addr, f.Entry.Port)]; api && (external || lb) &&
				f.Entry.Protocol == model.TCP {
				t.Fatalf("%s is the API server's and %s's", f.Entry, s.key)
			}
		}
		for _, p := range s.shown.pools {
			if p != nil {
				soundBackends(t, r, s, p)
				n := len(p.Backends) + len(p.Unselected)
				c.pools, c.slots, endpoints = c.pools+1, c.slots+1+n, endpoints+n
				if p.Unselected != nil {
					c.slots++
				}
			}
		}
		if c.frontends > limits.Service.Frontends || endpoints > max(limits.Service.Slots, c.pools) {
			t.Fatalf("%s comes to %+v of %+v", s.key, c, limits.Service)
		}
		all = all.plus(c)
	}
	if !all.fits(limits.Total, 100) {
		t.Fatalf("all come to %+v of %+v", all, limits.Total)
	}
}

// soundBackends checks that no backend of a pool of s is an entry that would lead to a Service again.
func soundBackends(t dice, r *Resolver, s *service, p *model.Pool) {
	for _, b := range p.Backends {
		x, ok := r.entries.holder[model.Entry{Addr: b.Addr.Addr(), Port: b.Addr.Port(), Protocol: p.Protocol}]
		if ok && (x.entry().via == viaClusterIP || x.by.key.Namespace == s.key.Namespace) {
			t.Fatalf("%s has the endpoint %s, which is an entry of %s", p.Name, b.Addr, x.by.key)
		}
	}
}

func TestSteps(t *testing.T) { rapid.Check(t, func(t *rapid.T) { steps(rapidDice{t}) }) }

func FuzzApply(f *testing.F) {
	for seed := range 20 {
		data := make([]byte, 2048)
		rand.NewChaCha8([32]byte{byte(seed)}).Read(data)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) { steps(&byteDice{t, data}) })
}

// orders returns the objects at once, one by one, one by one reversed, and mixed, each put twice.
func orders(t dice, there map[source.Key]source.Object) [][][]source.Change {
	keys := slices.SortedFunc(maps.Keys(there), func(a,
		b source.Key) int {
		return strings.Compare(a.String(), b.String())
	})
	single := func(keys []source.Key) (order [][]source.Change) {
		for _, k := range keys {
			order = append(order, puts(there[k]))
		}
		return order
	}
	forth := single(keys)
	mixed := slices.Clone(forth)
	for i := range mixed {
		j := t.roll("order", i+1)
		mixed[i], mixed[j] = mixed[j], mixed[i]
	}
	back := slices.Clone(forth)
	slices.Reverse(back)
	return [][][]source.Change{{slices.Concat(forth...)}, forth, back, append(mixed, mixed...)}
}

func deepCopies(there map[source.Key]source.Object) (cs []source.Change) {
	for _, o := range there {
		switch o := o.(type) {
		case *corev1.Service:
			cs = append(cs, puts(o.DeepCopy())...)
		case *discoveryv1.EndpointSlice:
			cs = append(cs, puts(o.DeepCopy())...)
		case *corev1.Node:
			cs = append(cs, puts(o.DeepCopy())...)
		case *networkingv1.ServiceCIDR:
			cs = append(cs, puts(o.DeepCopy())...)
		case *corev1.Pod:
			cs = append(cs, puts(o.DeepCopy())...)
		}
	}
	return cs
}

func mustEqual(t dice, a, b *Resolver) {
	if !reflect.DeepEqual(a.Services(), b.Services()) {
		t.Fatalf("Services (-fresh +stepped):\n%s", cmp.Diff(a.Services(), b.Services(), comparers...))
	}
	if !reflect.DeepEqual(a.Problems(), b.Problems()) {
		t.Fatalf("Problems (-fresh +stepped):\n%s", cmp.Diff(a.Problems(), b.Problems()))
	}
}

// parts is the sum of Deltas.
type parts struct {
	now       []model.ServicePart
	health    []*model.HealthCheck
	unchanged bool
}

func (s *parts) apply(t dice, d model.Delta) {
	s.unchanged = d.Empty()
	s.now = replace(t, s.now, d.Services.Del, d.Services.Put)
	s.health = replace(t, s.health, d.Health.Del, d.Health.Put)
	gone := map[string]model.ServicePart{}
	for _, p := range d.Services.Del {
		gone[partNames([]model.ServicePart{p})[0]] = p
	}
	for i, name := range partNames(d.Services.Put) {
		if reflect.DeepEqual(gone[name], d.Services.Put[i]) {
			t.Fatalf("%s is put again as it was", name)
		}
	}
}

// replace takes del, which must be there, out of list, and puts put, which must not, in.
func replace[P comparable](t dice, list, del, put []P) []P {
	for _, p := range del {
		i := slices.Index(list, p)
		if i < 0 {
			t.Fatalf("%v is deleted but not there", p)
		}
		list = slices.Delete(list, i, i+1)
	}
	for _, p := range put {
		if slices.Contains(list, p) {
			t.Fatalf("%v is put but there", p)
		}
		list = append(list, p)
	}
	return list
}

func (s *parts) mustBe(t dice, all *model.Snapshot) {
	want := all.Parts()
	if len(want) != len(s.now) || len(all.HealthChecks) != len(s.health) {
		t.Fatalf("the deltas come to %d parts and %d health checks, Services has %d and %d", len(s.now), len(s.health),
			len(want), len(all.HealthChecks))
	}
	for _, p := range want {
		if !slices.Contains(s.now, p) {
			t.Fatalf("%v is in no delta", p)
		}
	}
	for _, h := range all.HealthChecks {
		if !slices.Contains(s.health, h) {
			t.Fatalf("%v is in no delta", h)
		}
	}
}

// mustRetainPointers checks that what is equal before and after is the same.
func mustRetainPointers(t dice, before, after *model.Snapshot) {
	for e, f := range before.Frontends {
		if g := after.Frontends[e]; g != f && reflect.DeepEqual(f, g) {
			t.Fatalf("%s is equal but another", e)
		}
	}
	if before.Node != after.Node && reflect.DeepEqual(before.Node, after.Node) {
		t.Fatalf("the node is equal but another")
	}
}

// sound checks what holds for every decided node.
func sound(t dice, s *model.Snapshot) {
	pools := map[uint64]*model.Pool{}
	for e, f := range s.Frontends {
		unusable := unusable(e.Addr) != "" && !(f.Via == model.ViaHostPort && e.Addr == localhost)
		if f.Entry != e || e.Port == 0 || !e.AnyAddr() && unusable || f.Service == "" || f.Via == "" {
			t.Fatalf("frontend %s: %+v", e, f)
		}
		if f.Via != model.ViaHostPort && (f.Via == viaNodePort.String()) != e.AnyAddr() {
			t.Fatalf("%s is a %s", e, f.Via)
		}
		for _, p := range []*model.Pool{f.Internal.Pool, f.External.Pool} {
			soundPool(t, p, e)
			if other := pools[p.ID]; other != nil && other != p {
				t.Fatalf("pools %q and %q have one ID", p.Name, other.Name)
			}
			pools[p.ID] = p
		}
		if !slices.IsSortedFunc(f.Sources, netip.Prefix.Compare) {
			t.Fatalf("%s lets in %s", e, f.Sources)
		}
		for i, p := range f.Sources {
			if p != p.Masked() || p.Addr().Is4() != e.Addr.Is4() || slices.ContainsFunc(f.Sources[:i], p.Overlaps) {
				t.Fatalf("%s lets in %s", e, f.Sources)
			}
		}
	}
	soundNode(t, s.ServiceNode)
	checks := map[uint16]bool{}
	for _, h := range s.HealthChecks {
		if checks[h.Port] || h.Port == 0 || h.Local < 0 {
			t.Fatalf("health check %+v", h)
		}
		checks[h.Port] = true
	}
}

func soundPool(t dice, p *model.Pool, e model.Entry) {
	if p == nil || p.Protocol != e.Protocol || p.ID != hashName(p.Name) {
		t.Fatalf("%s has pool %+v", e, p)
	}
	for i, b := range p.Backends {
		bad := b.Addr.Port() == 0 || b.Addr.Addr().Is4() != e.Addr.Is4() || unusable(b.Addr.Addr()) != ""
		if bad || i > 0 && p.Backends[i-1].Addr.Compare(b.Addr) >= 0 {
			t.Fatalf("%s has backends %v", e, p.Backends)
		}
		if strings.HasSuffix(p.Name, " local") && !b.Local {
			t.Fatalf("%s has a backend elsewhere: %v", p.Name, b)
		}
	}
	for i, b := range p.Unselected {
		if p.Protocol == model.TCP || b.Weight != 0 || i > 0 && p.Unselected[i-1].Addr.Compare(b.Addr) >= 0 ||
			slices.ContainsFunc(p.Backends, func(o model.Backend) bool { return o.Addr == b.Addr }) || !p.Serves(b.Addr) {
			t.Fatalf("%s has backends %v, and not selected are %v", p.Name, p.Backends, p.Unselected)
		}
	}
}

func soundNode(t dice, n *model.ServiceNode) {
	for i, r := range n.NodePorts {
		if r.Last.Less(r.First) || r.First.BitLen() != r.Last.BitLen() || i > 0 && !n.NodePorts[i-1].Last.Less(r.First) {
			t.Fatalf("node ports %v", n.NodePorts)
		}
	}
	if !slices.IsSortedFunc(n.Addresses, netip.Addr.Compare) || !slices.IsSortedFunc(n.Pods, netip.Prefix.Compare) {
		t.Fatalf("node %v", n)
	}
}
