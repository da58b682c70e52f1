package analysis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// Comparison is what two runs of one experiment, A and B, say of each other.
type Comparison struct {
	A, B        Summary
	Differences []Difference // between machines, programs and settings, as the manifests have them
	Ratios      []Versus     // each run's own ratio to its own baseline; Over is B's over A's
	More        []Versus     // each run's own difference to its own baseline; Over is B's less A's
	Counts      []Versus     // exact ones, but for instructions; Over is B's over A's
	Counted     []Counted    // instructions of two exact runs, the greatest difference in per cent first
	// of the baseline, and of measures without one: measured in different runs, so that all that differs between these is
	// in Over
	Values []Versus
	Claims []AimResult // of two machines
	Left   []string    // what is not compared, and why
}

// Difference is what A's manifest says otherwise than B's.
type Difference struct{ Name, A, B string }

// Versus is a cell in both runs.
type Versus struct {
	Measure, Arm string
	Params       result.Params
	A, B         stats.Estimate // of each run
	Over         stats.Estimate
	Verdict      stats.Verdict
	Margin       float64
	Resolution   float64 // what the two runs together can't tell from nothing
}

// Counted is a cell of two exact runs: equal, or different by a number of instructions.
type Counted struct {
	Versus
	RatioA, RatioB float64 // to each run's own baseline; 0: none
	Parts          []PartDifference
}

// More is by how many instructions B's is greater than A's.
func (c Counted) More() float64 { return c.B.Value - c.A.Value }

// PartDifference is a part of an operation that has other instructions in B than in A: of one traced operation each.
type PartDifference struct {
	Title string
	A, B  float64
}

// More is by how many instructions B's is greater than A's.
func (p PartDifference) More() float64 { return p.B - p.A }

// Compare compares two runs. It returns an error that names what can't be compared: runs of different experiments,
// profiles, baselines or varied parameters.
func Compare(a, b result.Run) (c Comparison, err error) {
	if err := comparable(a.Manifest, b.Manifest); err != nil {
		return c, err
	}
	for i, r := range []result.Run{a, b} {
		if len(r.Blocks) == 0 {
			return c, fmt.Errorf("can't compare: %s measured nothing%s; run it again", []string{"A", "B"}[i],
				strings.TrimSuffix(": "+r.Manifest.Outcome, ": "))
		}
	}
	if c.A, err = Summarize(a); err != nil {
		return c, fmt.Errorf("summarize A: %w", err)
	}
	if c.B, err = Summarize(b); err != nil {
		return c, fmt.Errorf("summarize B: %w", err)
	}
	ag, err := group(a)
	if err != nil {
		return c, err
	}
	bg, err := group(b)
	if err != nil {
		return c, err
	}
	c.Differences = differencesOf(a.Manifest, b.Manifest)
	known := c.measures(a.Manifest.Machine.Emulated() != b.Manifest.Machine.Emulated())
	both := 0
	for _, g := range ag {
		o := find(bg, g.measure.ID, g.arm, g.params)
		if o == nil || !known[g.measure.ID] || g.arm == a.Manifest.Design.Again {
			continue
		}
		both++
		c.add(a.Manifest.Seed, g, o, ag, bg)
	}
	if both == 0 {
		return c, fmt.Errorf("the runs of experiment %s have no cell in common: %s", a.Manifest.Design.ID,
			strings.Join(append(c.Left, "arms, parameters and measures all differ"), "; "))
	}
	c.countParts(ag, bg)
	c.leave(ag, bg)
	c.claims(a, b, ag, bg)
	return c, c.shareArms(ag, bg)
}

// shareArms returns an error where both runs have arms beside the baseline and none of these in common.
func (c *Comparison) shareArms(ag, bg []*cellBlocks) error {
	base := []string{c.A.Design.Baseline, c.A.Design.Again}
	inA, inB := armsOf(ag, base), armsOf(bg, base)
	shared := slices.ContainsFunc(inA, func(s string) bool { return slices.Contains(inB, s) })
	if shared || len(inA) == 0 || len(inB) == 0 {
		return nil
	}
	return fmt.Errorf("can't compare: the runs have no arm in common but %s; A has %s, B has %s: run one of them "+
		"again with an arm of the other", c.A.Design.ArmTitle(c.A.Design.Baseline), strings.Join(inA, ", "),
		strings.Join(inB, ", "))
}

// armsOf returns the arms of cells but for some, sorted.
func armsOf(l []*cellBlocks, but []string) (names []string) {
	for _, g := range l {
		if !slices.Contains(but, g.arm) {
			names = append(names, g.arm)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// countParts finds the parts that differ, and sorts what is counted by how much it differs in per cent: a first write
// is so many instructions that a per mille of it would stand before any connection.
func (c *Comparison) countParts(ag, bg []*cellBlocks) {
	for i := range c.Counted {
		v := &c.Counted[i]
		m, _ := c.A.Design.Measure(v.Measure)
		for _, p := range c.A.Design.Measures {
			if whole, is := result.Whole(p.ID); !is || whole != v.Measure {
				continue
			}
			d := PartDifference{Title: strings.TrimPrefix(p.Title, m.Title+": ")}
			for _, of := range []struct {
				groups []*cellBlocks
				to     *float64
			}{{ag, &d.A}, {bg, &d.B}} {
				if g := find(of.groups, p.ID, v.Arm, v.Params); g != nil {
					*of.to = g.value().Value
				}
			}
			if d.A != d.B {
				v.Parts = append(v.Parts, d)
			}
		}
		slices.SortStableFunc(v.Parts, func(a, b PartDifference) int {
			return cmp.Compare(math.Abs(b.More()), math.Abs(a.More()))
		})
	}
	slices.SortStableFunc(c.Counted, func(a, b Counted) int {
		return cmp.Compare(math.Abs(b.Over.Value-1), math.Abs(a.Over.Value-1))
	})
}

// comparable returns an error that names why two runs can't be compared.
func comparable(a, b result.Manifest) error {
	if a.Design.Exact != b.Design.Exact {
		names := map[bool]string{a.Design.Exact: "A", b.Design.Exact: "B"}
		return fmt.Errorf("can't compare: %s counts instructions and %s measures times; run the experiment of %[2]s again "+
			"with --exact, or compare each with a run of its own kind", names[true], names[false])
	}
	for _, x := range []struct{ what, a, b, do string }{
		{"experiment", a.Design.ID, b.Design.ID, "compare two runs of one experiment"},
		{"profile", a.Profile, b.Profile, "run both with --quick, or both without"},
		{"baseline", a.Design.Baseline, b.Design.Baseline, "their designs differ: run both with the same program and flags"},
		{"varied parameter", a.Design.Vary.Param, b.Design.Vary.Param,
			"their designs differ: run both with the same program"},
	} {
		if x.a != x.b && !(a.Design.Exact && x.what == "profile") { // which counts no other instructions
			return fmt.Errorf("can't compare: the %s of A is %q, of B %q; %s", x.what, x.a, x.b, x.do)
		}
	}
	return nil
}

// measures returns those that mean the same in both runs, and names the others. Where one processor is emulated, only
// counts mean anything.
func (c *Comparison) measures(emulated bool) map[string]bool {
	known := map[string]bool{}
	for _, m := range c.A.Design.Measures {
		o, ok := c.B.Design.Measure(m.ID)
		switch {
		case !ok:
			c.Left = append(c.Left, fmt.Sprintf("%s: B's design has no measure %s", m.Title, m.ID))
		case m.Unit != o.Unit || m.Stat != o.Stat || m.From != o.From || m.Ratio != o.Ratio || m.More != o.More ||
			m.Mean != o.Mean || m.Exact != o.Exact:
			c.Left = append(c.Left, fmt.Sprintf("%s: the designs define the measure %s differently", m.Title, m.ID))
		case emulated && !m.Exact:
		default:
			known[m.ID] = true
		}
		if ok && m.Text != o.Text {
			c.Differences = append(c.Differences, Difference{"Measure " + m.ID, m.Text, o.Text})
		}
	}
	for _, m := range c.B.Design.Measures {
		if _, ok := c.A.Design.Measure(m.ID); !ok {
			c.Left = append(c.Left, fmt.Sprintf("%s: A's design has no measure %s", m.Title, m.ID))
		}
	}
	if emulated {
		c.Left = append(c.Left, "All times and shares: the processor of one of the two is emulated; counts alone compare")
	}
	return known
}

// leave names the arms that one run alone has.
func (c *Comparison) leave(ag, bg []*cellBlocks) {
	inA, inB := armsOf(ag, nil), armsOf(bg, nil)
	for _, of := range []struct {
		in, not []string
		name    string
		d       result.Design
	}{{inA, inB, "A", c.A.Design}, {inB, inA, "B", c.B.Design}} {
		for _, arm := range of.in {
			if !slices.Contains(of.not, arm) {
				c.Left = append(c.Left, fmt.Sprintf("%s: %s alone has it", of.d.ArmTitle(arm), of.name))
			}
		}
	}
}

// add compares a cell of A with the same of B.
func (c *Comparison) add(seed uint64, a, b *cellBlocks, ag, bg []*cellBlocks) {
	m, base := a.measure, c.A.Design.Baseline
	v := Versus{Measure: m.ID, Arm: a.arm, Params: a.params, A: a.value(), B: b.value(), Margin: marginOf(c.A.Design, m)}
	_, part := result.Whole(m.ID)
	v.Resolution = c.A.Resolution[m.ID].Half + c.B.Resolution[m.ID].Half
	if v.A.N == 0 || v.B.N == 0 {
		return
	}
	switch {
	case a.counted && part: // shown with its whole
		return
	case a.counted:
		v.Over = exact(v.B.Value / v.A.Value)
		if v.A.Value == v.B.Value { // also where both are 0
			v.Over = exact(1)
		}
		v.Verdict = stats.Compare(v.Over, 0, 0)
		if m.Unit == result.Instructions {
			c.Counted = append(c.Counted, Counted{Versus: v, RatioA: a.ratio(ag, base).Value, RatioB: b.ratio(bg, base).Value})
		} else {
			c.Counts = append(c.Counts, v)
		}
	case a.arm == base || !m.Ratio && !m.More:
		if v.Over = stats.MedianRatio(seed, b.figures(), a.figures()); finite(v.Over.Value) {
			v.Resolution = 0
			v.Verdict = stats.Compare(v.Over, v.Margin, 0)
			c.Values = append(c.Values, v)
		}
	case m.Ratio:
		ra, rb := a.ratios(ag, base), b.ratios(bg, base)
		v.A, v.B, v.Over = stats.MedianCI(ra), stats.MedianCI(rb), stats.MedianRatio(seed, rb, ra)
		if finite(v.Over.Value) {
			v.Verdict = stats.Compare(v.Over, v.Margin, v.Resolution)
			c.Ratios = append(c.Ratios, v)
		}
	case m.More:
		ma, mb := a.differences(ag, base), b.differences(bg, base)
		v.A, v.B = stats.MedianCI(ma), stats.MedianCI(mb)
		v.Over = stats.Bootstrap(seed, func(s ...[]float64) float64 {
			return stats.Median(s[0]) - stats.Median(s[1])
		}, mb, ma)
		if finite(v.Over.Value) {
			v.Verdict = compareMore(v.Over, v.Margin, v.Resolution)
			c.More = append(c.More, v)
		}
	}
}

// differencesOf lists what the manifests have differently.
func differencesOf(a, b result.Manifest) (l []Difference) {
	add := func(name, x, y string) {
		if x != y {
			l = append(l, Difference{name, x, y})
		}
	}
	add("With", without(a.Versions, b.Versions), without(b.Versions, a.Versions))
	for _, f := range []struct {
		name string
		of   func(result.Manifest) string
	}{
		{"Kernel", func(m result.Manifest) string { return m.Machine.Kernel }},
		{"Processor", func(m result.Manifest) string { return m.Machine.CPU }},
		{"Processors", func(m result.Manifest) string { return fmt.Sprint(m.Machine.CPUs) }},
		{"Virtual machine", func(m result.Manifest) string {
			return map[bool]string{true: "yes", false: "no"}[m.Machine.Hypervisor]
		}},
		{"Architecture", func(m result.Manifest) string { return m.Machine.Arch }},
		{"Memory", func(m result.Manifest) string { return fmt.Sprintf("%.1f GiB", float64(m.Machine.Memory)/(1<<30)) }},
		{"Clock", func(m result.Manifest) string { return m.Machine.Clocksource }},
		{"Governor", func(m result.Manifest) string { return m.Machine.Governor }},
		{"Processor limit", func(m result.Manifest) string { return m.Machine.CPUMax }},
		{"Commit", func(m result.Manifest) string {
			return fmt.Sprintf("%.12s", m.Build.Commit) + map[bool]string{true: " with changes"}[m.Build.Modified]
		}},
		{"Version", func(m result.Manifest) string { return m.Build.Version }},
		{"Go", func(m result.Manifest) string { return m.Build.Go }},
		{"Program, SHA-256", func(m result.Manifest) string { return fmt.Sprintf("%.12s", m.Build.Binary) }},
		{"Rounds planned", func(m result.Manifest) string { return fmt.Sprint(m.Design.Rounds) }},
		{"Load before", func(m result.Manifest) string { return loadAverage(m.Before) }},
	} {
		add(f.name, f.of(a), f.of(b))
	}
	for _, of := range []struct {
		name string
		a, b map[string]string
	}{{"Kernel option", a.Machine.Config, b.Machine.Config}, {"Setting", a.Machine.Sysctls, b.Machine.Sysctls},
		{"Mitigation", a.Machine.Mitigations, b.Machine.Mitigations}} {
		all := maps.Clone(of.a)
		if all == nil {
			all = map[string]string{}
		}
		maps.Copy(all, of.b)
		for _, k := range slices.Sorted(maps.Keys(all)) {
			add(of.name+" "+k, of.a[k], of.b[k])
		}
	}
	return l
}

// without returns what a run was measured with and the other was not.
func without(l, other []string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(l), func(s string) bool { return slices.Contains(other, s) }), "; ")
}

// loadAverage returns the three averages of a load, without what follows.
func loadAverage(l result.Load) string {
	f := strings.Fields(l.Average)
	return strings.Join(f[:min(3, len(f))], " ")
}

// claims judges what the designs claim of two machines: of the virtual one against the bare one.
func (c *Comparison) claims(a, b result.Run, ag, bg []*cellBlocks) {
	virtual, bare := ag, bg
	if b.Manifest.Machine.Hypervisor {
		virtual, bare = bg, ag
	}
	for _, x := range c.A.Design.Aims {
		if x.Across != result.Hypervisor {
			continue
		}
		r := AimResult{Aim: x, Outcome: NotTestable}
		switch v, o := find(virtual, x.Measure, x.Arm, x.Params), find(bare, x.Measure, x.Arm, x.Params); {
		case a.Manifest.Machine.Hypervisor == b.Manifest.Machine.Hypervisor:
			r.Why = "it wants one virtual machine and one that is none: " +
				map[bool]string{true: "both are virtual", false: "neither is virtual"}[a.Manifest.Machine.Hypervisor]
		case v == nil || o == nil:
			r.Outcome, r.Why = NotMeasured, "one of the runs has no such cell"
		default:
			if e := stats.MedianRatio(a.Manifest.Seed, v.figures(), o.figures()); finite(e.Value) {
				r.Got, r.Outcome = &e, word(x, judge(x, e, 0))
			}
		}
		c.Claims = append(c.Claims, r)
	}
}
