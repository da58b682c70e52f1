package romana

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// prepare prepares a run of so many policies.
func prepare(counts ...int) labtest.Prepare {
	return func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		return newTrial(ctx, b, profile{"tiny", counts, 2, 3, time.Millisecond, 100, false})
	}
}

func TestRomana(t *testing.T) {
	dir, s := labtest.Run(t, nil, prepare(10, 200))
	few, many := experiment.PolicyParams(10), experiment.PolicyParams(200)
	arms := []string{experiment.ArmListIPTables, experiment.ArmListNFT, "nftables", "iptables", "ebpf"}
	for _, arm := range arms {
		for _, m := range []string{"http-.5k", "http-1M", "http-1M-mean", "rules", "rules-established", "load"} {
			labtest.Number(t, s, m, arm, few)
			labtest.Number(t, s, m, arm, many)
		}
		if a, b := labtest.Number(t, s, "rules-established", arm, few),
			labtest.Number(t, s, "rules-established", arm, many); a != b {
			t.Errorf("%s: an established packet is tested against %v rules under 10 policies, %v under 200", arm, a, b)
		}
	}
	for _, arm := range arms[:2] { // one rule for each policy, behind the two of the hook
		if got := labtest.Number(t, s, "rules", arm, many); got != 202 {
			t.Errorf("%s: a new connection is tested against %v rules under 200 policies, want 202", arm, got)
		}
	}
	for _, arm := range arms[2:] {
		a, b := labtest.Number(t, s, "rules", arm, few), labtest.Number(t, s, "rules", arm, many)
		most := map[string]float64{"nftables": 9, "iptables": 60, "ebpf": 7}[arm]
		if b > most || arm != "iptables" && a != b || arm == "ebpf" && b != most {
			t.Errorf("%s: a new connection is tested against %v rules under 10 policies, %v under 200", arm, a, b)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, report.MarkdownFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`\[783 µs]`, `\[+7.00 %]`, "times-list-iptables.svg", "shares-ebpf.svg"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the report lacks %s", want)
		}
	}
}

func TestRomanaInterrupted(t *testing.T) { labtest.Interrupt(t, "http-10k", prepare(10)) }

func TestDesign(t *testing.T) {
	r := &trial{grid: &experiment.PolicyGrid{Counts: full.Counts, Lists: []string{experiment.ArmListIPTables}},
		profile: full}
	labtest.AimsAreOfCells(t, r.Design())
}

func TestExactDesign(t *testing.T) {
	grid := &experiment.PolicyGrid{Counts: exact.Counts, Lists: []string{experiment.ArmListIPTables}}
	timed, counted := &trial{grid: grid, profile: full}, &trial{grid: grid, profile: exact}
	labtest.Counts(t, timed.Design(), counted.Design(), "http-.5k", "http-1k", "http-10k", "load")
}
