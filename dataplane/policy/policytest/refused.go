package policytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/verdict"
)

// refusing is an engine in a kernel that refuses one fact.
type refusing[K dataplane.Key] struct {
	Engine[K]
	sync.Mutex
	key *K // nil: none
}

func (r *refusing[K]) refuse(key *K) {
	r.Lock()
	defer r.Unlock()
	r.key = key
}

// Write implements dataplane.Plane.
func (r *refusing[K]) Write(ctx context.Context, put, del []dataplane.Fact[K, string]) error {
	r.Lock()
	defer r.Unlock()
	if r.key != nil && slices.ContainsFunc(put, func(f dataplane.Fact[K, string]) bool { return f.Key == *r.key }) {
		return errors.New("no space left on device")
	}
	return r.Engine.Write(ctx, put, del)
}

// Join implements dataplane.Joiner: as the engine does, if it does.
func (r *refusing[K]) Join() func(put, del []model.PolicyPart) (puts, dels []model.PolicyPart) {
	if j, ok := r.Engine.(dataplane.Joiner[model.PolicyPart]); ok {
		return j.Join()
	}
	return func(put, del []model.PolicyPart) (puts, dels []model.PolicyPart) { return put, del }
}

// example is a fact that only policies need, and a part that renders it.
type example[K dataplane.Key] struct {
	key  K
	part model.PolicyPart
}

// kind is what facts are of one kind by.
type kind struct {
	group string
	rank  int
}

// examples returns one fact of each kind, but of those tried, of the facts that only policies need.
func (r *refusing[K]) examples(parts []model.PolicyPart, tried map[kind]bool) (l []example[K]) {
	joined, _ := r.Join()(parts, nil)
	first := map[kind]example[K]{}
	for _, p := range joined {
		switch p.(type) {
		case *model.PolicyNode:
			continue
		}
		for _, f := range r.Render(p) {
			k := kind{any(f.Key).(dataplane.Grouped).Group(), f.Key.Rank()}
			if e, ok := first[k]; !tried[k] && (!ok || fmt.Sprint(f.Key) < fmt.Sprint(e.key)) {
				first[k] = example[K]{f.Key, p}
			}
		}
	}
	for k := range first {
		tried[k] = true
	}
	return slices.SortedFunc(maps.Values(first), func(a, b example[K]) int {
		return cmp.Compare(a.key.Rank(), b.key.Rank())
	})
}

// divide returns which of parts come before the one that the example is of, and that one; peer: it is a peer, or what
// is decided about one.
func (x example[K]) divide(parts []model.PolicyPart) (first, last []model.PolicyPart, peer bool) {
	origin := x.part
	if o, is := origin.(model.DerivedPart); is {
		origin = o.Origin()
	}
	for _, p := range parts {
		if p == origin {
			last = append(last, p)
		} else {
			first = append(first, p)
		}
	}
	switch origin.(type) {
	case *model.Peer, *model.PeerVerdict:
		peer = true
	}
	return first, last, peer
}

// refused has the kernel refuse facts of policies, from the start on, or when a peer comes to rulesets in force: what
// depends on them is closed, all else is as verdict says, and nothing is closed when the kernel accepts them.
func (s Suite[K]) refused(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	rand := rand.New(rand.NewPCG(3, 4))
	r, tried := &refusing[K]{Engine: e.Engine}, map[kind]bool{}
	for _, world := range []string{"admin-over-allow.yaml", "ip-block.yaml", "end-port.yaml"} {
		d := Decide(objects[world])
		for _, x := range r.examples(d.Parts(), tried) {
			for _, later := range []bool{false, true} {
				e.refuse(r, d, x, later, world, rand)
			}
		}
	}
}

// refuse has the kernel refuse a fact of a world; later: when a peer, or what is decided about it, comes last.
func (e *engine[K]) refuse(r *refusing[K], d *Decided, x example[K], later bool, world string, rand *rand.Rand) {
	t := e.T
	t.Helper()
	first, last, peer := x.divide(d.Parts())
	if later && !peer {
		return
	}
	l := reconcile.New(r, reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf,
		Base:     func(p model.PolicyPart) bool { _, is := p.(*model.PolicyNode); return is },
		MaxFacts: 1 << 20, StandIns: model.FailClosed, Backoff: func(int) time.Duration { return time.Millisecond }})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.Run(ctx) })
	defer running.Wait()
	defer cancel()
	if later {
		l.Change(first, nil)
		e.Must(l.Sync(ctx))
		first = nil
	}
	r.refuse(&x.key)
	l.Change(append(first, last...), nil)
	if err := l.Sync(ctx); err == nil {
		t.Errorf("%s: %v is refused, and Sync returns no error", world, x.key)
	}
	closed := *d.Now
	closed.Subjects = maps.Clone(d.Now.Subjects)
	for _, in := range model.FailClosed([]model.PolicyPart{x.part}, d.Parts(), nil) {
		switch in := in.(type) {
		case *model.Subject:
			closed.Subjects[in.Addr] = in
		case *model.PolicyNode:
			closed.Node = in
		}
	}
	name := world + " without " + fmt.Sprint(x.key)
	packets := e.Packets(rand, 60)
	e.judge(name, &closed, packets)
	for _, p := range packets {
		if verdict.Policy(d.Now, p).Verdict == model.VerdictDrop && verdict.Policy(&closed, p).Verdict != model.VerdictDrop {
			t.Errorf("%s: %v is not closed", name, p)
		}
	}
	r.refuse(nil)
	for l.Check(ctx) != nil { // what was refused is tried again after a while
		if ctx.Err() != nil {
			return
		}
	}
	e.judge(world+" with all facts", d.Now, e.Packets(rand, 20))
	e.Must(e.Clean(ctx))
}
