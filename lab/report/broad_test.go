package report

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// modes is a design of many arms, with every kind of measure, claim and picture.
func modes() result.Design {
	at := func(n string) map[string]string { return map[string]string{"services": n} }
	d := result.Design{ID: "modes", Title: "Many modes", Question: "Which?",
		Vary:     result.Axis{Param: "services", Title: "Services × 10 endpoints", Short: "Services"},
		Baseline: "direct", Again: "again", Margin: 0.02, Rounds: 9,
		Measures: []result.Measure{
			{ID: "crr", Title: "connection", Text: "one.", Unit: "µs", Stat: "p50", Ratio: true},
			{ID: "mean", From: "crr", Title: "its mean", Unit: "µs", Stat: "mean", Ratio: true, Detail: true},
			{ID: "cpu", From: "crr", Title: "processor time", Unit: "%", Stat: "cpu", More: true, Margin: 0.005},
			{ID: "client", From: "crr", Title: "client", Unit: "%", Stat: "cpu:client", More: true, Detail: true},
			{ID: "server", From: "crr", Title: "server", Unit: "%", Stat: "cpu:server", More: true, Detail: true},
			{ID: "rules", Title: "rules", Stat: "value", Exact: true},
			{ID: "load", Title: "first write", Unit: "s", Stat: "value"},
		},
		Aims: []result.Aim{
			{ID: "C1", Text: "the same within 2 %", Claim: "Somebody 2019", Measure: "crr", Arm: "iptables", Params: at("1000"),
				Of: "value", Over: &result.CellRef{Arm: "nftables", Params: at("1000")}, Bound: 1, Margin: 0.02},
			{ID: "C4", Text: "about 2,000 rules", Claim: "Somebody 2019", Measure: "rules", Arm: "classic", Params: at("1000"),
				Of: "value", Bound: 2000, Margin: 0.02},
			{ID: "C7", Text: "something else", Claim: "Somebody 2019", Cannot: "this kernel can't"},
			{ID: "G1", Text: "ebpf ≤ 1.01 × direct", Measure: "crr", Arm: "ebpf", Params: at("1000"), Of: "ratio", Bound: 1.01},
		},
		Method: []string{"Made up."}, Missing: []string{"Mode ipvs: it can't run here: no module."},
		Pictures: []result.Picture{
			{ID: "parts", Kind: result.Stack, Title: "Who spent it", Measures: []string{"client", "server", "load"}},
			{ID: "overlay", Kind: result.Overlay, Title: "Where the times lie", Measures: []string{"crr"},
				Arms: []string{"iptables", "userspace"}},
			{ID: "deviation", Kind: result.Deviation, Title: "Mean and deviation", Measures: []string{"crr"}},
			{ID: "shares", Kind: result.Shares, Title: "Who answered", Measures: []string{"crr"}},
			{ID: "crr-ecdf", Kind: result.ECDF, Title: "How many within", Measures: []string{"crr"}},
		},
	}
	for _, a := range []string{"direct", "again", "iptables", "userspace", "nftables", "ebpf", "classic"} {
		d.Arms = append(d.Arms, result.Arm{ID: a, Title: map[string]string{"again": "direct again"}[a] +
			map[bool]string{true: a}[a != "again"]})
	}
	return d
}

// madeUpModes writes a run of that design and returns its directory.
func madeUpModes(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "modes")
	w, err := result.Create(dir, result.Manifest{Design: modes(), Profile: "quick", Seed: 7,
		Command: []string{"fairlead", "lab", "run", "modes"}, Machine: machineOf})
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(3, 3))
	add := func(b result.Block, err error) {
		if err == nil {
			err = w.Add(b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	block := func(round int, arm string, services int, mid float64) {
		ns := make([]int64, 200)
		for i := range ns {
			ns[i] = int64(mid * (1 + 0.002*math.Abs(r.NormFloat64())))
		}
		b := result.Block{Measure: "crr", Arm: arm, Round: round, Wall: 200 * time.Millisecond,
			Answers: map[string]int64{"1": 100, "2": 98, "3": 102}, Counters: map[string]float64{"servers": 3},
			CPU: &load.CPU{User: time.Duration(mid * 40), Server: time.Duration(mid * 20)}}
		if services > 0 {
			b.Params = map[string]string{"services": fmt.Sprint(services)}
		}
		add(b.Times(ns))
	}
	costs := map[string]float64{"iptables": 1.2, "userspace": 4.5, "nftables": 1.21, "ebpf": 1.003, "classic": 1.25}
	for i := range 9 {
		block(i, "direct", 0, 60e3)
		block(i, "again", 0, 60e3)
		for _, n := range []int{1, 1000} {
			for arm, cost := range costs {
				if arm == "classic" {
					cost += 1e-3 * float64(n)
				}
				block(i, arm, n, 60e3*cost)
			}
		}
		block(i, "direct", 0, 60e3)
	}
	for _, n := range []int{1, 1000} {
		for arm, rules := range map[string]float64{"iptables": 20, "userspace": 0, "nftables": 6, "ebpf": 0,
			"classic": 15 + 2*float64(n)} {
			b := result.Block{Arm: arm, Params: map[string]string{"services": fmt.Sprint(n)}}
			b.Measure = "rules"
			add(b.Is(rules), nil)
			b.Measure = "load"
			add(b.Is(1e7*float64(n)), nil)
		}
	}
	wide := result.Block{Measure: "load", Arm: "ebpf", Params: map[string]string{"services": "100", "endpoints": "50"}}
	add(wide.Is(5e9), nil)
	if err := w.Close("", loadAfter); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestManyModes(t *testing.T) {
	dir := madeUpModes(t)
	h, md := reports(t, dir)
	wellFormed(t, h)
	files := tree(t, dir)
	for _, name := range []string{"claims", "aims", "parts", "overlay", "deviation", "shares", "crr-ecdf", "crr",
		"crr-value", "mean", "cpu", "rules", "load"} {
		if _, ok := files[ChartsDir+"/"+name+".svg"]; !ok {
			t.Errorf("no chart %s", name)
		}
	}
	if _, ok := files[ChartsDir+"/mean-value.svg"]; ok {
		t.Error("a detail is drawn twice")
	}
	if s := files[ChartsDir+"/load.svg"]; !strings.Contains(s, ">ebpf, endpoints 50<") {
		t.Error("a further parameter has no line of its own")
	}
	if s := files[ChartsDir+"/crr-ecdf.svg"]; strings.Count(s, "1,000") == 0 || !strings.Contains(s, "classic, 1,000") {
		t.Error("the cumulated shares are not of every arm at its greatest number")
	}
	if s := files[ChartsDir+"/crr.svg"]; !strings.Contains(s, "left out: userspace") ||
		strings.Contains(strings.ReplaceAll(s, "left out: userspace", ""), ">userspace<") {
		t.Error("what lies far above the others flattens them")
	}
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	var term bytes.Buffer
	if err := Table(&term, s, 90); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(term.String()) {
		if n := utf8.RuneCountInString(line) - 1; n > 90 && !strings.HasPrefix(line, "!") {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	for _, want := range []string{"Claims: 2 confirmed, 1 not testable here", "no difference beyond the margin",
		"Shares of the answers"} {
		if !strings.Contains(term.String(), want) {
			t.Errorf("the terminal doesn't say %q:\n%s", want, term.String())
		}
	}
	if strings.Contains(term.String(), "its mean") {
		t.Error("the terminal has details")
	}
	plain := html.UnescapeString(h)
	for _, want := range []string{"Somebody 2019", "confirmed", "this kernel can't", "no module", "its mean", "ipvs",
		"▲ more, ▼ less, = the same within the margin, ? unclear"} {
		for where, text := range map[string]string{"HTML": plain, "Markdown": md} {
			if !strings.Contains(text, want) {
				t.Errorf("%s doesn't say %q", where, want)
			}
		}
	}
}
