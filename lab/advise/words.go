package advise

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/stats"
)

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Sentences returns the answer: the recommendation, and the three figures that decide it.
func (a Advice) Sentences() []string {
	head := map[Outcome]string{
		Better: fmt.Sprintf("Switch from %s to %s.", a.Current, a.Recommended),
		Same:   fmt.Sprintf("Stay with %s: no measurable difference speaks for another.", a.Current),
		Unclear: fmt.Sprintf("Stay with %s: another may be faster, but the intervals are too wide to tell; a longer --time "+
			"narrows them.", a.Current),
		Unfit: fmt.Sprintf("Switch from %s, which can't serve here what this cluster uses, to %s.", a.Current,
			a.Recommended),
		None: "No candidate can serve here what this cluster uses.",
	}[a.Outcome]
	return append([]string{head}, a.Figures()...)
}

// Figures returns the three figures that decide, in sentences.
func (a Advice) Figures() (l []string) {
	if a.Against == nil {
		return []string{"There is no other candidate to compare with."}
	}
	of := a.Against
	second := incoming
	if _, ok := of.figure(incoming); !ok {
		second = roundTrip
	}
	for _, id := range []string{connection, second} {
		if f, ok := of.figure(id); ok {
			l = append(l, a.ratioSentence(id, f))
		}
	}
	if f, ok := of.figure(upkeep); ok {
		l = append(l, a.upkeepSentence(f))
	}
	return l
}

// now returns the current option's figure.
func (a Advice) now(id string) (Figure, bool) {
	for _, o := range a.Options {
		if o.Current {
			return o.figure(id)
		}
	}
	return Figure{}, false
}

// ratioSentence returns "A new connection … takes 61.0 µs with ebpf and 73.0 µs with nftables: 0.84 × (0.82–0.87),
// measurably less."
func (a Advice) ratioSentence(id string, f Figure) string {
	text := fmt.Sprintf("A %s takes %s with %s", f.Title, f.Amount(f.Value.Value), a.Against.Candidate)
	if y, ok := a.now(id); ok {
		text += fmt.Sprintf(" and %s with %s", y.Amount(y.Value.Value), a.Current)
	}
	if f.Over == nil {
		return text + "."
	}
	text = fmt.Sprintf("%s: %s, %s", text, Ratio(*f.Over), verdictWords(f.Verdict))
	if f.Verdict == stats.Unclear && f.Resolution > margin {
		text += fmt.Sprintf(", since it resolves ±%.2g %%", 100*f.Resolution)
	}
	return text + "."
}

// Ratio returns "0.84 × (0.82–0.87)".
func Ratio(e stats.Estimate) string {
	return fmt.Sprintf("%.3f × (%.3f–%.3f)", e.Value, e.CI.Low, e.CI.High)
}

// verdictWords returns what a verdict on a ratio means.
func verdictWords(v stats.Verdict) string {
	return map[stats.Verdict]string{stats.Lower: "measurably less", stats.Higher: "measurably more",
		stats.Same: fmt.Sprintf("the same within %.0f %%", 100*margin)}[v] +
		map[bool]string{true: "too little for this run to tell apart"}[v == stats.Unclear || v == ""]
}

// upkeepSentence returns what changes of endpoints cost with either.
func (a Advice) upkeepSentence(f Figure) string {
	say := func(c Candidate, f Figure) string {
		text := fmt.Sprintf("%s (%s–%s) of processor time with %s", f.Amount(f.Value.Value), f.Amount(f.Value.CI.Low),
			f.Amount(f.Value.CI.High), c)
		if a.PerSecond > 0 {
			text += fmt.Sprintf(", at most %.2g %% of a core", 100*a.share(f.Value.Value))
		}
		return text
	}
	when := fmt.Sprintf("At %.3g changes of endpoints a second, one takes ", a.PerSecond)
	switch a.PerSecond {
	case 0:
		when = "A change of endpoints takes "
	case 1:
		when = "At 1 change of endpoints a second, one takes "
	}
	text := when + say(a.Against.Candidate, f)
	if y, ok := a.now(upkeep); ok {
		text += ", and " + say(a.Current, y)
	}
	return text + "."
}

// Table returns a row for each option below a heading.
func (a Advice) Table() (rows [][]string) {
	ids := []string{connection, incoming, roundTrip, upkeep, memory}
	heads := map[string]string{connection: "NEW CONNECTION", incoming: "INTO A POD", roundTrip: "ROUND TRIP",
		upkeep: "A CHANGE", memory: "MEMORY"}
	ids = slices.DeleteFunc(ids, func(id string) bool {
		return !slices.ContainsFunc(a.Options, func(o Option) bool { _, ok := o.figure(id); return ok })
	})
	head := []string{"CANDIDATE"}
	for _, id := range ids {
		head = append(head, heads[id])
	}
	rows = append(rows, append(head, "SUPPORTS ALL"))
	for _, o := range a.Options {
		row := []string{o.Candidate.String()}
		if o.Current {
			row[0] += " (now)"
		}
		for _, id := range ids {
			f, ok := o.figure(id)
			cell := "-"
			if ok {
				cell = f.Amount(f.Value.Value)
			}
			if f.Over != nil {
				cell += ", " + Ratio(*f.Over)
			}
			row = append(row, cell)
		}
		rows = append(rows, append(row, o.support()))
	}
	return rows
}

// support returns whether an option serves all that the cluster uses, in a few words.
func (o Option) support() string {
	switch {
	case o.Cannot != "":
		return "not measured"
	case len(o.Lacks) > 0:
		return fmt.Sprintf("no: %d", len(o.Lacks))
	case o.Failed > 0:
		return fmt.Sprintf("%d failed", o.Failed)
	}
	return "yes"
}

// Chart draws how long a new connection takes with each candidate, for a terminal of so many columns. It is "" where
// none was measured.
func (a Advice) Chart(width int) string {
	var l []report.Bar
	title := ""
	for _, o := range a.Options {
		if f, ok := o.figure(connection); ok {
			title = strings.ToUpper(f.Title[:1]) + f.Title[1:] + ":\n"
			l = append(l, report.Bar{Name: o.Candidate.String() + map[bool]string{true: " (now)"}[o.Current],
				Text: f.Amount(f.Value.Value), Value: f.Value.Value})
		}
	}
	return title + report.Bars(l, width)
}

// Unsupported returns what options don't support of what the cluster uses, by option.
func (a Advice) Unsupported() (l []string) {
	seen := map[string]bool{}
	for _, o := range a.Options {
		if !seen[o.Mode] {
			seen[o.Mode] = true
			for _, s := range o.Lacks {
				l = append(l, o.Mode+": "+s)
			}
		}
	}
	return l
}

// Changed returns what would be otherwise with the option that the figures are of.
func (a Advice) Changed() (l []string) {
	if a.Against == nil {
		return nil
	}
	for _, c := range a.Against.Changes {
		if c.Goes {
			l = append(l, "no longer: "+c.Text)
		} else {
			l = append(l, "from then on: "+c.Text)
		}
	}
	return l
}

// Commands returns how to switch, none where nothing is to be switched.
func (a Advice) Commands() []string {
	c := a.Recommended
	if c == a.Current || c == (Candidate{}) {
		return nil
	}
	helm, run := []string{"mode=" + c.Mode}, []string{"--mode", c.Mode}
	if c.Engine != "" {
		helm = append(helm, "policy.engine="+c.Engine)
		run = append(run, "--policy-mode", "Enforce", "--policy-engine", c.Engine)
	}
	return []string{
		"helm upgrade fairlead deploy/chart -n kube-system --reuse-values --set " + strings.Join(helm, ","),
		"fairlead run " + strings.Join(run, " ") + "   # without Helm",
	}
}

// DefaultTime is how long a measurement takes unless told otherwise, and QuickTime a short one.
const (
	DefaultTime = 3 * time.Minute
	QuickTime   = 45 * time.Second
)
