package services

import (
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// tiny is a run of every part, too short for its numbers to mean anything.
func tiny() profile {
	return profile{
		Name: "tiny", Services: []int{1, 10, 20}, Rounds: 2, Block: 5 * time.Millisecond, Warm: time.Millisecond,
		Cold: 2, Batches: 2, Batch: 4, Files: 2, PerFiles: 4, Quiet: 100 * time.Millisecond,
		Rate: 200, Calm: 50 * time.Millisecond, Others: 10, Own: 20, Kills: 1,
	}
}

func TestMain(m *testing.M) { labtest.Main(m) }

// prepareTiny begins the experiment services with the tiny profile.
func prepareTiny(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
	return newTrial(ctx, b, o, tiny())
}

func TestServices(t *testing.T) {
	dir, err := labtest.Perform(t.Context(), labtest.Options(t, io.Discard), prepareTiny)
	if err != nil {
		t.Fatal(err)
	}
	labtest.NothingLeft(t)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	p := tiny()
	for _, c := range promised(p, false) {
		got, ok := s.Cell(c.Measure, c.Arm, c.Params)
		if !ok || got.Value == nil || got.Ops == 0 {
			t.Errorf("no number for %s of %s, %v", c.Measure, c.Arm, c.Params)
		} else if got.Failed() > 0 {
			t.Errorf("%s of %s, %v: failed %v", c.Measure, c.Arm, c.Params, got.Errors)
		}
	}
	if len(s.Cells) != len(promised(p, false)) {
		t.Errorf("%d cells, promised were %d", len(s.Cells), len(promised(p, false)))
	}
	if s.Rounds != p.Rounds {
		t.Errorf("%d rounds, planned %d", s.Rounds, p.Rounds)
	}
	inEveryRoundTheBaselineStandsAtBothEnds(t, r)
	whatWasWrittenIsExact(t, s)
	labtest.ReportsFromRawFilesAlone(t, dir)
}

// compared are the measures with a baseline.
var compared = []string{"connect", "crr", "rr", "connect-many"}

// promised are the cells that a run must have, an exact one or another.
func promised(p profile, exact bool) (l []analysis.Cell) {
	add := func(measure, arm string, params result.Params) {
		l = append(l, analysis.Cell{Measure: measure, Arm: arm, Params: params})
	}
	for _, o := range compared {
		many := o == "connect-many"
		add(o, testbed.ArmDirect, nil)
		add(o, testbed.ArmAgain, nil)
		if !many {
			add(o, armRule, nil)
		}
		for _, n := range p.Services {
			if !many || n > testbed.FewTargets {
				add(o, experiment.ArmNFTables, testbed.ServiceParams(n))
			}
		}
		if n := p.most(); bpf.Probe() == nil && (!many || n > testbed.FewTargets) {
			add(o, experiment.ArmEBPF, testbed.ServiceParams(n))
		}
	}
	for _, n := range p.Services {
		for _, m := range []string{"cold", "cold-kernel", "restart", "cold-allocations", "cold-allocated",
			"restart-allocations", "restart-allocated"} {
			add(m, experiment.ArmNFTables, testbed.ServiceParams(n))
		}
		add("ready", experiment.ArmNFTables, testbed.ServiceParams(n).With("kernel", "empty"))
		if exact {
			continue
		}
		add("file", experiment.ArmNFTables, testbed.ServiceParams(n))
		for _, after := range []string{"the first sync", "the changes"} {
			add("memory", experiment.ArmNFTables, testbed.ServiceParams(n).With("after", after))
		}
		for _, during := range []string{duringQuiet, duringTraffic} {
			add("idle", experiment.ArmNFTables, testbed.ServiceParams(n).With("during", during))
		}
	}
	if bpf.Probe() == nil {
		add("ready", experiment.ArmEBPF, testbed.ServiceParams(p.most()).With("kernel", "empty"))
	}
	for _, n := range []int{10, p.most()} {
		for _, m := range []string{"change", "change-whole", "change-allocations", "change-allocated"} {
			add(m, experiment.ArmNFTables, testbed.ServiceParams(n))
		}
	}
	if exact {
		return l
	}
	add("ready", experiment.ArmNFTables, testbed.ServiceParams(p.most()).With("kernel", "full"))
	for _, while := range []string{whileNothing, whileOthers, whileOwn, whileKilled} {
		add("loss", experiment.ArmNFTables, testbed.ServiceParams(p.most()).With("while", while))
	}
	return l
}

// besideAlone is a run that counts other modes' syncs and changes, and nothing else.
type besideAlone struct{ *trial }

func (r besideAlone) Steps(out *result.Writer) (l []experiment.Step) {
	for _, s := range r.trial.Steps(out) {
		if strings.HasPrefix(s.Title, "syncs and changes of mode ") {
			l = append(l, s)
		}
	}
	return l
}

// What other modes take is counted by the same measures as nftables', and nothing of theirs is left.
func TestSyncsBeside(t *testing.T) {
	modes := []string{"nftables", "iptables"}
	if bpf.Probe() == nil {
		modes = append(modes, "ebpf")
	}
	o := labtest.Options(t, io.Discard)
	o.Modes = modes
	dir, err := labtest.Perform(t.Context(), o, func(ctx context.Context, b *testbed.Testbed,
		o experiment.Options) (experiment.Trial, error) {
		p, err := prepareTiny(ctx, b, o)
		if err != nil {
			return nil, err
		}
		p.(*trial).exact = true
		return besideAlone{p.(*trial)}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	labtest.NothingLeft(t)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, arm := range modes[1:] {
		for _, m := range []string{"cold", "restart", "change-whole", "cold-allocations", "restart-allocations",
			"change-allocations", "cold-allocated"} {
			if c, ok := s.Cell(m, arm, testbed.ServiceParams(tiny().most())); !ok || c.Value == nil || c.Value.Value <= 0 {
				t.Errorf("%s of %s: %v", m, arm, c.Value)
			}
		}
	}
	if l := s.Select("cold", experiment.ArmNFTables); len(l) > 0 {
		t.Errorf("nftables is beside itself: %v", l)
	}
}

func inEveryRoundTheBaselineStandsAtBothEnds(t *testing.T, r result.Run) {
	t.Helper()
	order := map[string][]string{}
	for _, b := range r.Blocks {
		if slices.Contains(compared, b.Measure) {
			key := fmt.Sprint(b.Measure, b.Round)
			order[key] = append(order[key], b.Arm)
		}
	}
	for key, arms := range order {
		if n := len(arms); n < 4 || arms[0] != testbed.ArmDirect || arms[n-1] != testbed.ArmDirect ||
			slices.Contains(arms[1:n-1], testbed.ArmDirect) {
			t.Errorf("%s: order %v", key, arms)
		}
	}
}

// What one change writes follows the endpoints of its Service, not the number of Services, in one transaction; and a
// restart writes nothing.
func whatWasWrittenIsExact(t *testing.T, s analysis.Summary) {
	t.Helper()
	for _, m := range []string{"change", "file"} {
		for _, c := range s.Select(m, experiment.ArmNFTables) {
			if f := c.Counters["facts"]; f < 1 || f > testbed.Endpoints || c.Counters["transactions"] != 1 {
				t.Errorf("%s at %s Services: %v facts in %v transactions, want at most %d in one", m, c.Params["services"], f,
					c.Counters["transactions"], testbed.Endpoints)
			}
		}
	}
	for _, n := range tiny().Services {
		c, _ := s.Cell("restart", experiment.ArmNFTables, testbed.ServiceParams(n))
		if c.Counters["facts"] != 0 || c.Counters["transactions"] != 0 {
			t.Errorf("restart at %d Services wrote: %v", n, c.Counters)
		}
	}
}

func TestServicesInterrupted(t *testing.T) {
	for _, measure := range []string{"file", "loss"} {
		t.Run(measure, func(t *testing.T) { labtest.Interrupt(t, measure, prepareTiny) })
	}
}

func TestServicesOfBrokenSubject(t *testing.T) { labtest.BrokenSubject(t, prepareTiny) }

func TestProfiles(t *testing.T) {
	for _, p := range []profile{quick(), full(), tiny(), quick().exactly()} {
		if err := experiment.CheckServices(p.Services); err != nil {
			t.Error(err)
		}
		if p.PerFiles%2 != 0 || p.Batch%2 != 0 || p.Own%testbed.Servers != 0 {
			t.Errorf("%s: a phase ends with endpoints replaced", p.Name)
		}
	}
	for _, bad := range [][]int{nil, {0}, {-1, 2}, {10, 1}, {5, 5}, {1 << 30}} {
		if err := experiment.CheckServices(bad); err == nil {
			t.Errorf("%v Services are no error", bad)
		}
	}
	if n := (profile{Services: []int{1, 10, 99}}).few(); n != 10 {
		t.Errorf("few of 1, 10, 99 is %d", n)
	}
	if n := (profile{Services: []int{3, 7}}).few(); n != 3 {
		t.Errorf("few of 3, 7 is %d", n)
	}
}

// Every measure and aim of the design must be of an arm, a measure and a figure that there are.
func TestDesign(t *testing.T) {
	d := design(quick(), false)
	ids := map[string]bool{}
	for _, m := range d.Measures {
		if ids[m.ID] || m.Title == "" || m.Text == "" || m.Stat == "" {
			t.Errorf("measure %+v", m)
		}
		ids[m.ID] = true
	}
	cells := promised(quick(), false)
	for _, a := range d.Aims {
		if !slices.ContainsFunc(cells, func(c analysis.Cell) bool {
			return c.Measure == a.Measure && c.Arm == a.Arm && c.Params.String() == a.Params.String()
		}) {
			t.Errorf("aim %q is of a cell that no run has: %s %s %v", a.ID, a.Measure, a.Arm, a.Params)
		}
	}
}

// An exact design has the measures of an exact run and no other, none of which is a time, and names those that it
// leaves out, for which there is no step.
func TestExactDesign(t *testing.T) {
	r := &trial{profile: quick().exactly(), exact: true, bed: &testbed.Testbed{}}
	measured := map[string]bool{}
	for _, c := range promised(r.profile, true) {
		measured[c.Measure] = true
	}
	d, timed := r.Design(), design(quick(), false)
	for _, m := range d.Measures {
		if !measured[m.ID] {
			t.Errorf("the design has %s, which an exact run doesn't measure", m.ID)
		}
		if !slices.Contains([]string{"KiB", ""}, m.Unit) && !m.Ratio && m.Counted == "" {
			t.Errorf("%s is in %s", m.ID, m.Unit)
		}
	}
	if len(d.Measures) != len(measured) {
		t.Errorf("%d measures, %d are measured", len(d.Measures), len(measured))
	}
	missing := strings.Join(d.Missing, "\n")
	for _, m := range timed.Measures {
		if _, ok := d.Measure(m.ID); !ok && !strings.Contains(missing, m.Title) {
			t.Errorf("%s is left out without a word", m.ID)
		}
	}
	for _, a := range d.Counted().Aims {
		if a.Over == nil && a.Of != result.Ratio {
			t.Errorf("aim %s has a bound in time", a.ID)
		}
	}
	for _, s := range r.Steps(nil) {
		for _, word := range []string{"losses", "memory", "idle", "files"} {
			if strings.Contains(s.Title, word) {
				t.Errorf("step %q", s.Title)
			}
		}
	}
}

// Go's collector rests while an exact run counts, and no longer; where time is measured it is part of that.
func TestWithoutGC(t *testing.T) {
	before := debug.SetGCPercent(77)
	defer debug.SetGCPercent(before)
	for exact, want := range map[bool]int{true: -1, false: 77} {
		restore := (&trial{exact: exact}).withoutGC()
		during := debug.SetGCPercent(77)
		debug.SetGCPercent(during)
		restore()
		after := debug.SetGCPercent(77)
		if during != want || after != 77 {
			t.Errorf("exact %v: %d %%, then %d %%", exact, during, after)
		}
	}
}

// A kube-proxy adds rows, the aim that compares with it, and nothing else; without one the design says so.
func TestSubjectDesign(t *testing.T) {
	without := (&trial{profile: quick()}).Design()
	with := (&trial{profile: quick(), kubeProxy: "/kube-proxy"}).Design()
	if !slices.Contains(without.Missing, experiment.NoKubeProxy) || slices.Contains(with.Missing, experiment.NoKubeProxy) {
		t.Error("what is missing does not follow what is given")
	}
	isG5 := func(a result.Aim) bool { return a.ID == "G5" }
	if slices.ContainsFunc(without.Aims, isG5) || !slices.ContainsFunc(with.Aims, isG5) {
		t.Error("the aim G5 is to be there with a kube-proxy alone")
	}
	if len(with.Arms) != len(without.Arms)+len(experiment.KubeProxyArms) {
		t.Errorf("%d arms with a kube-proxy, %d without", len(with.Arms), len(without.Arms))
	}
}
