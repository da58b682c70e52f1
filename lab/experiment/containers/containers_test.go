package containers

import (
	"context"
	"fmt"
	"math"
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

func TestMain(m *testing.M) { labtest.Main(m) }

var tiny = profile{"tiny", 5, time.Millisecond, 10 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
	10 * time.Millisecond, false}

// Every arm is made by the program that users run, and has the packets that its path takes.
func TestContainers(t *testing.T) {
	program := labtest.Program(t)
	dir, s := labtest.Run(t, nil, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		b.Config.Agent = []string{program}
		return newTrial(ctx, b, o, tiny)
	})
	for arm, want := range map[string]float64{testbed.ArmDirect: 2, armTracked: 2, armVeth: 4, armTrackedVeth: 4,
		armBridge: 5, armMACVLAN: 3, armOwn: 4, armOwnVXLAN: 6, armFast: 4, armIPTables: 4, armEBPF: 4} {
		// what other packets the processor took meanwhile is in it too
		if got := labtest.Number(t, s, "packets", arm, nil); math.Abs(got-want) > 0.3 {
			t.Errorf("%s: %v packets for each round trip, want %v", arm, got, want)
		}
	}
	for _, arm := range []string{testbed.ArmDirect, armOwn, armLimit, armOwnLimit} {
		if ns := labtest.Number(t, s, "app", arm, nil); ns < float64(application)/2 {
			t.Errorf("%s: a request of an application takes %v", arm, time.Duration(ns))
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, report.MarkdownFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"before-after.svg", "+25.6 % of time and -22.6 % of requests", "C19, L2"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	picture, err := os.ReadFile(filepath.Join(dir, "charts", "before-after.svg"))
	if err != nil || !strings.Contains(string(picture), "2.11 ms, +25.6 %") {
		t.Errorf("the chart lacks the article's bar: %v", err)
	}
}

func TestContainersInterrupted(t *testing.T) {
	labtest.Interrupt(t, "app", func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return newTrial(ctx, b, o, tiny)
	})
}

// allOf is a trial that has every arm.
func allOf(p profile) *trial { return &trial{arms: allArms, profile: p} }

// On an emulated processor, no claim is judged by an arm that is left out.
func TestEmulatedLeavesAgentsOut(t *testing.T) {
	r := allOf(emulated)
	r.arms = slices.DeleteFunc(slices.Clone(allArms), func(a arm) bool { return a.agent || a.limit > 0 })
	for _, a := range r.Design().Aims {
		if (armOf(a.Arm).agent || armOf(a.Arm).limit > 0) != (a.Cannot != "") {
			t.Errorf("aim %s of %s: can't be tested: %q", a.ID, a.Arm, a.Cannot)
		}
	}
}

func TestDesign(t *testing.T) {
	for _, p := range []profile{quick, full, emulated} {
		d := allOf(p).Design()
		if p.App > 0 {
			labtest.AimsAreOfCells(t, d)
		}
		if !strings.HasSuffix(d.Aims[0].Cannot, "nothing") != (p.App > 0) {
			t.Errorf("%s: claim %s can't be tested: %q", p.Name, d.Aims[0].ID, d.Aims[0].Cannot)
		}
	}
	if got := published.podMs / published.hostMs; math.Abs(got-slower) > 0.0005 {
		t.Errorf("the article's ratio is %v", got)
	}
}

func TestExactDesign(t *testing.T) {
	r := allOf(exact)
	r.arms = slices.DeleteFunc(slices.Clone(allArms), exact.leavesOut)
	labtest.Counts(t, allOf(full).Design(), r.Design(), "packets", "rr", "crr", "packets-connection")
	for _, id := range []string{armOwn, armOwnVXLAN, armIPIP, armIPVLANL2, armFast} {
		if !r.has(id) {
			t.Errorf("an exact run leaves %s out", id)
		}
	}
	if r.has(armLimit) || r.has(armOwnLimit) {
		t.Error("an exact run limits processor time")
	}
}

// emulatedRun writes a run of one round in which ipvlan has 3 packets for each round trip, against host's 2.
func emulatedRun(t *testing.T, id, cpu string) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "run")
	d := allOf(emulated).Design()
	d.ID = id
	w, err := result.Create(dir, result.Manifest{Design: d, Machine: result.Machine{CPU: cpu, Kernel: "6.12"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []struct {
		arm      string
		ns       float64
		softnets float64
	}{{testbed.ArmDirect, 100, 20}, {armIPVLANL2, 150, 30}, {testbed.ArmDirect, 200, 20}} {
		if err := w.Add(result.Block{Measure: "rr", Arm: b.arm, Ops: 10, Figures: map[string]float64{"p50": b.ns},
			Counters: map[string]float64{"softnet_pinned": b.softnets}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close("", result.Load{}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPanelOfTheSecondKernel(t *testing.T) {
	p, err := readPanel(emulatedRun(t, "containers", "QEMU TCG CPU version 2.5+"))
	if err != nil {
		t.Fatal(err)
	}
	r := allOf(quick)
	r.arms, r.second = slices.DeleteFunc(slices.Clone(allArms), func(a arm) bool { return a.ID == armIPVLANL2 }), p
	if d := r.Design(); d.ArmTitle(armIPVLANL2) != "ipvlan L2" {
		t.Error("the design lacks the panel's arm")
	}
	for _, a := range r.ipvlan() {
		if a.Measure != "second-packets" || a.Cannot != "" {
			t.Errorf("aim %s is of %s, %s", a.ID, a.Measure, a.Cannot)
		}
	}
	dir := filepath.Join(t.TempDir(), "run")
	w, err := result.Create(dir, result.Manifest{Design: r.Design()})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.copy(w); err != nil {
		t.Fatal(err)
	}
	if err := w.Close("", result.Load{}); err != nil {
		t.Fatal(err)
	}
	run, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, b := range run.Blocks {
		got = append(got, fmt.Sprint(b.Measure, " ", b.Arm, " ", b.Figures["value"]))
	}
	want := []string{"second-packets direct 2", "second-packets ipvlan-l2 3", "second-packets direct 2",
		"second-rr ipvlan-l2 1"}
	if !slices.Equal(got, want) {
		t.Errorf("copied: %q, want %q", got, want)
	}
}

func TestPanelsOfOtherRunsAreRefused(t *testing.T) {
	for _, dir := range []string{emulatedRun(t, "containers", "AMD EPYC"), emulatedRun(t, "romana", "QEMU TCG CPU"),
		t.TempDir()} {
		if _, err := readPanel(dir); err == nil || !strings.Contains(err.Error(), "--second-kernel "+dir) {
			t.Errorf("error %v", err)
		}
	}
}
