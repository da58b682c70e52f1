package conformance

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// faulty passes wrong parts to a right data plane, or handles it wrongly.
type faulty struct {
	*plain
	node     func(*model.ServiceNode)
	pool     func(*model.Pool)
	frontend func(*model.Frontend)
	parts    map[model.ServicePart]model.ServicePart // the wrong part for a right one
	changes  int
	stop     int  // hear no changes after so many; 0: hear all
	uncut    bool // leave stale UDP flows
	cutAll   bool // cut every UDP flow at each sync
	flush    bool // remove all at the start
}

// implementation returns a data plane with the fault.
func (f faulty) implementation() Implementation {
	return Implementation{Capabilities: model.Capabilities{Name: "faulty", Unsupported: noDirect},
		Start: func() (Runner[model.ServicePart], error) {
			p, err := startPlain()
			if err != nil {
				return nil, err
			}
			n := f
			n.plain, n.parts = p.(*plain), map[model.ServicePart]model.ServicePart{}
			if f.flush {
				err = n.plane.Clean(context.Background())
			}
			return &n, err
		}}
}

func (f *faulty) wrong(x model.ServicePart) model.ServicePart {
	if p, ok := f.parts[x]; ok {
		return p
	}
	out := x
	switch x := x.(type) {
	case *model.ServiceNode:
		if f.node != nil {
			node := *x.Node
			c := *x
			c.Node = &node
			f.node(&c)
			out = &c
		}
	case *model.Pool:
		if f.pool != nil {
			c := *x
			c.Backends = slices.Clone(x.Backends)
			f.pool(&c)
			out = &c
		}
	case *model.Frontend:
		c := *x
		c.Internal.Pool, c.External.Pool = f.wrong(x.Internal.Pool).(*model.Pool), f.wrong(x.External.Pool).(*model.Pool)
		if f.frontend != nil {
			f.frontend(&c)
		}
		out = &c
	}
	f.parts[x] = out
	return out
}

func (f *faulty) Change(put, del []model.ServicePart) {
	if len(put)+len(del) > 0 {
		f.changes++
	}
	if f.stop > 0 && f.changes > f.stop {
		return
	}
	each := func(l []model.ServicePart) (out []model.ServicePart) {
		for _, x := range l {
			out = append(out, f.wrong(x))
		}
		return out
	}
	f.plain.Change(each(put), each(del))
}

func (f *faulty) Sync(ctx context.Context) error {
	f.plain.uncut, f.plain.cutAll = f.uncut, f.cutAll
	return f.plain.Sync(ctx)
}

// TestFaultsAreFound makes a data plane with one fault after the other and asks whether a case finds it.
func TestFaultsAreFound(t *testing.T) {
	all, err := Cases("service")
	if err != nil {
		t.Fatal(err)
	}
	extra := model.Backend{Addr: netip.MustParseAddrPort("10.244.2.3:8080")}
	for _, c := range []struct {
		fault string
		does  faulty
		cases []string // that must find it
	}{
		{"a backend too many", faulty{pool: func(p *model.Pool) {
			if len(p.Backends) > 0 && p.Backends[0].Addr.Addr().Is4() && !slices.Contains(p.Backends, extra) {
				p.Backends = append(p.Backends, extra)
			}
		}}, []string{"clusterip-dual-stack", "nodeport", "port-equals-target", "external-policy-local-inside"}},
		{"a backend too few", faulty{pool: func(p *model.Pool) {
			if len(p.Backends) > 1 {
				p.Backends = p.Backends[1:]
			}
		}}, []string{"clusterip-tcp", "clusterip-ipv6", "nodeport-udp", "hundred-endpoints"}},
		{"an uneven draw", faulty{pool: func(p *model.Pool) {
			if len(p.Backends) > 1 {
				for range 20 {
					p.Backends = append(p.Backends, p.Backends[0])
				}
			}
		}}, []string{"clusterip-tcp", "clusterip-udp"}},
		{"sources kept", faulty{frontend: func(f *model.Frontend) { f.Masquerade = 0 }},
			[]string{"nodeport", "clusterip-from-outside", "masquerade-all"}},
		{"sources hidden", faulty{frontend: func(f *model.Frontend) { f.Masquerade = model.AllOrigins }},
			[]string{"clusterip-tcp", "external-policy-local-outside", "pods-by-cluster-range"}},
		{"no hairpin", faulty{pool: func(p *model.Pool) {
			for i := range p.Backends {
				p.Backends[i].Local = false
			}
		}}, []string{"hairpin", "hairpin-external"}},
		{"rejects what it should drop", faulty{frontend: func(f *model.Frontend) {
			f.Internal.Empty, f.External.Empty = model.Reject, model.Reject
		}}, []string{"internal-policy-local", "internal-policy-local-udp", "external-policy-local-outside"}},
		{"drops what it should reject", faulty{frontend: func(f *model.Frontend) {
			f.Internal.Empty, f.External.Empty = model.Drop, model.Drop
		}}, []string{"reject-without-endpoints", "endpoints-come-and-go"}},
		{"everybody let in", faulty{frontend: func(f *model.Frontend) { f.Sources = nil }},
			[]string{"source-ranges", "source-ranges-other-family", "source-ranges-many"}},
		{"no affinity", faulty{pool: func(p *model.Pool) { p.Affinity = 0 }},
			[]string{"affinity", "affinity-udp-ipv6", "affinity-all-ways"}},
		{"endless affinity", faulty{pool: func(p *model.Pool) { p.Affinity *= 1000 }}, []string{"affinity-expires"}},
		{"outside as inside", faulty{frontend: func(f *model.Frontend) { f.External = f.Internal }},
			[]string{"external-policy-local-inside", "both-policies-local"}},
		{"inside as outside", faulty{frontend: func(f *model.Frontend) { f.Internal = f.External }},
			[]string{"external-policy-local-inside", "topology-and-local-policy"}},
		{"node ports at every address", faulty{node: func(n *model.ServiceNode) {
			n.NodePorts = []model.Range{{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("255.255.255.255")},
				{First: netip.MustParseAddr("::2"), Last: netip.MustParseAddr("ffff::")}}
		}}, []string{"nodeport-primary", "nodeport-cidr", "nodeport-not-localhost"}},
		{"nothing counts as a pod", faulty{node: func(n *model.ServiceNode) { n.Pods = nil }},
			[]string{"clusterip-tcp", "external-policy-local-inside"}},
		{"hears no changes", faulty{stop: 1}, []string{"endpoints-come-and-go", "service-changes", "service-removed",
			"endpoint-moves"}},
		{"leaves stale flows", faulty{uncut: true}, []string{"udp-endpoint-removed", "udp-last-endpoint-removed",
			"udp-service-comes-late", "tcp-service-comes-late", "nodeport-remote-udp"}},
		{"cuts every UDP flow", faulty{cutAll: true}, []string{"udp-endpoint-stays"}},
	} {
		for _, name := range c.cases {
			t.Run(c.fault+"/"+name, func(t *testing.T) {
				t.Parallel()
				i := slices.IndexFunc(all, func(k *Case) bool { return k.File == "cases/service/"+name+".txt" })
				if i < 0 {
					t.Fatal("there is no such case")
				}
				const tries = 8 // a flow that is cut may by chance come back to its backend
				for range tries {
					if wrong, _ := tryCase(t.Context(), c.does.implementation(), all[i], 1); len(wrong) > 0 {
						return
					}
				}
				t.Errorf("%s is not found by %s", c.fault, name)
			})
		}
	}
}

func TestRandomFindsFaults(t *testing.T) {
	for fault, f := range map[string]faulty{
		"sources kept": {frontend: func(f *model.Frontend) { f.Masquerade = 0 }},
		"no hairpin": {pool: func(p *model.Pool) {
			for i := range p.Backends {
				p.Backends[i].Local = false
			}
		}},
		"hears one change": {stop: 2},
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			s := f.implementation()
			log, found := wander(t.Context(), s, 1, 200)
			t.Log(log)
			if found == nil {
				t.Fatal("not found")
			}
			text := found.reduce(t.Context(), s)
			c, err := Parse("found.txt", []byte(text))
			if err != nil {
				t.Fatalf("what is found is no case: %v\n%s", err, text)
			}
			if len(text) > 3000 {
				t.Errorf("what is found is not small:\n%s", text)
			}
			if wrong, _ := tryCase(t.Context(), s, c, 1); len(wrong) == 0 {
				t.Errorf("the case doesn't find it again:\n%s", text)
			}
			right := Implementation{Capabilities: model.Capabilities{Name: "plain", Unsupported: noDirect},
				Start: startPlain}
			if wrong, _ := tryCase(t.Context(), right, c, 1); len(wrong) > 0 {
				t.Errorf("the case finds it where it isn't: %v\n%s", wrong, text)
			}
		})
	}
}

func TestChurnFindsFaults(t *testing.T) {
	for fault, f := range map[string]faulty{
		"flushes at the start":   {flush: true},
		"hears no changes":       {stop: 2},
		"leaves stale UDP flows": {uncut: true},
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			for try := 1; ; try++ { // on a busy machine few ask while an answer would be wrong
				log, wrong := churned(t.Context(), f.implementation(), 40)
				if len(wrong) > 0 {
					return
				}
				if try == 5 {
					t.Fatalf("not found: %s", log)
				}
			}
		})
	}
}
