// Package agent is the straight line, joined: source → resolve → model → reconcile → data planes, for one node. It holds
// wiring and the node's own status page, and no decision about any packet.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// servicesLoop and flowsLoop are the loops of the service side.
type (
	servicesLoop = reconcile.Loop[model.Part, nftables.Key, string]
	flowsLoop    = reconcile.Loop[model.Part, flows.Key, flows.Allowed]
)

// Services is the service side of a node in one network namespace: the data plane and, behind it, the cutting of stale
// flows.
type Services struct {
	plane *nftables.Plane
	stale *flows.Plane
	loop  *servicesLoop
	after *flowsLoop

	stop    context.CancelFunc
	ended   sync.WaitGroup
	told    chan struct{} // holds one when there is something to hand on
	mu      sync.Mutex
	settled *sync.Cond // signals that handing may have changed
	handing bool       // changes are on their way to after
	waiting []change   // what the data plane was told of and after not yet, in its order
}

// change is what one Change told.
type change struct{ put, del []model.Part }

// OpenServices opens the service side of the calling thread's network namespace. It begins with the first Change.
func OpenServices(log *slog.Logger) (*Services, error) {
	plane, err := nftables.New()
	if err != nil {
		return nil, err
	}
	stale, err := flows.New()
	if err != nil {
		plane.Close()
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Services{
		plane: plane, stale: stale, stop: stop, told: make(chan struct{}, 1),
		loop:  reconcile.New(plane, reconcile.Options[model.Part]{Owner: Owner, Log: log.With("plane", "nftables")}),
		after: reconcile.New(stale, reconcile.Options[model.Part]{Owner: Owner, Log: log.With("plane", "flows")}),
	}
	s.settled = sync.NewCond(&s.mu)
	for _, run := range []func(context.Context) error{s.loop.Run, s.after.Run, s.follow} {
		s.ended.Go(func() { run(ctx) })
	}
	return s, nil
}

// Owner names what a part belongs to, for people.
func Owner(p model.Part) string {
	switch v := p.(type) {
	case *model.Frontend:
		return v.Service
	case *model.Pool:
		return v.Name
	case *model.Node:
		return "node " + v.Name
	}
	return fmt.Sprintf("%T", p)
}

// Change tells what is wanted, as a change. It returns at once.
func (s *Services) Change(put, del []model.Part) {
	s.loop.Change(put, del)
	s.mu.Lock()
	s.waiting = append(s.waiting, change{put, del})
	s.handing = true
	s.mu.Unlock()
	select {
	case s.told <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// follow tells after of changes once the data plane has them. To look for stale flows the kernel walks all its flows: follow
// leaves as long as that took until the next time, and tells of what changed meanwhile together.
func (s *Services) follow(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.told:
		}
		s.mu.Lock()
		changes := s.waiting
		s.waiting = nil
		s.mu.Unlock()
		s.loop.Sync(ctx) // what could not be written is in the loop's status; the rest is
		writes := s.after.Status().Writes
		for _, c := range changes {
			s.after.Change(c.put, c.del)
		}
		s.after.Sync(ctx) // likewise
		s.mu.Lock()
		s.handing = len(s.waiting) > 0
		s.settled.Broadcast()
		s.mu.Unlock()
		if looked := s.after.Status(); looked.Writes > writes {
			select {
			case <-ctx.Done():
			case <-time.After(looked.LastWrite):
			}
		}
	}
}

// Sync waits until the kernel has what was changed before the call and no flow is stale. The error says what it has not.
func (s *Services) Sync(ctx context.Context) error {
	err := s.loop.Sync(ctx)
	stop := context.AfterFunc(ctx, func() { s.mu.Lock(); s.settled.Broadcast(); s.mu.Unlock() })
	defer stop()
	s.mu.Lock()
	for s.handing && ctx.Err() == nil {
		s.settled.Wait()
	}
	s.mu.Unlock()
	return errors.Join(err, s.after.Sync(ctx))
}

// Close ends the loops and leaves the kernel as it is: traffic goes on.
func (s *Services) Close() error {
	s.stop()
	s.ended.Wait()
	s.stale.Close()
	return s.plane.Close()
}
