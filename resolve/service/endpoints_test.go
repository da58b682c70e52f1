package service

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/source"
)

// arrow is how the line of the base Service's clusterIP begins.
const arrow = "10.96.0.1:80/tcp ClusterIP -> "

func TestReadiness(t *testing.T) {
	for _, c := range []struct {
		name      string
		endpoints []discoveryv1.Endpoint
		want      string
	}{
		{"nothing said", []discoveryv1.Endpoint{ep("10.0.0.1")}, "10.0.0.1:8080"},
		{"ready", []discoveryv1.Endpoint{ep("10.0.0.1", conditions("t--"))}, "10.0.0.1:8080"},
		{"not ready", []discoveryv1.Endpoint{ep("10.0.0.1", conditions("f--"))}, "reject"},
		{"ready beats draining", []discoveryv1.Endpoint{ep("10.0.0.1"), ep("10.0.0.2", drains)}, "10.0.0.1:8080"},
		{"draining alone", []discoveryv1.Endpoint{ep("10.0.0.1", drains), ep("10.0.0.2", gone)}, "10.0.0.1:8080"},
		{"draining with serving not said", []discoveryv1.Endpoint{ep("10.0.0.1", conditions("f-t"))}, "10.0.0.1:8080"},
		{"terminating not said", []discoveryv1.Endpoint{ep("10.0.0.1", conditions("ft-"))}, "reject"},
		{"terminating, not serving", []discoveryv1.Endpoint{ep("10.0.0.1", gone)}, "reject"},
		{"ready though terminating", []discoveryv1.Endpoint{ep("10.0.0.1", conditions("ttt")), ep("10.0.0.2")},
			"10.0.0.1:8080 10.0.0.2:8080"},
		{"sorted by address", []discoveryv1.Endpoint{ep("10.0.0.10"), ep("10.0.0.9")}, "10.0.0.9:8080 10.0.0.10:8080"},
		{"local", []discoveryv1.Endpoint{ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2")), ep("10.0.0.3", on(""))},
			"10.0.0.1:8080* 10.0.0.2:8080 10.0.0.3:8080"},
	} {
		t.Run(c.name, func(t *testing.T) {
			same(t, "frontends", frontLines(resolved(n1, svc(), eps(c.endpoints...)).Services()), lines(arrow+c.want))
		})
	}
}

func TestSlices(t *testing.T) {
	labelledEps := func(k, v string) editEps { return func(s *discoveryv1.EndpointSlice) { s.Labels[k] = v } }
	addressType := func(a discoveryv1.AddressType) editEps {
		return func(s *discoveryv1.EndpointSlice) { s.AddressType = a }
	}
	name, udp := "http", corev1.ProtocolUDP
	number := int32(8080)
	one := ep("10.0.0.1")
	runScenarios(t, []scenario{
		{name: "several slices", objects: objects(svc(), eps(ep("10.0.0.2")), slice(eps(one), sliceNamed("web-2"))),
			fronts: lines(arrow + "10.0.0.1:8080 10.0.0.2:8080")},
		{name: "each with its own port number", objects: objects(svc(), eps(ep("10.0.0.2")),
			slice(eps(one), sliceNamed("web-2"), slicePorts(eport("http", 81)))),
			fronts: lines(arrow + "10.0.0.1:81 10.0.0.2:8080")},
		{name: "other names are other ports", objects: objects(svc(), slice(eps(one),
			slicePorts(eport("https", 1), eport("http", 2), eport("", 3)))), fronts: lines(arrow + "10.0.0.1:2")},
		{name: "unnamed ports", objects: objects(svc(ports(sport("", 80))),
			slice(eps(one), slicePorts(discoveryv1.EndpointPort{Port: &number}))), fronts: lines(arrow + "10.0.0.1:8080")},
		{name: "the protocol must be the same",
			objects: objects(svc(), slice(eps(one), slicePorts(discoveryv1.EndpointPort{Name: &name, Port: &number,
				Protocol: &udp}))), fronts: lines(arrow + "reject"), problems: lines("spec.ports[0] NoEndpoints")},
		{name: "no port number", objects: objects(svc(), slice(eps(one), slicePorts(discoveryv1.EndpointPort{Name: &name}))),
			fronts: lines(arrow + "reject"), problems: lines("EndpointSlice shop/web-1 ports[0] PortMissing",
				"spec.ports[0] NoEndpoints")},
		{name: "no ports", objects: objects(svc(), slice(eps(one), slicePorts())), fronts: lines(arrow + "reject"),
			problems: lines("spec.ports[0] NoEndpoints")},
		{name: "port numbers out of range", objects: objects(svc(),
			slice(eps(one), slicePorts(eport("http", 0), eport("http", 65536), eport("http", 81)))),
			fronts: lines(arrow + "10.0.0.1:81"), problems: lines("EndpointSlice shop/web-1 ports[0] InvalidPort",
				"EndpointSlice shop/web-1 ports[1] InvalidPort")},
		{name: "unknown protocol", objects: objects(svc(),
			slice(eps(one), func(s *discoveryv1.EndpointSlice) { p := corev1.Protocol("ICMP"); s.Ports[0].Protocol = &p })),
			fronts: lines(arrow + "reject"), problems: lines("EndpointSlice shop/web-1 ports[0] UnknownProtocol",
				"spec.ports[0] NoEndpoints")},
		{name: "unusable addresses", objects: objects(svc(), eps(one, ep("127.0.0.1"), ep("169.254.0.1"), ep("224.0.1.1"),
			ep("0.0.0.0"), ep("ten"), ep("fd00::1"), ep("::ffff:10.0.0.2"),
			discoveryv1.Endpoint{})),
			fronts: lines(arrow + "10.0.0.1:8080 10.0.0.2:8080"), problems: lines(
				"EndpointSlice shop/web-1 endpoints[1].addresses UnusableAddress",
				"EndpointSlice shop/web-1 endpoints[2].addresses UnusableAddress",
				"EndpointSlice shop/web-1 endpoints[3].addresses UnusableAddress",
				"EndpointSlice shop/web-1 endpoints[4].addresses UnusableAddress",
				"EndpointSlice shop/web-1 endpoints[5].addresses InvalidAddress",
				"EndpointSlice shop/web-1 endpoints[6].addresses WrongFamily",
				"EndpointSlice shop/web-1 endpoints[8].addresses InvalidAddress")},
		{name: "leading zeros", objects: objects(svc(), eps(ep("010.000.0.001"))),
			fronts: lines(arrow + "10.0.0.1:8080")},
		{name: "only the first address", objects: objects(svc(),
			eps(discoveryv1.Endpoint{Addresses: []string{"10.0.0.1", "10.0.0.2"}})),
			fronts:   lines(arrow + "10.0.0.1:8080"),
			problems: lines("EndpointSlice shop/web-1 endpoints[0].addresses AddressesLeftOut")},
		{name: "names", objects: objects(svc(), slice(eps(one), addressType(discoveryv1.AddressTypeFQDN))),
			fronts: lines(arrow + "reject"), problems: lines("EndpointSlice shop/web-1 addressType NameNotAddress")},
		{name: "unknown type", objects: objects(svc(), slice(eps(one), addressType("IPX"))),
			fronts: lines(arrow + "reject"), problems: lines("EndpointSlice shop/web-1 addressType UnknownValue")},
		{name: "no service", objects: objects(slice(eps(ep("ten")), addressType(discoveryv1.AddressTypeFQDN)))},
		{name: "no service-name label", objects: objects(svc(), slice(eps(one), of("")),
			slice(eps(one), func(s *discoveryv1.EndpointSlice) {
				s.Labels, s.Name = nil, "x"
			})), fronts: lines(arrow + "reject"), problems: lines("spec.ports[0] NoEndpoints")},
		{name: "a headless Service's slices have no problems", objects: objects(svc(clusterIPs("None")), eps(ep("ten")))},
		{name: "slice of a headless Service", objects: objects(svc(),
			slice(eps(one), labelledEps(corev1.IsHeadlessService, ""))), fronts: lines(arrow + "reject")},
		{name: "the label of a proxy counts on Services only",
			objects: objects(svc(), slice(eps(one), labelledEps(proxyNameLabel, "other"))), fronts: lines(arrow +
				"10.0.0.1:8080")},
		{name: "slice for this proxy", config: Config{ProxyName: "mine"},
			objects: objects(svc(labelled(proxyNameLabel, "mine")), slice(eps(one), labelledEps(proxyNameLabel, "mine"))),
			fronts:  lines(arrow + "10.0.0.1:8080")},
		{name: "slice of another namespace", objects: objects(svc(),
			slice(eps(one), func(s *discoveryv1.EndpointSlice) { s.Namespace = "other" })), fronts: lines(arrow + "reject")},
	})
}

func TestDuplicateEndpoints(t *testing.T) {
	for _, c := range []struct {
		name string
		a, b editEp // of the same address in two slices
		want string
	}{
		{"both ready", conditions("t--"), conditions("t--"), "10.0.0.1:8080"},
		{"running before terminating", drains, conditions("ttf"), "10.0.0.1:8080"},
		{"running before terminating, though not ready", conditions("ttt"), notReady, "reject"},
		{"ready before not ready", notReady, conditions("ttf"), "10.0.0.1:8080"},
		{"serving before not serving", gone, drains, "10.0.0.1:8080"},
		{"local before remote", on("n2"), on("n1"), "10.0.0.1:8080*"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, pair := range [][2]editEp{{c.a, c.b}, {c.b, c.a}} {
				for _, os := range [][]source.Object{
					objects(svc(), eps(ep("10.0.0.1", pair[0])), slice(eps(ep("10.0.0.1", pair[1])), sliceNamed("web-2"))),
					objects(svc(), eps(ep("10.0.0.1", pair[0]), ep("10.0.0.1", pair[1]))),
				} {
					same(t, "frontends", frontLines(resolved(n1, os...).Services()), lines(arrow+c.want))
				}
			}
		})
	}
}

// Why a Service has no endpoint is a problem where its objects contradict each other, and is said of any.
func TestWhyEmpty(t *testing.T) {
	no := conditions("f--")
	web := svc(ports(sport("http", 80)))
	for _, c := range []struct {
		name    string
		objects []source.Object
		why     string
		problem bool
	}{
		{"no slice", objects(web), "it has no endpoints", false},
		{"scaled to zero", objects(web, eps()), "it has no endpoints", false},
		{"none ready", objects(web, eps(ep("10.0.0.1", no), ep("10.0.0.2", no))), "none of its 2 endpoints is ready",
			false},
		{"none ready, other port", objects(web, slice(eps(ep("10.0.0.1", no)), slicePorts(eport("https", 1)))),
			"it has no endpoints", false},
		{"port name", objects(web, slice(eps(ep("10.0.0.1")), slicePorts(eport("https", 1), eport("", 2)))),
			`no port of its EndpointSlices is named "http", but ["https" ""]`, true},
		{"unnamed port", objects(svc(ports(sport("", 80))), eps(ep("10.0.0.1"))), `is named "", but ["http"]`, true},
		{"protocol", objects(svc(ports(corev1.ServicePort{Name: "http", Port: 80, Protocol: "UDP"})),
			eps(ep("10.0.0.1"))), `port "http" of EndpointSlice web-1 has protocol tcp, not udp`, true},
		{"family", objects(svc(clusterIPs("fd96::1")), eps(ep("10.0.0.1"))),
			"all of the other family; give endpoints of ipv6", true},
		{"label", objects(web, slice(eps(ep("10.0.0.1")), of(""), sliceNamed("web-x"))),
			"EndpointSlice web-x belongs to no Service; give it the label kubernetes.io/service-name: web", true},
		{"label, whole name", objects(web, slice(eps(ep("10.0.0.1")), of(""), sliceNamed("web"))),
			"EndpointSlice web belongs to no Service", true},
		{"another's name", objects(web, slice(eps(ep("10.0.0.1")), of(""), sliceNamed("website-x"))),
			"it has no endpoints", false},
		{"all elsewhere, Local", objects(svc(internal("Local")), eps(ep("10.0.0.1", on("n2")))),
			"no endpoint that is ready is on this node", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := New(n1)
			r.Apply(puts(c.objects...)[:1]) // the Service first, then its slice, as they come
			r.Apply(puts(c.objects...)[1:])
			for e := range r.Services().Frontends {
				if why := r.WhyEmpty()(e); !strings.Contains(why, c.why) {
					t.Errorf("%v: %q, want %q", e, why, c.why)
				}
			}
			var said []string
			for _, p := range r.Problems() {
				if p.Reason == source.NoEndpoints {
					said = append(said, p.Message)
				}
			}
			if c.problem != (len(said) == 1) || c.problem && !strings.Contains(said[0], c.why) {
				t.Errorf("problems %q", said)
			}
			r.Apply(dels(c.objects...))
			if len(r.Problems()) != 0 || len(r.strays) != 0 {
				t.Errorf("stays: %v, %v", r.Problems(), r.strays)
			}
		})
	}
}
