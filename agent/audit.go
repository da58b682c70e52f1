package agent

import (
	"context"
	"errors"
	"log/slog"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/model"
)

// Audit is what a node should hold against what its kernel holds. Nothing was written for it.
type Audit struct {
	Wanted, Held int                   // facts
	Put, Del     []string              // the facts that a sync would write and remove, such as "chain refuse"; one that changes is in both
	Counts       map[uint64]ebpf.Count // what became of pools' clients on this node, by pools' IDs; nil where the mode counts nothing
	Packets      *ebpf.PacketCounts    // what became of packets at devices; nil where the mode serves none there
	FastPath     *ebpf.FastPath        // of packets for pods; nil where the mode has no programs at devices
	lacks        []func(model.Part) (lacking, of int)
}

// Check audits the calling thread's network namespace.
func Check(ctx context.Context, m Mode, s *model.Services) (*Audit, error) {
	a, parts := &Audit{}, s.Parts()
	if m.Accepts {
		parts = withHealth(parts, s.HealthChecks)
	}
	return a, m.each(func(l loop) error {
		l.Change(parts, nil)
		return l.audit(ctx, a)
	})
}

// Probe says why the calling thread's network namespace can't have the mode, nil if it can. It opens and reads, and writes
// nothing.
func (m Mode) Probe(ctx context.Context) error {
	return m.each(func(l loop) error { return l.audit(ctx, &Audit{}) })
}

// each opens the mode's planes one after the other, and closes them again.
func (m Mode) each(do func(loop) error) error {
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

// Lacks gives how many facts that f and its pools need the kernel lacks, and of how many.
func (a *Audit) Lacks(f *model.Frontend) (missing, of int) {
	parts := []model.Part{f, f.Inside.Pool}
	if f.Outside.Pool != f.Inside.Pool {
		parts = append(parts, f.Outside.Pool)
	}
	for _, p := range parts {
		for _, lacks := range a.lacks {
			m, n := lacks(p)
			missing, of = missing+m, of+n
		}
	}
	return missing, of
}

// Attached returns how many facts that all frontends need the kernel lacks, such as hooks, and of how many.
func (a *Audit) Attached(n *model.Node) (missing, of int) {
	for _, lacks := range a.lacks {
		m, all := lacks(n)
		missing, of = missing+m, of+all
	}
	return missing, of
}

// Clean removes everything of ours from the calling thread's network namespace, whatever the mode that wrote it. A mode
// that this kernel can't do at all has left nothing.
func Clean(ctx context.Context) error {
	_, err := flows.Release(nil)
	errs := []error{err}
	for _, m := range modes {
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
