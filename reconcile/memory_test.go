package reconcile_test

import (
	"context"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/ipvs"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// onPaper is a plane that writes nothing.
type onPaper[K dataplane.Key] struct {
	dataplane.Plane[model.ServicePart, K, string]
}

func (onPaper[K]) Read(context.Context) ([]dataplane.Fact[K, string], error) { return nil, nil }

func (onPaper[K]) Write(context.Context, []dataplane.Fact[K, string], []dataplane.Fact[K, string]) error {
	return nil
}

// What was rendered for parts that are gone is gone: 10,000 round-robin pools, which have chains of their own in some
// planes, leave as much memory in use as one.
func TestRoundRobinPoolsLeaveNoMemory(t *testing.T) {
	t.Run("nftables", func(t *testing.T) { leavesNone[nftables.Key](t, &nftables.Plane{}) })
	t.Run("ipvs", func(t *testing.T) { leavesNone[ipvs.Key](t, &ipvs.Plane{}) })
	t.Run("iptables", func(t *testing.T) { leavesNone[iptables.Key](t, &iptables.Plane{}) })
	t.Run("userspace", func(t *testing.T) { leavesNone[userspace.Key](t, &userspace.Plane{}) })
}

// roundRobin returns a pool and the frontend that leads to it. No two share an ID or, in mode ipvs, a chain.
func roundRobin(i int) []model.ServicePart {
	p := &model.Pool{ID: uint64(i) << 32, Name: "p", Protocol: model.TCP, Scheduler: model.RoundRobin}
	if i%2 == 1 {
		p.Affinity = time.Duration(i) * time.Second
	}
	for j := range 2 + i%9 {
		at := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)})
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(at, 80)})
	}
	t := model.Target{Pool: p}
	e := model.Entry{Addr: netip.AddrFrom4([4]byte{10, 96, 0, 1}), Port: 80, Protocol: model.TCP}
	return []model.ServicePart{p, &model.Frontend{Service: "shop/web", Via: model.ViaClusterIP, Entry: e, Internal: t,
		External: t}}
}

// A fact that is in the kernel is known by hashes: what a loop holds of it doesn't depend on how long keys and values
// are, and is a third of what the facts themselves would be.
func TestWrittenFactsLeaveLittleMemory(t *testing.T) {
	p := &nftables.Plane{}
	l := reconcile.New(onPaper[nftables.Key]{p}, reconcile.Options[model.ServicePart]{Owner: model.OwnerOf})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- l.Run(ctx) }()
	defer func() { stop(); <-ended }()
	var parts []model.ServicePart
	facts := 0
	for i := range 4000 {
		parts = append(parts, roundRobin(2 * i)[0])
		facts += len(p.Render(parts[i]))
	}
	used := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := used()
	l.Change(parts, nil)
	if err := l.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if each := (used() - before) / int64(facts); each > 80 {
		t.Errorf("%d facts leave %d bytes each, want at most 80", facts, each)
	} else {
		t.Logf("%d facts leave %d bytes each", facts, each)
	}
	runtime.KeepAlive(parts)
}

func leavesNone[K dataplane.Key](t *testing.T, p dataplane.Plane[model.ServicePart, K, string]) {
	l := reconcile.New(onPaper[K]{p}, reconcile.Options[model.ServicePart]{Owner: model.OwnerOf, Label: model.LabelOf})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- l.Run(ctx) }()
	defer func() { stop(); <-ended }()
	was := roundRobin(1)
	l.Change(append(was, &model.ServiceNode{Node: &model.Node{Name: "a"}}), nil)
	next := 2
	change := func(n int) runtime.MemStats {
		for range n {
			now := roundRobin(next)
			l.Change(now, was)
			if was, next = now, next+1; next%16 == 0 {
				if err := l.Sync(ctx); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := l.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // what the first finalized
		runtime.ReadMemStats(&m)
		return m
	}
	before := change(1000)
	after := change(10_000)
	bytes, objects := int64(after.HeapAlloc-before.HeapAlloc), int64(after.HeapObjects-before.HeapObjects)
	if bytes > 1<<20 || objects > 10_000 {
		t.Errorf("10,000 changes leave %d KiB in %d objects", bytes>>10, objects)
	}
	t.Logf("%d KiB, %d objects more", bytes>>10, objects)
}
