package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/conformance"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// judged is the plane with its loop, and behind it the cutting of stale flows, as a conformance.Runner.
type judged struct {
	plane   *iptables.Plane
	stale   *flows.Plane
	loop    *reconcile.Loop[model.Part, iptables.Key, string]
	after   *reconcile.Loop[model.Part, flows.Key, flows.Allowed]
	stop    context.CancelFunc
	ended   sync.WaitGroup
	waiting [][2][]model.Part
	repairs uint64 // that there must be before the kernel is as told
}

func subject(v iptables.Variant) conformance.Subject {
	return conformance.Subject{Abilities: iptables.Abilities, Start: func() (conformance.Runner, error) { return start(v) }}
}

func start(v iptables.Variant) (*judged, error) {
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() && os.Getenv("FAIRLEAD_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	plane, err := iptables.NewVariant(v)
	if err != nil {
		return nil, err
	}
	stale, err := flows.New()
	if err != nil {
		plane.Close()
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	j := &judged{plane: plane, stale: stale, stop: stop,
		loop:  reconcile.New(plane, reconcile.Options[model.Part]{Log: log, MaxFacts: iptables.Abilities.Batch}),
		after: reconcile.New(stale, reconcile.Options[model.Part]{Log: log})}
	j.ended.Go(func() { j.loop.Run(ctx) })
	j.ended.Go(func() { j.after.Run(ctx) })
	return j, nil
}

func (j *judged) Change(put, del []model.Part) {
	j.loop.Change(put, del)
	j.waiting = append(j.waiting, [2][]model.Part{put, del})
}

// Sync also waits for what Disturb did to be seen and repaired.
func (j *judged) Sync(ctx context.Context) error {
	for j.loop.Status().Repairs < j.repairs {
		select {
		case <-ctx.Done():
			return fmt.Errorf("drift was not repaired: %w", ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	err := j.loop.Sync(ctx)
	for _, c := range j.waiting {
		j.after.Change(c[0], c[1])
	}
	j.waiting = nil
	return errors.Join(err, j.after.Sync(ctx))
}

func (j *judged) Close() error {
	j.stop()
	j.ended.Wait()
	j.stale.Close()
	return j.plane.Close()
}

// Disturb implements conformance.Disturber: a stranger empties the nodes' nat tables.
func (j *judged) Disturb(ctx context.Context) error {
	j.repairs = j.loop.Status().Repairs + 1
	for _, name := range []string{"iptables-", "ip6tables-"} {
		if out, err := exec.CommandContext(ctx, name+string(j.plane.Variant()), "-w", "-t", "nat", "-F").CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
	}
	return nil
}

// Dump implements conformance.Dumper.
func (j *judged) Dump() (text string) {
	for _, name := range []string{"iptables-", "ip6tables-"} {
		out, err := exec.Command(name+string(j.plane.Variant())+"-save", "-c").CombinedOutput()
		text += fmt.Sprintf("%s%s: %v\n%s", name, j.plane.Variant(), err, out)
	}
	return text
}

// each judges both variants.
func each(t *testing.T, judge func(*testing.T, conformance.Subject)) {
	for _, v := range []iptables.Variant{iptables.Legacy, iptables.NFT} {
		t.Run(string(v), func(t *testing.T) { judge(t, subject(v)) })
	}
}

func TestConformance(t *testing.T) { each(t, conformance.Run) }

func TestRandomWorlds(t *testing.T) {
	each(t, func(t *testing.T, s conformance.Subject) { conformance.Random(t, s, 200) })
}

func TestChangeUnderTraffic(t *testing.T) { each(t, conformance.Churn) }
