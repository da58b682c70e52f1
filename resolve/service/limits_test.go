package service

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

func inNamespace(name string) edit { return func(s *corev1.Service) { s.Namespace = name } }

// manyPorts sets n ports of a Service, from 1000.
func manyPorts(n int) edit {
	return func(s *corev1.Service) {
		s.Spec.Ports = nil
		for i := range n {
			s.Spec.Ports = append(s.Spec.Ports, sport(fmt.Sprintf("p%d", i), int32(1000+i)))
		}
	}
}

func manyExternalIPs(n int) edit {
	return func(s *corev1.Service) {
		for i := range n {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("203.%d.%d.%d", i>>16, i>>8&255, i&255))
		}
	}
}

func manyRanges(n int) edit {
	return func(s *corev1.Service) {
		for i := range n {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("100.%d.%d.0/25",
				i>>8, i&255))
		}
	}
}

// manyEndpoints makes the slice of a Service's ports from manyPorts, with n endpoints.
func manyEndpoints(ports, n int) *discoveryv1.EndpointSlice {
	s := eps()
	for i := range n {
		s.Endpoints = append(s.Endpoints, ep(fmt.Sprintf("10.%d.%d.%d", 1+i>>16, i>>8&255, i&255)))
	}
	s.Ports = nil
	for i := range ports {
		s.Ports = append(s.Ports, eport(fmt.Sprintf("p%d", i), int32(1000+i)))
	}
	return s
}

func scheduler(name string) edit {
	return func(s *corev1.Service) { s.Annotations = map[string]string{SchedulerAnnotation: name} }
}

// reasons returns the reasons of all problems of an object.
func reasons(r *Resolver, k source.Key) (list []string) {
	for _, p := range r.Problems() {
		if p.Object == k {
			list = append(list, p.Reason)
		}
	}
	return list
}

// allocated returns how many MiB f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return (after.TotalAlloc - before.TotalAlloc) >> 20
}

// Products of a Service's lists are counted before anything of them is made.
func TestProductsAreBounded(t *testing.T) {
	for _, c := range []struct {
		name    string
		objects []source.Object
		reason  string
		mib     uint64
	}{
		{"addresses by ports", objects(svc(manyExternalIPs(1000), manyPorts(1000))), "TooManyFrontends", 16},
		{"one address by ports", objects(svc(manyPorts(20000))), "TooManyFrontends", 24},
		{"endpoints by ports", objects(svc(manyPorts(1000)), manyEndpoints(1000, 1000)), "TooManyEndpoints", 24},
		{"source ranges by ports", objects(svc(ingress("192.0.2.1"), manyPorts(1000), manyRanges(1000))),
			"TooManyFrontends", 24},
		{"tables by ports", objects(svc(manyPorts(650), scheduler("maglev")), manyEndpoints(650, 11)), "TableTooLarge",
			16},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := New(n1)
			if n := allocated(func() { r.Apply(puts(c.objects...)) }); n > c.mib {
				t.Errorf("%d MiB allocated, want at most %d", n, c.mib)
			}
			if !slices.Contains(reasons(r, source.KeyOf(svc())), c.reason) {
				t.Errorf("problems %v, want %s among them", reasons(r, source.KeyOf(svc())), c.reason)
			}
			s := r.Services()
			backends, ranges := 0, 0
			for _, p := range s.Pools() {
				backends += len(p.Backends)
				if p.Scheduler == model.Maglev {
					t.Fatalf("pool %s has a table", p.Name)
				}
			}
			for _, f := range s.Frontends {
				ranges += len(f.Sources)
			}
			if l := DefaultLimits.Service; len(s.Frontends) == 0 || len(s.Frontends) > l.Frontends ||
				backends > l.Slots || ranges > rangesPerFrontend*l.Frontends {
				t.Errorf("%d frontends, %d backends and %d source ranges are served", len(s.Frontends), backends,
					ranges)
			}
			r.Apply(dels(c.objects...))
			mustBeEmpty(t, r)
		})
	}
}

// Two Services that want each other's entries, all of them: the problems are ten and a count, and cost nothing again.
func TestConflictsAreCounted(t *testing.T) {
	r := resolved(n1, svc(manyExternalIPs(300), manyPorts(300), born(1)), svc(named("late"), clusterIPs("10.96.0.2"),
		manyExternalIPs(300), manyPorts(300), born(2)))
	key := source.KeyOf(svc(named("late")))
	if got := reasons(r, key); len(got) != mostOfObject+1 || !slices.Contains(got, "MoreProblems") {
		t.Errorf("problems of the later Service: %v", got)
	}
	first := r.Problems()
	if n := testing.AllocsPerRun(10, func() { r.Problems() }); n != 0 {
		t.Errorf("asking again allocates %v times", n)
	}
	r.Apply(puts(svc(named("other"), clusterIPs("10.96.0.3"))))
	if second := r.Problems(); &second[0] != &first[0] {
		t.Error("a change that has no problem makes the list anew")
	}
}

// A namespace takes no more than its share while others want the rest, the oldest of it first; what they leave is lent.
func TestNamespacesShare(t *testing.T) {
	config := n1
	config.Limits = Limits{Total: Bounds{Frontends: 10, Slots: 1000}}
	greedy := func(i int) *corev1.Service {
		return svc(inNamespace("greedy"), named(fmt.Sprintf("g%d", i)), clusterIPs(fmt.Sprintf("10.96.1.%d", i)),
			born(int64(i)))
	}
	served := func(r *Resolver, namespace string) (names []string) {
		for _, f := range r.Services().Sorted() {
			if ns, name, _ := strings.Cut(f.Service, "/"); ns == namespace {
				names = append(names, strings.TrimSuffix(name, ":http"))
			}
		}
		slices.Sort(names)
		return names
	}
	r := New(config)
	for i := range 9 {
		r.Apply(puts(greedy(i)))
	}
	same(t, "alone", len(served(r, "greedy")), 9)
	for i := range 4 {
		r.Apply(puts(svc(inNamespace("late"), named(fmt.Sprintf("l%d", i)), clusterIPs(fmt.Sprintf("10.96.2.%d", i)),
			born(int64(100+i)))))
	}
	same(t, "of the others", served(r, "late"), lines("l0", "l1", "l2", "l3"))
	same(t, "the oldest, and what is left", served(r, "greedy"), lines("g0", "g1", "g2", "g3", "g4", "g5"))
	for s := range r.excluded {
		if s.entries != nil || s.groups[0].pools[cluster].name != "" {
			t.Errorf("%s was served, is not, and keeps its entries", s.key)
		}
	}
	same(t, "the rest is named", reasons(r, source.KeyOf(greedy(8))), lines("ShareExceeded"))
	r.Apply(dels(greedy(0)))
	same(t, "one comes after", served(r, "greedy"), lines("g1", "g2", "g3", "g4", "g5", "g6"))
	for i := range 4 {
		r.Apply(dels(svc(inNamespace("late"), named(fmt.Sprintf("l%d", i)))))
	}
	same(t, "alone again", len(served(r, "greedy")), 8)
	same(t, "problems", problemLines(r), nil)
}

// What Kubernetes documents as supported passes.
func TestDocumentedScalePasses(t *testing.T) {
	var all []source.Object
	for i := range 10000 {
		ns := fmt.Sprintf("ns%d", i/100)
		s := svc(inNamespace(ns), named(fmt.Sprintf("s%d", i)), clusterIPs(fmt.Sprintf("10.96.%d.%d", i>>8, i&255)),
			ports(sport("p0", 80, int32(10000+i))),
			typed(corev1.ServiceTypeNodePort))
		n := 15 // 150,000 endpoints
		if i == 0 {
			n = 5000
		}
		e := manyEndpoints(1, n)
		e.Namespace, e.Name, e.Labels[discoveryv1.LabelServiceName] = ns, s.Name+"-1", s.Name
		all = append(all, s, e)
	}
	same(t, "problems", problemLines(resolved(n1, all...)), nil)
}

// Services that are not served for want of a share keep what they say, not what they would come to.
func TestExcludedServicesAreSmall(t *testing.T) {
	r, all := New(n1), []source.Object(nil)
	for i := range 400 {
		all = append(all, svc(inNamespace("evil"), named(fmt.Sprintf("s%d", i)),
			clusterIPs(fmt.Sprintf("10.96.%d.%d", i>>8, i&255)),
			manyExternalIPs(1000), manyPorts(4), born(int64(i))))
	}
	for _, o := range all {
		r.Apply(puts(o))
	}
	if len(r.excluded) < 300 {
		t.Fatalf("%d Services are not served, want most of them", len(r.excluded))
	}
	want := 0
	for s := range r.excluded {
		want += len(s.entries) + len(s.refused)
	}
	for _, l := range r.entries.rivals {
		want += len(slices.DeleteFunc(slices.Clone(l),
			func(x claim) bool { _, excluded := r.excluded[x.by]; return !excluded }))
	}
	if want > 0 {
		t.Errorf("%d entries and claims of Services that are not served are kept", want)
	}
	r.Apply(dels(all...))
	mustBeEmpty(t, r)
}

// To say why ports have no endpoint costs a look at the slices for ten ports at most. Without that bound it would
// cost four hundred times as much here.
func TestMismatchesAreBounded(t *testing.T) {
	decide := func(ports int) time.Duration {
		e := manyEndpoints(1, 50000)
		for i := range e.Endpoints {
			e.Endpoints[i].Conditions = ep("10.0.0.1", notReady).Conditions
		}
		r := resolved(n1, svc(manyPorts(ports)), slice(e, slicePorts(eport("other", 80))))
		s := r.services[source.KeyOf(svc())]
		best := time.Hour
		for range 5 {
			began := time.Now()
			r.decide(s)
			best = min(best, time.Since(began))
		}
		return best
	}
	if few, many := decide(10), decide(4000); many > 100*few {
		t.Errorf("%s for 4000 ports, %s for 10", many, few)
	}
}
