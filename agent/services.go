// Package agent is the straight line, joined: source → resolve → model → reconcile → data planes, for one node. It holds
// wiring and the node's own status page, and no decision about any packet.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Services is the service side of a node in one network namespace: the mode's data planes and, behind them, the cutting of
// stale flows where they leave any.
type Services struct {
	planes []opener
	loops  []loop // a plane each
	stale  *flows.Plane
	flows  share
	after  *reconcile.Loop[model.Part, flows.Key, flows.Allowed] // nil where the mode leaves no flows

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
func OpenServices(m Mode, log *slog.Logger) (*Services, error) {
	ctx, stop := context.WithCancel(context.Background())
	s := &Services{planes: m.planes, stop: stop, told: make(chan struct{}, 1)}
	s.settled = sync.NewCond(&s.mu)
	for _, p := range m.planes {
		l, err := p.open(log)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("mode %s: %w", m.Name, err), s.Close())
		}
		s.loops = append(s.loops, l)
	}
	if m.Tracked {
		var err error
		if s.stale, err = flows.New(); err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.flows.takes = m.tracked
		s.after = reconcile.New(s.stale, reconcile.Options[model.Part]{Owner: Owner, Group: serviceOf,
			Log: log.With("plane", "flows")})
		s.ended.Go(func() { s.after.Run(ctx) })
		s.ended.Go(func() { s.follow(ctx) })
	}
	for i, l := range s.loops {
		if i+1 < len(s.loops) { // it may hold another mode's frontends, which the next is to serve
			l.Hold(s.loops[i+1].Served())
		}
		s.ended.Go(func() { l.Run(ctx) })
	}
	return s, nil
}

// Owner names what a part belongs to, for people.
func Owner(p model.Part) string {
	switch v := p.(type) {
	case *model.Frontend:
		return v.Service
	case *model.Pool:
		return poolOwner(v.Name)
	case *model.Node:
		return "node " + v.Name
	case *model.HealthCheck:
		return v.Service
	case *model.ClusterIP:
		return v.Service
	}
	return fmt.Sprintf("%T", p)
}

// poolOwner returns the owner of the frontends that lead to a pool, which its name begins with. Its last three words
// are the protocol, the family and the scope.
func poolOwner(name string) string {
	owner := name
	for range 3 {
		i := strings.LastIndexByte(owner, ' ')
		if i < 0 {
			return name
		}
		owner = owner[:i]
	}
	return owner
}

// serviceOf returns the Service, "namespace/name", of an owner such as "shop/web:http"; others stand for themselves.
func serviceOf(owner string) string {
	service, _, _ := strings.Cut(owner, ":")
	return service
}

// isNode reports whether a part is what all others of a plane need.
func isNode(p model.Part) bool {
	_, is := p.(*model.Node)
	return is
}

// weigh returns about how much of a plane a part takes: an entry of a map for each frontend, backend, and place in
// Maglev's table.
func weigh(p model.Part) int {
	switch v := p.(type) {
	case *model.Pool:
		if n := len(v.Backends); v.Scheduler != model.Maglev {
			return n
		} else if v.Entries > 0 {
			return v.Entries
		} else {
			return 100 * n
		}
	case *model.Frontend:
		return 1 + len(v.Sources)
	case *model.ClusterIP:
		return 1
	}
	return 0
}

// Change tells what is wanted, as a change. It returns at once.
func (s *Services) Change(put, del []model.Part) {
	for _, l := range s.loops {
		l.Change(put, del)
	}
	if s.after == nil {
		return
	}
	put, del = s.flows.of(put, del)
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
func (s *Services) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.told:
		}
		s.mu.Lock()
		changes := s.waiting
		s.waiting = nil
		s.mu.Unlock()
		s.syncPlanes(ctx) // what could not be written is in the loop's status; the rest is
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
	err := s.syncPlanes(ctx)
	if s.after == nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.mu.Lock(); s.settled.Broadcast(); s.mu.Unlock() })
	defer stop()
	s.mu.Lock()
	for s.handing && ctx.Err() == nil {
		s.settled.Wait()
	}
	s.mu.Unlock()
	return errors.Join(err, s.after.Sync(ctx))
}

// syncPlanes waits until the planes have what was changed before the call. Those behind one that serves nothing yet are not waited
// for: they wait for it themselves.
func (s *Services) syncPlanes(ctx context.Context) error {
	var errs []error
	for _, l := range slices.Backward(s.loops) {
		errs = append(errs, l.Sync(ctx))
		if l.Status().FirstSync.IsZero() {
			break
		}
	}
	return errors.Join(errs...)
}

// Serving reports whether what all Services need is in the kernel: hooks, base chains, devices' programs. If not, why
// is the reason, "" while nothing has been tried yet.
func (s *Services) Serving() (serving bool, why string) {
	for _, l := range slices.Backward(s.loops) {
		if serving, why = l.Serving(); !serving {
			return false, why
		}
	}
	return len(s.loops) > 0, ""
}

// Served waits until all planes have served for the first time.
func (s *Services) Served(ctx context.Context) {
	for _, l := range slices.Backward(s.loops) {
		select {
		case <-l.Served():
		case <-ctx.Done():
			return
		}
	}
}

// Status gives the loops' states by data plane.
func (s *Services) Status() map[string]reconcile.Status {
	m := map[string]reconcile.Status{}
	for i, l := range s.loops {
		m[s.planes[i].name] = l.Status()
	}
	if s.after != nil {
		m["flows"] = s.after.Status()
	}
	return m
}

// Counts gives what became of pools' clients on this node, by the pools' IDs; nil where the mode counts nothing.
func (s *Services) Counts() (counts map[uint64]ebpf.Count, err error) {
	for _, l := range s.loops {
		if counts, err = l.merge(counts); err != nil {
			return nil, err
		}
	}
	return counts, nil
}

// Packets gives what became of packets at the node's devices; nil where the mode serves none there.
func (s *Services) Packets() (counts *ebpf.PacketCounts, err error) {
	for _, l := range s.loops {
		if c, err := l.packets(); c != nil || err != nil {
			return c, err
		}
	}
	return nil, nil
}

// FastPath returns whether packets for pods are redirected past the node's stack; nil where the mode has no programs at
// devices.
func (s *Services) FastPath() (*ebpf.FastPath, error) {
	for _, l := range s.loops {
		if f, err := l.fastPath(); f != nil || err != nil {
			return f, err
		}
	}
	return nil, nil
}

// Refused returns how many connections the mode refused beyond a bound; nil where it has none.
func (s *Services) Refused() *userspace.Refused {
	for _, l := range s.loops {
		if r := l.refused(); r != nil {
			return r
		}
	}
	return nil
}

// Counted returns what the mode's rules counted; nil where they count nothing.
func (s *Services) Counted() (*iptables.Counted, error) {
	for _, l := range s.loops {
		if c, err := l.counted(); c != nil || err != nil {
			return c, err
		}
	}
	return nil, nil
}

// Affinity returns how much of its capacity for session affinity the mode uses; nil where it has no limit.
func (s *Services) Affinity() ([]service.AffinityUse, error) {
	for _, l := range s.loops {
		if uses, err := l.affinity(); uses != nil || err != nil {
			return uses, err
		}
	}
	return nil, nil
}

// Invalid returns how many packets connection tracking has called invalid; tracks is false where the mode needs none.
func (s *Services) Invalid() (packets uint64, tracks bool, err error) {
	if s.stale == nil {
		return 0, false, nil
	}
	packets, err = s.stale.Invalid()
	return packets, true, err
}

// Close ends the loops and leaves the kernel as it is: traffic goes on.
func (s *Services) Close() error {
	s.stop()
	s.ended.Wait()
	var errs []error
	if s.stale != nil {
		s.stale.Close()
	}
	for _, l := range s.loops {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
