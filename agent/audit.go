package agent

import (
	"context"
	"log/slog"

	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Audit is what a node should hold against what its kernel holds. Nothing was written for it.
type Audit struct {
	Wanted, Held int             // facts
	Put, Del     []nftables.Fact // what a sync would write and remove
	plane        *nftables.Plane
	missing      map[nftables.Key]bool
}

// Check audits the calling thread's network namespace.
func Check(ctx context.Context, s *model.Services) (*Audit, error) {
	plane, err := nftables.New()
	if err != nil {
		return nil, err
	}
	defer plane.Close()
	loop := reconcile.New(plane, reconcile.Options[model.Part]{Owner: Owner, Log: slog.New(slog.DiscardHandler)})
	loop.Change(s.Parts(), nil)
	p, err := loop.Plan(ctx)
	if err != nil {
		return nil, err
	}
	a := &Audit{Wanted: p.Held + len(p.Put), Held: p.Held + len(p.Del), Put: p.Put, Del: p.Del, plane: plane, missing: map[nftables.Key]bool{}}
	for _, f := range p.Put {
		a.missing[f.Key] = true
	}
	return a, nil
}

// Lacks gives how many facts that f and its pools need the kernel lacks, and of how many.
func (a *Audit) Lacks(f *model.Frontend) (missing, of int) {
	parts := []model.Part{f, f.Inside.Pool}
	if f.Outside.Pool != f.Inside.Pool {
		parts = append(parts, f.Outside.Pool)
	}
	for _, p := range parts {
		for _, fact := range a.plane.Render(p) {
			of++
			if a.missing[fact.Key] {
				missing++
			}
		}
	}
	return missing, of
}

// Clean removes everything of ours from the calling thread's network namespace.
func Clean(ctx context.Context) error {
	plane, err := nftables.New()
	if err != nil {
		return err
	}
	defer plane.Close()
	return plane.Clean(ctx)
}
