package service

import (
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

func scheduled(text string) edit {
	return func(s *corev1.Service) { s.Annotations = map[string]string{SchedulerAnnotation: text} }
}

func TestScheduler(t *testing.T) {
	const field = "metadata.annotations[" + SchedulerAnnotation + "] "
	few := n1
	few.Capabilities.Name, few.Capabilities.Schedulers = "nftables", model.SchedulersOf(model.Random, model.SourceHash)
	both := few
	both.Capabilities.Fallback = model.SchedulersOf(model.Random)
	byDefault := n1
	byDefault.Scheduler = model.Maglev
	for _, c := range []struct {
		name     string
		config   Config
		edits    []edit
		want     model.Scheduler
		ports    bool
		problems []string
	}{
		{"none", n1, nil, model.Random, false, nil},
		{"the default", byDefault, nil, model.Maglev, false, nil},
		{"its own", byDefault, []edit{scheduled("rr")}, model.RoundRobin, false, nil},
		{"long name", n1, []edit{scheduled("least-connections")}, model.LeastConnections, false, nil},
		{"with ports", n1, []edit{scheduled("maglev, port")}, model.Maglev, true, nil},
		{"unknown", byDefault, []edit{scheduled("fast")}, model.Maglev, false, lines(field + "UnknownScheduler")},
		{"unknown option", n1, []edit{scheduled("maglev,ports")}, model.Random, false, lines(field + "UnknownScheduler")},
		{"option of no hash", n1, []edit{scheduled("rr,port")}, model.Random, false, lines(field + "UnknownScheduler")},
		{"empty", n1, []edit{scheduled("")}, model.Random, false, lines(field + "UnknownScheduler")},
		{"what the plane can do", few, []edit{scheduled("sh")}, model.SourceHash, false, nil},
		{"what stands in", few, []edit{scheduled("maglev,port")}, model.SourceHash, true,
			lines(field + "SchedulerNotAvailable")},
		{"on the node alone", both, []edit{scheduled("sh")}, model.SourceHash, false, lines(field + "SchedulerNotAvailable")},
		{"from everywhere", both, []edit{scheduled("random")}, model.Random, false, nil},
		{"nowhere, and elsewhere otherwise", both, []edit{scheduled("maglev")}, model.SourceHash, false,
			lines(field+"SchedulerNotAvailable", field+"SchedulerNotAvailable")},
		{"what stands in at last", few, []edit{scheduled("nq")}, model.Random, false, lines(field + "SchedulerNotAvailable")},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(c.config, svc(c.edits...), eps(ep("10.0.0.1")))
			p := frontend(t, r, "10.96.0.1:80/tcp").Internal.Pool
			if p.Scheduler != c.want || p.Ports != c.ports {
				t.Errorf("%s, ports %t; want %s, %t", p.Scheduler, p.Ports, c.want, c.ports)
			}
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

func TestWeights(t *testing.T) {
	weigh := func(w string) editEps {
		return func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{WeightAnnotation: w} }
	}
	const bad = "metadata.annotations[" + WeightAnnotation + "] InvalidWeight"
	for _, c := range []struct {
		first, second string
		want          []uint16
		problems      []string
	}{
		{"1", "1", []uint16{0, 0}, nil},
		{"7", "7", []uint16{0, 0}, nil},
		{"6", "4", []uint16{3, 2}, nil},
		{"256", "1", []uint16{256, 1}, nil},
		{"0", "3", []uint16{1, 3}, lines("EndpointSlice shop/web-1 " + bad)},
		{"257", "1", []uint16{0, 0}, lines("EndpointSlice shop/web-1 " + bad)},
		{"many", "2", []uint16{1, 2}, lines("EndpointSlice shop/web-1 " + bad)},
	} {
		t.Run(c.first+" "+c.second, func(t *testing.T) {
			r := resolved(n1, svc(), slice(eps(ep("10.0.0.1")), weigh(c.first)),
				slice(eps(ep("10.0.0.2")), sliceNamed("web-2"), weigh(c.second)))
			var got []uint16
			for _, b := range frontend(t, r, "10.96.0.1:80/tcp").Internal.Pool.Backends {
				got = append(got, b.Weight)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("weights %d, want %d", got, c.want)
			}
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

func TestWhatThePlaneCannot(t *testing.T) {
	c := n1
	c.Capabilities = model.Capabilities{Name: "userspace",
		Unserved: []model.Remark{{Text: "this kernel has no SCTP sockets",
			About: &model.Packets{Protocols: []model.Protocol{model.SCTP}}}}}
	r := resolved(c, svc(ports(sport("http", 80), sport("sctp", 81))),
		slice(eps(ep("10.0.0.1")), slicePorts(eport("http", 8080), eport("sctp", 8081))))
	if n := len(r.Services().Frontends); n != 1 {
		t.Errorf("%d frontends are served, want http's alone", n)
	}
	same(t, "problems", problemLines(r), lines("spec.clusterIPs[0] NotServed"))
}

func TestPlaneThatAlwaysMasquerades(t *testing.T) {
	c := n1
	c.Capabilities.MasqueradesAll = true
	if f := frontend(t, resolved(c, svc(), eps(ep("10.0.0.1"))), "10.96.0.1:80/tcp"); f.Masquerade != model.AllOrigins {
		t.Errorf("hides %s", f.Masquerade)
	}
}

func TestMaglevsTable(t *testing.T) {
	c := n1
	c.Entries = 16381
	for text, want := range map[string]int{"maglev": 16381, "random": 0} {
		r := resolved(c, svc(scheduled(text)), eps(ep("10.0.0.1")))
		if got := frontend(t, r, "10.96.0.1:80/tcp").Internal.Pool.Entries; got != want {
			t.Errorf("%s: %d entries, want %d", text, got, want)
		}
	}
	for _, n := range []int{-7, 16380, 65537} {
		if c.Entries = n; c.Validate() == nil {
			t.Errorf("a table of %d entries is taken", n)
		}
	}
}
