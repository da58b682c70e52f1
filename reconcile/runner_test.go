package reconcile

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/model"
)

var _ Runner[*part] = (*Loop[*part, key, string])(nil)

// syncOwner returns what SyncOwner returns, on a channel.
func (r *rig) syncOwner(ctx context.Context, owner string) <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.loop.SyncOwner(ctx, model.Owner{Name: owner}) }()
	synctest.Wait()
	return done
}

// returned is the result on a channel that must have one.
func (r *rig) returned(done <-chan error) error {
	r.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		return err
	default:
		r.Fatal("SyncOwner waits on")
		return nil
	}
}

// checkOwned checks that the parts by owner, where they were asked for, are the parts that there are.
func (r *rig) checkOwned() {
	r.Helper()
	x, found := &r.loop.owned, 0
	if x.parts == nil {
		return
	}
	for _, l := range x.parts {
		found += len(l)
	}
	if found != len(r.loop.parts) {
		r.Errorf("%d of %d parts are known by their owners", found, len(r.loop.parts))
	}
	for p := range r.loop.parts {
		if !slices.Contains(x.by(x.of(p), nil), p) {
			r.Errorf("%v is not known by its owner", p)
		}
	}
}

// delayed is a plane whose Writes of one fact last until a channel is closed.
type delayed struct {
	watched
	name string
	end  chan struct{}
}

func (s delayed) Write(ctx context.Context, put, del []fact) error {
	if slices.ContainsFunc(put, func(f fact) bool { return f.Key.name == s.name }) {
		<-s.end
	}
	return s.watched.Write(ctx, put, del)
}

func TestSyncOwnerDoesNotWaitForOthers(t *testing.T) {
	in(t, Options[*part]{MaxFacts: 1}, func(r *rig) {
		end := make(chan struct{})
		r.loop = New(delayed{watched{plane{r.kernel}}, "slow", end}, Options[*part]{Owner: ownerOf, MaxFacts: 1})
		r.loop.Change([]*part{of("a", "1 x v"), of("b", "2 slow v"), of("c", "3 z v")}, nil)
		a, b, c := r.syncOwner(r.Context(), "a"), r.syncOwner(r.Context(), "b"), r.syncOwner(r.Context(), "c")
		r.run() // after them: one that comes during the slow Write is answered once that has ended
		if err := r.returned(a); err != nil {
			r.Error(err)
		}
		if len(b)+len(c) > 0 {
			r.Error("what is not written yet counts as written")
		}
		if err := r.returned(r.syncOwner(r.Context(), "nobody's")); err != nil {
			r.Error("an owner without parts:", err)
		}
		close(end)
		if err := errors.Join(r.returned(b), r.returned(c)); err != nil {
			r.Error(err)
		}
	})
}

func TestSyncOwnerAfterChanges(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		first, second, third := of("a", "1 x v"), of("a", "1 y v"), of("a", "1 z v")
		r.loop.Change([]*part{first, second, of("b", "1 w v")}, nil)
		r.run()
		if err := r.returned(r.syncOwner(r.Context(), "a")); err != nil {
			r.Error(err)
		}
		r.loop.Change([]*part{third}, []*part{first})
		r.loop.Change([]*part{first}, []*part{third, second})
		r.loop.Change([]*part{third}, nil)
		if err := r.returned(r.syncOwner(r.Context(), "a")); err != nil {
			r.Error(err)
		}
		if r.facts[key{1, "z"}] != "v" || len(r.facts) != 3 {
			r.Errorf("the kernel holds %v", r.facts)
		}
		r.checkOwned()
	})
}

func TestSyncOwnerBesideRejections(t *testing.T) {
	withPlane(t, Options[*part]{}, func(r *rig, _ bool) {
		r.refuse["chain"] = errBusy
		bad, good := of("bad", "1 chain v", "2 el v>chain", "1 free v"), of("good", "1 x v", "2 y v>x")
		r.loop.Change([]*part{bad, good}, nil)
		r.run()
		b, g := r.syncOwner(r.Context(), "bad"), r.syncOwner(r.Context(), "good")
		r.later(time.Minute)
		if err := r.returned(g); err != nil {
			r.Error("of an owner of which nothing is refused:", err)
		}
		if err := r.returned(b); !errors.Is(err, errBusy) || !strings.Contains(err.Error(), "chain") {
			r.Errorf("SyncOwner gives %v where a fact is refused", err)
		}
		r.with(func() { delete(r.refuse, "chain") })
		r.later(time.Hour)
		if err := r.returned(r.syncOwner(r.Context(), "bad")); err != nil {
			r.Error("once nothing is refused:", err)
		}
		r.wants(bad, good)
	})
}

func TestSyncOwnerAfterFailures(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.failWrite = 1
		r.loop.Change([]*part{of("a", "1 x v")}, nil)
		r.run()
		a := r.syncOwner(r.Context(), "a")
		r.later(time.Minute)
		if err := r.returned(a); err != nil {
			r.Error("a Write failed once:", err)
		}
		r.with(func() { r.failRead = 1 << 30; r.failWrite = 1 })
		r.loop.Change([]*part{of("a", "1 y v")}, nil)
		a = r.syncOwner(r.Context(), "a")
		r.later(time.Minute)
		if err := r.returned(a); !errors.Is(err, errBusy) {
			r.Errorf("SyncOwner gives %v where nothing can be read", err)
		}
	})
}

func TestSyncOwnerOfWhatIsReplacedAndDeferred(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		deferred := make(chan struct{})
		r.facts[key{1, "old"}] = "v"
		r.loop.After(deferred)
		r.failRead = 1
		old := of("a", "1 x v")
		r.loop.Change([]*part{old}, nil)
		r.run()
		a := r.syncOwner(r.Context(), "a")
		r.loop.Change([]*part{of("b", "1 x w")}, []*part{old})
		r.later(time.Minute)
		if err := r.returned(a); err != nil {
			r.Error("of a part that is no longer wanted:", err)
		}
		if err := r.returned(r.syncOwner(r.Context(), "b")); err != nil {
			r.Error("beside a deletion that is deferred:", err)
		}
		close(deferred)
		synctest.Wait()
	})
}

func TestSyncOwnerEnds(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		ctx, cancel := context.WithCancel(r.Context())
		before := r.syncOwner(ctx, "a") // there is no Change yet
		if len(before) > 0 {
			r.Error("SyncOwner doesn't wait for the first Change")
		}
		r.loop.Change([]*part{of("a", "1 x v")}, nil)
		idle, cancelled := r.syncOwner(r.Context(), "a"), r.syncOwner(ctx, "a")
		cancel()
		if err := r.returned(cancelled); !errors.Is(err, context.Canceled) {
			r.Errorf("SyncOwner gives %v in a context that has ended", err)
		}
		if err := r.returned(before); !errors.Is(err, context.Canceled) {
			r.Errorf("SyncOwner gives %v in a context that has ended", err)
		}
		r.run()
		if err := r.returned(idle); err != nil {
			r.Error(err)
		}
		r.stop()
		if err := r.loop.SyncOwner(r.Context(), model.Owner{Name: "a"}); !errors.Is(err, errEnded) {
			r.Errorf("SyncOwner gives %v of a loop that has ended", err)
		}
		if len(r.loop.waiters) > 0 {
			r.Error("waiters are left")
		}
	})
}

func TestPlanForPeople(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		for _, f := range of("", "1 x v", "2 gone v").facts {
			r.facts[f.Key] = f.Value
		}
		a := of("a", "1 x v", "1 z v")
		r.loop.Change([]*part{a}, nil)
		p, err := r.loop.Plan(r.Context())
		if err != nil || len(p.Put) != 1 || len(p.Del) != 1 || p.Held != 1 || p.Put[0].Group != "fact" {
			r.Errorf("%+v, %v", p, err)
		}
		if lacking, of := p.Lacks(a); lacking != 1 || of != 2 {
			r.Errorf("%d of %d facts are lacking", lacking, of)
		}
	})
}

// joining is a plane that renders one part for all parts of an owner: the last one of them.
type joining struct{ watched }

// Join implements dataplane.Joiner.
func (joining) Join() func(put, del []*part) (puts, dels []*part) {
	held := map[string]*part{}
	return func(put, del []*part) (puts, dels []*part) {
		for _, p := range slices.Concat(del, put) {
			if was := held[p.owner]; was != nil {
				dels = append(dels, was)
				delete(held, p.owner)
			}
		}
		for _, p := range put {
			held[p.owner] = &part{p.owner, p.facts}
		}
		for _, p := range put {
			if is := held[p.owner]; !slices.Contains(puts, is) {
				puts = append(puts, is)
			}
		}
		return puts, dels
	}
}

func TestJoinedPartsAreRendered(t *testing.T) {
	in(t, Options[*part]{}, func(r *rig) {
		r.loop = New(joining{watched{plane{r.kernel}}}, Options[*part]{Owner: ownerOf})
		first, second := of("a", "1 x v"), of("a", "1 y v")
		r.loop.Change([]*part{first, second, of("b", "1 z v")}, nil)
		r.run()
		r.sync(second, of("b", "1 z v"))
		if err := r.returned(r.syncOwner(r.Context(), "a")); err != nil {
			r.Error(err)
		}
		r.loop.Change(nil, []*part{second})
		r.sync(of("b", "1 z v"))
	})
}
