package control

import (
	"context"
	"io"
	"maps"
	"math/rand/v2"
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
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// tiny has every part, too short for its numbers to mean anything.
var tiny = profile{Name: "tiny", Sizes: []size{{3, testbed.Endpoints}, {2, 50}}, Rounds: 2,
	Quiet: 20 * time.Millisecond, Moves: 2, Rate: 100, Churn: 50 * time.Millisecond, Least: 10}

func TestControl(t *testing.T) {
	p := tiny
	dir, s := labtest.Run(t, nil, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return newTrial(ctx, b, o, p)
	})
	var arms []string
	for _, a := range s.Design.Arms {
		arms = append(arms, a.ID)
	}
	for _, m := range []string{experiment.ArmNFTables, "iptables", "userspace"} {
		if !slices.Contains(arms, m) {
			t.Errorf("no arm %s: %v", m, s.Design.Missing)
		}
	}
	for _, arm := range arms {
		for _, n := range p.Sizes {
			at := n.params()
			for _, m := range s.Design.Measures {
				if v := labtest.Number(t, s, m.ID, arm, at); v <= 0 && m.ID != "idle" {
					t.Errorf("%s of %s at %s is %v", m.ID, arm, n, v)
				}
			}
			if whole, sync := labtest.Number(t, s, "cold", arm, at), labtest.Number(t, s, "sync", arm, at); sync >= whole {
				t.Errorf("%s at %s: its first sync took %v of the %v of its start", arm, n, sync, whole)
			}
			c, _ := s.Cell("moved-churn", arm, at)
			e, _ := s.Cell("event", arm, at)
			if c.Ops < int64(p.Rounds*p.Least) || e.Ops < c.Ops {
				t.Errorf("%s at %s: %d changes were waited for, and the agent told of %d", arm, n, c.Ops, e.Ops)
			}
		}
	}
	if n := labtest.Number(t, s, "churn-rate", experiment.ArmNFTables, p.Sizes[0].params()); n < 1 {
		t.Errorf("%v changes a second", n)
	}
	for _, name := range []string{"moved-churn-ecdf", "event-ecdf", "sync", "memory"} {
		if _, err := os.Stat(filepath.Join(dir, report.ChartsDir, name+".svg")); err != nil {
			t.Error(err)
		}
	}
}

func TestControlDesign(t *testing.T) {
	both := map[string]string{"kube-proxy": "/kube-proxy", "control-plane": "/control-plane"}
	cannot := func(d result.Design) (l []string) {
		for _, a := range d.Aims {
			if a.Cannot != "" {
				l = append(l, a.ID)
			}
		}
		return l
	}
	for _, c := range []struct {
		modes    []string
		programs map[string]string
		sizes    []size
		want     []string // what can't be tested
	}{
		{[]string{experiment.ArmNFTables, experiment.ArmEBPF, "userspace"}, both, full.Sizes, nil},
		{[]string{experiment.ArmNFTables, experiment.ArmEBPF}, nil, full.Sizes,
			[]string{"G5, kube-proxy", "G9, nftables", "G9, ebpf", "restarts"}},
		{[]string{experiment.ArmNFTables}, both, []size{{10000, testbed.Endpoints}}, []string{"cold start, ebpf",
			"G8, ebpf, p50", "G8, ebpf, p99", "G9, ebpf", "G10, ebpf", "G10, ebpf, later", "G11, ebpf", "no loss, ebpf"}},
	} {
		p := full
		p.Sizes = c.sizes
		d := (&trial{profile: p, modes: c.modes, programs: c.programs}).Design()
		labtest.AimsAreOfCells(t, d)
		if got := cannot(d); !slices.Equal(got, c.want) {
			t.Errorf("%v with %v: can't test %q, want %q", c.modes, c.programs, got, c.want)
		}
		if without := slices.Contains(d.Missing, experiment.NoKubeProxy); without != (c.programs == nil) {
			t.Errorf("what is missing does not follow what is given: %v", d.Missing)
		}
	}
	small := (&trial{profile: quick, modes: []string{experiment.ArmNFTables, experiment.ArmEBPF}, programs: both}).Design()
	if len(small.Aims) != 1 || !slices.ContainsFunc(small.Missing,
		func(s string) bool { return strings.Contains(s, "aims, which are of 10,000 × 10") }) {
		t.Errorf("without 10,000 Services it tests %v; missing: %q", small.Aims, small.Missing)
	}
}

// Each subject lives once a round with every cluster that it is asked to serve.
func TestControlSteps(t *testing.T) {
	r := &trial{bed: &testbed.Testbed{Rand: rand.New(rand.NewPCG(1, 1))},
		modes: []string{experiment.ArmNFTables, "userspace"}, programs: map[string]string{"kube-proxy": "/kube-proxy"},
		profile: profile{Sizes: []size{{1000, testbed.Endpoints}, {10000, testbed.Endpoints}}, Rounds: 3, Moves: 1,
			Churn: time.Second}}
	lives := map[string]int{}
	for _, s := range r.Steps(nil) {
		if s.Planned <= 0 {
			t.Errorf("%s is planned to take %v", s.Title, s.Planned)
		}
		if words := strings.Split(s.Title, ", "); len(words) > 2 {
			lives[words[1]]++
		}
	}
	if want := map[string]int{experiment.ArmNFTables: 6, "userspace": 3, experiment.ArmKubeProxyIPTables: 6,
		experiment.ArmKubeProxyNFTables: 6}; !maps.Equal(lives, want) {
		t.Errorf("%v, want %v", lives, want)
	}
}

func TestControlSizes(t *testing.T) {
	for _, sizes := range [][]size{nil, {{1, testbed.Endpoints}}, {{100, testbed.Endpoints}, {100, testbed.Endpoints}},
		{{1 << 20, testbed.Endpoints}}, {{100, generate.PerSlice + 1}}} {
		if err := (profile{Sizes: sizes}).check(); err == nil {
			t.Errorf("%v is no error", sizes)
		}
	}
	for _, p := range []profile{quick, full} {
		if err := p.check(); err != nil {
			t.Error(err)
		}
	}
	if l := quick.of(50); !slices.Equal(l, []size{{100, 50}, {1000, 50}}) || !slices.Equal(quick.of(0), quick.Sizes) {
		t.Errorf("of fifty endpoints: %v", l)
	}
}

// Each change of the churn is one: replaced, then put back; and never of the Service that the load connects to.
func TestNextChange(t *testing.T) {
	own := newServed(size{2, testbed.Endpoints}, 1)
	before := own.cluster.Slice(2).Endpoints[0].Addresses[0]
	a, b := own.next(), own.next()
	if a.Name != b.Name || a.Endpoints[0].Addresses[0] == before || b.Endpoints[0].Addresses[0] != before {
		t.Errorf("%s %v, then %s %v; it was %s", a.Name, a.Endpoints[0].Addresses, b.Name, b.Endpoints[0].Addresses, before)
	}
	if steady := own.cluster.Slice(steadyService).Name; a.Name == steady {
		t.Errorf("%s changes, to which a client connects", steady)
	}
}

// A change that the API server does not take ends the run.
func TestStirFails(t *testing.T) {
	a := newServed(size{2, testbed.Endpoints}, 1)
	published := make(chan struct{}, 100)
	a.publish = func(context.Context, source.Object) error {
		published <- struct{}{}
		return os.ErrPermission
	}
	stop := a.stir(t.Context(), 1000)
	<-published
	if n, err := stop(); err == nil || n > 0 || !strings.Contains(err.Error(), "permission") {
		t.Errorf("%d changes, %v", n, err)
	}
}

func TestDelays(t *testing.T) {
	text := func(a, b, c string) []byte {
		return []byte("# TYPE fairlead_programming_seconds histogram\nfairlead_programming_seconds_bucket{le=\"0.0001\"} " +
			a +
			"\nfairlead_programming_seconds_bucket{le=\"0.002\"} " + b + "\nfairlead_programming_seconds_bucket{le=\"+Inf\"} " +
			c +
			"\nfairlead_programming_seconds_sum 1\nfairlead_programming_seconds_count " + c + "\n")
	}
	before, err := parseDelays(text("1", "3", "3"))
	if err != nil {
		t.Fatal(err)
	}
	now, err := parseDelays(text("2", "6", "7"))
	if err != nil {
		t.Fatal(err)
	}
	want := []int64{int64(100 * time.Microsecond), int64(2 * time.Millisecond), int64(2 * time.Millisecond),
		int64(time.Minute)}
	if got := now.since(before); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, bad := range []string{"", "# TYPE other counter\nother 1\n", "}{"} {
		if _, err := parseDelays([]byte(bad)); err == nil {
			t.Errorf("%q is no error", bad)
		}
	}
}

func FuzzParseDelays(f *testing.F) {
	f.Add("# TYPE fairlead_programming_seconds histogram\nfairlead_programming_seconds_bucket{le=\"+Inf\"} 1\n")
	f.Fuzz(func(t *testing.T, s string) {
		if l, err := parseDelays([]byte(s)); err != nil && l != nil {
			t.Errorf("%v with %v", l, err)
		}
	})
}

// prepareTiny begins the experiment control with the tiny profile.
func prepareTiny(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
	o.Modes = []string{experiment.ArmNFTables}
	return newTrial(ctx, b, o, tiny)
}

func TestControlOfBrokenSubject(t *testing.T) { labtest.BrokenSubject(t, prepareTiny) }

func TestBrokenControlPlane(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control-plane")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho $1 has a word before the end\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := labtest.Options(t, io.Discard)
	o.Subjects = []string{"control-plane=" + path}
	if _, err := labtest.Perform(t.Context(), o, prepareTiny); err == nil ||
		!strings.Contains(err.Error(), "kube-apiserver has a word before the end") {
		t.Errorf("error %v", err)
	}
	labtest.NothingLeft(t)
}

func TestMain(m *testing.M) { labtest.Main(m) }
