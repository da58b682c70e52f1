package report

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// counts is a page on exact runs of one experiment, beside runs of it by time.
type counts struct {
	id      string
	design  result.Design // of the first run, with the arms of all
	kernels []kernel
	timed   []run
}

// kernel is the exact runs in a kernel.
type kernel struct {
	name string
	runs []run
}

// run is a folder as it was read.
type run struct {
	manifest result.Manifest
	summary  analysis.Summary
}

// ExactPage returns a page, in Markdown, on the runs in some folders: exact ones of several kernels, and runs of the
// same experiments by time, which the ratios of the exact ones are compared with. Of a cell that several runs in one
// kernel have, the run that is named first counts.
func ExactPage(dirs []string) (string, error) {
	var all []*counts
	var timed []run
	for _, dir := range dirs {
		if IsSuite(dir) {
			return "", fmt.Errorf("%s holds runs of several experiments: name the folders below it", dir)
		}
		r, err := result.Read(dir)
		if err != nil {
			return "", err
		}
		s, err := analysis.Summarize(r)
		if err != nil {
			return "", fmt.Errorf("summarize %s: %w", dir, err)
		}
		one := run{r.Manifest, s}
		if !s.Design.Exact {
			timed = append(timed, one)
			continue
		}
		all = addRun(all, one)
	}
	if len(all) == 0 {
		return "", errors.New("no exact run is named: fairlead lab run connect --exact makes one")
	}
	for _, t := range timed {
		i := slices.IndexFunc(all, func(c *counts) bool { return c.id == t.summary.Design.ID })
		if i < 0 {
			return "", fmt.Errorf("a run of %s by time is named, and no exact one", t.summary.Design.ID)
		}
		all[i].timed = append(all[i].timed, t)
	}
	b := &document{}
	b.say("%s", exactIntroduction)
	exactRuns(b, all)
	for _, c := range all {
		c.write(b)
	}
	return strings.TrimRight(b.String(), "\n") + "\n", nil
}

// exactIntroduction is the page's beginning: what its numbers can't see.
const exactIntroduction = `# Instructions, counted

**What these numbers can't see**: caches, the prediction of branches, memory's latency, real devices and their queues, several
processors. Where an instruction is slow, they are too low; where two are executed at once, too high. Ratios stand beside those of
times at the end of each section, with the distance between both.

Instructions of both ends of a connection and all between them, counted in an emulated machine
([how](../how-to/count-instructions.md)), in brackets × direct. This page is generated: ` + "`make exact-page`" + `.`

// addRun adds an exact run to the page on its experiment.
func addRun(all []*counts, r run) []*counts {
	d := r.summary.Design
	i := slices.IndexFunc(all, func(c *counts) bool { return c.id == d.ID })
	if i < 0 {
		i = len(all)
		d.Arms = slices.Clone(d.Arms)
		all = append(all, &counts{id: d.ID, design: d})
	}
	c := all[i]
	for at, a := range d.Arms { // in their order, where an earlier run lacks some
		if !slices.ContainsFunc(c.design.Arms, func(o result.Arm) bool { return o.ID == a.ID }) {
			c.design.Arms = slices.Insert(c.design.Arms, min(at, len(c.design.Arms)), a)
		}
	}
	name := kernelName(r.manifest.Machine)
	k := slices.IndexFunc(c.kernels, func(k kernel) bool { return k.name == name })
	if k < 0 {
		k = len(c.kernels)
		c.kernels = append(c.kernels, kernel{name: name})
	}
	c.kernels[k].runs = append(c.kernels[k].runs, r)
	return all
}

// exactRuns writes which runs a page is of.
func exactRuns(b *document, all []*counts) {
	t := &table{Head: []string{"", "kernel", "commit", "command"}}
	add := func(kind string, r run) {
		t.Rows = append(t.Rows, []cell{{Text: kind}, {Text: kernelName(r.manifest.Machine)},
			{Text: commitName(r.manifest.Build)}, {Text: strings.Join(r.manifest.Command, " ")}})
	}
	for _, c := range all {
		for _, k := range c.kernels {
			for _, r := range k.runs {
				add("exact", r)
			}
		}
		for _, r := range c.timed {
			add("by time", r)
		}
	}
	b.say("\n## Runs\n\n%s", t.markdown())
}

// write writes the section of an experiment.
func (c *counts) write(b *document) {
	b.say("## %s\n", escape(c.design.Title))
	for _, m := range c.measures() {
		b.say("### %s\n\n%s", escape(upper(m.Title)), c.table(m).markdown())
	}
	if l := c.lacking(); len(l) > 0 {
		b.say("Not counted: %s.\n", escape(strings.Join(l, "; ")))
	}
	for _, m := range c.measures() {
		if c.design.Answer == nil || !strings.HasPrefix(m.ID, c.design.Answer.Chart) {
			continue
		}
		for _, k := range c.kernels {
			if t := c.parts(m, k); len(t.Rows) > 0 {
				b.say("### %s: parts, %s\n\n%s", escape(upper(m.Title)), k.name, t.markdown())
			}
		}
	}
	for _, r := range c.timed {
		c.writeTimes(b, r)
	}
	b.say("### Aims and claims, and what judged them\n\n%s", c.aims().markdown())
}

// measures returns those that a ratio to the baseline is counted of.
func (c *counts) measures() (l []result.Measure) {
	for _, m := range c.design.Measures {
		if _, part := result.Whole(m.ID); m.Ratio && !part && c.design.Counts(m) {
			l = append(l, m)
		}
	}
	return l
}

// params returns the parameters that cells of all exact runs have, the least first.
func (c *counts) params() (l []result.Params) {
	for _, k := range c.kernels {
		for _, r := range k.runs {
			for _, x := range r.summary.Cells {
				same := func(p result.Params) bool { return maps.Equal(p, x.Params) }
				ours := func(m result.Measure) bool { return m.ID == x.Measure }
				if len(x.Params) > 0 && slices.ContainsFunc(c.measures(), ours) && !slices.ContainsFunc(l, same) {
					l = append(l, x.Params)
				}
			}
		}
	}
	slices.SortStableFunc(l, func(a, b result.Params) int {
		x, y := a[c.design.Vary.Param], b[c.design.Vary.Param]
		return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(x, y), cmp.Compare(a.String(), b.String()))
	})
	return l
}

// cell returns the first run's that has one. An arm without parameters is the same beside all.
func (k kernel) cell(measure, arm string, p result.Params) (analysis.Cell, bool) {
	for _, params := range []result.Params{p, nil} {
		for _, r := range k.runs {
			if x, ok := r.summary.Cell(measure, arm, params); ok && x.Value != nil {
				return x, true
			}
		}
	}
	return analysis.Cell{}, false
}

// at returns "10 Services".
func (c *counts) at(p result.Params) string {
	h := head(c.design, analysis.Cell{Params: p})
	if _, varied := p[c.design.Vary.Param]; varied && len(p) == 1 {
		return h[1].Text + " " + c.design.Vary.Short
	}
	return h[1].Text
}

// columns returns the table's beginning: a column for each kernel and parameters.
func (c *counts) columns() *table {
	t := &table{Head: []string{""}, Groups: []heading{{Cols: 1}}}
	for _, k := range c.kernels {
		for _, p := range c.params() {
			t.Head = append(t.Head, c.at(p))
		}
		t.Groups = append(t.Groups, heading{k.name, len(c.params())})
	}
	return t
}

// table has a row for each arm: instructions, and × the baseline.
func (c *counts) table(m result.Measure) *table {
	t := c.columns()
	for _, a := range c.design.Arms {
		row, known := []cell{{Text: a.Title}}, false
		for _, k := range c.kernels {
			for _, p := range c.params() {
				x := cell{Text: "–", Class: "num"}
				if v, ok := k.cell(m.ID, a.ID, p); ok {
					known = true
					if x.Text = instructions(v.Value.Value); v.Ratio != nil {
						x.Small = ratio(v.Ratio.Value)
					}
				}
				row = append(row, x)
			}
		}
		if known {
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

// lacking names the arms that a kernel has not at some parameters, and another cell of the page has.
func (c *counts) lacking() (l []string) {
	main := c.measures()
	for _, k := range c.kernels {
		for _, p := range c.params() {
			var arms []string
			for _, a := range c.design.Arms {
				has := func(k kernel, p result.Params) bool {
					return slices.ContainsFunc(main, func(m result.Measure) bool { _, ok := k.cell(m.ID, a.ID, p); return ok })
				}
				if !has(k, p) {
					arms = append(arms, a.Title)
				}
			}
			if len(arms) > 0 {
				l = append(l, fmt.Sprintf("%s at %s: %s", k.name, c.at(p), strings.Join(arms, ", ")))
			}
		}
	}
	return l
}

// parts has a row for each part of a measure in a kernel, and a column for each arm at its greatest parameters there.
func (c *counts) parts(m result.Measure, k kernel) *table {
	t := &table{Head: []string{"part"}}
	type column struct {
		arm    string
		params result.Params
	}
	var columns []column
	params := c.params()
	for _, a := range c.design.Arms {
		for _, p := range slices.Backward(params) {
			x, ok := k.cell(m.ID, a.ID, p)
			if !ok {
				continue
			}
			columns = append(columns, column{a.ID, x.Params})
			title := a.Title
			if len(x.Params) > 0 {
				title += ", " + c.at(x.Params)
			}
			t.Head = append(t.Head, title)
			break
		}
	}
	for _, part := range c.design.Measures {
		if whole, is := result.Whole(part.ID); !is || whole != m.ID {
			continue
		}
		row, known := []cell{{Text: strings.TrimPrefix(part.Title, m.Title+": ")}}, false
		for _, of := range columns {
			x := cell{Class: "num"}
			if v, ok := k.cell(part.ID, of.arm, of.params); ok {
				x.Text, known = instructions(v.Value.Value), true
			}
			row = append(row, x)
		}
		if known {
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

// writeTimes compares ratios of instructions with those of a run by time.
func (c *counts) writeTimes(b *document, r run) {
	k := c.kernels[0]
	if i := slices.IndexFunc(c.kernels, func(k kernel) bool { return k.name == kernelName(r.manifest.Machine) }); i >= 0 {
		k = c.kernels[i]
	}
	t, far, within := c.times(r, k)
	if len(far) == 0 {
		return
	}
	b.say("### Ratios of instructions beside those of times\n")
	b.say("By time on %s, %s. Each cell: the ratio of instructions in %s · that of times (its 95 %% interval) · the "+
		"distance.",
		escape(cpuName(r.manifest.Machine)), kernelName(r.manifest.Machine), k.name)
	b.say("Of %s %d lie within the interval of times; half of all distances are at most %s, the greatest is %s.%s\n\n%s",
		plural(len(far), "ratio"), within, share(stats.Median(far)), share(slices.Max(far)), c.noise(r), t.markdown())
}

// noise returns what the run by time can't tell, and whether it was noisy.
func (c *counts) noise(r run) (words string) {
	half := 0.0
	for _, m := range c.measures() {
		half = max(half, r.summary.Resolution[m.ID].Half)
	}
	words = " The run by time resolves " + plusMinus(half) + " (A/A)"
	if r.summary.Noise.Noisy {
		words += ", and was noisy: " + strings.Join(r.summary.Noise.Why, "; ")
	}
	return words + "."
}

// times has a row for each arm and parameters that both have, and a column for each measure; and how far ratios are
// from each other.
func (c *counts) times(r run, k kernel) (t *table, far []float64, within int) {
	t = &table{Head: []string{"", c.design.Vary.Short}}
	for _, m := range c.measures() {
		t.Head = append(t.Head, m.Title)
	}
	for _, a := range c.design.Arms {
		for _, p := range append([]result.Params{nil}, c.params()...) {
			h := head(c.design, analysis.Cell{Arm: a.ID, Params: p})
			row, known := []cell{h[0], h[1]}, false
			for _, m := range c.measures() {
				x, there := r.summary.Cell(m.ID, a.ID, p)
				e, here := k.cell(m.ID, a.ID, p)
				text := "–"
				if there && here && x.Ratio != nil && e.Ratio != nil && maps.Equal(e.Params, p) {
					known = true
					apart := e.Ratio.Value / x.Ratio.Value
					far = append(far, math.Abs(apart-1))
					if x.Ratio.CI.Contains(e.Ratio.Value) {
						within++
					}
					text = fmt.Sprintf("%s · %s (%s) · %s", ratio(e.Ratio.Value), ratio(x.Ratio.Value), ratios(x.Ratio.CI),
						percent(apart))
				}
				row = append(row, cell{Text: text})
			}
			if known {
				t.Rows = append(t.Rows, row)
			}
		}
	}
	return t, far, within
}

// aims has a row for each aim and claim, by what judged it: instructions in a kernel, or time.
func (c *counts) aims() *table {
	t := &table{Head: []string{"", "", "judged by", "number", "outcome"}}
	add := func(by string, runs []run) {
		done := map[string]bool{}
		for _, r := range runs {
			for _, a := range r.summary.Aims {
				other := func(o run) bool { // has its number, where this one doesn't
					got := func(x analysis.AimResult) bool { return x.ID == a.ID && x.Got != nil }
					return slices.ContainsFunc(o.summary.Aims, got)
				}
				if done[a.ID] || a.Got == nil && slices.ContainsFunc(runs, other) {
					continue
				}
				done[a.ID] = true
				number := "–"
				if a.Got != nil {
					number = quantity(a.Aim, r.summary.Design, a.Got.Value)
					if a.Got.CI.Low != a.Got.CI.High {
						number += fmt.Sprintf(" (%s–%s)", quantity(a.Aim, r.summary.Design, a.Got.CI.Low),
							quantity(a.Aim, r.summary.Design, a.Got.CI.High))
					}
				}
				t.Rows = append(t.Rows, []cell{{Text: a.ID}, {Text: a.Text}, {Text: by}, {Text: number},
					{Text: string(a.Outcome)}})
			}
		}
	}
	for _, k := range c.kernels {
		add("instructions, "+k.name, k.runs)
	}
	for _, r := range c.timed {
		add("time, "+kernelName(r.manifest.Machine), []run{r})
	}
	return t
}
