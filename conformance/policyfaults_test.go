package conformance

import (
	"context"
	"maps"
	"path"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/model"
)

// plainEngine is the simplest policy Runner there can be, as plain is for Services, with a fault.
type plainEngine struct {
	plane *nftables.Plane
	parts map[model.PolicyPart]bool
	wrong func(nftables.Fact) bool // facts that it leaves out
	deaf  int                      // hear no changes after so many; 0: hear all

	changes int
}

// pair returns a right service data plane beside a policy engine that leaves facts out, or hears no changes after some.
func pair(wrong func(nftables.Fact) bool, deaf int) Implementation {
	e := &Engine{Name: "plain", Start: func() (Runner[model.PolicyPart], error) {
		p, err := nftables.New()
		return &plainEngine{plane: p, parts: map[model.PolicyPart]bool{}, wrong: wrong, deaf: deaf}, err
	}}
	return Implementation{Capabilities: model.Capabilities{Name: "plain", Unsupported: noDirect},
		Start: startPlain, Engine: e}
}

func (p *plainEngine) Change(put, del []model.PolicyPart) {
	if p.changes++; p.deaf > 0 && p.changes > p.deaf {
		return
	}
	for _, x := range del {
		delete(p.parts, x)
	}
	for _, x := range put {
		p.parts[x] = true
	}
}

func (p *plainEngine) Sync(ctx context.Context) error {
	wanted := map[nftables.Key]nftables.Fact{}
	for x := range p.parts {
		for _, f := range p.plane.Render(x) {
			if p.wrong == nil || !p.wrong(f) {
				wanted[f.Key] = f
			}
		}
	}
	held, err := p.plane.Read(ctx)
	if err != nil {
		return err
	}
	var del []nftables.Fact
	for _, f := range held {
		if w, ok := wanted[f.Key]; ok && w.Equal(f) {
			delete(wanted, f.Key)
		} else {
			del = append(del, f)
		}
	}
	return p.plane.Write(ctx, slices.Collect(maps.Values(wanted)), del)
}

func (p *plainEngine) Close() error { return p.plane.Close() }

// TestPolicyFaultsAreFound makes an engine with one fault after the other and wants a case to find it.
func TestPolicyFaultsAreFound(t *testing.T) {
	all, err := Cases("policy")
	if err != nil {
		t.Fatal(err)
	}
	without := func(set string) func(nftables.Fact) bool {
		return func(f nftables.Fact) bool { return f.Key.Group() == set }
	}
	for _, c := range []struct {
		fault string
		pair  Implementation
		cases []string // that must find it
	}{
		{"no pod is isolated", pair(without("subject4"), 0), []string{"isolation", "ports", "services"}},
		{"none of IPv6 is", pair(without("subject6"), 0), []string{"isolation", "peers"}},
		{"no peer is known", pair(without("peer4"), 0), []string{"peers", "selectors"}},
		{"no range is", pair(without("range4"), 0), []string{"ip-blocks"}},
		{"no port is", pair(without("port"), 0), []string{"ports", "named-ports"}},
		{"no span of ports is", pair(without("portspan"), 0), []string{"ports"}},
		{"unknown pods pass", pair(without("unknown4"), 0), []string{"unknown-pods"}},
		{"the node's packets are evaluated", pair(without("node4"), 0), []string{"nodes"}},
		{"hears no changes", pair(nil, 3), []string{"relabelled", "cluster-tiers"}},
	} {
		for _, name := range c.cases {
			t.Run(c.fault+"/"+name, func(t *testing.T) {
				t.Parallel()
				i := slices.IndexFunc(all, func(k *Case) bool { return path.Base(k.File) == name+".txt" })
				if i < 0 {
					t.Fatal("there is no such case")
				}
				if wrong, _ := tryCase(t.Context(), c.pair, all[i], 1); len(wrong) == 0 {
					t.Errorf("%s is not found by %s", c.fault, name)
				}
			})
		}
	}
	t.Run("none", func(t *testing.T) {
		if wrong, _ := tryCase(t.Context(), pair(nil, 0), all[slices.IndexFunc(all, func(k *Case) bool {
			return path.Base(k.File) == "isolation.txt"
		})], 1); len(wrong) > 0 {
			t.Errorf("a right engine is found wrong: %s", wrong)
		}
	})
}
