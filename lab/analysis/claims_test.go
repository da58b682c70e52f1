package analysis

import (
	"math"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// busyBlocks is blocks of processor time: nft takes 5 % of a core more than direct at 10 Services and 25 % at 1,000, of
// which the agent's share is 2 %.
func busyBlocks(n int) (blocks []result.Block) {
	for i := range n {
		drift := 0.01 * math.Sin(float64(i))
		add := func(arm string, params map[string]string, share, agent float64) {
			of := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
			blocks = append(blocks, result.Block{Measure: "work", Arm: arm, Params: params, Round: i, Ops: 100,
				Wall: time.Second, Figures: map[string]float64{"p50": 1e5, "mean": 2e5},
				Counters: map[string]float64{"bytes": 1e9, "servers": 4},
				Answers:  map[string]int64{"1": 30, "2": 25, "3": 25, "4": 20},
				CPU:      &load.CPU{User: of(share - agent - 0.05 + drift), System: of(0.02), Server: of(0.03), Agent: of(agent)}})
		}
		add("direct", nil, 0.2, 0)
		add("again", nil, 0.2, 0)
		add("nft", at("10"), 0.25, 0.02)
		add("nft", at("1000"), 0.45, 0.02)
		add("direct", nil, 0.2, 0)
	}
	return blocks
}

func busyDesign() result.Design {
	d := design()
	d.Measures = []result.Measure{
		{ID: "work", Title: "work", Unit: "µs", Stat: "p50", Ratio: true},
		{ID: "mean", From: "work", Unit: "µs", Stat: "mean", Ratio: true},
		{ID: "cpu", From: "work", Unit: "%", Stat: "cpu", More: true, Margin: 0.01},
		{ID: "agent", From: "work", Unit: "%", Stat: "cpu:agent", More: true},
		{ID: "rate", From: "work", Stat: "rate:bytes"}, {ID: "spent", From: "work", Stat: "spent:bytes"},
		{ID: "uneven", From: "work", Stat: "imbalance"},
		{ID: "count", Stat: "value", Exact: true},
	}
	return d
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6*math.Max(1, math.Abs(b)) }

func TestMeasuresOfTheSameBlocks(t *testing.T) {
	s := summarize(t, record(t, busyDesign(), busyBlocks(9)...))
	for _, w := range []struct {
		measure, arm string
		params       map[string]string
		value, more  float64
	}{
		{"work", "nft", at("10"), 1e5, math.NaN()}, {"mean", "nft", at("10"), 2e5, math.NaN()},
		{"cpu", "nft", at("1000"), 0.45, 0.25}, {"cpu", "nft", at("10"), 0.25, 0.05},
		{"cpu", "again", nil, 0.2, 0}, {"agent", "nft", at("10"), 0.02, 0.02}, {"rate", "nft", at("10"), 1e9, math.NaN()},
		{"spent", "direct", nil, 0.2, math.NaN()},
		{"uneven", "nft", at("10"), 0.2, math.NaN()},
	} {
		c, ok := s.Cell(w.measure, w.arm, w.params)
		if !ok || c.Value == nil || math.Abs(c.Value.Value-w.value) > 0.011*math.Max(1, w.value) {
			t.Errorf("%s of %s %v: %+v, want %v", w.measure, w.arm, w.params, c.Value, w.value)
		}
		if math.IsNaN(w.more) != (c.More == nil) || c.More != nil && !near(c.More.Value, w.more) {
			t.Errorf("%s of %s %v: %+v more, want %v", w.measure, w.arm, w.params, c.More, w.more)
		}
	}
	for key, want := range map[string]string{"10": "higher", "1000": "higher"} {
		if c, _ := s.Cell("cpu", "nft", at(key)); string(c.Verdict) != want {
			t.Errorf("cpu at %s is %s", key, c.Verdict)
		}
	}
	if c, _ := s.Cell("cpu", "again", nil); c.Verdict != "same" {
		t.Errorf("cpu again is %s", c.Verdict)
	}
	c, _ := s.Cell("work", "nft", at("10"))
	if f := c.Fit; f == nil || f.Freedom != 3 || !near(f.ChiSquare, 9*2) || c.Answers["1"] != 270 { // 9 blocks of 50/25
		t.Errorf("fit %+v of %v", f, c.Answers)
	}
	if c, _ := s.Cell("mean", "nft", at("10")); c.Fit != nil || c.Counters != nil {
		t.Errorf("what a block says of itself is told twice: %+v", c)
	}
}

func TestClaims(t *testing.T) {
	d := busyDesign()
	add := func(id string, a result.Aim) {
		a.ID, a.Arm = id, "nft"
		if a.Params == nil {
			a.Params = at("1000")
		}
		d.Aims = append(d.Aims, a)
	}
	ten := &result.CellRef{Params: at("10")}
	add("within", result.Aim{Measure: "work", Of: "ratio", Bound: 1, Margin: 0.02, Claim: "A"})
	add("beside", result.Aim{Measure: "work", Of: "ratio", Bound: 1.5, Margin: 0.02, Claim: "A"})
	add("ours", result.Aim{Measure: "work", Of: "ratio", Bound: 1.5, Margin: 0.02})
	add("less", result.Aim{Measure: "cpu", Of: "value", Less: ten, Bound: 0.2, Margin: 0.05, Claim: "A"})
	add("less, plus", result.Aim{Measure: "cpu", Of: "value", Less: ten,
		Plus: &result.CellRef{Measure: "count", Params: at("10")}, Bound: 0.3, Claim: "A"})
	add("more over more", result.Aim{Measure: "cpu", Of: "more", Over: ten, Bound: 5, Margin: 0.02, Claim: "A"})
	add("counted", result.Aim{Measure: "count", Of: "value", Over: ten, Bound: 3, Claim: "A"})
	add("counted, too many", result.Aim{Measure: "count", Of: "value", Bound: 2.9, Claim: "A"})
	add("fit", result.Aim{Measure: "work", Of: "p", Bound: 0.5, Least: true, Claim: "A"})
	add("cannot", result.Aim{Claim: "A", Cannot: "no such machine"})
	add("nobody", result.Aim{Measure: "cpu", Of: "value", Less: &result.CellRef{Arm: "nobody"}, Bound: 1, Claim: "A"})
	want := map[string]Outcome{"within": Confirmed, "beside": Refuted, "ours": Miss, "less": Confirmed,
		"less, plus": Undecided, "more over more": Confirmed,
		"counted": Confirmed, "counted, too many": Refuted, "fit": Refuted, "cannot": NotTestable, "nobody": NotMeasured}
	blocks := append(busyBlocks(9), result.Block{Measure: "count", Arm: "nft", Params: at("10")}.Is(1),
		result.Block{Measure: "count", Arm: "nft", Params: at("1000")}.Is(3))
	for _, r := range summarize(t, record(t, d, blocks...)).Aims {
		if r.Outcome != want[r.ID] {
			t.Errorf("%s: %s, want %s (%+v, %s)", r.ID, r.Outcome, want[r.ID], r.Got, r.Why)
		}
	}
}
