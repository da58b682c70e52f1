package mode

import (
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// recorder is a Runner that keeps the parts that it was given.
type recorder struct {
	reconcile.Runner[model.PolicyPart]
	t     *testing.T
	parts map[model.PolicyPart]bool
	calls int
}

func (g *recorder) Change(put, del []model.PolicyPart) {
	g.calls++
	for _, p := range del {
		if !g.parts[p] {
			g.t.Errorf("%T is taken and was not recorder", p)
		}
		delete(g.parts, p)
	}
	for _, p := range put {
		if g.parts[p] {
			g.t.Errorf("%T is recorder twice", p)
		}
		g.parts[p] = true
	}
}

// A policy plane is recorder nothing while no policy could decide anything, and everything while one could.
func TestIdlePolicies(t *testing.T) {
	open, closed := &model.PolicyNode{Unknown: model.VerdictAccept}, &model.PolicyNode{Unknown: model.VerdictDrop}
	free, free2, bound := &model.Subject{Pod: "shop/a"}, &model.Subject{Pod: "shop/b"}, &model.Subject{Pod: "shop/a"}
	rs, table := &model.Ruleset{}, &model.PeerTable{}
	type parts = []model.PolicyPart
	g := &recorder{t: t, parts: map[model.PolicyPart]bool{}}
	p := newIdle(g)
	for _, c := range []struct {
		what     string
		put, del parts
		holds    parts
		calls    int
	}{
		{"no policy", parts{open, free}, nil, nil, 1},
		{"one pod more", parts{free2}, nil, nil, 1},
		{"a policy elsewhere", parts{closed}, parts{open}, parts{closed, free, free2}, 2},
		{"none again", parts{open}, parts{closed}, nil, 3},
		{"an audited policy here", parts{rs, table, bound}, parts{free}, parts{open, free2, rs, table, bound}, 4},
		{"enforced", parts{closed}, parts{open}, parts{closed, free2, rs, table, bound}, 5},
		{"a pod goes", nil, parts{free2}, parts{closed, rs, table, bound}, 6},
		{"all at once", parts{open, free}, parts{closed, rs, table, bound}, nil, 7},
		{"no change", nil, nil, nil, 7},
	} {
		p.Change(c.put, c.del)
		if g.calls != c.calls {
			t.Errorf("%s: %d changes, want %d", c.what, g.calls, c.calls)
		}
		missing := func(x model.PolicyPart) bool { return !g.parts[x] }
		if len(g.parts) != len(c.holds) || slices.ContainsFunc(c.holds, missing) {
			t.Errorf("%s: it holds %v, want %v", c.what, g.parts, c.holds)
		}
	}
}

func TestEnginesByName(t *testing.T) {
	for _, e := range Engines() {
		if of, err := EngineOf(e.Name); err != nil || of.Name != e.Name || e.Summary == "" || e.Needs == "" {
			t.Errorf("%+v, %v", of, err)
		}
	}
	if _, err := EngineOf("pigeons"); err == nil || !strings.Contains(err.Error(), "nftables") ||
		!strings.Contains(err.Error(), Auto) {
		t.Errorf("an unknown engine: %v", err)
	}
	if _, _, err := ChooseEngine(t.Context(), "pigeons", false); err == nil {
		t.Error("an unknown engine is chosen")
	}
}

// Beside mode ebpf's fast path, which calls its program, the engine ebpf is chosen; else the first.
func TestEngineBesideFastPath(t *testing.T) {
	node := netnstest.New(t)
	for _, c := range []struct {
		mode   string
		o      Options
		engine string
	}{{mode: "nftables", engine: "nftables"}, {mode: "iptables", engine: "nftables"}, {mode: "ebpf", engine: "ebpf"},
		{"ebpf", Options{NoFastPath: true}, "nftables"}} {
		m, err := Of(c.mode)
		if err != nil {
			t.Fatal(err)
		}
		err = node.Do(func() error {
			e, why, err := ChooseEngine(t.Context(), Auto, m.FastPath(c.o))
			if e.Name != c.engine || strings.Contains(why, "fast path") != (c.engine == "ebpf") {
				t.Errorf("beside mode %s with %+v: engine %s, %s", c.mode, c.o, e.Name, why)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
