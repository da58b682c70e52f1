package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/analysis"
)

// instructions returns "102,068".
func instructions(v float64) string { return group(fmt.Sprintf("%.0f", v)) }

// moreInstructions returns "+1,068", "−12" or "equal".
func moreInstructions(v float64) string {
	switch v = math.Round(v); {
	case v < 0:
		return "−" + instructions(-v)
	case v > 0:
		return "+" + instructions(v)
	}
	return "equal"
}

// mostGrown is how many parts a cell names.
const mostGrown = 3

// grownWords returns "TCP +1,068, IP +12", the parts that grew, the one that did most first.
func grownWords(v analysis.Counted) string {
	var l []string
	for _, p := range v.Parts {
		if p.More() > 0 {
			l = append(l, p.Title+" "+moreInstructions(p.More()))
		}
	}
	if n := len(l) - mostGrown; n > 0 {
		l = append(l[:mostGrown], fmt.Sprintf("%d more", n))
	}
	return strings.Join(l, ", ")
}

// counted makes the tables of two exact runs: all instructions, the greatest difference in per cent first, and
// their parts.
func (p *Comparison) counted() (l []*table) {
	d := p.c.A.Design
	whole := &table{Title: "Instructions, the greatest difference in per cent first", Head: []string{"", "", d.Vary.Short,
		"A", "B", lessA, "%", "A, × " + d.ArmTitle(d.Baseline), "B, ×", "parts that grew"}, Remark: randomWords}
	parts := &table{Title: "Parts that differ", Head: []string{"", "", d.Vary.Short, "part", "A", "B", lessA},
		Remark: "Of one traced operation of each run, the shortest."}
	number := func(s string) cell { return cell{Text: s, Class: "num"} }
	for _, v := range p.c.Counted {
		m, _ := d.Measure(v.Measure)
		h := head(d, analysis.Cell{Arm: v.Arm, Params: v.Params})
		share := map[bool]string{true: percent(v.Over.Value)}[v.More() != 0]
		whole.Rows = append(whole.Rows, []cell{{Text: m.Title}, h[0], h[1], number(instructions(v.A.Value)),
			number(instructions(v.B.Value)), number(moreInstructions(v.More())), number(share), number(ratio(v.RatioA)),
			number(ratio(v.RatioB)), {Text: grownWords(v)}})
		for _, x := range v.Parts {
			parts.Rows = append(parts.Rows, []cell{{Text: m.Title}, h[0], h[1], {Text: x.Title}, number(instructions(x.A)),
				number(instructions(x.B)), number(moreInstructions(x.More()))})
		}
	}
	for _, t := range []*table{whole, parts} {
		if len(t.Rows) > 0 {
			l = append(l, t)
		}
	}
	return l
}

// randomWords is what differs of one program in one kernel.
const randomWords = "What the guest draws at random, seeds of hash tables above all, moves a number of one program " +
	"in one kernel by some ten instructions, with nftables' sets by up to three hundred."

// countedSentences returns what two exact runs say of each other.
func (p *Comparison) countedSentences() (l []string) {
	c := p.c
	if len(c.Counted) == 0 {
		return nil
	}
	a, b := p.machines[0], p.machines[1]
	switch {
	case a.Kernel == b.Kernel:
		l = append(l, "Both counted in the same kernel image, "+kernelName(a)+": their instructions compare.")
	default:
		l = append(l, fmt.Sprintf("A counted in %s, B in %s: what these kernels differ in is in every number; ratios to %s "+
			"stand beside.", kernelName(a), kernelName(b), c.A.Design.ArmTitle(c.A.Design.Baseline)))
	}
	count := map[bool]int{}
	for _, v := range c.Counted {
		if v.More() != 0 {
			count[v.More() > 0]++
		}
	}
	text := fmt.Sprintf("Of %s %d are equal, %d are higher in B and %d lower", plural(len(c.Counted), "number"),
		len(c.Counted)-count[true]-count[false], count[true], count[false])
	if v := c.Counted[0]; v.More() != 0 {
		text += fmt.Sprintf("; the farthest is %s: %s in A, %s in B (%s, %s)", p.name(v.Versus), instructions(v.A.Value),
			instructions(v.B.Value), moreInstructions(v.More()), percent(v.Over.Value))
	}
	grew := func(v analysis.Counted) bool { return v.More() > 0 && grownWords(v) != "" }
	if i := slices.IndexFunc(c.Counted, grew); i >= 0 {
		v := c.Counted[i]
		text += fmt.Sprintf("; what grew most, %s (%s, %s), did so in %s", p.name(v.Versus), moreInstructions(v.More()),
			percent(v.Over.Value), grownWords(v))
	}
	return append(l, text+".")
}
