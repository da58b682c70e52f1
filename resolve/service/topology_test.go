package service

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/source"
)

func TestTopology(t *testing.T) {
	list := func(es ...discoveryv1.Endpoint) []discoveryv1.Endpoint { return es }
	const (
		a, b = "10.0.0.1", "10.0.0.2"
		both = a + ":8080 " + b + ":8080"
	)
	for _, c := range []struct {
		name      string
		requested string // trafficDistribution
		noNode    bool   // the Node object isn't there
		noZone    bool   // it has no zone; else its zone is z1
		endpoints []discoveryv1.Endpoint
		want      string
	}{
		{"no hints", "", false, false, list(ep(a, in("z1")), ep(b, in("z2"))), both},
		{"zone hints", "", false, false, list(ep(a, forZones("z1")), ep(b, forZones("z2"))), a + ":8080"},
		{"zone hints with a distribution", "PreferClose", false, false, list(ep(a, forZones("z1")), ep(b, forZones("z2"))),
			a + ":8080"},
		{"several zones", "", false, false, list(ep(a, forZones("z2", "z1")), ep(b, forZones("z2", "z11"))), a + ":8080"},
		{"one endpoint without a hint", "", false, false, list(ep(a, forZones("z1")), ep(b)), both},
		{"an unready endpoint needs no hint", "", false, false,
			list(ep(a, forZones("z1")), ep(b, forZones("z2")), ep("10.0.0.3", notReady)), a + ":8080"},
		{"hints of unready endpoints don't count", "", false, false,
			list(ep(a, forZones("z1"), notReady), ep(b, forZones("z2"))), b + ":8080"},
		{"none for this zone", "", false, false, list(ep(a, forZones("z3")), ep(b, forZones("z2"))), both},
		{"the node has no zone", "", false, true, list(ep(a, forZones("z1")), ep(b, forZones("z2"))), both},
		{"empty zones are no hints", "", false, true, list(ep(a, forZones("")), ep(b, forZones("z2"))), both},
		{"no Node yet", "", true, false, list(ep(a, forZones("z1")), ep(b, forZones("z2"))), both},
		{"node hints", "", false, false, list(ep(a, forNodes("n2")), ep(b, forNodes("n3", "n1"))), b + ":8080"},
		{"node hints need no Node", "", true, false, list(ep(a, forNodes("n2")), ep(b, forNodes("n1"))), b + ":8080"},
		{"one endpoint without a node hint", "", false, false, list(ep(a), ep(b, forNodes("n1"))), both},
		{"none for this node, no zones", "", false, false, list(ep(a, forNodes("n2")), ep(b, forNodes("n3"))), both},
		{"none for this node, then zones", "", false, false,
			list(ep(a, forNodes("n2"), forZones("z1")), ep(b, forNodes("n3"), forZones("z2"))), a + ":8080"},
		{"node before zone", "", false, false, list(ep(a, forNodes("n2"), forZones("z1")),
			ep(b, forNodes("n1"), forZones("z2"))), b + ":8080"},
		{"all draining: no topology", "", false, false, list(ep(a, forZones("z1"), drains), ep(b, forZones("z2"), drains)),
			both},

		{"own zones, PreferClose", "PreferClose", false, false, list(ep(a, in("z1")), ep(b, in("z2"))), a + ":8080"},
		{"own zones, PreferSameZone", "PreferSameZone", false, false, list(ep(a, in("z1")), ep(b, in("z2"))), a + ":8080"},
		{"own zones, one not said", "PreferSameZone", false, false, list(ep(a, in("z1")), ep(b)), both},
		{"own zones, none here", "PreferSameZone", false, false, list(ep(a, in("z3")), ep(b, in("z2"))), both},
		{"own zones, no zone here", "PreferSameZone", false, true, list(ep(a, in("z1")), ep(b, in("z2"))), both},
		{"own zones don't count beside hints", "PreferSameZone", false, false,
			list(ep(a, in("z1")), ep(b, in("z2"), forZones("z2"))), both},
		{"hints of unready endpoints leave own zones", "PreferSameZone", false, false,
			list(ep(a, in("z1")), ep(b, in("z2")), ep("10.0.0.3", forZones("z2"), notReady)), a + ":8080"},
		{"PreferSameZone knows no nodes", "PreferSameZone", false, false,
			list(ep(a, in("z1"), on("n2")), ep(b, in("z1"), on("n1"))), both + "*"},
		{"own nodes", "PreferSameNode", false, false, list(ep(a, on("n2")), ep(b, on("n1"))), b + ":8080*"},
		{"own nodes, one not said, then zones", "PreferSameNode", false, false,
			list(ep(a, in("z1")), ep(b, in("z2"), on("n1"))), a + ":8080"},
		{"own nodes, none here, then zones", "PreferSameNode", false, false,
			list(ep(a, in("z1"), on("n2")), ep(b, in("z2"), on("n3"))), a + ":8080"},
		{"own nodes, none here, no zones", "PreferSameNode", false, false, list(ep(a, on("n2")), ep(b, on("n3"))), both},
		{"unknown distribution", "Odd", false, false, list(ep(a, in("z1")), ep(b, in("z2"))), both},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, n := svc(), node(zoned("z1"))
			if c.requested != "" {
				distribute(c.requested)(s)
			}
			if c.noZone {
				n = node()
			}
			os := []source.Object{s, eps(c.endpoints...)}
			if !c.noNode {
				os = append(os, n, node(zoned("z2"), func(n *corev1.Node) { n.Name = "n2" }))
			}
			same(t, "frontends", frontLines(resolved(n1, os...).Services()), lines(arrow+c.want))
		})
	}
}

func TestTopologyLeavesLocalAlone(t *testing.T) {
	r := resolved(n1, node(zoned("z1")), svc(internal("Local"), nodePort(30080)),
		eps(ep("10.0.0.1", on("n2"), forZones("z1")), ep("10.0.0.2", on("n1"), forZones("z2"))))
	same(t, "frontends", frontLines(r.Services()), lines("*4:30080/tcp NodePort -> 10.0.0.1:8080", arrow+"10.0.0.2:8080*"))
}

func TestWithoutANameNothingIsLocal(t *testing.T) {
	r := resolved(Config{}, svc(), eps(ep("10.0.0.1", on(""), forNodes("")), ep("10.0.0.2", on("n1"), forNodes("n1"))))
	same(t, "frontends", frontLines(r.Services()), lines(arrow+"10.0.0.1:8080 10.0.0.2:8080"))
}
