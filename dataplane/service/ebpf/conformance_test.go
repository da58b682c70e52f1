package ebpf_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/conformance"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// runner is the plane with one for packets behind it.
type runner struct {
	hooks   *reconcile.Loop[model.Part, ebpf.Key, string]
	packets *reconcile.Loop[model.Part, nftables.Key, string]
	flows   *reconcile.Loop[model.Part, flows.Key, flows.Allowed]
	repairs uint64
	waiting [][2][]model.Part
	plane   *ebpf.Plane
	behind  *nftables.Plane
	stale   *flows.Plane
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

func start() (conformance.Runner, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	r := &runner{}
	var err error
	if r.plane, err = ebpf.New(); err != nil {
		return nil, err
	}
	if r.behind, err = nftables.New(); err != nil {
		return nil, err
	}
	if r.stale, err = flows.New(); err != nil {
		return nil, err
	}
	r.hooks = reconcile.New(r.plane, reconcile.Options[model.Part]{Log: log})
	r.packets = reconcile.New(r.behind, reconcile.Options[model.Part]{Log: log})
	r.flows = reconcile.New(r.stale, reconcile.Options[model.Part]{Log: log})
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	for _, run := range []func(context.Context) error{r.hooks.Run, r.packets.Run, r.flows.Run} {
		r.ended.Go(func() { run(ctx) })
	}
	return r, nil
}

func (r *runner) Change(put, del []model.Part) {
	r.hooks.Change(put, del)
	r.packets.Change(put, del)
	r.waiting = append(r.waiting, [2][]model.Part{put, del})
}

func (r *runner) Sync(ctx context.Context) error {
	for r.hooks.Status().Repairs < r.repairs {
		select {
		case <-ctx.Done():
			return errors.New("drift was not repaired")
		case <-time.After(time.Millisecond):
		}
	}
	err := errors.Join(r.hooks.Sync(ctx), r.packets.Sync(ctx))
	for _, c := range r.waiting {
		r.flows.Change(c[0], c[1])
	}
	r.waiting = nil
	return errors.Join(err, r.flows.Sync(ctx))
}

func (r *runner) Close() error {
	r.stop()
	r.ended.Wait()
	r.stale.Close()
	return errors.Join(r.plane.Close(), r.behind.Close())
}

// Disturb implements conformance.Disturber: all that is pinned goes.
func (r *runner) Disturb(ctx context.Context) error {
	r.repairs = r.hooks.Status().Repairs + 1
	folder, _, err := bpf.Folder()
	if err != nil {
		return err
	}
	return os.RemoveAll(folder)
}

func (r *runner) Dump() string {
	facts, err := r.plane.Read(context.Background())
	if err != nil {
		return err.Error()
	}
	text := ""
	for _, f := range facts {
		text += f.Key.String() + "\n"
	}
	out, _ := exec.Command("nft", "list", "table", "inet", nftables.Table).CombinedOutput()
	_ = out
	return text
}

func subject() conformance.Subject {
	a := ebpf.Abilities
	a.Schedulers &= nftables.Abilities.Schedulers
	return conformance.Subject{Abilities: a, Start: start}
}

func TestConformance(t *testing.T) { conformance.Run(t, subject()) }

func TestWorlds(t *testing.T) { conformance.Random(t, subject(), 100) }

func TestChurn(t *testing.T) { conformance.Churn(t, subject()) }
