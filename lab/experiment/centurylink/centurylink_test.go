package centurylink

import (
	"bytes"
	"context"
	"encoding/csv"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestCenturylink(t *testing.T) {
	p := profile{"tiny", 3, 2, 20, time.Millisecond, 5 * time.Millisecond}
	modes := []string{"userspace", "iptables"}
	dir, s := labtest.Run(t, modes, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return newTrial(ctx, b, o, p)
	})
	at := testbed.ServiceParams(3)
	for _, m := range []string{"rr", "rr-mean", "crr", "crr-mean", "stream", "stream-spent"} {
		for _, arm := range modes {
			labtest.Number(t, s, m, arm, at)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, result.SamplesFile))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(b)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if want := 1 + 2*p.Rounds*p.Each*(3+len(modes)); len(rows) != want { // direct stands twice in each round
		t.Errorf("%d lines of samples, want %d", len(rows), want)
	}
	svg, err := os.ReadFile(filepath.Join(dir, report.ChartsDir, "rr-overlay.svg"))
	if err != nil || bytes.Count(svg, []byte(`fill-opacity=".3"`)) != 2 {
		t.Errorf("the histogram fills %d sets, want userspace and iptables: %v",
			bytes.Count(svg, []byte(`fill-opacity=".3"`)), err)
	}
}

// bereaved kills the agents before the first round.
type bereaved struct {
	experiment.Trial
	r *testbed.Testbed
}

func (b bereaved) Steps(out *result.Writer) []experiment.Step {
	l := b.Trial.Steps(out)
	i := slices.IndexFunc(l, func(s experiment.Step) bool { return strings.HasPrefix(s.Title, "traffic") })
	return slices.Insert(l, i, experiment.Step{Title: "killing", Do: func(context.Context) error {
		for _, p := range b.r.Pairs {
			if p.Agent != nil {
				p.Agent.Child.Kill()
			}
		}
		return nil
	}})
}

// The rules of nftables go on without an agent: blocks alone would not show that it is gone.
func TestAgentEnds(t *testing.T) {
	o := labtest.Options(t, io.Discard)
	o.Modes = []string{"nftables"}
	_, err := labtest.Perform(t.Context(), o, func(ctx context.Context, b *testbed.Testbed,
		o experiment.Options) (experiment.Trial, error) {
		w, err := newTrial(ctx, b, o, profile{"tiny", 3, 2, 20, time.Millisecond, 5 * time.Millisecond})
		return bereaved{w, b}, err
	})
	if err == nil || !strings.Contains(err.Error(), "ended by itself: signal: killed") {
		t.Errorf("error %v", err)
	}
	labtest.NothingLeft(t)
}

func TestMain(m *testing.M) { labtest.Main(m) }
