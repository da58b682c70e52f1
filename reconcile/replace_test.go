package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// framed is a plane in which one fact holds all others: where that is replaced, all that was held goes.
type framed struct{ watched }

var frame = key{0, "frame"}

// Foundation implements dataplane.Foundation.
func (k key) Foundation() bool { return k == frame }

// Read implements dataplane.Plane: of another frame's facts none is read.
func (f framed) Read(ctx context.Context) ([]fact, error) {
	facts, err := f.watched.Read(ctx)
	if i := slices.Index(facts, fact{Key: frame, Value: "old"}); i >= 0 {
		return facts[i : i+1], err
	}
	return facts, err
}

// Check implements dataplane.Checker.
func (f framed) Check(_ context.Context, put, _ []fact) (err error) {
	f.with(func() {
		for _, p := range put {
			err = errors.Join(err, f.refuse[p.Key.name])
		}
	})
	return err
}

// Write implements dataplane.Plane.
func (f framed) Write(ctx context.Context, put, del []fact) error {
	if !slices.ContainsFunc(del, func(d fact) bool { return d.Key == frame }) {
		return f.watched.Write(ctx, put, del)
	}
	if err := f.Check(ctx, put, del); err != nil {
		f.with(func() { f.writes++ })
		return err
	}
	f.with(func() {
		clear(f.facts)
		f.blind = true
	})
	return f.watched.Write(ctx, put, del)
}

// What is held stays in force until one Write replaces it by all that is wanted but what is refused, however much that
// is; where the base is refused, it stays until that is not.
func TestReplacementIsWhole(t *testing.T) {
	for _, refused := range []string{"rule70", "chain", "hook"} {
		t.Run(refused, func(t *testing.T) {
			in(t, tenants(Options[*part]{MaxFacts: 10}), func(r *rig) {
				r.loop = New(framed{watched{plane{r.kernel}}}, tenants(Options[*part]{MaxFacts: 10, Backoff: doubling,
					Log: r.loop.options.Log}))
				r.atomic = true
				hook := key{3, "hook"}
				r.facts[frame], r.facts[hook], r.facts[key{2, "former"}] = "old", "v>chain", "v"
				r.facts[key{1, "chain"}] = "v"
				r.required[hook] = "v>chain"
				r.refuse[refused] = errBusy
				all := []*part{of("node", "0 frame new", "1 chain v", "3 hook v>chain")}
				for i := range 100 {
					all = append(all, of(fmt.Sprintf("pod%d:a", i), fmt.Sprintf("2 rule%d v>chain", i)))
				}
				r.loop.Change(all, nil)
				r.run()
				if err := r.outcome(); !errors.Is(err, errBusy) || !strings.Contains(err.Error(), refused) {
					r.Errorf("Sync returns %v", err)
				}
				if refused == "rule70" {
					r.wants(slices.Delete(slices.Clone(all), 71, 72)...)
				} else if err := r.holds([]*part{of("", "0 frame old", "1 chain v", "2 former v", "3 hook v>chain")}); err != nil {
					r.Error(err)
				}
				r.with(func() { clear(r.refuse) })
				r.later(2 * time.Minute)
				r.sync(all...)
			})
		})
	}
}
