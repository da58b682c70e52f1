package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// services is a design as the experiment of that name has it.
func services() result.Design {
	at := func(n string) map[string]string { return map[string]string{"services": n} }
	return result.Design{
		ID: "services", Title: "What a Service costs",
		Question: "What does a connection through a Service's address cost, against the same connection without any " +
			"Service, and what does it cost to keep the kernel up to date?",
		Vary: result.Axis{Param: "services", Title: "Services × 10 endpoints", Short: "Services"},
		Arms: []result.Arm{{ID: "direct", Title: "direct"}, {ID: "again", Title: "direct again"},
			{ID: "nftables", Title: "nftables"}},
		Baseline: "direct", Again: "again", Margin: 0.02, Rounds: 21,
		Measures: []result.Measure{
			{ID: "connect", Title: "connect() alone", Unit: "µs", Stat: "p50", Ratio: true},
			{ID: "crr", Title: "connect, request, close", Unit: "µs", Stat: "p50", Ratio: true},
			{ID: "rr", Title: "request on a kept connection", Unit: "µs", Stat: "p50", Ratio: true},
			{ID: "cold", Title: "cold sync", Unit: "ms", Stat: "value"},
			{ID: "change", Title: "one endpoint change, kernel part", Unit: "µs", Stat: "p50"},
			{ID: "file", Title: "one endpoint change, file to kernel", Unit: "ms", Stat: "p50"},
			{ID: "memory", Title: "resident memory", Unit: "MiB", Stat: "value"},
			{ID: "idle", Title: "idle processor time", Unit: "%", Stat: "value"},
		},
		Aims: []result.Aim{
			{ID: "G5", Text: "cold sync of 10,000 Services × 10 endpoints in ≤ 0.4 s", Measure: "cold", Arm: "nftables",
				Params: at("10000"), Of: "value", Bound: 4e8},
			{ID: "G6a", Text: "one endpoint change at 10,000 Services: p99 in the kernel ≤ 0.3 ms", Measure: "change",
				Arm: "nftables", Params: at("10000"), Of: "p99", Bound: 3e5},
			{ID: "G6b", Text: "one endpoint change costs ≤ 1.1 times as much at 10,000 Services as at 10", Measure: "change",
				Arm: "nftables", Params: at("10000"), Of: "value", Over: &result.CellRef{Params: at("10")}, Bound: 1.1},
			{ID: "G10", Text: "resident memory ≤ 150 MiB at 10,000 Services", Measure: "memory", Arm: "nftables",
				Params: at("10000"), Of: "value", Bound: 150 << 20},
			{ID: "G11", Text: "idle ≤ 0.02 % of a core", Measure: "idle", Arm: "nftables", Params: at("10000"), Of: "value",
				Bound: 0.0002},
			{ID: "G17", Text: "no connection fails while endpoints change", Measure: "crr", Arm: "nftables", Params: at("10000"),
				Of: "failed", Bound: 0},
			{ID: "S1", Text: "cold sync at least 100 times faster than kube-proxy", Measure: "cold", Arm: "nftables",
				Params: at("10"), Of: "value", Over: &result.CellRef{Params: at("10000")}, Least: true, Bound: 100},
			{ID: "S2", Text: "the ebpf plane: ≤ 1.01 × direct at 10,000 Services", Measure: "crr", Arm: "ebpf",
				Params: at("10000"), Of: "ratio", Bound: 1.01},
		},
		Method: []string{"Client and server are pinned to one processor each, in network namespaces joined by veth; direct " +
			"traffic has namespaces of its own without any rule."},
		Missing: []string{"IPVS and eBPF: these planes are not built yet.", "Traffic from outside the node."},
		Ghosts: []result.Ghost{{Measure: "cold", X: 1000, Value: 820e6, Label: "kube-proxy",
			Source: "kube-proxy 1.36.3 in nftables mode, same kind of machine"}, {Measure: "cold", X: 10000, Value: 14.3e9,
			Label: "kube-proxy", Source: "kube-proxy 1.36.3 in nftables mode, same kind of machine"}},
	}
}

// The machine of made-up runs, and what else it did.
var (
	machineOf = result.Machine{Kernel: "6.12.0 #1 SMP", Arch: "amd64", CPU: "A Processor", CPUs: 2, Memory: 8 << 30,
		Clocksource: "tsc", Cgroup: "/"}
	loadAfter = result.Load{Average: "0.10 0.10 0.10 1/100 1000", Total: 100 * time.Second, Busy: 20 * time.Second,
		Own: 19 * time.Second, Memory: 4 << 30}
)

// madeUp writes a run of made-up numbers and returns its directory.
func madeUp(t *testing.T, rounds int, edit func(*result.Manifest)) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	m := result.Manifest{Design: services(), Profile: "full", Seed: 7,
		Command: []string{"fairlead", "lab", "run", "services", "--profile", "full", "--seed", "7", "--out", "my results"},
		Build:   result.Build{Module: "fairlead.dev/fairlead", Version: "(devel)", Go: "go1.26"}, Machine: machineOf}
	m.Build.Commit = "f06a0ae5f06a0ae5f06a0ae5f06a0ae5"
	m.Versions = []string{"nft 1.0.6, for reading back only"}
	if edit != nil {
		edit(&m)
	}
	w, err := result.Create(dir, m)
	if err != nil {
		t.Fatal(err)
	}
	g := &generator{t: t, w: w, r: rand.New(rand.NewPCG(5, 5))}
	for i := range rounds {
		g.round(i)
	}
	w.Remark("These numbers are made up.")
	if err := w.Close("", loadAfter); err != nil {
		t.Fatal(err)
	}
	return dir
}

type generator struct {
	t *testing.T
	w *result.Writer
	r *rand.Rand
}

func (g *generator) add(b result.Block, err error) {
	g.t.Helper()
	if err == nil {
		err = g.w.Add(b)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// times is a block of n operations around a median in ns, with a tail.
func (g *generator) times(round int, measure, arm string, services int, mid float64, n int) {
	b := result.Block{Measure: measure, Arm: arm, Round: round, Wall: 100 * time.Millisecond}
	if services > 0 {
		b.Params = map[string]string{"services": fmt.Sprint(services)}
	}
	mid *= 1 + 0.004*g.r.NormFloat64()
	ns := make([]int64, n)
	for i := range ns {
		v := mid * (0.97 + 0.05*math.Abs(g.r.NormFloat64()))
		if g.r.IntN(150) == 0 {
			v *= 1 + 4*g.r.Float64()
		}
		ns[i] = int64(v)
	}
	b, err := b.Times(ns)
	packets := map[string]float64{"connect": 6, "crr": 14, "rr": 4}[measure]
	if packets > 0 {
		b.Counters = map[string]float64{"softnet": packets * float64(n), "switches": 2 * float64(n), "retransmits": 0}
		b.CPU = &load.CPU{System: time.Duration(mid * float64(n) * 0.5), User: time.Duration(mid * float64(n) * 0.1),
			Server: time.Duration(mid * float64(n) * 0.3)}
	}
	g.add(b, err)
}

func (g *generator) scalar(round int, measure string, services int, v float64) {
	g.add(result.Block{Measure: measure, Arm: "nftables", Round: round,
		Params: map[string]string{"services": fmt.Sprint(services)}}.Is(v*(1+0.02*g.r.NormFloat64())), nil)
}

func (g *generator) round(i int) {
	drift := 1 + 0.03*math.Sin(float64(i))
	for _, o := range []struct {
		measure   string
		mid, cost float64
	}{{"connect", 26_100, 1.05}, {"crr", 61_300, 1.14}, {"rr", 15_000, 1.012}} {
		measure, mid, cost := o.measure, o.mid, o.cost
		n := int(3e6 / mid)
		g.times(i, measure, "direct", 0, mid*drift, n)
		g.times(i, measure, "again", 0, mid*drift, n)
		for k, services := range []int{1, 10, 100, 1000, 10000} {
			g.times(i, measure, "nftables", services, mid*drift*(cost+0.003*float64(k)), n)
		}
		g.times(i, measure, "direct", 0, mid*drift, n)
	}
	if i%3 != 0 {
		return
	}
	for _, services := range []int{1, 10, 100, 1000, 10000} {
		s := float64(services)
		g.scalar(i, "cold", services, 2.5e6+s*38e3)
		g.times(i, "change", "nftables", services, 105_000+s, 60)
		g.times(i, "file", "nftables", services, 900_000+60*s, 60)
		g.scalar(i, "memory", services, (24+s*0.0091)*(1<<20))
	}
	g.scalar(i, "idle", 10000, 0.00003)
}
