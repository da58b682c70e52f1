package policies

import (
	"context"
	"testing"
	"time"

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

func TestPoliciesInterrupted(t *testing.T) { labtest.Interrupt(t, "namespace", prepare) }
