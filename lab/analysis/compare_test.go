package analysis

import (
	"math"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// runOf is a run of rounds whose times are slower by a factor, and whose nft arm costs more by another.
func runOf(t *testing.T, slower, dearer float64, edit func(*result.Manifest)) result.Run {
	t.Helper()
	blocks := rounds(t, 21)
	for i, b := range blocks {
		f := slower
		if b.Arm == "nft" {
			f *= dearer
		}
		blocks[i].Figures["p50"] *= f
	}
	for i, n := range []float64{7, 0} {
		blocks = append(blocks, result.Block{Measure: "rules", Arm: "nft", Params: at([]string{"10", "1000"}[i])}.Is(n))
	}
	d := design()
	d.Measures = append(d.Measures, result.Measure{ID: "rules", Title: "rules", Stat: "value", Exact: true})
	r, err := result.Read(record(t, d, blocks...))
	if err != nil {
		t.Fatal(err)
	}
	r.Manifest.Machine = result.Machine{Kernel: "6.1", CPUs: 2, Sysctls: map[string]string{"a": "1"}}
	if edit != nil {
		edit(&r.Manifest)
	}
	return r
}

func TestCompareRuns(t *testing.T) {
	a := runOf(t, 1, 1, nil)
	b := runOf(t, 0.5, 1.2, func(m *result.Manifest) {
		m.Machine.Kernel, m.Machine.Sysctls = "6.18", map[string]string{"a": "1", "b": "2"}
	})
	c, err := Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	if want := []Difference{{"Kernel", "6.1", "6.18"}, {"Setting b", "", "2"}}; len(c.Differences) != 2 ||
		c.Differences[0] != want[0] || c.Differences[1] != want[1] {
		t.Errorf("differences %v", c.Differences)
	}
	if len(c.Ratios) != 2 || len(c.Counts) != 2 {
		t.Fatalf("%d ratios, %d counts", len(c.Ratios), len(c.Counts))
	}
	for _, v := range c.Ratios {
		if math.Abs(v.Over.Value-1.2) > 0.005 || v.Verdict != stats.Higher || !v.Over.Sure || !v.Over.CI.Contains(1.2) {
			t.Errorf("%+v, want 1.2", v)
		}
	}
	if v := c.Counts; v[0].Verdict != stats.Same || v[1].Over.Value != 1 {
		t.Errorf("counts %+v", v)
	}
	if len(c.Values) == 0 || c.Values[0].Arm != "direct" || math.Abs(c.Values[0].Over.Value-0.5) > 0.02 ||
		c.Values[0].Verdict != stats.Lower {
		t.Errorf("values %+v", c.Values)
	}
	same, err := Compare(a, a)
	if err != nil || len(same.Differences) != 0 {
		t.Fatalf("%v, %v", same.Differences, err)
	}
	for _, v := range same.Ratios {
		if v.Verdict != stats.Same || v.Over.Value != 1 {
			t.Errorf("a run against itself: %+v", v)
		}
	}
}

func TestCompareNamesWhatCannotBe(t *testing.T) {
	a := runOf(t, 1, 1, nil)
	for want, edit := range map[string]func(*result.Manifest){
		`experiment of A is "services", of B "tigera"`:      func(m *result.Manifest) { m.Design.ID = "tigera" },
		`profile of A is "quick", of B "full"`:              func(m *result.Manifest) { m.Profile = "full" },
		`baseline of A is "direct", of B "again"`:           func(m *result.Manifest) { m.Design.Baseline = "again" },
		`varied parameter of A is "services", of B "pods"`:  func(m *result.Manifest) { m.Design.Vary.Param = "pods" },
		"connection: the designs define the measure crr di": func(m *result.Manifest) { redefine(m) },
	} {
		if _, err := Compare(a, runOf(t, 1, 1, edit)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	c, err := Compare(a, runOf(t, 1, 1, func(m *result.Manifest) { m.Machine.CPU = "QEMU TCG" }))
	if err != nil || len(c.Ratios) != 0 || len(c.Values) != 0 || len(c.Counts) != 2 ||
		!strings.Contains(strings.Join(c.Left, " "), "emulated") {
		t.Errorf("against an emulated processor: %d ratios, %d counts, left %q, %v", len(c.Ratios), len(c.Counts), c.Left,
			err)
	}
}

// Runs that share no arm but the baseline say nothing of each other.
func TestCompareWantsASharedArm(t *testing.T) {
	a, b := runOf(t, 1, 1, nil), runOf(t, 1, 1, func(m *result.Manifest) {
		m.Design.Arms = append(m.Design.Arms, result.Arm{ID: "other"})
	})
	for i := range b.Blocks {
		if b.Blocks[i].Arm == "nft" {
			b.Blocks[i].Arm = "other"
		}
	}
	want := "no arm in common but direct; A has nft, B has other"
	if _, err := Compare(a, b); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
}

// redefine changes the unit of all measures.
func redefine(m *result.Manifest) {
	for i := range m.Design.Measures {
		m.Design.Measures[i].Unit = "h"
	}
}

// A claim of two machines is judged where one is virtual and the other not, whichever comes first.
func TestClaimOfTwoMachines(t *testing.T) {
	run := func(virtual bool, slower float64) result.Run {
		return runOf(t, slower, 1, func(m *result.Manifest) {
			m.Machine.Hypervisor = virtual
			m.Design.Aims = []result.Aim{{ID: "C11", Claim: "C", Measure: "crr", Arm: "direct", Of: result.Value,
				Across: result.Hypervisor, Bound: 3, Margin: 0.25}}
		})
	}
	for _, x := range []struct {
		a, b result.Run
		want Outcome
	}{
		{run(false, 1), run(true, 3), Confirmed}, {run(true, 3), run(false, 1), Confirmed},
		{run(false, 1), run(true, 1.1), Refuted}, {run(true, 1), run(true, 3), NotTestable},
	} {
		c, err := Compare(x.a, x.b)
		if err != nil || len(c.Claims) != 1 || c.Claims[0].Outcome != x.want {
			t.Errorf("%+v, want %s: %v", c.Claims, x.want, err)
		}
	}
	if s, err := Summarize(run(true, 1)); err != nil || s.Aims[0].Outcome != NotTestable ||
		!strings.Contains(s.Aims[0].Why, "lab compare") {
		t.Errorf("of one machine: %+v, %v", s.Aims, err)
	}
}

func TestStandardDeviationOfBlock(t *testing.T) {
	b, err := result.Block{Wall: time.Second}.Times([]int64{1000, 3000})
	if err != nil {
		t.Fatal(err)
	}
	if v, ok := figure(result.Measure{Stat: result.StdDev}, b); !ok || math.Abs(v-1000) > 5 {
		t.Errorf("%v, %v, want 1000", v, ok)
	}
}
