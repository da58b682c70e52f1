package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"

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
	lacks        []func(model.Part) (lacking, of int)
}

// Check audits the calling thread's network namespace.
func Check(ctx context.Context, m Mode, s *model.Services) (*Audit, error) {
	a := &Audit{}
	return a, m.each(func(l loop) error {
		l.Change(s.Parts(), nil)
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

// tracks says whether the mode's own rules have the kernel translate connections.
func (m Mode) tracks() bool { return m.Tracked && m.tracked == nil }

// KeepOthers has TCP connections go on that the kernel translates by what other modes than m, or a kube-proxy, left in the calling
// thread's network namespace, also once that goes. It comes before m's first write, which may take the place of another mode's.
func KeepOthers(m Mode) error {
	if m.tracks() {
		return nil
	}
	return flows.Keep()
}

// ReleaseOthers undoes KeepOthers if the last such connection has ended, or m does without. It gives how many there are.
func ReleaseOthers(m Mode) (connections int, err error) { return flows.Release(m.tracks()) }

// CleanOthers removes what other modes than m left in the calling thread's network namespace, but for what TCP connections that began
// with them need to go on, and gives the number of those. Modes that share a plane's name, or are variants of one, leave each other's.
func CleanOthers(ctx context.Context, m Mode) (connections int, err error) {
	uses := func(name string) bool {
		return slices.ContainsFunc(m.planes, func(p opener) bool { return family(p.name) == family(name) })
	}
	var errs []error
	for _, o := range modes {
		for _, p := range o.planes {
			if p.name != o.Name || uses(p.name) || o.Name != family(o.Name) {
				continue
			}
			if l, err := p.open(slog.New(slog.DiscardHandler)); err == nil {
				n, err := l.retire(ctx)
				connections += n
				errs = append(errs, err, l.Close())
			}
		}
	}
	return connections, errors.Join(errs...)
}

// family is the name of a plane without its variant.
func family(name string) string {
	name, _, _ = strings.Cut(name, "-")
	return name
}

// Clean removes everything of ours from the calling thread's network namespace, whatever the mode that wrote it. A mode
// that this kernel can't do at all has left nothing.
func Clean(ctx context.Context) error {
	_, err := flows.Release(true)
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
