package analysis

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/result"
)

// countedRun is an exact run of three rounds: nft takes so many instructions, of which some are TCP's and chains'.
func countedRun(t *testing.T, nft, tcp, chains float64, aims ...result.Aim) result.Run {
	t.Helper()
	d := design().Counted()
	d.Rounds, d.Aims = 3, aims
	for _, p := range []string{"tcp", "nftables"} {
		d.Measures = append(d.Measures, result.Measure{ID: result.PartID("crr", p), Title: "connection: " + p,
			Unit: result.Instructions, Stat: result.Value, Exact: true})
	}
	var blocks []result.Block
	for i := range 3 {
		add := func(arm string, params result.Params, v float64) {
			blocks = append(blocks, result.Block{Measure: "crr", Arm: arm, Params: params, Round: i, Ops: 51,
				Figures: map[string]float64{"p50": v}})
		}
		add("direct", nil, 1000)
		add("again", nil, 1000+float64(i)) // 1001
		add("nft", at("10"), nft+float64(7*i-7))
		add("direct", nil, 1000)
	}
	for part, v := range map[string]float64{"tcp": tcp, "nftables": chains} {
		blocks = append(blocks, result.Block{Measure: result.PartID("crr", part), Arm: "nft", Params: at("10")}.Is(v))
	}
	r, err := result.Read(record(t, d, blocks...))
	if err != nil {
		t.Fatal(err)
	}
	r.Manifest.Machine = result.Machine{Kernel: "6.12", CPU: "QEMU TCG"}
	return r
}

// What differs most in per cent comes first, not what differs by most instructions.
func TestCompareCountedSortsByShare(t *testing.T) {
	at := func(direct, nft float64) result.Run {
		r := countedRun(t, nft, 0, 0)
		for i := range r.Blocks {
			if b := &r.Blocks[i]; b.Arm == "direct" {
				b.Figures["p50"] = direct
			}
		}
		return r
	}
	c, err := Compare(at(1_000_000, 1200), at(999_000, 1140))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Counted) != 2 || c.Counted[0].More() != -60 || c.Counted[1].More() != -1000 {
		t.Errorf("%+v, want nft's −5 %% before direct's −0.1 %%", c.Counted)
	}
}

// Two exact runs are compared by absolute numbers, without intervals, and the parts that differ are named.
func TestCompareCounted(t *testing.T) {
	c, err := Compare(countedRun(t, 1200, 900, 300), countedRun(t, 1260, 905, 355))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Counted) != 2 || len(c.Ratios)+len(c.Values)+len(c.Counts) > 0 {
		t.Fatalf("%d counted, %d ratios, %d values, %d counts", len(c.Counted), len(c.Ratios), len(c.Values), len(c.Counts))
	}
	v := c.Counted[0]
	if v.Arm != "nft" || v.A.Value != 1200 || v.More() != 60 || v.Over.Value != 1.05 || v.RatioA != 1.2 ||
		v.RatioB != 1.26 {
		t.Errorf("%+v", v)
	}
	if v.A.CI.Low != v.A.CI.High || v.Over.CI.Low != v.Over.CI.High {
		t.Errorf("intervals of what is counted: %+v", v)
	}
	if len(v.Parts) != 2 || v.Parts[0] != (PartDifference{"nftables", 300, 355}) || v.Parts[1].More() != 5 {
		t.Errorf("parts %+v", v.Parts)
	}
	if o := c.Counted[1]; o.Arm != "direct" || o.More() != 0 || len(o.Parts) > 0 {
		t.Errorf("%+v, want what is equal last", o)
	}
}

// What else an exact run counts is compared as counts are, such as what is allocated.
func TestCompareAllocations(t *testing.T) {
	with := func(objects float64) result.Run {
		r := countedRun(t, 1200, 900, 300)
		r.Manifest.Design.Measures = append(r.Manifest.Design.Measures,
			result.Measure{ID: "allocations", Title: "allocations", Stat: result.Value})
		r.Blocks = append(r.Blocks, result.Block{Measure: "allocations", Arm: "nft", Params: at("10")}.Is(objects))
		return r
	}
	c, err := Compare(with(150), with(163))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Counts) != 1 || len(c.Counted) != 2 || len(c.Values)+len(c.Left) > 0 {
		t.Fatalf("%d counts, %d of instructions, %d values, left %q", len(c.Counts), len(c.Counted), len(c.Values), c.Left)
	}
	if v := c.Counts[0]; v.A.Value != 150 || v.B.Value != 163 || v.Over.CI.Low != v.Over.CI.High {
		t.Errorf("%+v", v)
	}
}

// An exact run compares with no run by time, and the error says what to do; a quick one does with a full one.
func TestCompareCountedWithTimes(t *testing.T) {
	exact, timed := countedRun(t, 1200, 900, 300), runOf(t, 1, 1, nil)
	for i, of := range [][2]result.Run{{exact, timed}, {timed, exact}} {
		_, err := Compare(of[0], of[1])
		want := []string{"A counts instructions and B measures times; run the experiment of B again with --exact",
			"B counts instructions and A measures times; run the experiment of A again with --exact"}[i]
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	full := countedRun(t, 1200, 900, 300)
	full.Manifest.Profile = "full"
	if _, err := Compare(exact, full); err != nil {
		t.Error(err)
	}
}

// An aim of what is counted is hit or missed, however few rounds there are and however far A/A lie apart.
func TestCountedAimsAreNeverUnclear(t *testing.T) {
	aim := func(id string, bound float64, over *result.CellRef) result.Aim {
		a := result.Aim{ID: id, Measure: "crr", Arm: "nft", Params: at("10"), Of: result.Ratio, Bound: bound}
		if a.Over = over; over != nil {
			a.Of = result.Value
		}
		return a
	}
	s := summarize(t, recordRun(t, countedRun(t, 1200, 900, 300, aim("just", 1.2, nil), aim("by little", 1.1999, nil),
		aim("over", 1.198, &result.CellRef{Arm: "again"}), aim("within", 1.2, &result.CellRef{Arm: "again"}))))
	for i, want := range []Outcome{Hit, Miss, Miss, Hit} {
		if a := s.Aims[i]; a.Outcome != want || a.Got == nil || a.Got.CI.Low != a.Got.CI.High {
			t.Errorf("%s: %s, want %s: %+v", a.ID, a.Outcome, want, a.Got)
		}
	}
	if c, _ := s.Cell("crr", "nft", at("10")); c.Ratio == nil || c.Ratio.Value != 1.2 || !c.Ratio.Sure {
		t.Errorf("ratio %+v", c.Ratio)
	}
}

// So is one of events, and one of a difference: three rounds are enough for both.
func TestCountedEventsAreNeverUnclear(t *testing.T) {
	packets := func(id string, bound float64, less *result.CellRef) result.Aim {
		return result.Aim{ID: id, Measure: "packets", Arm: "nft", Params: at("10"), Of: result.Value, Less: less,
			Bound: bound}
	}
	direct := &result.CellRef{Arm: "direct"}
	r := countedRun(t, 1200, 900, 300, packets("just", 4, nil), packets("by little", 3.99, nil),
		packets("less", 2, direct), packets("too much", 1.99, direct))
	for _, b := range r.Blocks {
		n := map[string]float64{"direct": 2, "nft": 4}[b.Arm]
		if b.Measure == "crr" && n > 0 {
			b.Measure, b.Counters = "packets", map[string]float64{"softnet": n * float64(b.Ops)}
			r.Blocks = append(r.Blocks, b)
		}
	}
	s := summarize(t, recordRun(t, r))
	for i, want := range []Outcome{Hit, Miss, Hit, Miss} {
		if a := s.Aims[i]; a.Outcome != want || a.Got == nil || a.Got.CI.Low != a.Got.CI.High {
			t.Errorf("%s: %s, want %s: %+v", a.ID, a.Outcome, want, a.Got)
		}
	}
}

// recordRun returns the folder of a run.
func recordRun(t *testing.T, r result.Run) string {
	t.Helper()
	return record(t, r.Manifest.Design, r.Blocks...)
}
