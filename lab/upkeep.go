package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"fairlead.dev/fairlead/lab/result"
)

// begin starts a node's agent with nothing in the kernel and waits until it is done and rests.
func (r *services) begin(ctx context.Context, n *node) error {
	if err := r.hire(n); err != nil {
		return err
	}
	r.later(func() error { n.end(); return nil })
	if err := r.ready(ctx, n, 0, "empty"); err != nil {
		return err
	}
	return n.settle(ctx)
}

// ready waits until a node's agent is ready and notes how long after its start that was.
func (r *services) ready(ctx context.Context, n *node, round int, kernel string) error {
	took, err := n.wait(ctx)
	if err != nil {
		return err
	}
	b := result.Block{Arm: armNFT, Round: round, Params: with(n.services, also("kernel", kernel)), Wall: took}
	if r.kubeProxy != "" && kernel == "empty" {
		used, err := n.used()
		if err = errors.Join(err, r.add(b, "ready-cpu", float64(used))); err != nil {
			return err
		}
	}
	return r.add(b, "ready", float64(took))
}

// looks is how many times memory is read, and into how many windows the idle time is divided: as many as an interval
// needs at least.
const looks = 5

// memory reads the resident memory of every agent.
func (r *services) memory(ctx context.Context, after string) error {
	for _, n := range r.nodes {
		if err := n.settle(ctx); err != nil {
			return err
		}
	}
	for i := range looks {
		if err := rest(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		for _, n := range r.nodes {
			now, most, err := n.memory()
			if err != nil {
				return err
			}
			b := result.Block{Arm: armNFT, Round: i, Params: with(n.services, also("after", after)), Counters: map[string]float64{"most": float64(most)}}
			if err := r.add(b, "memory", float64(now)); err != nil {
				return err
			}
		}
	}
	return nil
}

// What goes on while an agent has nothing to do.
const (
	duringQuiet   = "quiet"
	duringTraffic = "traffic"
)

// idle sees what the agents use of a processor while nothing changes and nothing else runs here.
func (r *services) idle(ctx context.Context) error {
	for i := range looks {
		if err := r.unchanged(i, duringQuiet, func() error { return rest(ctx, r.Profile.Quiet/looks) }); err != nil {
			return err
		}
	}
	return nil
}

// unchanged notes what the agents use of a processor while something goes on that changes nothing for them.
func (r *services) unchanged(round int, during string, something func() error) error {
	before, err := r.activity()
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := something(); err != nil {
		return err
	}
	wall := time.Since(begin)
	after, err := r.activity()
	if err != nil {
		return err
	}
	for k, n := range r.nodes {
		b := result.Block{Arm: armNFT, Round: round, Params: with(n.services, also("during", during)), Start: begin, Wall: wall,
			Counters: map[string]float64{"wakeups": after[k].woken - before[k].woken}}
		if err := r.add(b, "idle", float64(after[k].used-before[k].used)/float64(wall)); err != nil {
			return err
		}
	}
	return nil
}

type activity struct {
	used  time.Duration
	woken float64
}

// activity reads what every agent has used so far.
func (r *services) activity() (l []activity, err error) {
	for _, n := range r.nodes {
		used, uerr := n.used()
		woken, werr := n.woken()
		l = append(l, activity{used, woken})
		err = errors.Join(err, uerr, werr)
	}
	return l, err
}

// params are a block's parameters.
func params(services int) map[string]string {
	if services == 0 {
		return nil
	}
	return map[string]string{"services": fmt.Sprint(services)}
}

// with adds others to them.
func with(services int, more map[string]string) map[string]string {
	p := params(services)
	maps.Copy(p, more)
	return p
}

// also is one parameter, for with.
func also(name, value string) map[string]string { return map[string]string{name: value} }
