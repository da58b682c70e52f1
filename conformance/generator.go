package conformance

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// scene is everything that a random world has beside the cast.
type scene struct {
	Config  Config
	Restart []string // nodes whose agent restarts on the way here
	Apps    [8]app
	Hosts   bool // web-1 and web-2 have host ports
	isolation
}

// hostPorts are those of pods that have some.
var hostPorts = []corev1.ContainerPort{
	{ContainerPort: 8080, HostPort: 18080, Protocol: corev1.ProtocolTCP},
	{ContainerPort: 8053, HostPort: 18053, Protocol: corev1.ProtocolUDP},
	{ContainerPort: 8905, HostPort: 18905, Protocol: corev1.ProtocolSCTP},
}

// app is a Service and its EndpointSlices; without a Service, nothing.
type app struct {
	Service *corev1.Service
	Slices  []*discoveryv1.EndpointSlice
}

// objects returns the scene's objects by key.
func (s *scene) objects() map[source.Key]source.Object {
	m := map[source.Key]source.Object{}
	for _, a := range s.Apps {
		if a.Service != nil {
			m[source.KeyOf(a.Service)] = a.Service
		}
		for _, e := range a.Slices {
			m[source.KeyOf(e)] = e
		}
	}
	for _, name := range []string{"web-1", "web-2"} {
		if p := memberNamed(name).podObject(); s.Hosts {
			p.Spec.Containers[0].Ports = hostPorts
			m[source.KeyOf(p)] = p
		}
	}
	for _, o := range s.isolation.objects() {
		m[source.KeyOf(o)] = o
	}
	return m
}

// changesFrom returns what must change to come from another scene to this one.
func (s *scene) changesFrom(old *scene) (l []source.Change) {
	was, is := old.objects(), s.objects()
	for _, k := range sortedKeys(was) {
		if _, stays := is[k]; !stays {
			l = append(l, source.Change{Key: k})
		}
	}
	for _, k := range sortedKeys(is) {
		if !reflect.DeepEqual(was[k], is[k]) {
			l = append(l, source.Change{Key: k, Object: is[k]})
		}
	}
	return l
}

// generator draws scenes and packets.
type generator struct{ *rand.Rand }

func newGenerator(seed uint64) generator { return generator{rand.New(rand.NewPCG(seed, seed))} }

// chance is true in so many of a hundred draws.
func (d generator) chance(percent int) bool { return d.IntN(100) < percent }

// one draws one of the list.
func one[T any](d generator, of ...T) T { return of[d.IntN(len(of))] }

// some draws up to n different ones of the list.
func some[T any](d generator, n int, of ...T) []T {
	of = slices.Clone(of)
	d.Shuffle(len(of), func(i, j int) { of[i], of[j] = of[j], of[i] })
	return of[:min(n, len(of))]
}

// next draws the scene after s: some Services new, changed or gone, others with other endpoints, most as they were.
func (d generator) next(s *scene) *scene {
	n := *s
	n.Restart = some(d, one(d, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2), nodes...)
	if d.chance(10) {
		n.Config = d.config()
	}
	if d.chance(10) {
		n.Hosts = !n.Hosts
	}
	for i := range n.Apps {
		switch k := d.IntN(100); {
		case k < 20:
			n.Apps[i] = d.app(i)
		case k < 30:
			n.Apps[i] = app{}
		case k < 50 && n.Apps[i].Service != nil:
			n.Apps[i].Slices = d.slices(n.Apps[i].Service)
		}
	}
	return &n
}

func (d generator) config() Config {
	return Config{
		ExternalIPs: one(d, "", "", resolve.SafeExternalIPs, resolve.AnyExternalIPs,
			resolve.RefuseExternalIPs), Limits: d.limits(),
		MasqueradeAll: d.chance(20), DirectServerReturn: d.chance(50), HostPorts: d.chance(70),
		PodInterfaces: one(d, "", "", "", "veth*"),
		ClusterCIDRs: one(d, nil, nil, []string{"10.244.0.0/16", "fd00:10:244::/48"}, []string{"10.244.0.0/16"},
			[]string{"10.244.2.0/24", "fd00:10:244:1::/64"}),
		NodePortAddresses: one(d, nil, nil, []string{"primary"}, []string{"primary", "localhost"},
			[]string{"192.168.78.0/24", "fd00:77::/64"}),
	}
}

// limits draws bounds that some worlds meet.
func (d generator) limits() resolve.Limits {
	if !d.chance(30) {
		return resolve.Limits{}
	}
	return resolve.Limits{
		Service: resolve.Bounds{Frontends: one(d, 0, 2, 6), Slots: one(d, 0, 3, 8), TableEntries: one(d, 0, 1, 3000)},
		Total:   resolve.Bounds{Frontends: one(d, 0, 8, 20), Slots: one(d, 0, 20)},
	}
}

// app draws the i-th Service, with slices.
func (d generator) app(i int) app {
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: one(d, "default", "shop"), Name: fmt.Sprintf("s%d", i)},
	}
	spec := &s.Spec
	spec.Type = one(d, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	four, six := fmt.Sprintf("10.96.0.%d", 10+i), fmt.Sprintf("fd00:96::%d", 10+i)
	spec.ClusterIPs = one(d, []string{four}, []string{six}, []string{four, six}, []string{four, six})
	spec.ClusterIP = spec.ClusterIPs[0]
	if d.chance(20) {
		spec.ExternalIPs = some(d, 2, "203.0.113.80", "203.0.113.81", "2001:db8::80", "192.168.77.1", "fd00:78::2",
			"10.96.0.10")
	}
	d.ports(s)
	d.policies(s)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		d.ingress(s)
	}
	if d.chance(15) {
		d.hostile(s)
	}
	return app{s, d.slices(s)}
}

// productSide is the most external IPs and further ports of a hostile Service: enough for products beyond small bounds.
const productSide = 12

// hostile has a Service take what is others', or ask for more than others get: external IPs that are pods', nodes' and
// other Services', or the API server's with its port; products of external IPs and ports.
func (d generator) hostile(s *corev1.Service) {
	spec := &s.Spec
	switch d.IntN(4) {
	case 0:
		spec.ExternalIPs = some(d, 1+d.IntN(3), "10.244.1.1", "10.244.2.2", "fd00:10:244:2::3", "10.244.1.10",
			"10.244.2.200")
	case 1:
		spec.ExternalIPs = some(d, 1+d.IntN(2), "10.96.0.10", "10.96.0.13", "fd00:96::12", "192.168.77.2", "fd00:77::1")
	case 2:
		spec.ExternalIPs = []string{apiServer.Addr().String()}
		spec.Ports = append(spec.Ports, corev1.ServicePort{Name: "api", Port: int32(apiServer.Port()),
			Protocol: corev1.ProtocolTCP})
	case 3:
		spec.ExternalIPs = nil
		for i := range 1 + d.IntN(productSide) {
			spec.ExternalIPs = append(spec.ExternalIPs, fmt.Sprintf("203.0.113.%d", 100+i))
		}
		for i := range d.IntN(productSide) {
			spec.Ports = append(spec.Ports, corev1.ServicePort{Name: fmt.Sprint("x", i), Port: int32(1000 + i),
				Protocol: corev1.ProtocolTCP})
		}
	}
}

// entrySlices draws slices whose one endpoint is a ClusterIP at the Service's own ports: of the Service itself, or of
// another.
func (d generator) entrySlices(s *corev1.Service) []*discoveryv1.EndpointSlice {
	line := sliceLine{Name: s.Name + "#entry", Namespace: s.Namespace, Service: s.Name, Families: []bool{false, true}}
	for _, p := range s.Spec.Ports {
		line.Ports = append(line.Ports, slicePort{p.Name, uint16(p.Port), uint16(p.Port), p.Protocol})
	}
	e := sliceEndpoint{Ready: true, Serving: true}
	for _, text := range s.Spec.ClusterIPs {
		a := netip.MustParseAddr(text)
		e.Addrs[b2i(a.Is6())] = a
	}
	if d.chance(50) {
		i := 10 + d.IntN(len(scene{}.Apps))
		e.Addrs = [2]netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}),
			netip.MustParseAddr(fmt.Sprintf("fd00:96::%d", i))}
	}
	line.Endpoints = []sliceEndpoint{e}
	return line.slices()
}

func (d generator) ports(s *corev1.Service) {
	names := []string{"p0", "p1", "p2"}
	numbers := some(d, 3, int32(80), 443, 53, 8080)
	for i := range 1 + d.IntN(3) {
		p := corev1.ServicePort{Name: names[i], Port: numbers[i],
			Protocol: one(d, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolUDP,
				corev1.ProtocolSCTP)}
		if s.Spec.Type != corev1.ServiceTypeClusterIP && d.chance(90) {
			p.NodePort = 30000 + int32(d.IntN(30))
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	if d.chance(30) {
		by := one(d, model.AllSchedulers.List()...)
		name := by.String()
		if by.Hashes() && d.chance(30) {
			name += ",port"
		}
		s.Annotations = map[string]string{resolve.SchedulerAnnotation: name}
	}
}

func (d generator) policies(s *corev1.Service) {
	spec, local := &s.Spec, corev1.ServiceInternalTrafficPolicyLocal
	if d.chance(40) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if d.chance(25) {
		spec.InternalTrafficPolicy = &local
	}
	if d.chance(20) {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	if d.chance(20) {
		near := one(d, corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone,
			corev1.ServiceTrafficDistributionPreferSameNode)
		spec.TrafficDistribution = &near
	}
}

func (d generator) ingress(s *corev1.Service) {
	modes := []corev1.LoadBalancerIPMode{corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy}
	for _, ip := range some(d, 1+d.IntN(3), "203.0.113.10", "203.0.113.11", "203.0.113.12", "2001:db8::10",
		"2001:db8::11") {
		i := corev1.LoadBalancerIngress{IP: ip}
		if d.chance(30) {
			i.IPMode = &modes[d.IntN(2)]
		}
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, i)
	}
	if d.chance(35) {
		s.Spec.LoadBalancerSourceRanges = some(d, 1+d.IntN(4), "192.0.2.0/24", "192.0.2.1/32", "198.51.100.0/25",
			"10.244.0.0/16", "10.244.1.0/24",
			"192.168.77.0/31", "192.168.0.0/16", "0.0.0.0/0", "2001:db8::/64", "fd00:10:244::/48", "fd00:10:244:1::10/128",
			"fd00:77::/64", "::/0")
	}
}

// listens is where the pods of the cast answer, by protocol.
var listens = map[corev1.Protocol][]int32{
	corev1.ProtocolTCP: {8080, 9000, 9001, 8443}, corev1.ProtocolUDP: {8053}, corev1.ProtocolSCTP: {8905},
}

// slices draws up to two slices for each family.
func (d generator) slices(s *corev1.Service) (l []*discoveryv1.EndpointSlice) {
	for n := range one(d, 1, 1, 1, 1, 2, 0) {
		line := sliceLine{Name: fmt.Sprintf("%s#%d", s.Name, n), Namespace: s.Namespace, Service: s.Name,
			Families: []bool{false, true}}
		if d.chance(15) {
			line.Families = []bool{d.chance(50)}
		}
		if d.chance(15) {
			line.Weight = one(d, "1", "2", "3", "4")
		}
		host := true // an endpoint on the node's network serves one port
		for _, p := range s.Spec.Ports {
			if d.chance(5) {
				continue
			}
			number := uint16(one(d, listens[p.Protocol]...))
			host = host && number == 8443
			line.Ports = append(line.Ports, slicePort{p.Name, number, number, p.Protocol})
		}
		pods := []string{"web-1", "web-2", "web-3"}
		if host {
			pods = append(pods, "host-b")
		}
		for _, name := range some(d, one(d, 0, 1, 1, 2, 2, 3, 3, 4), pods...) {
			line.Endpoints = append(line.Endpoints, d.endpoint(memberNamed(name)))
		}
		if len(line.Ports) > 0 {
			l = append(l, line.slices()...)
		}
	}
	if d.chance(5) {
		l = append(l, d.entrySlices(s)...)
	}
	return l
}

func (d generator) endpoint(m *member) sliceEndpoint {
	e := sliceEndpoint{Ready: true, Serving: true}
	e.of(m)
	switch k := d.IntN(100); {
	case k < 10:
		e.Ready, e.Serving = false, false
	case k < 25:
		e.Ready, e.Terminates = false, true
	case k < 30:
		e.Ready, e.Serving, e.Terminates = false, false, true
	}
	if d.chance(5) {
		e.Node = ""
	}
	if d.chance(30) {
		e.Zones = some(d, 1+d.IntN(2), "z1", "z2", "z3")
	}
	if d.chance(20) {
		e.Nodes = some(d, 1, "a", "b")
	}
	return e
}

// packet draws a packet that is worth sending: mostly to a frontend of one of the nodes, at times to one's neighbour,
// to an address that may have none, or straight to a pod.
func (d generator) packet(w *testbed) *packetLine {
	l := &packetLine{Via: one(d, "a", "b")}
	l.Proto = one(d, model.TCP, model.UDP, model.SCTP)
	fronts := d.ofOneKind(w.agents[one(d, nodes...)].services.Sorted())
	switch k := d.IntN(100); {
	case k < 90 && len(fronts) > 0:
		e := fronts[d.IntN(len(fronts))].Entry
		l.Proto, l.To = e.Protocol, netip.AddrPortFrom(e.Addr, e.Port)
		if e.AnyAddr() {
			l.To = netip.AddrPortFrom(d.nodeAddress(e.Addr.Is6()), e.Port)
		}
		if d.chance(4) {
			l.To = netip.AddrPortFrom(l.To.Addr(), uint16(one(d, 80, 443, 53, 30000+d.IntN(30))))
		}
	case k < 95:
		if d.chance(20) {
			l.To, l.Proto = apiServer, model.TCP
			break
		}
		l.To = netip.AddrPortFrom(one(d, addrs("10.96.0.12", "fd00:96::12", "203.0.113.10", "2001:db8::80",
			"192.168.77.2")...), uint16(one(d, 80, 443, 53)))
	default:
		l.To = netip.AddrPortFrom(one(d, memberNamed("web-1"), memberNamed("web-3")).addr(d.chance(50)),
			uint16(listens[corev1.ProtocolTCP][0]))
		l.Proto = model.TCP
	}
	l.Clients = []client{d.client(l.To.Addr())}
	if l.Proto != model.SCTP && d.chance(10) && !toItself(l) {
		l.Size = 4000 // fragments, by UDP
	}
	return l
}

// ofOneKind returns, at times, those of frontends that are of a kind which it draws: of addresses of that kind and with
// one traffic policy. So each kind is asked, however many there are of another.
func (d generator) ofOneKind(fronts []*model.Frontend) []*model.Frontend {
	if len(fronts) == 0 || d.chance(50) {
		return fronts
	}
	kinds := map[string][]*model.Frontend{}
	for _, f := range fronts {
		k := addressKind(f)
		kinds[k] = append(kinds[k], f)
	}
	return kinds[one(d, slices.Sorted(maps.Keys(kinds))...)]
}

// addressKind returns what kind of address a frontend is at, and its traffic policy, such as "NodePort Local".
func addressKind(f *model.Frontend) string {
	if f.Internal != f.External {
		return f.Via + " Local"
	}
	return f.Via
}

// toItself reports whether a node asks at an address of its own: there nothing is too long for the loopback device.
func toItself(l *packetLine) bool {
	from := memberNamed(l.Clients[0].Name)
	return from.onNode() && (l.To.Addr().IsLoopback() || nodeOf(l.To.Addr()) == from.Node)
}

// nodeAddress draws an address at which node ports may be.
func (d generator) nodeAddress(six bool) netip.Addr {
	if !six && d.chance(10) {
		return netip.MustParseAddr("127.0.0.1")
	}
	l := slices.DeleteFunc(slices.Concat(memberNamed("node-a").Addrs, memberNamed("node-b").Addrs),
		func(a netip.Addr) bool { return a.Is6() != six })
	return one(d, l...)
}

// client draws who sends to an address.
func (d generator) client(to netip.Addr) client {
	if to.IsLoopback() {
		return client{Name: one(d, "node-a", "node-b"), Addr: to}
	}
	name := one(d, "client-a", "client-b", "node-a", "node-b", "host-b", "outside", "outside", "web-1", "web-2")
	m := memberNamed(name)
	c := client{Name: name, Addr: m.addr(to.Is6())}
	if name == "outside" && d.chance(20) {
		c.Addr = m.Addrs[2+b2i(to.Is6())]
	}
	return c
}
