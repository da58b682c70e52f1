package nftables

import (
	"context"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	kernel "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/source"
)

// open opens the plane of a network's node.
func open(n *policytest.Network) (p *Plane) {
	n.Must(n.Node.Do(func() (err error) {
		p, err = New()
		return err
	}))
	n.Cleanup(func() { p.Close() })
	return p
}

func TestSuite(t *testing.T) {
	var opened *Plane
	policytest.Suite[Key]{
		Open: func(n *policytest.Network) policytest.Engine[Key] {
			opened = open(n)
			return opened
		},
		LogGroup: LogGroup, PrefixDeny: PrefixDeny, PrefixAudit: PrefixAudit, PrefixForged: PrefixForged,
		Cuts: true,
		EndMidstream: func() error {
			var tx kernel.Tx
			tx.DelElements(Table, setMidstream, declared.Initial[setMidstream])
			return opened.conn.Commit(&tx)
		},
	}.Run(t)
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n)
	all, none := policytest.Facts(t, p, policytest.Everything()), map[Key]Fact{}
	frame := map[Key]Fact{}
	for k, f := range all {
		if k.Kind != nft.KindElement {
			frame[k] = f
		}
	}
	policytest.Move(t, p, none, all)
	list := func(args ...string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var out []byte
		n.Must(n.Node.Do(func() (err error) {
			out, err = exec.CommandContext(ctx, "nft", args...).CombinedOutput()
			return err
		}))
		return string(out)
	}
	if text := list("list", "table", "inet", Table); !strings.Contains(text, "policy accept") {
		t.Errorf("nft list: %s", text)
	}
	policytest.Move(t, p, all, frame) // of ranges that touch, each by itself
	policytest.Move(t, p, frame, all)
	again := slices.Collect(maps.Values(all))
	n.Must(p.Write(t.Context(), again, again)) // anew, since the table is replaced
	if missing, extra := policytest.Read(t, p, all); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	list("add", "table", "inet", "others")
	n.Must(p.Clean(t.Context()))
	n.Must(p.Clean(t.Context()))
	if missing, extra := policytest.Read(t, p, none); len(missing)+len(extra) > 0 {
		t.Errorf("after clean: %v", extra)
	}
	if rest := list("list", "ruleset"); strings.TrimSpace(rest) != "table inet others {\n}" {
		t.Errorf("after clean: %s", rest)
	}
}

// TestTableOfLayout5IsReplaced has it replaced in one transaction, so that no packet passes in between. The second has
// the ranges in force.
func TestTableOfLayout5IsReplaced(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n)
	former := *p.table
	former.Sets = map[string]kernel.Set{setMidstream: allSets[setMidstream]}
	for _, proto := range protos {
		former.Sets[proto.subject] = kernel.Set{Name: proto.subject, Key: []kernel.Type{proto.Type}}
	}
	n.Must(former.Write(p.conn, append(former.Frame(), former.Chain("egress4-unknown", nil)), nil))
	held, err := p.Read(t.Context())
	n.Must(err)
	wanted := policytest.Facts(t, p, policytest.Everything())
	before, err := p.conn.Generation()
	n.Must(err)
	n.Must(p.Write(t.Context(), slices.Collect(maps.Values(wanted)), held))
	after, err := p.conn.Generation()
	if n.Must(err); after != before+2 {
		t.Errorf("%d transactions", after-before)
	}
	if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
}

func TestOthersFlushLeavesThePolicies(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n)
	if p.table.Flags == 0 {
		t.Fatal("this kernel knows no owners of tables: the test needs Linux 6.9")
	}
	_, objects := policytest.Worlds(t)
	wanted := policytest.Facts(t, p, policytest.Decide(objects["deny-ingress.yaml"]).Parts())
	policytest.Move(t, p, nil, wanted)
	flush := func() {
		t.Helper()
		n.Must(n.Node.Do(func() error { return exec.Command("nft", "flush", "ruleset").Run() }))
		if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
			t.Errorf("after another program's flush: missing %v, extra %v", missing, extra)
		}
	}
	flush()
	n.Must(p.Close()) // as a process that is killed does
	p = open(n)
	if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Errorf("after a restart: missing %v, extra %v", missing, extra)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changes, err := p.Watch(ctx)
	n.Must(err)
	flush()
	other := open(n)
	if err := other.Clean(t.Context()); err == nil || !strings.Contains(err.Error(), "stop that first") {
		t.Errorf("another process removes the table: %v", err)
	}
	if _, err := other.Watch(ctx); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("another process watches the table as its own: %v", err)
	}
	cancel()
	for range changes {
	}
	n.Must(p.Close())
	n.Must(other.Clean(t.Context()))
}

func TestRenderIsPure(t *testing.T) {
	p := &Plane{}
	a, b := policytest.Facts(t, p, policytest.Everything()), policytest.Facts(t, p, policytest.Everything())
	if d := append(policytest.Difference(a, b), policytest.Difference(b, a)...); len(d) > 0 {
		t.Errorf("equal parts differ: %v", d)
	}
	names, objects := policytest.Worlds(t)
	for _, name := range names {
		one, two := policytest.Decide(objects[name]), policytest.Decide(objects[name])
		a, b := policytest.Facts(t, p, one.Parts()), policytest.Facts(t, p, two.Parts())
		if d := append(policytest.Difference(a, b), policytest.Difference(b, a)...); len(d) > 0 {
			t.Errorf("%s: equal parts differ: %v", name, d)
		}
	}
}

func TestLabelChangeTouchesItsPeerOnly(t *testing.T) {
	n := policytest.Bare(t)
	p := open(n)
	_, objects := policytest.Worlds(t)
	d := policytest.Decide(objects["selector-on-port.yaml"])
	before := policytest.Facts(t, p, d.Parts())
	policytest.Move(t, p, map[Key]Fact{}, before)
	for _, o := range objects["selector-on-port.yaml"] {
		if source.KeyOf(o).Name == "client" {
			pod := o.(*corev1.Pod).DeepCopy()
			pod.Labels = map[string]string{"app": "other"}
			d.Apply(pod)
		}
	}
	after := policytest.Facts(t, p, d.Parts())
	put, del := policytest.Difference(after, before), policytest.Difference(before, after)
	for _, f := range append(slices.Clone(put), del...) {
		switch f.Key.Name {
		case "peer4", "peer6", setDecision:
		default:
			t.Errorf("%v changes", f.Key)
		}
	}
	if len(put) > 0 || len(del) != 3 {
		t.Errorf("put %v, del %v: want two peers and a decision gone", put, del)
	}
	policytest.Move(t, p, before, after)
}

// TestWriteEndedHalfwayIsCompleted has no state be the current one, as between the two transactions of a Write that
// changes ranges: nothing new is accepted then, Read says what lacks, and writing that completes it.
func TestWriteEndedHalfwayIsCompleted(t *testing.T) {
	n := policytest.NewNetwork(t)
	p := open(n)
	_, objects := policytest.Worlds(t)
	wanted := policytest.Facts(t, p, policytest.Decide(objects["ip-block.yaml"]).Parts())
	policytest.Move(t, p, nil, wanted)
	allowed := n.Packet(policytest.Behind[2][0], policytest.Behind[0][0], policytest.Served[0])
	if !n.Passes(allowed, true) {
		t.Fatal("it isn't allowed")
	}
	var tx kernel.Tx
	suspend(&tx)
	n.Must(p.conn.Commit(&tx))
	if n.Passes(n.Packet(policytest.Behind[2][0], policytest.Behind[0][0], policytest.Served[0]), false) {
		t.Error("a new connection passes")
	}
	missing, extra := policytest.Read(t, p, wanted)
	if len(missing) != 2 || len(extra) != 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
	n.Must(p.Write(t.Context(), missing, nil))
	if missing, extra := policytest.Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Errorf("afterwards: missing %v, extra %v", missing, extra)
	}
	if !n.Passes(n.Packet(policytest.Behind[2][0], policytest.Behind[0][0], policytest.Served[0]), true) {
		t.Error("nothing passes afterwards")
	}
}
