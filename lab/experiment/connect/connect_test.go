package connect

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestConnect(t *testing.T) {
	p := profile{"tiny", []int{10, 20}, 2, 3 * time.Millisecond, time.Millisecond, 1, 2, 20, exactPolicies}
	_, s := labtest.Run(t, nil, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return newTrial(ctx, b, o, p)
	})
	for _, n := range p.Services {
		for _, arm := range []string{experiment.ArmEBPF, experiment.ArmNFTables, "iptables", experiment.LayoutIPTables19,
			experiment.LayoutIPTables} {
			for _, m := range []string{"connect", "crr", "connect-cold", "crr-cold", "connect-pod", "crr-pod",
				"connect-pod-cold", "crr-pod-cold", "load"} {
				labtest.Number(t, s, m, arm, testbed.ServiceParams(n))
			}
		}
		for _, m := range []string{"run", "runs"} { // each program of a socket by an exchange that it has a part in
			for _, program := range []string{"connect4, TCP", "getpeername4, TCP", "release, TCP", "arrive-14, TCP",
				"leave-14, TCP", "connect6, TCP by IPv6 socket", "getpeername6, TCP by IPv6 socket",
				"sendmsg4, UDP", "recvmsg4, UDP", "connect4, UDP, connected", "recvmsg6, UDP by IPv6 socket, connected"} {
				if v := labtest.Number(t, s, m, experiment.ArmEBPF, testbed.ServiceParams(n).With("program", program)); v <= 0 {
					t.Errorf("%s of %s is %v", m, program, v)
				}
			}
		}
		if v := labtest.Number(t, s, "runs", experiment.ArmEBPF,
			testbed.ServiceParams(n).With("program", "connect4, TCP")); v != 1 {
			t.Errorf("connect4 runs %v times for a connection", v)
		}
	}
	for _, m := range []string{"connect-pod", "crr-pod", "connect-pod-cold", "crr-pod-cold"} {
		for _, v := range variantsOf(p.Policies) {
			labtest.Number(t, s, m, v.arm.ID, testbed.ServiceParams(20))
			if c, ok := s.Cell(strings.Replace(m, experiment.SuffixPod, "", 1), v.arm.ID, testbed.ServiceParams(20)); ok {
				t.Errorf("a process of the node is measured by %s: %+v", v.arm.ID, c)
			}
		}
	}
	for _, program := range []string{"release", "connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6",
		"getpeername4", "getpeername6", "arrive-14", "leave-14"} {
		if i, v := labtest.Number(t, s, "instructions", experiment.ArmEBPF, result.Params{"program": program}),
			labtest.Number(t, s, "verified", experiment.ArmEBPF, result.Params{"program": program}); i < 2 || v < 2 {
			t.Errorf("%s has %v instructions, of which the verifier walked %v", program, i, v)
		}
	}
	if shown, cost := labtest.Number(t, s, "shown", experiment.ArmEBPF, nil),
		labtest.Number(t, s, "cost", experiment.ArmEBPF, nil); shown <= 0 || cost <= 0 {
		t.Errorf("to count a run shows as %v ns and costs %v ns", shown, cost)
	}
}

// Aims of new connections are of cells that a whole run has.
func TestConnectDesign(t *testing.T) {
	m, err := load.NewMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, modes := range [][]string{{experiment.ArmEBPF, experiment.ArmNFTables, "iptables"}, {experiment.ArmNFTables},
		{experiment.ArmEBPF}} {
		r := &trial{grid: &experiment.Grid{Counts: full.Services, Modes: modes, Layouts: classic.Layouts[:2]}, profile: full,
			memory: m}
		d := r.Design()
		want := 0
		if slices.Contains(modes, experiment.ArmEBPF) {
			want = 17 // 4, of clients on the node and in a pod, with warm and with cold caches; policies
			if !slices.Contains(modes, "iptables") {
				want = 13
			}
		}
		if len(d.Aims) != want {
			t.Errorf("%v: %d aims, want %d", modes, len(d.Aims), want)
		}
		for _, a := range d.Aims {
			if _, ok := d.Measure(a.Measure); !ok || !slices.Contains([]string{"10", "10000"}, a.Params["services"]) {
				t.Errorf("%v: aim %s is of %s at %v", modes, a.ID, a.Measure, a.Params)
			}
		}
	}
}

// A quick exact run without a choice of layouts writes few of them; one with a choice has all to choose from.
func TestQuickExactLayouts(t *testing.T) {
	for _, tt := range []struct {
		o    experiment.Options
		want []classic.Layout
	}{{experiment.Options{Exact: true, Quick: true}, []classic.Layout{classic.IPTables19}},
		{experiment.Options{Exact: true}, layouts}, {experiment.Options{Quick: true}, layouts},
		{experiment.Options{Exact: true, Quick: true, Layouts: []string{"nft-classic"}}, layouts}} {
		if got := compared(tt.o); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: layouts %v, want %v", tt.o, got, tt.want)
		}
	}
}

func TestMain(m *testing.M) { labtest.Main(m) }
