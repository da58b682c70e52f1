package service

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

func TestFrontends(t *testing.T) {
	lb := func(in ...corev1.LoadBalancerIngress) edit {
		return func(s *corev1.Service) {
			s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, in
		}
	}
	vip, proxy, odd := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy, corev1.LoadBalancerIPMode("Odd")
	one := eps(ep("10.0.0.1"))
	both := objects(one, slice(eps(ep("fd00::1")), sliceNamed("web-6")))
	with := func(edits ...edit) []source.Object { return append(objects(svc(edits...)), both...) }
	dual := clusterIPs("10.96.0.1", "fd96::1")
	runScenarios(t, []scenario{
		{name: "clusterIP", objects: with(), fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "clusterIP alone in spec.clusterIP",
			objects: with(spec(func(s *corev1.ServiceSpec) { s.ClusterIPs, s.ClusterIP = nil, "10.96.0.1" })),
			fronts:  lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "spec.clusterIP unreadable", objects: with(spec(func(s *corev1.ServiceSpec) {
			s.ClusterIPs, s.ClusterIP = nil, "ten"
		})), problems: lines("spec.clusterIP InvalidAddress")},
		{name: "spec.clusterIP differs", objects: with(spec(func(s *corev1.ServiceSpec) { s.ClusterIP = "10.96.0.2" })),
			fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080"), problems: lines("spec.clusterIP ClusterIPsDiffer")},
		{name: "two families", objects: with(dual), fronts: lines(
			"10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080",
			"[fd96::1]:80/tcp ClusterIP -> [fd00::1]:8080")},
		{name: "three protocols", objects: objects(svc(ports(sport("http", 80), sport("udp", 80), sport("sctp", 80))),
			slice(eps(ep("10.0.0.1")), slicePorts(eport("http", 1), eport("udp", 2), eport("sctp", 3)))),
			fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:1", "10.96.0.1:80/udp ClusterIP -> 10.0.0.1:2",
				"10.96.0.1:80/sctp ClusterIP -> 10.0.0.1:3")},
		{name: "no protocol is TCP", objects: with(ports(corev1.ServicePort{Name: "http", Port: 80})),
			fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "no endpoints", objects: objects(svc()), fronts: lines("10.96.0.1:80/tcp ClusterIP -> reject")},
		{name: "node port", objects: with(nodePort(30080)),
			fronts: lines("*4:30080/tcp NodePort -> 10.0.0.1:8080", "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "node port in two families", objects: with(dual, nodePort(30080)), fronts: lines(
			"*4:30080/tcp NodePort -> 10.0.0.1:8080", "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080",
			"*6:30080/tcp NodePort -> [fd00::1]:8080", "[fd96::1]:80/tcp ClusterIP -> [fd00::1]:8080")},
		{name: "node port by ipFamilies", objects: with(nodePort(30080), ipFamilies("IPv4", "IPv6")), fronts: lines(
			"*4:30080/tcp NodePort -> 10.0.0.1:8080", "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080",
			"*6:30080/tcp NodePort -> [fd00::1]:8080")},
		{name: "load balancer with a node port", objects: with(nodePort(30080), ingress("192.0.2.1")), fronts: lines(
			"*4:30080/tcp NodePort -> 10.0.0.1:8080", "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080",
			"192.0.2.1:80/tcp LoadBalancer -> 10.0.0.1:8080")},
		{name: "load balancer without a node port", objects: with(ingress("192.0.2.1")), fronts: lines(
			"10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080", "192.0.2.1:80/tcp LoadBalancer -> 10.0.0.1:8080")},
		{name: "ipMode", objects: with(lb(
			corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: &vip},
			corev1.LoadBalancerIngress{IP: "192.0.2.2", IPMode: &proxy},
			corev1.LoadBalancerIngress{Hostname: "lb.example"}, corev1.LoadBalancerIngress{IP: "192.0.2.3", IPMode: &odd})),
			fronts:   lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080", "192.0.2.1:80/tcp LoadBalancer -> 10.0.0.1:8080"),
			problems: lines("status.loadBalancer.ingress[3].ipMode UnknownValue")},
		{name: "external addresses", objects: with(dual, externalIPs("192.0.2.9", "2001:db8::9")), fronts: lines(
			"10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080", "192.0.2.9:80/tcp ExternalIP -> 10.0.0.1:8080",
			"[2001:db8::9]:80/tcp ExternalIP -> [fd00::1]:8080", "[fd96::1]:80/tcp ClusterIP -> [fd00::1]:8080")},
		{name: "headless", objects: with(clusterIPs("None"))},
		{name: "headless by spec.clusterIP", objects: with(
			spec(func(s *corev1.ServiceSpec) { s.ClusterIPs, s.ClusterIP = nil, "None" }))},
		{name: "the label of headless Services counts on slices only",
			objects: with(labelled(corev1.IsHeadlessService,
				"")), fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "ExternalName", objects: with(typed(corev1.ServiceTypeExternalName))},
		{name: "no clusterIP", objects: with(clusterIPs(), nodePort(30080)),
			problems: lines("spec.clusterIP ClusterIPMissing")},
		{name: "another proxy's", objects: with(labelled(proxyNameLabel, "other"))},
		{name: "another proxy's, without a name", objects: with(labelled(proxyNameLabel, ""))},
		{name: "this proxy's by name", config: Config{ProxyName: "mine"}, objects: with(labelled(proxyNameLabel, "mine")),
			fronts: lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080")},
		{name: "no name where one is asked for", config: Config{ProxyName: "mine"}, objects: with()},
	})
}

func TestServiceProblems(t *testing.T) {
	one := eps(ep("10.0.0.1"))
	served := "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080"
	tests := []struct {
		name     string
		edits    []edit
		fronts   []string // nil: served
		problems []string
	}{
		{"clusterIP unreadable", []edit{clusterIPs("10.96.0.1", "ten")}, nil, lines("spec.clusterIPs[1] InvalidAddress")},
		{"leading zeros", []edit{externalIPs("192.000.2.001")},
			lines(served, "192.0.2.1:80/tcp ExternalIP -> 10.0.0.1:8080"), nil},
		{"leading zeros, too large", []edit{externalIPs("192.000.2.0256")}, nil,
			lines("spec.externalIPs[0] InvalidAddress")},
		{"unspecified", []edit{externalIPs("0.0.0.0")}, nil, lines("spec.externalIPs[0] UnusableAddress")},
		{"loopback", []edit{externalIPs("127.0.0.1")}, nil, lines("spec.externalIPs[0] UnusableAddress")},
		{"link-local", []edit{ingress("169.254.1.1")}, nil, lines("status.loadBalancer.ingress[0].ip UnusableAddress")},
		{"link-local IPv6", []edit{ingress("fe80::1")}, nil, lines("status.loadBalancer.ingress[0].ip UnusableAddress")},
		{"zone", []edit{externalIPs("2001:db8::1%eth0")}, nil, lines("spec.externalIPs[0] UnusableAddress")},
		{"multicast", []edit{externalIPs("224.0.1.1", "ff02::1")}, nil,
			lines("spec.externalIPs[0] UnusableAddress", "spec.externalIPs[1] UnusableAddress")},
		{"IPv4-mapped", []edit{externalIPs("::ffff:192.0.2.1")},
			lines(served, "192.0.2.1:80/tcp ExternalIP -> 10.0.0.1:8080"), nil},
		{"IPv4-mapped loopback", []edit{externalIPs("::ffff:127.0.0.1")}, nil,
			lines("spec.externalIPs[0] UnusableAddress")},
		{"clusterIP of a family it hasn't", []edit{clusterIPs("10.96.0.1", "fd96::1"), ipFamilies("IPv4")}, nil,
			lines("spec.clusterIPs[1] WrongFamily")},
		{"external address of a family it hasn't", []edit{externalIPs("2001:db8::1")}, nil,
			lines("spec.externalIPs[0] WrongFamily")},
		{"ingress address of a family it hasn't", []edit{ingress("2001:db8::1")}, nil,
			lines("status.loadBalancer.ingress[0].ip WrongFamily")},
		{"unknown family", []edit{ipFamilies("IPv4", "IPv5")}, nil, lines("spec.ipFamilies[1] UnknownValue")},
		{"port 0", []edit{ports(sport("http", 80), sport("b", 0))}, nil, lines("spec.ports[1].port InvalidPort")},
		{"port 65536", []edit{ports(sport("http", 80), sport("b", 65536))}, nil, lines("spec.ports[1].port InvalidPort")},
		{"node port too large", []edit{nodePort(70000)}, nil, lines("spec.ports[0].nodePort InvalidPort")},
		{"node port negative", []edit{nodePort(-1)}, nil, lines("spec.ports[0].nodePort InvalidPort")},
		{"unknown protocol", []edit{ports(sport("http", 80), corev1.ServicePort{Name: "b", Port: 81, Protocol: "ICMP"})}, nil,
			lines("spec.ports[1].protocol UnknownProtocol")},
		{"two ports of one name", []edit{ports(sport("http", 80), sport("http", 81))}, nil,
			lines("spec.ports[1].name DuplicateName")},
		{"two ports of one number", []edit{ports(sport("http", 80), sport("b", 80))}, nil,
			lines("spec.clusterIPs[0] EntryTaken", "spec.ports[1] NoEndpoints")},
		{"unknown type", []edit{typed("Odd")}, nil, lines("spec.type UnknownValue")},
		{"unknown internal policy", []edit{internal("Odd")}, nil, lines("spec.internalTrafficPolicy UnknownValue")},
		{"unknown external policy", []edit{external("Odd")}, nil, lines("spec.externalTrafficPolicy UnknownValue")},
		{"unknown distribution", []edit{distribute("Odd")}, nil, lines("spec.trafficDistribution UnknownValue")},
		{"empty distribution", []edit{distribute("")}, nil, nil},
		{"unknown affinity", []edit{spec(func(s *corev1.ServiceSpec) { s.SessionAffinity = "Odd" })}, nil,
			lines("spec.sessionAffinity UnknownValue")},
		{"node port without the type", []edit{nodePort(30080), typed(corev1.ServiceTypeClusterIP)}, nil,
			lines("spec.ports[0].nodePort NodePortLeftOut")},
		{"ingress without the type", []edit{ingress("192.0.2.1"), typed("")}, nil,
			lines("status.loadBalancer IngressLeftOut")},
		{"source ranges without the type", []edit{sources("10.0.0.0/8")}, nil,
			lines("spec.loadBalancerSourceRanges SourceRangesLeftOut")},
		{"health check without the policy", []edit{ingress(), health(30001)}, nil,
			lines("spec.healthCheckNodePort HealthCheckLeftOut")},
		{"health check port too large", []edit{ingress(), external("Local"), health(70000)}, nil,
			lines("spec.healthCheckNodePort InvalidPort")},
		{"all at once", []edit{clusterIPs("ten"), ipFamilies("IPv4"), nodePort(30080), externalIPs("127.0.0.1")},
			lines("*4:30080/tcp NodePort -> 10.0.0.1:8080"),
			lines("spec.clusterIPs[0] InvalidAddress", "spec.externalIPs[0] UnusableAddress")},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, svc(c.edits...), one)
			if c.fronts == nil {
				c.fronts = lines(served)
			}
			same(t, "frontends", frontLines(r.Services()), c.fronts)
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

func TestAffinity(t *testing.T) {
	const bad = "spec.sessionAffinityConfig.clientIP.timeoutSeconds InvalidTimeout"
	for _, c := range []struct {
		name     string
		edits    []edit
		want     time.Duration
		problems []string
	}{
		{"none", nil, 0, nil},
		{"None", []edit{spec(func(s *corev1.ServiceSpec) { s.SessionAffinity = corev1.ServiceAffinityNone })}, 0, nil},
		{"default", []edit{sticky()}, 3 * time.Hour, nil},
		{"given", []edit{sticky(60)}, time.Minute, nil},
		{"longest", []edit{sticky(86400)}, 24 * time.Hour, nil},
		{"too long", []edit{sticky(86401)}, 3 * time.Hour, lines(bad)},
		{"zero", []edit{sticky(0)}, 3 * time.Hour, lines(bad)},
		{"negative", []edit{sticky(-1)}, 3 * time.Hour, lines(bad)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, svc(append(c.edits, nodePort(30080))...))
			f, g := frontend(t, r, "10.96.0.1:80/tcp"), frontend(t, r, "*4:30080/tcp")
			if f.Internal.Pool.Affinity != c.want || f.Internal.Pool != g.Internal.Pool {
				t.Errorf("affinity %s, pools shared: %t; want %s and one pool", f.Internal.Pool.Affinity,
					f.Internal.Pool == g.Internal.Pool, c.want)
			}
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

func TestNames(t *testing.T) {
	r := resolved(n1, svc(nodePort(30080), external("Local")),
		svc(named("a b"), clusterIPs("fd96::2"), ports(sport("", 80))))
	var got []string
	for _, p := range r.Services().Pools() {
		got = append(got, p.Name)
		if p.ID != hashName(p.Name) {
			t.Errorf("pool %q has ID %x", p.Name, p.ID)
		}
	}
	same(t, "pools", got, lines(`shop/"a b" tcp ipv6 cluster`, "shop/web:http tcp ipv4 cluster",
		"shop/web:http tcp ipv4 local"))
	if f := frontend(t, r, "10.96.0.1:80/tcp"); f.Service != "shop/web:http" {
		t.Errorf("the frontend's Service is %q", f.Service)
	}
	// SHA-256 of the name begins so, by sha256sum.
	if id := hashName("shop/web:http tcp ipv4 cluster"); id != 0x454fbd7aa160e325 {
		t.Errorf("ID %#x", id)
	}
}
