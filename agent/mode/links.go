package mode

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"fairlead.dev/fairlead/agent/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// deviceUser is a plane whose parts include the node's network devices.
type deviceUser interface {
	UsesDevices() bool
}

// linked is the Runner of such a plane.
type linked struct {
	reconcile.Runner[model.ServicePart]
	links *link.Source
	log   *slog.Logger

	stop  context.CancelFunc
	begin sync.Once
	ended sync.WaitGroup
}

// withLinks returns the loop of a plane, with the devices of the calling thread's network namespace.
func withLinks(l reconcile.Runner[model.ServicePart], log *slog.Logger) (reconcile.Runner[model.ServicePart], error) {
	s, err := link.Open()
	if err != nil {
		return nil, err
	}
	return &linked{Runner: l, links: s, log: log, stop: func() {}}, nil
}

// Change implements reconcile.Runner. With the first change come the devices that are there, and after it those that
// come and go.
func (l *linked) Change(put, del []model.ServicePart) {
	begins := false
	l.begin.Do(func() {
		begins = true
		links, _, err := l.links.Update()
		if err != nil {
			l.report(err) // Run lists them again
		}
		put = append(put[:len(put):len(put)], links...)
	})
	l.Runner.Change(put, del)
	if !begins {
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	l.ended.Go(func() {
		if err := l.links.Run(ctx, l.Runner.Change, l.report); ctx.Err() == nil {
			l.log.Error("watch network devices failed: those that come are not served", "error", err)
		}
	})
}

func (l *linked) report(err error) { l.log.Warn("list network devices failed", "error", err) }

// Close implements reconcile.Runner.
func (l *linked) Close() error {
	l.stop()
	l.ended.Wait()
	return errors.Join(l.Runner.Close(), l.links.Close())
}
