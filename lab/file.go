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

// watched is an agent with its folder and an independent view of what it writes.
type watched struct {
	*process
	*folder
	conn    *nft.Conn
	signals <-chan struct{} // one for each transaction of the agent that wrote into its table
	stop    func()
	service int // whose endpoint is replaced at present; -1: none
	k       int // which endpoint that is
}

// watch begins to look at what an agent's node's kernel tells of changes.
func watch(p *process, f *folder) (*watched, error) {
	w := &watched{process: p, folder: f, service: -1}
	err := p.pair.node.Do(func() (err error) {
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
	w.stop = func() {
		cancel()
		for range w.signals {
		}
		w.conn.Close()
	}
	return w, nil
}

// next writes the next change beside the folder: one endpoint of a Service replaced, or put back.
func (w *watched) next(r *run) (save func() error, err error) {
	if w.service >= 0 {
		s := w.service
		w.service = -1
		return w.prepare(s, w.slice(s))
	}
	w.service, w.k = r.rand.IntN(w.services), r.rand.IntN(endpoints)
	return w.prepare(w.service, w.with(w.service, w.k, spare(w.service, w.k)))
}

// late is how long a change is waited for.
const late = 5 * time.Second

// files measures a batch of saved files with each agent, in random order.
func (r *run) files(ctx context.Context, round int) error {
	runtime.GC()
	for _, i := range r.rand.Perm(len(r.watched)) {
		if err := r.save(ctx, round, r.watched[i]); err != nil {
			return fmt.Errorf("save files of %d Services: %w", r.watched[i].services, err)
		}
	}
	return nil
}

// save saves files one by one, each from a moment of rest until the kernel tells of the change.
func (r *run) save(ctx context.Context, round int, w *watched) error {
	before, err := w.loop()
	if err != nil {
		return err
	}
	var ns []int64
	missed, begin := int64(0), time.Now()
	for range r.Profile.PerFiles {
		took, err := r.saveOne(ctx, w)
		switch {
		case err != nil:
			return err
		case took > late:
			missed++
		default:
			ns = append(ns, int64(took))
		}
	}
	b := result.Block{Arm: armNFT, Round: round, Params: params(w.services), Start: begin, Wall: time.Since(begin)}
	if missed > 0 {
		b.Errors = map[string]int64{"not seen": missed}
	}
	after, err := w.loop()
	if err != nil {
		return err
	}
	b.Counters = written2(before, after)
	return r.addTimes(b, "file", ns)
}

// written2 is what an agent wrote between two looks at its loop.
func written2(before, after reconcile.Status) map[string]float64 {
	return map[string]float64{"facts": float64(after.Puts - before.Puts), "transactions": float64(after.Writes - before.Writes)}
}

// saveOne saves one file and waits for the kernel's word.
func (r *run) saveOne(ctx context.Context, w *watched) (time.Duration, error) {
	save, err := w.next(r)
	if err != nil {
		return 0, err
	}
	if err := rest(ctx, time.Duration(2000+r.rand.IntN(4000))*time.Microsecond); err != nil {
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
	case <-time.After(late):
		return late + 1, nil
	case <-w.ended:
		return 0, fmt.Errorf("the agent ended by itself: %v: %s", w.err, w.last())
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}
