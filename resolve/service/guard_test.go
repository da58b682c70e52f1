package service

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
)

func sliceIn(namespace, name string) editEps {
	return func(s *discoveryv1.EndpointSlice) { s.Namespace, s.Name = namespace, name }
}

// kubernetes is the Service default/kubernetes and its slice, of an API server at 172.18.0.11:6443.
func kubernetes() []source.Object {
	return objects(svc(inNamespace("default"), named("kubernetes"), clusterIPs("10.96.0.9"),
		ports(sport("https", 443))),
		slice(eps(ep("172.18.0.11")), sliceIn("default", "kubernetes"), of("kubernetes"),
			slicePorts(eport("https", 6443))))
}

func TestCapturedAddresses(t *testing.T) {
	at := func(p int32) edit { return ports(sport("http", p)) }
	other := svc(named("other"), inNamespace("b"), clusterIPs("10.96.0.2"))
	n2 := func(n *corev1.Node) { n.Name = "n2" }
	for _, c := range []struct {
		name    string
		svc     *corev1.Service
		refused map[ExternalIPs]bool
	}{
		{"a pod of another node", svc(externalIPs("10.2.0.7")), map[ExternalIPs]bool{SafeExternalIPs: true}},
		{"another Service's ClusterIP, another port", svc(externalIPs("10.96.0.2"), at(81)),
			map[ExternalIPs]bool{SafeExternalIPs: true}},
		{"the API server", svc(externalIPs("172.18.0.11"), at(6443)), map[ExternalIPs]bool{SafeExternalIPs: true,
			AnyExternalIPs: true}},
		{"the API server by configuration", svc(externalIPs("192.0.2.99"), at(443)),
			map[ExternalIPs]bool{SafeExternalIPs: true, AnyExternalIPs: true}},
		{"another port of the API server's node", svc(externalIPs("172.18.0.11"), at(80)), nil},
		{"an address outside", svc(externalIPs("203.0.113.5")), nil},
		{"ingress at the API server", svc(ingress("172.18.0.11"), at(6443)), map[ExternalIPs]bool{SafeExternalIPs: true,
			AnyExternalIPs: true, RefuseExternalIPs: true}},
		{"ingress at another Service's ClusterIP", svc(ingress("10.96.0.2"), at(81)),
			map[ExternalIPs]bool{SafeExternalIPs: true, AnyExternalIPs: true, RefuseExternalIPs: true}},
		{"ingress in a range of pods", svc(ingress("10.2.0.7")), nil},
	} {
		for _, choice := range []ExternalIPs{SafeExternalIPs, AnyExternalIPs, RefuseExternalIPs} {
			t.Run(c.name+"/"+string(choice), func(t *testing.T) {
				config := n1
				config.ExternalIPs, config.APIServers = choice, []netip.AddrPort{netip.MustParseAddrPort("192.0.2.99:443")}
				around := append(kubernetes(), other, node(podCIDRs("10.1.0.0/16")), node(n2, podCIDRs("10.2.0.0/16"),
					internalIPs("172.18.0.11")))
				want, wantProblems := 3, 0 // kubernetes, other, its ClusterIP
				refused := c.refused[choice]
				if choice == RefuseExternalIPs && len(c.svc.Spec.ExternalIPs) > 0 {
					refused = true
				}
				if refused {
					wantProblems++
				} else {
					want++
				}
				for _, order := range [][]source.Object{append(around, c.svc), append(objects(c.svc), around...)} {
					r := New(config)
					for _, o := range order {
						r.Apply(puts(o))
					}
					if n := len(r.Services().Frontends); n != want {
						t.Errorf("%d frontends, want %d: %q", n, want, frontLines(r.Services()))
					}
					same(t, "problems", len(problemLines(r)), wantProblems)
					r.Apply(dels(order...))
					mustBeEmpty(t, r)
				}
			})
		}
	}
}

// What is refused holds no address from another Service.
func TestRefusedServiceClaimsNothing(t *testing.T) {
	r := resolved(n1, node(podCIDRs("10.1.0.0/16")), svc(named("grab"), externalIPs("10.1.0.7"), born(1)),
		svc(named("lb"), clusterIPs("10.96.0.2"), ingress("10.1.0.7"), born(2)))
	same(t, "frontends", owners(r), lines("10.1.0.7:80/tcp shop/lb", "10.96.0.1:80/tcp shop/grab",
		"10.96.0.2:80/tcp shop/lb"))
	r.Apply(puts(node()))
	same(t, "without the range", owners(r), lines("10.1.0.7:80/tcp shop/grab", "10.96.0.1:80/tcp shop/grab",
		"10.96.0.2:80/tcp shop/lb"))
}

func TestEndpointsThatAreEntries(t *testing.T) {
	self := slice(eps(ep("10.96.0.1"), ep("10.0.0.1")), slicePorts(eport("http", 80)))
	one := "10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:80"
	runScenarios(t, []scenario{
		{"its own", Config{}, objects(svc(), self), lines(one), lines(" EndpointIsEntry")},
		{"each other's", Config{}, objects(svc(named("b"), clusterIPs("10.96.0.2")), svc(),
			slice(eps(ep("10.96.0.2")), slicePorts(eport("http", 80))),
			slice(eps(ep("10.96.0.1")), slicePorts(eport("http", 80)), of("b"), sliceNamed("b-1"))),
			lines("10.96.0.1:80/tcp ClusterIP -> reject", "10.96.0.2:80/tcp ClusterIP -> reject"), lines("Service "+
				"shop/b  EndpointIsEntry", " EndpointIsEntry")},
		{"another port is none", Config{}, objects(svc(), slice(eps(ep("10.96.0.1")), slicePorts(eport("http", 81)))),
			lines("10.96.0.1:80/tcp ClusterIP -> 10.96.0.1:81"), nil},
		{"a ClusterIP of another namespace", Config{}, objects(svc(), svc(inNamespace("b"), clusterIPs("10.96.0.2")),
			slice(eps(ep("10.96.0.2")), slicePorts(eport("http", 80)))),
			lines("10.96.0.1:80/tcp ClusterIP -> reject", "10.96.0.2:80/tcp ClusterIP -> reject"), lines(" " +
				"EndpointIsEntry")},
		{"an external address of another namespace: each keeps what it has", Config{},
			objects(svc(), svc(inNamespace("b"), clusterIPs("10.96.0.2"), externalIPs("203.0.113.5")),
				slice(eps(ep("203.0.113.5")), slicePorts(eport("http", 80)))),
			lines("10.96.0.1:80/tcp ClusterIP -> 203.0.113.5:80", "10.96.0.2:80/tcp ClusterIP -> reject",
				"203.0.113.5:80/tcp ExternalIP -> reject"), nil},
		{"a node port of its own namespace, by any node", Config{}, objects(svc(nodePort(30080)), node(),
			slice(eps(ep("172.18.0.3")), slicePorts(eport("http", 30080))),
			node(func(n *corev1.Node) { n.Name = "n2" }, internalIPs("172.18.0.3"))),
			lines("*4:30080/tcp NodePort -> reject", "10.96.0.1:80/tcp ClusterIP -> reject"), lines(" " +
				"EndpointIsEntry")},
	})
	r := resolved(n1, slice(eps(ep("10.96.0.2")), slicePorts(eport("http", 80))), svc())
	same(t, "before", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> 10.96.0.2:80"))
	late := svc(named("late"), clusterIPs("10.96.0.2"))
	r.Apply(puts(late))
	same(t, "when it comes to be an entry", frontLines(r.Services())[:1], lines("10.96.0.1:80/tcp ClusterIP -> reject"))
	r.Apply(dels(late))
	same(t, "when it is none any more", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> 10.96.0.2:80"))
}

// An endpoint at a Node's address is looked at again when the namespace has other node ports.
func TestEndpointComesToBeANodePort(t *testing.T) {
	late := func(edits ...edit) *corev1.Service {
		return svc(append([]edit{named("late"), clusterIPs("10.96.0.2")}, edits...)...)
	}
	r := resolved(n1, node(internalIPs("172.18.0.3")), svc(),
		slice(eps(ep("172.18.0.3")), slicePorts(eport("http", 30080))), late())
	want := "10.96.0.1:80/tcp ClusterIP -> 172.18.0.3:30080"
	same(t, "before", frontLines(r.Services())[0], want)
	r.Apply(puts(late(nodePort(30080))))
	same(t, "with the node port", frontLines(r.Services())[1], "10.96.0.1:80/tcp ClusterIP -> reject")
	r.Apply(puts(late()))
	same(t, "without it", frontLines(r.Services())[0], want)
}

// Pool IDs depend on the cluster, so that a collision can't be searched for.
func TestIDsDependOnTheCluster(t *testing.T) {
	id := func(uid string) uint64 {
		all := kubernetes()
		all[0].SetUID(types.UID(uid))
		all = append(all, svc())
		observed := New(n1)
		observed.Observe(puts(all...)) // and once more, as where a list changes while it comes
		observed.Observe(puts(all...))
		observed.Apply(nil)
		n := frontend(t, resolved(n1, all...), "10.96.0.1:80/tcp").Internal.Pool.ID
		if m := frontend(t, observed, "10.96.0.1:80/tcp").Internal.Pool.ID; m != n {
			t.Errorf("the ID is %x, and %x where objects come one after the other", n, m)
		}
		return n
	}
	if id("a") == id("b") || id("") != hashName("shop/web:http tcp ipv4 cluster") {
		t.Errorf("IDs %x, %x, %x", id("a"), id("b"), id(""))
	}
}

// What a namespace is told of its own objects names no other namespace's.
func TestPublicTextNamesNoOtherObject(t *testing.T) {
	theirs := func(edits ...edit) *corev1.Service {
		return svc(append([]edit{inNamespace("bank"), named("vault"), clusterIPs("10.96.0.2"), born(1)}, edits...)...)
	}
	r := resolved(n1, theirs(ingress("192.0.2.1"), external("Local"), health(30900)),
		svc(ingress("192.0.2.1"), external("Local"), health(30900), born(2)), slice(eps(ep("10.96.0.2")),
			slicePorts(eport("http", 80))))
	same(t, "problems", problemLines(r), lines(" EndpointIsEntry", "spec.healthCheckNodePort HealthPortTaken",
		"status.loadBalancer.ingress[0].ip EntryTaken"))
	for _, p := range r.Problems() {
		if p.Public == "" || strings.Contains(p.Public, "bank") || !strings.Contains(p.Message, "bank/vault") {
			t.Errorf("%s: public %q", p, p.Public)
		}
	}
}
