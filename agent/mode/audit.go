package mode

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Audit is what a node should hold against what its kernel holds. Nothing was written for it.
type Audit struct {
	Wanted, Held int                     // facts
	Put, Del     []reconcile.PlannedFact // the facts that a sync would write and remove; one that changes is in both
	// what became of pools' clients on this node, by pools' IDs; nil where the mode counts nothing
	Counts   map[uint64]service.Count
	Packets  []service.Outcome // what became of packets at devices; nil where the mode serves none there
	FastPath *service.FastPath // of packets to pods; nil where the mode has no programs at devices
	plans    []reconcile.Plan[model.ServicePart]
}

// addCounts adds a plane's counts.
func (a *Audit) addCounts(counts map[uint64]service.Count) {
	if counts != nil && a.Counts == nil {
		a.Counts = map[uint64]service.Count{}
	}
	maps.Copy(a.Counts, counts)
}

// Check audits the calling thread's network namespace.
func Check(ctx context.Context, m Mode, s *model.Snapshot) (*Audit, error) {
	a, parts := &Audit{}, s.Parts()
	if m.Accepts {
		parts = WithHealth(parts, s.HealthChecks)
	}
	return a, m.each(func(l *Plane) error {
		l.Change(parts, nil)
		return l.audit(ctx, a)
	})
}

// Probe returns why the calling thread's network namespace can't have the mode, nil if it can. It opens and reads, and
// writes nothing.
func (m Mode) Probe(ctx context.Context) error {
	return m.each(func(l *Plane) error { return l.audit(ctx, &Audit{}) })
}

// each opens the mode's planes one after the other, and closes them again.
func (m Mode) each(do func(*Plane) error) error {
	for _, p := range m.planes {
		l, err := p.open(slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		if err := errors.Join(do(l), l.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Lacks returns how many facts that f and its pools need the kernel lacks, and of how many.
func (a *Audit) Lacks(f *model.Frontend) (missing, of int) {
	parts := []model.ServicePart{f, f.Internal.Pool}
	if f.External.Pool != f.Internal.Pool {
		parts = append(parts, f.External.Pool)
	}
	for _, p := range parts {
		for _, plan := range a.plans {
			m, n := plan.Lacks(p)
			missing, of = missing+m, of+n
		}
	}
	return missing, of
}

// Attached returns how many facts that all frontends need the kernel lacks, such as hooks, and of how many.
func (a *Audit) Attached(n *model.ServiceNode) (missing, of int) {
	for _, plan := range a.plans {
		m, all := plan.Lacks(n)
		missing, of = missing+m, of+all
	}
	return missing, of
}

// Clean removes everything of ours from the calling thread's network namespace, whatever the mode that wrote it. A mode
// that this kernel can't do at all has left nothing.
func Clean(ctx context.Context) error {
	_, err := flows.Release(nil, false)
	errs := []error{err, cleanEngines(ctx, "")}
	for _, m := range All() {
		for _, p := range m.planes {
			if p.name != m.Name {
				continue // another mode's
			}
			l, err := p.open(slog.New(slog.DiscardHandler))
			if err != nil {
				if m.Name == Default {
					errs = append(errs, err)
				}
				continue
			}
			errs = append(errs, l.Clean(ctx), l.Close())
		}
	}
	return errors.Join(errs...)
}

// WithHealth returns parts and health checks, for a mode that accepts packets to them.
func WithHealth(parts []model.ServicePart, checks []*model.HealthCheck) []model.ServicePart {
	parts = slices.Clip(parts)
	for _, h := range checks {
		parts = append(parts, h)
	}
	return parts
}
