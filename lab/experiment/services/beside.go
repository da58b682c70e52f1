package services

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// newMode opens a mode's planes in a pair's node and runs their loops in this process.
func (r *trial) newMode(name string, p *testbed.Pair) (*inProcess, error) {
	m, err := mode.Of(name)
	if err != nil {
		return nil, err
	}
	var planes []*mode.Plane
	if err := p.Enter(func() (err error) {
		planes, err = m.With(mode.Options{MapEntries: uint32(r.mapEntries())}).Open(slog.New(slog.DiscardHandler))
		return err
	}); err != nil {
		return nil, fmt.Errorf("open mode %s: %w", name, err)
	}
	c := &inProcess{arm: name, clock: r.bed.Clock}
	var loops []reconcile.Runner[model.ServicePart]
	for _, p := range planes {
		loops = append(loops, p)
	}
	c.run(loops...)
	return c, nil
}

// changesBeside are few: to iptables-restore one at many Services takes an emulated processor seconds.
const changesBeside = 10

// syncBeside counts a cold sync, a restart and single changes of a mode at the most Services, in a node of its own.
func (r *trial) syncBeside(ctx context.Context, name string) (err error) {
	p, err := testbed.NewPair(ctx, r.bed.Name+"-sync-"+name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if testbed.Hooks(name) {
		p.Group()
	}
	w, err := testbed.Decide(r.profile.most())
	if err != nil {
		return err
	}
	c, err := r.newMode(name, p)
	if err != nil {
		return err
	}
	if err := errors.Join(r.sync(ctx, 0, w, c, false), c.stop()); err != nil {
		return fmt.Errorf("sync %d Services by mode %s: %w", w.Cluster.Services, name, err)
	}
	if c, err = r.newMode(name, p); err != nil {
		return err
	}
	defer func() {
		c.halt()
		err = errors.Join(err, p.Enter(func() error { return clean(c.loops) }), c.stop())
	}()
	if err := r.sync(ctx, 0, w, c, true); err != nil {
		return fmt.Errorf("sync %d Services by mode %s again: %w", w.Cluster.Services, name, err)
	}
	if err := r.batch(ctx, 0, &changing{world: w, loop: c, service: -1}, changesBeside); err != nil {
		return fmt.Errorf("change an endpoint of %d Services by mode %s: %w", w.Cluster.Services, name, err)
	}
	return nil
}

// clean removes what loops wrote, which have ended.
func clean(loops []reconcile.Runner[model.ServicePart]) (err error) {
	for _, l := range loops {
		err = errors.Join(err, l.Clean(context.Background()))
	}
	return err
}
