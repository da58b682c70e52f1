package services

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"fairlead.dev/fairlead/dataplane/service/nftables"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/reconcile"
)

// watch observes, independently of the agent, what a node's kernel says of changes, and makes changes to observe.
type watch struct {
	node    *testbed.Node
	conn    *nft.Conn
	signals <-chan struct{} // one for each transaction of the agent that wrote into its table
	stop    func()
	service int // whose endpoint is replaced at present; -1: none
}

// newWatch begins to observe a node's kernel.
func newWatch(n *testbed.Node) (*watch, error) {
	w := &watch{node: n, service: -1}
	err := n.Pair.Near.Do(func() (err error) {
		w.conn, err = nft.Open()
		return err
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	if w.signals, err = w.conn.Watch(ctx, nftables.Table); err != nil {
		cancel()
		return nil, errors.Join(err, w.conn.Close())
	}
	w.stop = cancel
	return w, nil
}

// close ends it.
func (w *watch) close() error {
	w.stop()
	for range w.signals {
	}
	return w.conn.Close()
}

// next writes the next change beside the folder: one endpoint of a Service replaced, or put back.
func (w *watch) next(r *rand.Rand) (save func() error, err error) {
	f := w.node.Folder
	if s := w.service; s >= 0 {
		w.service = -1
		return f.Prepare(s, f.Cluster.Slice(s))
	}
	w.service = r.IntN(f.Cluster.Services)
	k := r.IntN(testbed.Endpoints)
	return f.Prepare(w.service, f.Cluster.With(w.service, k, testbed.Spare(w.service, k)))
}

// files measures a batch of saved files with each agent, in random order.
func (r *trial) files(ctx context.Context, round int) error {
	runtime.GC()
	for _, i := range r.bed.Rand.Perm(len(r.watches)) {
		if err := r.save(ctx, round, r.watches[i]); err != nil {
			return fmt.Errorf("save files of %d Services: %w", r.nodes[i].Pair.Services, err)
		}
	}
	return nil
}

// save saves files one by one, each from a moment of rest until the kernel tells of the change.
func (r *trial) save(ctx context.Context, round int, w *watch) error {
	n := w.node
	before, err := n.Status()
	if err != nil {
		return err
	}
	var ns []int64
	missed, begin := int64(0), time.Now()
	for range r.profile.PerFiles {
		elapsed, err := r.saveOne(ctx, w)
		switch {
		case err != nil:
			return err
		case elapsed > r.bed.Within(testbed.ChangeTimeout):
			missed++
		default:
			ns = append(ns, int64(elapsed))
		}
	}
	b := result.Block{Arm: experiment.ArmNFTables, Round: round, Params: testbed.ServiceParams(n.Pair.Services),
		Start: begin, Wall: time.Since(begin)}
	if missed > 0 {
		b.Errors = map[string]int64{"not seen": missed}
	}
	after, err := counted(ctx, n, before.Writes+uint64(len(ns)))
	if err != nil {
		return err
	}
	b.Counters = map[string]float64{"facts": float64(after.Puts - before.Puts),
		"transactions": float64(after.Writes - before.Writes)}
	return r.out.AddTimes(b, "file", ns)
}

// counted returns the state of an agent's loop once it has counted so many transactions, of which the kernel tells a
// moment earlier than it does. If it never does, it is that of a while later.
func counted(ctx context.Context, n *testbed.Node, writes uint64) (s reconcile.Status, err error) {
	for range 50 {
		if s, err = n.Status(); err != nil || s.Writes >= writes {
			return s, err
		}
		if err := testbed.Sleep(ctx, 4*time.Millisecond); err != nil {
			return s, err
		}
	}
	return s, nil
}

// saveOne saves one file and waits for the kernel's word.
func (r *trial) saveOne(ctx context.Context, w *watch) (time.Duration, error) {
	save, err := w.next(r.bed.Rand)
	if err != nil {
		return 0, err
	}
	if err := testbed.Sleep(ctx, time.Duration(2000+r.bed.Rand.IntN(4000))*time.Microsecond); err != nil {
		return 0, err
	}
	select {
	case <-w.signals: // of something before
	default:
	}
	begin := time.Now()
	if err := save(); err != nil {
		return 0, err
	}
	select {
	case <-w.signals:
		return time.Since(begin), nil
	case <-time.After(testbed.ChangeTimeout):
		return r.bed.Within(testbed.ChangeTimeout) + 1, nil
	case <-w.node.Agent.Child.Ended():
		return 0, w.node.Agent.Err()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}
