package lab

import (
	"context"
	"errors"
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

// made is an experiment that measures nothing: its block is made up, and it ends as during has it.
type made struct {
	id      string
	planned time.Duration
	during  func(context.Context) error
	repeats string
	before  func(context.Context) error // its preparation; nil: there is none
}

func (made) ProfileName() string { return "quick" }

func (m made) Design() result.Design {
	return result.Design{ID: m.id, Title: m.id, Vary: result.Axis{Param: "services", Short: "Services"}, Rounds: 1,
		Arms:     []result.Arm{{ID: "x", Title: "x"}},
		Measures: []result.Measure{{ID: "rules", Title: "rules", Stat: result.Value, Exact: true}},
		Aims: []result.Aim{
			{ID: "C4, last", Text: "about 20,000", Claim: "Tigera 2019", Measure: "rules", Arm: "x", Of: result.Value,
				Bound: 20000, Margin: 0.02},
			{ID: "C1", Text: "one", Claim: "Tigera 2019", Measure: "rules", Arm: "x", Of: result.Value, Bound: 3},
		}}
}

func (m made) Steps(out *result.Writer) []experiment.Step {
	return []experiment.Step{{Title: "counting", Planned: m.planned, Do: func(ctx context.Context) error {
		if err := out.AddValue(result.Block{Arm: "x"}, "rules", 20010); err != nil {
			return err
		}
		return m.during(ctx)
	}}}
}

func (m made) experiment() experiment.Experiment {
	return experiment.Experiment{Name: m.id, Short: "counts", Prepare: func(ctx context.Context, _ *testbed.Testbed,
		_ experiment.Options) (experiment.Trial, error) {
		if m.before == nil {
			return m, nil
		}
		return m, m.before(ctx)
	}, Repeats: m.repeats}
}

func fine(context.Context) error { return nil }

// page runs experiments and returns the page of all claims.
func page(t *testing.T, ctx context.Context, within time.Duration, l ...made) (text string, err error) {
	t.Helper()
	var experiments []experiment.Experiment
	for _, m := range l {
		experiments = append(experiments, m.experiment())
	}
	dir, err := RunAll(ctx, experiments, labtest.Options(t, io.Discard), within)
	labtest.NothingLeft(t)
	b, rerr := os.ReadFile(filepath.Join(dir, report.HTMLFile))
	if rerr != nil {
		t.Fatal(errors.Join(err, rerr))
	}
	if rerr := report.RebuildSuite(dir); rerr != nil {
		t.Error(rerr)
	}
	if again, rerr := os.ReadFile(filepath.Join(dir, report.HTMLFile)); rerr != nil || string(again) != string(b) {
		t.Errorf("the same folder makes another page: %v", rerr)
	}
	var terminal strings.Builder
	if terr := report.ShowSuite(&terminal, dir, 80); terr != nil ||
		!strings.HasPrefix(terminal.String(), "Of 21 claims: ") ||
		!strings.Contains(terminal.String(), "  not testable here  19  █") {
		t.Errorf("the terminal has no answer or no chart: %v\n%s", terr, terminal.String())
	}
	for _, part := range strings.Split(string(b), `href="`)[1:] { // each link leads to a report
		link, _, _ := strings.Cut(part, `"`)
		if _, serr := os.Stat(filepath.Join(dir, link)); serr != nil {
			t.Error(serr)
		}
	}
	return string(b), err
}

func wants(t *testing.T, text string, l ...string) {
	t.Helper()
	for _, w := range l {
		if !strings.Contains(text, w) {
			t.Errorf("the page doesn't say %q", w)
		}
	}
}

// Where instructions are counted, experiments that count none are named and left out; the others run.
func TestRunAllExact(t *testing.T) {
	o := labtest.Options(t, io.Discard)
	o.Exact = true
	counts, times := made{id: "counts", during: fine}.experiment(), made{id: "times", during: fine}.experiment()
	counts.Exact = true
	dir, err := RunAll(t.Context(), []experiment.Experiment{times, counts}, o, 0)
	if err != nil {
		t.Fatal(err)
	}
	runs, _ := filepath.Glob(filepath.Join(dir, "*", result.ManifestFile))
	if len(runs) != 1 || !strings.Contains(runs[0], "/counts-") {
		t.Errorf("runs %q, want one of what counts", runs)
	}
	text, err := os.ReadFile(filepath.Join(dir, report.HTMLFile))
	if err != nil {
		t.Fatal(err)
	}
	wants(t, string(text), "left out: it counts no instructions")
}

// One experiment's failure doesn't keep the others from running, and what none tests is named with the reason.
func TestRunAll(t *testing.T) {
	text, err := page(t, t.Context(), time.Minute, made{id: "broken", planned: time.Second, during: func(context.Context,
	) error {
		return errors.New("no such kernel")
	}}, made{id: "good", planned: time.Second, during: fine}, made{id: "long", planned: time.Hour, during: fine})
	if err != nil {
		t.Fatal(err)
	}
	wants(t, text, "Of 21 claims: 1 confirmed, 1 refuted, 19 not testable here.", "Confirmed: C4 (about 20,000 rules",
		"Refuted: C1 (iptables and IPVS differ trivially", "broken (no such kernel)", "long (left out for want of time)",
		"left out for want of time: it is planned to take 1h0m",
		"Not testable here: C2, C3, C5", "(the experiment that tests it was not run)",
		"20,010", "C21")
}

func TestRunAllIsBounded(t *testing.T) {
	text, err := page(t, t.Context(), 3*time.Second, made{id: "later", planned: time.Second,
		during: fine}, made{id: "endless",
		planned: time.Second, repeats: "an article", during: func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}})
	if err != nil {
		t.Fatal(err)
	}
	wants(t, text, "endless (the time was up before its end)", "later (not begun: the time was up)", "C4, last")
}

func TestRunAllInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	text, err := page(t, ctx, 0, made{id: "first", planned: time.Second, during: func(context.Context) error {
		cancel()
		return ctx.Err()
	}}, made{id: "second", planned: time.Second, during: fine})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	wants(t, text, "first (interrupted before its end)", "second (not begun: the run was interrupted)",
		"This is not a whole run: it was interrupted.", "C4, last")
}

// A run that ends while it is prepared says that, whatever the preparation failed with, and not that it has no time.
func TestRunEndsDuringPreparation(t *testing.T) {
	interrupted, stop := context.WithCancel(t.Context())
	defer stop()
	late, end := context.WithTimeout(t.Context(), time.Second)
	defer end()
	for _, c := range []struct {
		ctx    context.Context
		before func(context.Context) error
		want   error
	}{
		{interrupted, func(context.Context) error {
			stop()
			return errors.New("nft: signal: killed")
		}, context.Canceled},
		{interrupted, fine, context.Canceled},
		{late, func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		}, context.DeadlineExceeded},
	} {
		e := made{id: "prepared", planned: time.Hour, during: fine, before: c.before}.experiment()
		if dir, err := Run(c.ctx, e, labtest.Options(t, io.Discard)); !errors.Is(err, c.want) || dir != "" {
			t.Errorf("folder %q, error %v, want %v", dir, err, c.want)
		}
		labtest.NothingLeft(t)
	}
}

// A run that is killed leaves a page of its finished parts.
func TestRunAllKilled(t *testing.T) {
	o, killed := labtest.Options(t, io.Discard), t.TempDir()
	during := func(context.Context) error { // what is there now is there after a kill
		dirs, err := filepath.Glob(filepath.Join(o.Out, "all-*"))
		if err != nil || len(dirs) != 1 {
			return errors.Join(err, errors.New("no folder"))
		}
		return os.CopyFS(killed, os.DirFS(dirs[0]))
	}
	_, err := RunAll(t.Context(), []experiment.Experiment{made{id: "first", during: fine}.experiment(),
		made{id: "second", during: during}.experiment()}, o, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(killed, report.HTMLFile))
	if err != nil {
		t.Fatal(err)
	}
	wants(t, string(b), "This is not a whole run: it was killed.", "Confirmed: C4 (about 20,000 rules")
}

// A folder that is no run under the second kernel is refused before anything is measured.
func TestRunAllChecksTheSecondKernelsRun(t *testing.T) {
	o := labtest.Options(t, io.Discard)
	o.Second = t.TempDir()
	e := made{id: "good", during: func(context.Context) error { t.Error("it ran"); return nil }}.experiment()
	e.Second = func(folder string) error { return errors.New("no run in " + folder) }
	dir, err := RunAll(t.Context(), []experiment.Experiment{e}, o, 0)
	if dir != "" || err == nil || err.Error() != "no run in "+o.Second {
		t.Errorf("%q, %v", dir, err)
	}
	if left, err := os.ReadDir(o.Out); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// Each claim that has an experiment is tested by an aim of that id; the others say why not.
func TestClaims(t *testing.T) {
	ids := map[string]bool{}
	for _, c := range Claims() {
		if ids[c.ID] || c.Text == "" || c.Source == "" || !slices.ContainsFunc(Experiments(),
			func(e experiment.Experiment) bool { return e.Name == c.By }) {
			t.Errorf("%+v", c)
		}
		ids[c.ID] = true
	}
	if len(ids) != 21 {
		t.Errorf("%d claims", len(ids))
	}
}
