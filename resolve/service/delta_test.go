package service

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

func TestDeltaFollowsTheChange(t *testing.T) {
	a, b := svc(), svc(named("other"), clusterIPs("10.96.0.2"))
	first := eps(ep("10.0.0.1"))
	r := resolved(n1, a, b, first, slice(eps(ep("10.0.0.9")), sliceNamed("other-1"), of("other")))
	was, other := frontend(t, r, "10.96.0.1:80/tcp"), frontend(t, r, "10.96.0.2:80/tcp")

	d := r.Apply(puts(eps(ep("10.0.0.1"), ep("10.0.0.2"))))
	now := frontend(t, r, "10.96.0.1:80/tcp")
	same(t, "put", d.Services.Put, []model.ServicePart{now.Internal.Pool, now})
	same(t, "del", d.Services.Del, []model.ServicePart{was, was.Internal.Pool})
	if d.Services.Put[0] != model.ServicePart(now.Internal.Pool) || d.Services.Put[1] != model.ServicePart(now) ||
		d.Services.Del[0] != model.ServicePart(was) || d.Services.Del[1] != model.ServicePart(was.Internal.Pool) {
		t.Error("the delta holds other pointers than Services")
	}
	if frontend(t, r, "10.96.0.2:80/tcp") != other {
		t.Error("another Service's frontend changed")
	}
}

func TestPoolStaysWhereOnlyTheFrontendChanges(t *testing.T) {
	r := resolved(n1, svc(ingress("192.0.2.1"), sources("203.0.113.0/24")), eps(ep("10.0.0.1")))
	d := r.Apply(puts(svc(ingress("192.0.2.1"), sources("198.51.100.0/24"))))
	same(t, "put", partNames(d.Services.Put), lines("192.0.2.1:80/tcp"))
	same(t, "del", partNames(d.Services.Del), lines("192.0.2.1:80/tcp"))
}

func TestSliceMovesToAnotherService(t *testing.T) {
	r := resolved(n1, svc(), svc(named("other"), clusterIPs("10.96.0.2")), eps(ep("10.0.0.1")))
	r.Apply(puts(slice(eps(ep("10.0.0.1")), of("other"))))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> reject",
		"10.96.0.2:80/tcp ClusterIP -> 10.0.0.1:8080"))
	r.Apply(dels(eps()))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> reject",
		"10.96.0.2:80/tcp ClusterIP -> reject"))
	r.Apply(dels(svc(), svc(named("other"))))
	mustBeEmpty(t, r)
}

func TestSlicesBeforeTheirService(t *testing.T) {
	r := resolved(n1, eps(ep("10.0.0.1")))
	same(t, "frontends", frontLines(r.Services()), nil)
	r.Apply(puts(svc()))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080"))
	r.Apply(dels(svc()))
	same(t, "frontends", frontLines(r.Services()), nil)
	r.Apply(puts(svc()))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.1:80/tcp ClusterIP -> 10.0.0.1:8080"))
}

func TestWithinOneApplyTheLastCounts(t *testing.T) {
	r := New(n1)
	r.Apply(append(puts(svc(), eps(ep("10.0.0.1"))), append(dels(svc()), puts(svc(clusterIPs("10.96.0.7")))...)...))
	same(t, "frontends", frontLines(r.Services()), lines("10.96.0.7:80/tcp ClusterIP -> 10.0.0.1:8080"))
}

func TestProblemsAreSortedAndResolved(t *testing.T) {
	r := resolved(n1, svc(named("z"), externalIPs("x")),
		svc(named("a"), typed("Odd"), clusterIPs("10.96.0.2"), externalIPs("y")))
	same(t, "problems", problemLines(r), lines("Service shop/a spec.externalIPs[0] InvalidAddress",
		"Service shop/a spec.type UnknownValue", "Service shop/z spec.externalIPs[0] InvalidAddress"))
	r.Apply(puts(svc(named("z"))))
	r.Apply(dels(svc(named("a"))))
	same(t, "problems", problemLines(r), nil)
}

// Each line changes one thing about a Service; the parts that carry it change, and no others.
func TestWhatAChangeChanges(t *testing.T) {
	here, there := ep("10.0.0.1", on("n1")), ep("10.0.0.2", on("n2"))
	ingressAddresses := []edit{nodePort(30080), ingress("192.0.2.1"), external("Local")}
	whole, local := "shop/web:http tcp ipv4 cluster", "shop/web:http tcp ipv4 local"
	all := lines("10.96.0.1:80/tcp", "192.0.2.1:80/tcp", "*4:30080/tcp")
	two := func(s *corev1.Service) { s.Spec.Ports = append(s.Spec.Ports, sport("b", 81), sport("c", 82)) }
	turned := func(s *corev1.Service) { two(s); slices.Reverse(s.Spec.Ports) }
	for _, c := range []struct {
		name     string
		old, now []source.Object
		want     []string
	}{
		{"an endpoint elsewhere: inside alone", objects(svc(ingressAddresses...), eps(here)),
			objects(svc(ingressAddresses...), eps(here, there)), append(lines(whole), all...)},
		{"affinity", objects(svc(ingressAddresses...), eps(here)),
			objects(svc(append(ingressAddresses, sticky())...), eps(here)), append(lines(whole, local), all...)},
		{"from all sources to none", objects(svc(ingressAddresses...)),
			objects(svc(append(ingressAddresses, sources("none"))...)),
			lines("192.0.2.1:80/tcp")},
		{"policy", objects(svc(ingressAddresses...), eps(here)), objects(
			svc(append(ingressAddresses, external("Cluster"))...), eps(here)), lines("192.0.2.1:80/tcp", "*4:30080/tcp")},
		{"an unready endpoint", objects(svc(ingressAddresses...), eps(here)),
			objects(svc(ingressAddresses...), eps(here, ep("10.0.0.2", notReady))), nil},
		{"the order of ports", objects(svc(two)), objects(svc(turned)), nil},
		{"one clusterIP twice, and the order of ports with one number",
			objects(svc(clusterIPs("10.96.0.1", "10.96.0.1"), ports(sport("b", 80), sport("http", 80)))),
			objects(svc(clusterIPs("10.96.0.1", "10.96.0.1"), ports(sport("udp", 80), sport("b", 80)))),
			lines("shop/web:udp udp ipv4 cluster", "10.96.0.1:80/udp")},
		{"an age", objects(svc(born(1))), objects(svc(born(2))), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, c.old...)
			same(t, "put", partNames(r.Apply(puts(c.now...)).Services.Put), c.want)
		})
	}
}
