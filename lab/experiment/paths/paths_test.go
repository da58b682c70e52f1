package paths

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// TestPaths connects pods by the program that users run: each path has the packets that it takes, and the fast path
// redirects those to pods, and those to other nodes.
func TestPaths(t *testing.T) {
	program := labtest.Program(t)
	_, s := labtest.Run(t, nil, func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		b.Config.Agent = []string{program}
		return newTrial(ctx, b, profile{"tiny", 3, time.Millisecond, 10 * time.Millisecond})
	})
	onSameNode := labtest.Number(t, s, "redirected", armSame, nil)
	for _, want := range []struct {
		arm        string
		packets    float64
		redirected float64 // of those on one node
		tunnel     bool
	}{{testbed.ArmDirect, 2, 0, false}, {armSame + suffixPlain, 4, 0, false}, {armSame + suffixStack, 4, 0, false},
		{armSame, 4, 1, false}, {armPlain, 6, 0, false}, {"veth-tracked", 6, 0, false}, {"bridge-tracked", 8, 0, false},
		{armNative + suffixNFTables, 6, 0, false}, {armNative + suffixStack, 6, 0, false}, {armNative, 6, 2, false},
		{armVXLAN + suffixNFTables, 8, 0, true}, {armVXLAN + suffixStack, 8, 0, true}, {armVXLAN, 8, 2, true},
		{armMixed, 8, 1.2, true}} {
		// what other packets the processor took meanwhile is in it too, but no path has less than two more
		if got := labtest.Number(t, s, "packets", want.arm, nil); got < want.packets-0.3 || got > want.packets+1 {
			t.Errorf("%s: %v packets for each round trip, want %v", want.arm, got, want.packets)
		}
		got := labtest.Number(t, s, "redirected", want.arm, nil) / onSameNode
		least := want.redirected - 0.15
		if want.redirected > 1 { // what leaves a node while its next hop isn't known yet, and now and then, uses the stack
			least = 0.6 * want.redirected
		}
		if got < least || got > want.redirected+0.15 {
			t.Errorf("%s: %v of the packets that are redirected on one node, want %v", want.arm, got, want.redirected)
		}
		if got := labtest.Number(t, s, "tunnel", want.arm, nil); got > 1 != want.tunnel {
			t.Errorf("%s: %v packets of a connection through a tunnel, want some: %v", want.arm, got, want.tunnel)
		}
		for _, m := range []string{"rr", "crr"} {
			labtest.Number(t, s, m, want.arm, nil)
		}
	}
}

// TestMisnamedArm ends a run with an arm that has the fast path and is said to have none, and the other way round.
func TestMisnamedArm(t *testing.T) {
	program := labtest.Program(t)
	on, off := fast(native...), stack(native...)
	for _, c := range []struct {
		a    arm
		want string
	}{
		{arm{near: on, ipip: true}, "connections"}, // of which none is said to be redirected
		{arm{near: rules(native...), tracked: true}, ""},
		{arm{near: rules(native...)}, "tracked"},
		{arm{near: off}, ""},
		{arm{near: off, tunnel: true}, "tunnel"},
		{arm{near: off, far: on, tunnel: true}, "tunnel"},
	} {
		c.a.ID, c.a.Title = "tried", "tried"
		o := labtest.Options(t, t.Output())
		o.Agent = []string{program}
		_, err := labtest.Perform(t.Context(), o, func(ctx context.Context, b *testbed.Testbed,
			o experiment.Options) (experiment.Trial, error) {
			r := &trial{bed: b, profile: profile{"tiny", 1, time.Millisecond, time.Millisecond},
				nodes: map[string][]*testbed.Node{}, noIPIP: "not tried"}
			r.arms = append(slices.Clone(allArms[:2]), c.a)
			return r, nil
		})
		if failed := err != nil; failed != (c.want != "") || failed && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", c.a.near, err, c.want)
		}
		labtest.NothingLeft(t)
	}
}

func TestPathsInterrupted(t *testing.T) {
	labtest.Interrupt(t, "rr", func(_ context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial,
		error) {
		return &trial{bed: b, profile: profile{"tiny", 50, time.Millisecond, 5 * time.Millisecond}, noIPIP: "not tried",
			arms: slices.Concat(allArms[:2], []arm{armOf(armPlain)}), nodes: map[string][]*testbed.Node{}}, nil
	})
}

// Each aim is of cells that a run has, and says so where this machine can't make them.
func TestDesign(t *testing.T) {
	for _, why := range []string{"", "it has none"} {
		r := &trial{profile: full, noIPIP: why}
		r.choose()
		d := r.Design()
		labtest.AimsAreOfCells(t, d)
		cannot := 0
		for _, a := range d.Aims {
			if a.Cannot != "" {
				cannot++
			}
		}
		if len(d.Aims) != 17 || (cannot == 4) != (why != "") || cannot != 0 && why == "" {
			t.Errorf("without IPIP for %q: %d of %d aims can't be tested", why, cannot, len(d.Aims))
		}
	}
}

func TestExactDesign(t *testing.T) {
	r := &trial{profile: full}
	r.choose()
	d := r.Design()
	labtest.Counts(t, d, d, "rr", "crr", "packets", "redirected", "tunnel")
}

func TestPacketsOfTunnels(t *testing.T) {
	const text = `Inter-|   Receive
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo frame compressed multicast
    lo:       0       9    0    0    0     0          0         0        0       9    0    0    0     0          0         0
fl-vxlan:   100      30    0    0    0     0          0         0      200       4    0    0    0     0          0         0
`
	if got := passed(text); got != 34 {
		t.Errorf("%v packets, want 34", got)
	}
}
