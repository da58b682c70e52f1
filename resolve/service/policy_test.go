package service

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
)

func TestTrafficPolicies(t *testing.T) {
	const (
		np, lb, ext = "*4:30080/tcp NodePort -> ", "192.0.2.1:80/tcp LoadBalancer -> ", "192.0.2.9:80/tcp ExternalIP -> "
		all         = "10.0.0.1:8080* 10.0.0.2:8080"
	)
	here, there := ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2"))
	every := []edit{nodePort(30080), ingress("192.0.2.1"), externalIPs("192.0.2.9")}
	all4 := func(clusterIP, other string) []string {
		return lines(np+other, arrow+clusterIP, lb+other, ext+other)
	}
	for _, c := range []struct {
		name      string
		edits     []edit
		endpoints []discoveryv1.Endpoint
		want      []string
	}{
		{"cluster", every, []discoveryv1.Endpoint{here, there}, all4(all, all)},
		{"cluster, by word", append([]edit{internal("Cluster"), external("Cluster")}, every...),
			[]discoveryv1.Endpoint{here, there}, all4(all, all)},
		{"internal local", append([]edit{internal("Local")}, every...), []discoveryv1.Endpoint{here, there},
			all4("10.0.0.1:8080*", all)},
		{"internal local, none here", append([]edit{internal("Local")}, every...), []discoveryv1.Endpoint{there},
			all4("drop", "10.0.0.2:8080")},
		{"internal local, none at all", append([]edit{internal("Local")}, every...), nil, all4("reject", "reject")},
		{"internal local, one draining elsewhere", []edit{internal("Local")},
			[]discoveryv1.Endpoint{ep("10.0.0.2", on("n2"), drains)}, lines(arrow + "drop")},
		{"internal local, one gone elsewhere", []edit{internal("Local")},
			[]discoveryv1.Endpoint{ep("10.0.0.2", on("n2"), gone)}, lines(arrow + "reject")},
		{"internal local, draining here", []edit{internal("Local")},
			[]discoveryv1.Endpoint{ep("10.0.0.1", on("n1"), drains), there}, lines(arrow + "10.0.0.1:8080*")},
		{"external local", append([]edit{external("Local")}, every...), []discoveryv1.Endpoint{here, there},
			all4(all, all+" | 10.0.0.1:8080*")},
		{"external local, none here", append([]edit{external("Local")}, every...), []discoveryv1.Endpoint{there},
			all4("10.0.0.2:8080", "10.0.0.2:8080 | drop")},
		{"external local, none at all", append([]edit{external("Local")}, every...), nil, all4("reject", "reject | reject")},
		{"external local, none ready", append([]edit{external("Local")}, every...),
			[]discoveryv1.Endpoint{ep("10.0.0.1", on("n1"), notReady)}, all4("reject", "reject | reject")},
		{"external local, draining here", append([]edit{external("Local")}, every...),
			[]discoveryv1.Endpoint{ep("10.0.0.1", on("n1"), drains), there},
			all4("10.0.0.2:8080", "10.0.0.2:8080 | 10.0.0.1:8080*")},
		{"external local, draining elsewhere", append([]edit{external("Local")}, every...),
			[]discoveryv1.Endpoint{ep("10.0.0.2", on("n2"), drains)},
			all4("10.0.0.2:8080", "10.0.0.2:8080 | drop")},
		{"external local without external entries", []edit{external("Local")}, []discoveryv1.Endpoint{there},
			lines(arrow + "10.0.0.2:8080")},
		{"both local", append([]edit{internal("Local"), external("Local")}, every...), []discoveryv1.Endpoint{here, there},
			all4("10.0.0.1:8080*", all+" | 10.0.0.1:8080*")},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, svc(c.edits...), eps(c.endpoints...))
			same(t, "frontends", frontLines(r.Services()), c.want)
			same(t, "problems", problemLines(r), nil)
		})
	}
}

func TestPoolsThatPoliciesNeed(t *testing.T) {
	const cluster, local = "shop/web:http tcp ipv4 cluster", "shop/web:http tcp ipv4 local"
	for _, c := range []struct {
		name  string
		edits []edit
		want  []string
	}{
		{"cluster", []edit{nodePort(30080)}, lines(cluster)},
		{"internal local", []edit{internal("Local")}, lines(local)},
		{"internal local with a node port", []edit{internal("Local"), nodePort(30080)}, lines(cluster, local)},
		{"external local", []edit{external("Local"), nodePort(30080)}, lines(cluster, local)},
		{"external local without external entries", []edit{external("Local")}, lines(cluster)},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, p := range resolved(n1, svc(c.edits...)).Services().Pools() {
				got = append(got, p.Name)
			}
			same(t, "pools", got, c.want)
		})
	}
}

func TestMasquerade(t *testing.T) {
	pods := Config{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	own := Config{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.128/25")}}
	cni := Config{PodInterfaces: model.Interfaces{Name: "cni0"}}
	masq := Config{MasqueradeAll: true}
	byNode := node(podCIDRs("10.244.1.0/24"))
	const all, notPods = "node,pod,external", "node,external"
	for _, c := range []struct {
		name                   string
		config                 Config
		node                   *corev1.Node
		local                  bool // externalTrafficPolicy
		in4, in6               string
		port4, port6, external string
	}{
		{"pods not told apart", Config{}, node(), false, "none", "none", all, all, all},
		{"pods of all nodes", pods, byNode, false, notPods, "none", all, all, notPods},
		{"pods of this node by configuration", own, byNode, false, notPods, "none", notPods, all, notPods},
		{"pods by podCIDRs", Config{}, byNode, false, notPods, "none", notPods, all, notPods},
		{"pods by interface", cni, byNode, false, notPods, notPods, notPods, notPods, notPods},
		{"masqueradeAll", masq, byNode, false, all, all, all, all, all},
		{"policy Local", pods, node(), true, notPods, "none", "node", "node", "node"},
		{"policy Local, masqueradeAll", masq, node(), true, all, all, "node", "node", "node"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.config.Node = "n1"
			s := svc(clusterIPs("10.96.0.1", "fd96::1"), nodePort(30080), ingress("192.0.2.1"), externalIPs("192.0.2.9"))
			if c.local {
				external("Local")(s)
			}
			r := resolved(c.config, s, c.node)
			for entry, want := range map[string]string{
				"10.96.0.1:80/tcp": c.in4, "[fd96::1]:80/tcp": c.in6,
				"*4:30080/tcp": c.port4, "*6:30080/tcp": c.port6, "192.0.2.1:80/tcp": c.external,
				"192.0.2.9:80/tcp": c.external,
			} {
				if got := frontend(t, r, entry).Masquerade.String(); got != want {
					t.Errorf("%s hides %s, want %s", entry, got, want)
				}
			}
		})
	}
}

func TestDirectServerReturn(t *testing.T) {
	on1, on2, nowhere := ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2")), ep("10.0.0.3")
	hinted := ep("10.0.0.2", on("n2"), forZones("z2"))
	for _, c := range []struct {
		name                 string
		off                  bool
		cannot               string
		edits                []edit
		endpoints            []discoveryv1.Endpoint
		fromInternal, beyond string // the clients that endpoints' nodes answer, at the clusterIP and elsewhere
		remote               string
		problems             []string
	}{
		{name: "on", endpoints: []discoveryv1.Endpoint{on1, on2, nowhere}, fromInternal: "none", beyond: "external",
			remote: "10.0.0.2"},
		{name: "off", off: true, endpoints: []discoveryv1.Endpoint{on1, on2}, fromInternal: "none", beyond: "none"},
		{name: "policy Local: no client is masqueraded", edits: []edit{external("Local")},
			endpoints: []discoveryv1.Endpoint{on1, on2}, fromInternal: "none", beyond: "none", remote: "10.0.0.2"},
		{name: "near endpoints", edits: []edit{distribute("PreferClose")}, endpoints: []discoveryv1.Endpoint{on1, on2},
			fromInternal: "none", beyond: "none", remote: "10.0.0.2"},
		{name: "hints", endpoints: []discoveryv1.Endpoint{on1, hinted}, fromInternal: "none", beyond: "none",
			remote: "10.0.0.2"},
		{name: "SCTP", edits: []edit{func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP }},
			fromInternal: "none", beyond: "none"},
		{name: "not with this data plane", cannot: "it is old", endpoints: []discoveryv1.Endpoint{on1, on2},
			fromInternal: "none", beyond: "none",
			problems: lines("DirectServerReturn " + DSRUnavailable)},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := Config{Node: "n1", DirectServerReturn: !c.off,
				Capabilities: model.Capabilities{Unsupported: model.Unsupported{NoDirect: c.cannot}}}
			if err := config.Validate(); err != nil {
				t.Error(err)
			}
			s := svc(append([]edit{nodePort(30080), ingress("192.0.2.1"), externalIPs("192.0.2.9")}, c.edits...)...)
			r := resolved(config, s, eps(c.endpoints...), node(podCIDRs("10.244.1.0/24")))
			same(t, "problems", problemLines(r), c.problems)
			for e, f := range r.Services().Frontends {
				want := c.beyond
				if f.Via == "ClusterIP" {
					want = c.fromInternal
				}
				if f.DSR.String() != want {
					t.Errorf("%s: endpoints' nodes answer %s, want %s", e, f.DSR, want)
				}
				remote := ""
				for _, b := range f.Internal.Pool.Backends {
					if b.Remote {
						remote += b.Addr.Addr().String()
					}
				}
				if remote != c.remote {
					t.Errorf("%s: on other nodes are %q, want %q", e, remote, c.remote)
				}
			}
		})
	}
}

// A hint that changes no pool still changes who is answered by endpoints' nodes.
func TestHintsEndDirectServerReturn(t *testing.T) {
	r := resolved(Config{Node: "n1", DirectServerReturn: true}, svc(nodePort(30080)),
		eps(ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2"))))
	before := frontend(t, r, "*4:30080/tcp")
	r.Apply(puts(eps(ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2"), forZones("z2")))))
	if now := frontend(t, r, "*4:30080/tcp"); before.DSR == 0 || now.DSR != 0 || now.Internal != before.Internal {
		t.Errorf("before: %+v\nnow: %+v", before, now)
	}
}

// With direct server return, the node knows all nodes' addresses, and follows them; without, others' node ports alone.
func TestNodesKnowEachOther(t *testing.T) {
	other := node(internalIPs("172.18.0.3", "fd18::3"), func(n *corev1.Node) { n.Name = "n2" })
	for _, on := range []bool{true, false} {
		r := resolved(Config{Node: "n1", DirectServerReturn: on, Addresses: addrs("127.0.0.1")},
			node(internalIPs("172.18.0.2")), other, svc(nodePort(30080)))
		want := func(when string, list ...netip.Addr) {
			t.Helper()
			if !on {
				list = nil
			}
			n := r.Services().ServiceNode
			if n.DSR != on {
				t.Errorf("%s: Direct is %t", when, n.DSR)
			}
			same(t, when, n.Nodes, list)
		}
		want("at first", addrs("172.18.0.2", "172.18.0.3", "fd18::3")...)
		moved := node(internalIPs("172.18.0.4"), func(n *corev1.Node) { n.Name = "n2" })
		if d := r.Apply(puts(moved)); len(d.Services.Put) != 1 {
			t.Errorf("on %t: another node's new address changes %v", on, d.Services.Put)
		}
		want("with another address", addrs("172.18.0.2", "172.18.0.4")...)
		r.Apply(dels(moved))
		want("when it is gone", addrs("172.18.0.2")...)
	}
}

func TestSources(t *testing.T) {
	annotated := func(text string) edit {
		return func(s *corev1.Service) {
			s.Annotations = map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: text}
		}
	}
	noOrigins := []string{}
	const field = "spec.loadBalancerSourceRanges"
	open := lines(field + " SourceRangesOneFamily")
	for _, c := range []struct {
		name     string
		edit     edit
		v4, v6   []string // nil: all are let in
		problems []string
	}{
		{"none", sources(), nil, nil, nil},
		{"of both families, sorted", sources("203.0.113.0/24", "2001:db8:1::/48", "198.51.100.0/24"),
			lines("198.51.100.0/24", "203.0.113.0/24"), lines("2001:db8:1::/48"), nil},
		{"the other family is open", sources("203.0.113.0/24"), lines("203.0.113.0/24"), nil, open},
		{"the other family is open, IPv6", sources("2001:db8:1::/48"), nil, lines("2001:db8:1::/48"), open},
		{"spaces, bits after the length", sources(" 203.0.113.7/24 "), lines("203.0.113.0/24"), nil, open},
		{"one inside another, twice the same", sources("203.0.113.128/25", "203.0.113.0/24", "203.0.113.0/24"),
			lines("203.0.113.0/24"), nil, open},
		{"unreadable among others", sources("203.0.113.0/24", "all"), lines("203.0.113.0/24"), noOrigins,
			lines(field + "[1] InvalidRange")},
		{"unreadable alone allows no source", sources("203.0.113.0/33"), noOrigins, noOrigins,
			lines(field + "[0] InvalidRange")},
		{"IPv4-mapped", sources("::ffff:203.0.113.0/120"), lines("203.0.113.0/24"), nil, open},
		{"half IPv4-mapped", sources("::ffff:0.0.0.0/90"), noOrigins, noOrigins, lines(field + "[0] InvalidRange")},
		{"leading zeros", sources("203.000.113.000/024"), lines("203.0.113.0/24"), nil, open},
		{"an address without a length", sources("203.0.113.1"), noOrigins, noOrigins, lines(field + "[0] InvalidRange")},
		{"this node's address lets the ingress address in", sources("172.18.0.0/16"),
			lines("172.18.0.0/16", "192.0.2.1/32"), nil, open},
		{"of both families", sources("172.18.0.0/16", "fd18::/64"), lines("172.18.0.0/16", "192.0.2.1/32"),
			lines("2001:db8::1/128", "fd18::/64"), nil},
		{"everybody", sources("0.0.0.0/0"), lines("0.0.0.0/0"), nil, nil},
		{"the annotation restricts no source", annotated("203.0.113.0/24"), nil, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, node(internalIPs("172.18.0.2", "fd18::2")),
				svc(clusterIPs("10.96.0.1", "fd96::1"), nodePort(30080),
					ingress("192.0.2.1", "2001:db8::1"), externalIPs("192.0.2.9"), c.edit))
			same(t, "IPv4", texts(frontend(t, r, "192.0.2.1:80/tcp").Sources), c.v4)
			same(t, "IPv6", texts(frontend(t, r, "[2001:db8::1]:80/tcp").Sources), c.v6)
			for _, e := range lines("10.96.0.1:80/tcp", "*4:30080/tcp", "192.0.2.9:80/tcp") {
				if s := frontend(t, r, e).Sources; s != nil {
					t.Errorf("%s lets in only %s", e, s)
				}
			}
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

// texts shows prefixes: nil stays nil, empty stays empty.
func texts(ps []netip.Prefix) []string {
	if ps == nil {
		return nil
	}
	l := []string{}
	for _, p := range ps {
		l = append(l, p.String())
	}
	return l
}

// A health check is served where node ports are, as with kube-proxy.
func TestHealthCheckAddresses(t *testing.T) {
	for _, c := range []struct {
		list string // comma-separated
		want string
	}{
		{"", "all"},
		{"all", "all"},
		{"0.0.0.0/0,::/0", "all"},
		{"primary", "172.18.0.2 fd18::2"},
		{"172.18.0.0/16,fd00::/8", "172.18.0.2 172.18.0.3 fd18::2"},
		{"127.0.0.0/8,fd18::2/128", "127.0.0.1 fd18::2"},
		{"192.0.2.0/24,2001:db8::/32", ""},
	} {
		config := n1
		if c.list != "" {
			config.NodePortAddresses = strings.Split(c.list, ",")
		}
		r := resolved(config, node(internalIPs("172.18.0.2", "172.18.0.3", "fd18::2")),
			svc(nodePort(30080), ingress("192.0.2.1"), external("Local"), health(30900)))
		got := "all"
		if at := r.Services().HealthChecks[0].Addresses; at != nil {
			got = strings.Trim(sprint(at), "[]")
		}
		same(t, c.list, got, c.want)
	}
	r := resolved(Config{Node: "n1", NodePortAddresses: lines("primary")}, node(internalIPs("172.18.0.2")),
		svc(ingress("192.0.2.1"), external("Local"), health(30900)))
	d := r.Apply(puts(node(internalIPs("172.18.0.3"))))
	if len(d.Health.Put) != 1 || sprint(d.Health.Put[0].Addresses) != "[172.18.0.3]" || len(d.Health.Del) != 1 {
		t.Errorf("the node changedEntries: %v, %v", d.Health.Put, d.Health.Del)
	}
}

func TestHealthCheck(t *testing.T) {
	local := []edit{nodePort(30080), ingress("192.0.2.1"), external("Local"), health(30900)}
	with := func(edits ...edit) []edit { return append(append([]edit{}, local...), edits...) }
	two := ports(sport("http", 80), sport("https", 443))
	twoPorts := slicePorts(eport("http", 8080), eport("https", 8443))
	for _, c := range []struct {
		name  string
		edits []edit
		slice []*discoveryv1.EndpointSlice
		want  []*model.HealthCheck
	}{
		{"none here", local, []*discoveryv1.EndpointSlice{eps(ep("10.0.0.2", on("n2")))},
			[]*model.HealthCheck{{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 30900}}},
		{"ready ones only", local, []*discoveryv1.EndpointSlice{
			eps(ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n1"), drains), ep("10.0.0.3", on("n1"), notReady))},
			[]*model.HealthCheck{{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 30900,
				Local: 1}}},
		{"once over ports", with(two), []*discoveryv1.EndpointSlice{
			slice(eps(ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n1"))), twoPorts)},
			[]*model.HealthCheck{{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 30900,
				Local: 2}}},
		{"once over families", with(clusterIPs("10.96.0.1", "fd96::1")),
			[]*discoveryv1.EndpointSlice{eps(ep("10.0.0.1", on("n1"))),
				slice(eps(ep("fd00::1", on("n1")), ep("fd00::2", on("n1"))), sliceNamed("web-6"))}, []*model.HealthCheck{
				{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"}, Port: 30900, Local: 2}}},
		{"policy Cluster", with(external("Cluster")), nil, nil},
		{"no load balancer", with(typed(corev1.ServiceTypeNodePort)), nil, nil},
		{"no port", with(health(0)), nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, svc(c.edits...))
			for _, s := range c.slice {
				r.Apply(puts(s))
			}
			same(t, "health checks", r.Services().HealthChecks, c.want)
		})
	}
}

// Endpoints of UDP and SCTP that serve but get no new flow are told, so that flows stay with them.
func TestUnselected(t *testing.T) {
	both := []discoveryv1.Endpoint{ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2"))}
	for _, c := range []struct {
		name      string
		port      string
		edits     []edit
		endpoints []discoveryv1.Endpoint
		want      []string
	}{
		{"all selected", "udp", nil, both, lines("udp cluster: -")},
		{"TCP", "http", []edit{external("Local")}, both, lines("http cluster: -", "http local: -")},
		{"policy", "udp", []edit{external("Local")}, both, lines("udp cluster: -", "udp local: 10.0.0.2")},
		{"policy, SCTP, none here", "sctp", []edit{internal("Local"), external("Local")}, both[1:],
			lines("sctp cluster: -", "sctp local: 10.0.0.2")},
		{"terminating", "udp", nil, []discoveryv1.Endpoint{both[0], ep("10.0.0.3", drains)}, lines("udp cluster: 10.0.0.3")},
		{"terminating, none ready", "udp", nil, []discoveryv1.Endpoint{ep("10.0.0.3", drains)}, lines("udp cluster: -")},
		{"gone", "udp", nil, []discoveryv1.Endpoint{both[0], ep("10.0.0.3", gone)}, lines("udp cluster: -")},
		{"not ready", "udp", nil, []discoveryv1.Endpoint{both[0], ep("10.0.0.3", notReady)}, lines("udp cluster: -")},
		{"topology", "udp", []edit{distribute("PreferSameNode")}, both, lines("udp cluster: 10.0.0.2")},
	} {
		t.Run(c.name, func(t *testing.T) {
			port := sport(c.port, 53, 30053)
			edits := append([]edit{typed(corev1.ServiceTypeNodePort), ports(port)}, c.edits...)
			var got []string
			for _, p := range resolved(n1, svc(edits...), slice(eps(c.endpoints...), slicePorts(eport(c.port, 5353)))).
				Services().Pools() {
				text := "-"
				if len(p.Unselected) > 0 {
					text = p.Unselected[0].Addr.Addr().String()
				}
				got = append(got, c.port+p.Name[strings.LastIndexByte(p.Name, ' '):]+": "+text)
			}
			same(t, "pools", got, c.want)
		})
	}
}
