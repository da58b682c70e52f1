package policies

import (
	"context"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
)

func TestMain(m *testing.M) { labtest.Main(m) }

var tiny = profile{Name: "tiny", Counts: []int{2, 20}, Rounds: 2, Block: 3 * time.Millisecond, Warm: time.Millisecond,
	Large: generate.PolicySize{Pods: 400, Namespaces: 20, Here: 20, Cluster: 5},
	Wide:  generate.PolicySize{Pods: 400, Namespaces: 4, Here: 20, Cluster: 5}, Events: 5, Relabelled: 3, Peers: 500,
	Writes: 1, Flows: []int{100}, Cuts: 1, Patience: time.Minute}

func prepare(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
	return newTrial(ctx, b, tiny, "")
}

func TestPolicies(t *testing.T) {
	_, s := labtest.Run(t, nil, prepare)
	for _, arm := range []string{"nftables", "iptables", "ebpf"} {
		for _, n := range tiny.Counts {
			labtest.Number(t, s, "crr", arm, experiment.PolicyParams(n))
			labtest.Number(t, s, "rr", arm, experiment.PolicyParams(n))
		}
		for _, m := range []string{"label", "namespace", "resolve", "heap"} {
			labtest.Number(t, s, m, arm, nil)
		}
		if arm != "iptables" {
			labtest.Number(t, s, "write", arm, nil)
		}
		if arm != "ebpf" {
			labtest.Number(t, s, "cut-100", arm, nil)
		}
	}
	labtest.AimsAreOfCells(t, s.Design)
}

func TestExactDesign(t *testing.T) {
	grid := &experiment.PolicyGrid{Counts: full.Counts, Engines: mode.Engines()}
	timed, counted := &trial{grid: grid, profile: full}, &trial{grid: grid, profile: full.exact()}
	d := counted.Design()
	labtest.Counts(t, timed.Design(), d, "crr", "rr", "load", "add-resolve", "add-resolve-allocations", "add-write",
		"add-write-allocations")
	var aims []string
	for _, a := range d.Aims {
		aims = append(aims, a.ID)
	}
	want := []string{"P1, connection, nftables", "P1, round trip, nftables", "P2, nftables", "P2, both ends, nftables",
		"P3, connection, nftables", "P3, round trip, nftables", "P1, connection, iptables", "P1, round trip, iptables",
		"P2, iptables", "P2, both ends, iptables", "P3, connection, iptables", "P3, round trip, iptables",
		"P1, connection, ebpf", "P1, round trip, ebpf", "P3, connection, ebpf", "P3, round trip, ebpf"}
	if !slices.Equal(aims, want) {
		t.Errorf("an exact run judges %q, want %q", aims, want)
	}
}

// Policies of both ends select the server's pod and the client's, both on the node, without a problem.
func TestBothEnds(t *testing.T) {
	grid := &experiment.PolicyGrid{Counts: full.Counts, Ports: 1, Peers: true}
	r, _, err := testbed.DecidePolicies(testbed.NodeName, grid.BothEnds(10))
	if err != nil {
		t.Fatal(err)
	}
	subjects := r.Policies().Subjects
	if s := subjects[testbed.ServerPod]; s == nil || s.In[1] == nil || s.Out[1] != nil {
		t.Errorf("the server's pod is decided as %+v", s)
	}
	if s := subjects[testbed.ClientPod]; s == nil || s.Out[1] == nil || s.In[1] != nil {
		t.Errorf("the client's pod is decided as %+v", s)
	}
}

func TestPoliciesInterrupted(t *testing.T) { labtest.Interrupt(t, "namespace", prepare) }
