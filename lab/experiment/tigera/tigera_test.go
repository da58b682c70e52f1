package tigera

import (
	"context"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestTigera(t *testing.T) {
	p := profile{Name: "tiny", Services: []int{1, 20}, Rounds: 2, Closed: 3 * time.Millisecond,
		Open: 20 * time.Millisecond, Warm: time.Millisecond,
		Rate: 500, Each: 5, Work: 50 * time.Microsecond, Resyncs: 2}
	dir, s := labtest.Run(t, nil, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return newTrial(ctx, b, o, p)
	})
	arms := map[string]bool{}
	for _, a := range s.Design.Arms {
		arms[a.ID] = true
	}
	for _, m := range []string{experiment.ArmNFTables, "iptables", "userspace", experiment.LayoutIPTables19,
		experiment.LayoutIPTables, experiment.LayoutNFTables} {
		if !arms[m] {
			t.Errorf("no arm %s: %v", m, s.Design.Missing)
		}
	}
	for _, m := range mode.All() { // each is an arm, or is named with its reason
		if !arms[m.Name] && !strings.Contains(m.Name, "-") &&
			!slices.ContainsFunc(s.Design.Missing, func(w string) bool { return strings.HasPrefix(w, "Mode "+m.Name+":") }) {
			t.Errorf("mode %s is neither an arm nor named as missing", m.Name)
		}
	}
	few, many := testbed.ServiceParams(1), testbed.ServiceParams(20)
	for _, arm := range []string{experiment.ArmNFTables, experiment.LayoutIPTables19, experiment.LayoutIPTables,
		experiment.LayoutNFTables} {
		for _, m := range []string{"connect", "crr", "http", "cpu", "rules", "rules-none", "rules-established", "load"} {
			labtest.Number(t, s, m, arm, few)
			labtest.Number(t, s, m, arm, many)
		}
		for _, m := range []string{"crr-first", "crr-last", "crr-none", "http-last", "http-kept", "cpu-last", "rules-first",
			"rules-last"} {
			labtest.Number(t, s, m, arm, many)
		}
		if a, b := labtest.Number(t, s, "rules-established", arm, few),
			labtest.Number(t, s, "rules-established", arm, many); a != b {
			t.Errorf("%s: an established packet meets %v rules at 1 Service, %v at 20", arm, a, b)
		}
	}
	for arm, each := range map[string]float64{experiment.LayoutIPTables19: 2, experiment.LayoutIPTables: 1,
		experiment.ArmNFTables: 0, experiment.LayoutNFTables: 0} {
		if got := labtest.Number(t, s, "rules-last", arm, many) - labtest.Number(t, s, "rules-first", arm,
			many); math.Abs(got-19*each) > 1e-9 {
			t.Errorf("%s: the last of 20 Services meets %v rules more than the first, want %v", arm, got, 19*each)
		}
	}
	for _, a := range s.Aims {
		if want := map[string]analysis.Outcome{"C3": analysis.Confirmed, "C7": analysis.NotTestable,
			"C9, comes": analysis.Confirmed, "C9, leaves": analysis.Confirmed,
			"C9, stays": analysis.Refuted}[a.ID]; want != "" && a.Outcome != want {
			t.Errorf("%s is %s, want %s", a.ID, a.Outcome, want)
		}
	}
	for _, name := range []string{"claims", "cpu-parts", "crr", "crr-value", "rules"} {
		if _, err := os.Stat(filepath.Join(dir, report.ChartsDir, name+".svg")); err != nil {
			t.Error(err)
		}
	}
}

func TestTigeraInterrupted(t *testing.T) {
	p := profile{Name: "tiny", Services: []int{1}, Rounds: 2, Closed: 3 * time.Millisecond, Open: 20 * time.Millisecond,
		Rate: 500, Each: 5, Work: time.Millisecond, Resyncs: 1}
	labtest.Interrupt(t, "http-kept", func(ctx context.Context, b *testbed.Testbed,
		o experiment.Options) (experiment.Trial, error) {
		return newTrial(ctx, b, o, p)
	})
}

func TestTigeraOfBrokenSubject(t *testing.T) {
	labtest.BrokenSubject(t, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		o.Modes = []string{experiment.ArmNFTables}
		return newTrial(ctx, b, o, profile{Name: "tiny", Services: []int{1}})
	})
}

// Every aim must be of cells that a whole run has, whatever modes there are.
func TestTigeraDesign(t *testing.T) {
	for i, modes := range [][]string{{experiment.ArmNFTables},
		{experiment.ArmNFTables, "iptables", "userspace", "ebpf", "ipvs"}, {"userspace"}} {
		r := &trial{grid: &experiment.Grid{Counts: full.Services, Modes: modes, Layouts: classic.Layouts}, profile: full}
		if i > 0 {
			r.kubeProxy = "/kube-proxy"
		}
		d := r.Design()
		if isArm := slices.ContainsFunc(d.Arms, func(a result.Arm) bool {
			return a.ID == experiment.ArmKubeProxyNFTables
		}); isArm != (i > 0) || isArm == slices.Contains(d.Missing, experiment.NoKubeProxy) {
			t.Errorf("%v: kube-proxy is an arm: %v; missing: %v", modes, isArm, d.Missing)
		}
		labtest.AimsAreOfCells(t, d)
	}
}

// The list of kube-proxy's iptables mode is in no order that lasts: its arm connects to Services spread over all.
func TestTargetsOfKubeProxy(t *testing.T) {
	r := &trial{grid: &experiment.Grid{Counts: full.Services}, profile: full}
	all := func(*testbed.Pair) bool { return true }
	for _, c := range []struct {
		arm, position string
		want          int
	}{{experiment.ArmKubeProxyIPTables, experiment.Middle, testbed.FewTargets},
		{experiment.ArmKubeProxyNFTables, experiment.Middle, 1}, {experiment.ArmKubeProxyIPTables, experiment.Last, 0},
		{experiment.ArmKubeProxyNFTables, experiment.First, 0},
		{experiment.ArmKubeProxyIPTables, experiment.None, testbed.FewTargets}} {
		to := r.to(c.position, all)(&testbed.Pair{Arm: c.arm, Services: 100, KubeProxy: &kubeproxy.Node{}})
		if len(to) != c.want {
			t.Errorf("%s, %s: connects to %v", c.arm, c.position, to)
		}
		if c.position == experiment.Middle && !slices.Contains(to, testbed.ServiceEntry(50)) {
			t.Errorf("%s, %s: the middle is not among %v", c.arm, c.position, to)
		}
	}
	connected := testbed.NewCluster(100, append(testbed.Evenly(100, testbed.FewTargets),
		experiment.ServiceAt(experiment.Middle, 100))...)
	for _, i := range testbed.Evenly(100, testbed.FewTargets) {
		if a := connected.Slice(i).Endpoints[0].Addresses[0]; netip.MustParseAddr(a) != testbed.ServerAddr(0) {
			t.Errorf("Service %d has its first endpoint at %s", i, a)
		}
	}
}

func TestMain(m *testing.M) { labtest.Main(m) }
