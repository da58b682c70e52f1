package lab

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"fairlead.dev/fairlead/dataplane/service/nftables"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/reconcile"
)

// watch begins to look, independently of the agent, at what a node's kernel tells of changes.
func (n *node) watch() (err error) {
	err = n.pair.node.Do(func() error {
		n.conn, err = nft.Open()
		return err
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	if n.signals, err = n.conn.Watch(ctx, nftables.Table); err != nil {
		cancel()
		return errors.Join(err, n.conn.Close())
	}
	n.blind = func() error {
		cancel()
		for range n.signals {
		}
		return n.conn.Close()
	}
	return nil
}

// next writes the next change beside the folder: one endpoint of a Service replaced, or put back.
func (n *node) next(r *services) (save func() error, err error) {
	if s := n.service; s >= 0 {
		n.service = -1
		return n.prepare(s, n.slice(s))
	}
	n.service = r.rand.IntN(n.services)
	k := r.rand.IntN(endpoints)
	return n.prepare(n.service, n.with(n.service, k, spare(n.service, k)))
}

// late is how long a change is waited for.
const late = 5 * time.Second

// files measures a batch of saved files with each agent, in random order.
func (r *services) files(ctx context.Context, round int) error {
	runtime.GC()
	for _, i := range r.rand.Perm(len(r.nodes)) {
		if err := r.save(ctx, round, r.nodes[i]); err != nil {
			return fmt.Errorf("save files of %d Services: %w", r.nodes[i].services, err)
		}
	}
	return nil
}

// save saves files one by one, each from a moment of rest until the kernel tells of the change.
func (r *services) save(ctx context.Context, round int, n *node) error {
	before, err := n.loop()
	if err != nil {
		return err
	}
	var ns []int64
	missed, begin := int64(0), time.Now()
	for range r.Profile.PerFiles {
		took, err := r.saveOne(ctx, n)
		switch {
		case err != nil:
			return err
		case took > within(late):
			missed++
		default:
			ns = append(ns, int64(took))
		}
	}
	b := result.Block{Arm: armNFT, Round: round, Params: params(n.services), Start: begin, Wall: time.Since(begin)}
	if missed > 0 {
		b.Errors = map[string]int64{"not seen": missed}
	}
	after, err := n.counted(ctx, before.Writes+uint64(len(ns)))
	if err != nil {
		return err
	}
	b.Counters = map[string]float64{"facts": float64(after.Puts - before.Puts), "transactions": float64(after.Writes - before.Writes)}
	return r.addTimes(b, "file", ns)
}

// counted is the state of an agent's loop once it has counted so many transactions, of which the kernel tells a moment
// earlier than it does. If it never does, it is that of a while later.
func (n *node) counted(ctx context.Context, writes uint64) (s reconcile.Status, err error) {
	for range 50 {
		if s, err = n.loop(); err != nil || s.Writes >= writes {
			return s, err
		}
		if err := rest(ctx, 4*time.Millisecond); err != nil {
			return s, err
		}
	}
	return s, nil
}

// saveOne saves one file and waits for the kernel's word.
func (r *services) saveOne(ctx context.Context, n *node) (time.Duration, error) {
	save, err := n.next(r)
	if err != nil {
		return 0, err
	}
	if err := rest(ctx, time.Duration(2000+r.rand.IntN(4000))*time.Microsecond); err != nil {
		return 0, err
	}
	select {
	case <-n.signals: // of something before
	default:
	}
	begin := time.Now()
	if err := save(); err != nil {
		return 0, err
	}
	select {
	case <-n.signals:
		return time.Since(begin), nil
	case <-time.After(late):
		return within(late) + 1, nil
	case <-n.child.Ended():
		return 0, n.ended()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}
