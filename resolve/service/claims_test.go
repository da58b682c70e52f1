package service

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// owners shows which Service has each entry.
func owners(r *Resolver) (lines []string) {
	for _, f := range r.Services().Sorted() {
		lines = append(lines, f.Entry.String()+" "+strings.TrimSuffix(f.Service, ":http"))
	}
	return lines
}

func TestConflicts(t *testing.T) {
	a := func(edits ...edit) *corev1.Service { return svc(append([]edit{named("a")}, edits...)...) }
	b := func(edits ...edit) *corev1.Service {
		return svc(append([]edit{named("b"), clusterIPs("10.96.0.2")}, edits...)...)
	}
	one := clusterIPs("10.96.0.1")
	for _, c := range []struct {
		name     string
		a, b     *corev1.Service
		want     []string
		problems []string
		then     []string // when the winner has gone
	}{
		{"the first by name", a(), b(one), lines("10.96.0.1:80/tcp shop/a"),
			lines("Service shop/b spec.clusterIPs[0] EntryTaken"), lines("10.96.0.1:80/tcp shop/b")},
		{"the older", a(born(2)), b(one, born(1)), lines("10.96.0.1:80/tcp shop/b"),
			lines("Service shop/a spec.clusterIPs[0] EntryTaken"), lines("10.96.0.1:80/tcp shop/a")},
		{"of one age, by name", a(born(1)), b(one, born(1)), lines("10.96.0.1:80/tcp shop/a"),
			lines("Service shop/b spec.clusterIPs[0] EntryTaken"), lines("10.96.0.1:80/tcp shop/b")},
		{"an age before none", a(), b(one, born(9)), lines("10.96.0.1:80/tcp shop/b"),
			lines("Service shop/a spec.clusterIPs[0] EntryTaken"), lines("10.96.0.1:80/tcp shop/a")},
		{"a clusterIP before anything else", a(externalIPs("10.96.0.2"), born(1)), b(born(2)),
			lines("10.96.0.1:80/tcp shop/a", "10.96.0.2:80/tcp shop/b"),
			lines("Service shop/a spec.externalIPs[0] AddressRefused"), lines("10.96.0.1:80/tcp shop/a",
				"10.96.0.2:80/tcp shop/a")},
		{"external address", a(externalIPs("192.0.2.1")), b(ingress("192.0.2.1"), born(1)),
			lines("10.96.0.1:80/tcp shop/a", "10.96.0.2:80/tcp shop/b", "192.0.2.1:80/tcp shop/b"),
			lines("Service shop/a spec.externalIPs[0] EntryTaken"), lines("10.96.0.1:80/tcp shop/a", "192.0.2.1:80/tcp shop/a")},
		{"node port", a(nodePort(30080)), b(nodePort(30080)),
			lines("*4:30080/tcp shop/a", "10.96.0.1:80/tcp shop/a", "10.96.0.2:80/tcp shop/b"),
			lines("Service shop/b spec.ports[0].nodePort EntryTaken"), lines("*4:30080/tcp shop/b", "10.96.0.2:80/tcp shop/b")},
		{"another port is no conflict", a(), b(one, ports(sport("http", 81))),
			lines("10.96.0.1:80/tcp shop/a", "10.96.0.1:81/tcp shop/b"), nil, nil},
		{"another protocol is no conflict", a(), b(one, ports(sport("udp", 80))),
			lines("10.96.0.1:80/tcp shop/a", "10.96.0.1:80/udp shop/b:udp"), nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, os := range [][]source.Object{{c.a, c.b}, {c.b, c.a}} {
				r := resolved(n1, os...)
				same(t, "owners", owners(r), c.want)
				same(t, "problems", problemLines(r), c.problems)
				if c.then == nil {
					continue
				}
				winner, loser := c.a, c.b
				if strings.Contains(c.problems[0], "shop/a") {
					winner, loser = c.b, c.a
				}
				r.Apply(dels(winner))
				same(t, "owners then", owners(r), c.then)
				same(t, "problems then", problemLines(r), nil)
				r.Apply(puts(winner))
				same(t, "owners again", owners(r), c.want)
				r.Apply(dels(loser))
				same(t, "problems without the loser", problemLines(r), nil)
			}
		})
	}
}

func TestConflictIsNamed(t *testing.T) {
	config := n1
	config.ExternalIPs = AnyExternalIPs
	r := resolved(config, svc(named("a")), svc(named("b"), externalIPs("10.96.0.1"), clusterIPs("10.96.0.2")))
	m := r.Problems()[0].Message
	for _, word := range lines("10.96.0.1:80/tcp", "shop/a:http", "shop/b:http", "ClusterIP", "ExternalIP") {
		if !strings.Contains(m, word) {
			t.Errorf("no %s in %q", word, m)
		}
	}
}

func TestConflictInDelta(t *testing.T) {
	a, b := svc(named("a"), born(2)), svc(named("b"), born(1))
	r := resolved(n1, a)
	was := frontend(t, r, "10.96.0.1:80/tcp")
	d := r.Apply(puts(b))
	now := frontend(t, r, "10.96.0.1:80/tcp")
	same(t, "put", partNames(d.Services.Put), lines(now.Internal.Pool.Name, now.Entry.String(), "10.96.0.1"))
	same(t, "del", partNames(d.Services.Del), lines("10.96.0.1", was.Entry.String(), was.Internal.Pool.Name))
	if d := r.Apply(puts(b)); !d.Empty() {
		t.Errorf("the same again changes %v", d)
	}
	if d := r.Apply(dels(b)); !slices.Contains(d.Services.Put, model.ServicePart(was)) {
		t.Error("the loser comes back with another pointer")
	}
}

func TestThreeClaimOneAddress(t *testing.T) {
	all := objects(svc(named("a"), born(3)), svc(named("b"), born(1)), svc(named("c"), born(2)))
	r := resolved(n1, all...)
	for _, want := range lines("b", "c", "a") {
		same(t, "owners", owners(r), lines("10.96.0.1:80/tcp shop/"+want))
		r.Apply(dels(svc(named(want))))
	}
	same(t, "owners", owners(r), nil)
	if n := len(r.entries.holder) + len(r.entries.rivals) + len(r.ids.holder) + len(r.services); n != 0 {
		t.Errorf("%d things are left", n)
	}
}

func TestOneServiceWithOneEntryTwice(t *testing.T) {
	r := resolved(n1, svc(ingress("192.0.2.1"), externalIPs("192.0.2.1", "10.96.0.1"), sources("203.0.113.0/24")))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> reject",
		"192.0.2.1:80/tcp LoadBalancer -> reject"))
	same(t, "problems", problemLines(r), nil)
}

func TestNodeAddressAsExternalIP(t *testing.T) {
	r := resolved(n1, svc(externalIPs("172.18.0.2")))
	same(t, "problems before", problemLines(r), nil)
	r.Apply(puts(node(internalIPs("172.18.0.2"))))
	same(t, "problems", problemLines(r), lines("spec.externalIPs[0] NodeAddress"))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> reject",
		"172.18.0.2:80/tcp ExternalIP -> reject"))
	r.Apply(puts(node()))
	same(t, "problems after", problemLines(r), nil)
}

func TestHealthPortInUse(t *testing.T) {
	a := svc(named("a"), ingress(), external("Local"), health(30900), born(2))
	b := svc(named("b"), ingress(), external("Local"), health(30900), born(1), clusterIPs("10.96.0.2"))
	r := resolved(n1, a)
	d := r.Apply(puts(b))
	same(t, "put", d.Health.Put, []*model.HealthCheck{
		{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "b"}, Port: 30900}})
	same(t, "del", d.Health.Del, []*model.HealthCheck{
		{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "a"}, Port: 30900}})
	same(t, "problems", problemLines(r), lines("Service shop/a spec.healthCheckNodePort HealthPortTaken"))
	same(t, "owners", owners(r), lines("10.96.0.1:80/tcp shop/a", "10.96.0.2:80/tcp shop/b"))
	r.Apply(dels(b))
	same(t, "health checks", r.Services().HealthChecks,
		[]*model.HealthCheck{{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "a"}, Port: 30900}})
}

func TestLoserRetainsItsHealthCheck(t *testing.T) {
	r := resolved(n1, svc(named("a")), svc(named("b"), ingress("192.0.2.1"), external("Local"), health(30900)))
	same(t, "owners", owners(r), lines("10.96.0.1:80/tcp shop/a", "192.0.2.1:80/tcp shop/b"))
	same(t, "health checks", r.Services().HealthChecks,
		[]*model.HealthCheck{{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "b"}, Port: 30900}})
}

func TestLosersGoInAnyOrder(t *testing.T) {
	r := resolved(n1, svc(named("a")), svc(named("b")), svc(named("c")), svc(named("d")))
	for i, gone := range lines("c", "d", "b") {
		r.Apply(dels(svc(named(gone))))
		same(t, "owners", owners(r), lines("10.96.0.1:80/tcp shop/a"))
		same(t, "number of problems", len(r.Problems()), 2-i)
	}
}

func TestPoolIDCollision(t *testing.T) {
	a, b := svc(named("a"), nodePort(30080)), svc(named("b"), clusterIPs("10.96.0.2"))
	for _, os := range [][]source.Object{{a, b}, {b, a}} {
		r := New(n1)
		r.hash = func(string) uint64 { return 7 }
		r.Apply(puts(os...))
		same(t, "owners", owners(r), lines("*4:30080/tcp shop/a", "10.96.0.1:80/tcp shop/a"))
		same(t, "problems", problemLines(r), lines("Service shop/b metadata.name PoolIDTaken"))
		for _, name := range lines(`"shop/a:http tcp ipv4 cluster"`, `"shop/b:http tcp ipv4 cluster"`) {
			if m := r.Problems()[0].Message; !strings.Contains(m, name) {
				t.Errorf("no %s in %q", name, m)
			}
		}
		r.Apply(dels(a))
		same(t, "owners then", owners(r), lines("10.96.0.2:80/tcp shop/b"))
		same(t, "problems then", problemLines(r), nil)
	}
}

func TestPoolIDCollisionWithinOneService(t *testing.T) {
	r := New(n1)
	r.hash = func(string) uint64 { return 7 }
	r.Apply(puts(svc(nodePort(30080), external("Local"))))
	same(t, "owners", owners(r), lines("10.96.0.1:80/tcp shop/web"))
	same(t, "problems", problemLines(r), lines("metadata.name PoolIDTaken"))
}
