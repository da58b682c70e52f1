package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// naming is a plane that names the facts that the kernel refuses, as promised by dataplane.Refused.
type naming struct{ watched }

func (n naming) Write(ctx context.Context, put, del []fact) error {
	refused, rank := map[key]error{}, 0
	n.with(func() {
		for _, f := range put {
			if err := n.refuse[f.Key.name]; err != nil && (len(refused) == 0 || f.Key.rank == rank) {
				refused[f.Key], rank = err, f.Key.rank
			}
		}
	})
	if len(refused) == 0 {
		return n.watched.Write(ctx, put, del)
	}
	some := slices.DeleteFunc(slices.Clone(put),
		func(f fact) bool { return refused[f.Key] != nil || f.Key.rank > rank })
	replaced := slices.DeleteFunc(slices.Clone(del), func(f fact) bool {
		return !slices.ContainsFunc(some, func(p fact) bool { return p.Key == f.Key })
	})
	if len(some) > 0 {
		if err := n.watched.Write(ctx, some, replaced); err != nil {
			return err
		}
	}
	return &dataplane.Refused[key]{Facts: refused}
}

// tenants are options of a loop with ports of Services as owners and the node as base.
func tenants(o Options[*part]) Options[*part] {
	o.Owner = func(p *part) model.Owner { o, _, _ := strings.Cut(p.owner, ":"); return model.Owner{Name: o} }
	o.Label = labelOf
	o.Base = func(p *part) bool { return p.owner == "node" }
	return o
}

// withPlane runs f on each kind of plane.
func withPlane(t *testing.T, o Options[*part], f func(r *rig, named bool)) {
	for name, set := range map[string]func(*rig) dataplane.Plane[*part, key, string]{
		"names what is refused": func(r *rig) dataplane.Plane[*part, key, string] {
			r.atomic = true
			return naming{watched{plane{r.kernel}}}
		},
		"all or nothing": func(r *rig) dataplane.Plane[*part, key,
			string] {
			r.atomic = true
			return watched{plane{r.kernel}}
		},
		"step by step": func(r *rig) dataplane.Plane[*part, key, string] { return watched{plane{r.kernel}} },
	} {
		t.Run(name, func(t *testing.T) {
			in(t, o, func(r *rig) {
				if o.Backoff = doubling; o.Owner == nil {
					o.Owner = ownerOf
				}
				r.loop = New(set(r), o)
				f(r, strings.HasPrefix(name, "names"))
			})
		})
	}
}

// Ports of ten Services are refused, many for each. The node's hooks, which come last, and all other Services are there
// when the first Sync returns.
func TestRefusedFactsDoNotBlockOthers(t *testing.T) {
	withPlane(t, tenants(Options[*part]{MaxFacts: 100}), func(r *rig, named bool) {
		node := of("node", "0 maps v", "3 hooks v>maps")
		good, all := []*part{node}, []*part{node}
		for i := range 100 {
			good = append(good, of(fmt.Sprintf("good%d:http", i), fmt.Sprintf("1 pool%d v>maps", i)),
				of(fmt.Sprintf("good%d:http", i), fmt.Sprintf("2 front%d v>pool%d", i, i)))
		}
		for s := range 10 {
			for i := range 30 {
				pool := fmt.Sprintf("bad%d.%d", s, i)
				r.refuse[pool] = errBusy
				all = append(all, of(fmt.Sprintf("bad%d:%d", s, i), "1 "+pool+" v>maps"),
					of(fmt.Sprintf("bad%d:%d", s, i), fmt.Sprintf("2 front-%s v>%s", pool, pool)))
			}
		}
		r.loop.Change(append(all, good[1:]...), nil)
		begin := time.Now()
		r.run()
		if err := r.outcome(); !errors.Is(err, errBusy) {
			r.Errorf("Sync gives %v", err)
		}
		<-r.loop.Ready()
		r.wants(good...)
		if latency := time.Since(begin); latency > time.Second {
			r.Errorf("Sync took %v", latency)
		}
		if r.with(func() {}); named && r.writes > 20 {
			r.Errorf("%d Writes though the plane names what is refused", r.writes)
		}
		if s := r.loop.Status(); !s.Serving || s.NotServing != "" || len(s.Failing) < 300 {
			r.Errorf("not serving, or not all refused ports are named: %v %q %d", s.Serving, s.NotServing,
				len(s.Failing))
		}
		r.with(func() { clear(r.refuse) })
		r.later(2 * time.Minute)
		r.sync(append(all, good[1:]...)...)
	})
}

// What a plane names is tried again in one Write, however much it is, and without a Read.
func TestNamedRejectionsAreTriedTogether(t *testing.T) {
	in(t, tenants(Options[*part]{}), func(r *rig) {
		o := tenants(Options[*part]{Backoff: doubling})
		r.atomic, r.loop = true, New(naming{watched{plane{r.kernel}}}, o)
		p := &part{owner: "bad"}
		for i := range 1000 {
			p.facts = append(p.facts, of("", fmt.Sprintf("1 f%d v", i)).facts...)
			r.refuse[fmt.Sprint("f", i)] = errBusy
		}
		r.loop.Change([]*part{p, of("node", "3 hooks v")}, nil)
		r.run()
		_ = r.outcome()
		r.later(10 * time.Minute)
		if s := r.loop.Status(); r.reads > 1 || s.Failures > 40 {
			r.Errorf("%d Reads and %d failed Writes in 10 minutes", r.reads, s.Failures)
		}
	})
}

// large is a Service of many facts, on the node's maps.
func largeService(n int) *part {
	p := &part{owner: "large:http"}
	for i := range n {
		p.facts = append(p.facts, fact{Key: key{1 + i%2, fmt.Sprint("large", i)}, Value: "v>maps"})
	}
	return p
}

func TestSmallServicesBeforeLargeOnes(t *testing.T) {
	for _, changesOver := range []bool{false, true} {
		in(t, tenants(Options[*part]{}), func(r *rig) {
			r.atomic = true
			if changesOver { // another version's, with which the large Service is served
				r.facts[key{0, "maps"}], r.facts[key{3, "hooks"}] = "v", "old"
			}
			huge, shared := largeService(5*largeGroup), of("large:other", "1 chain v", "2 of-large v>chain")
			parts := []*part{huge, shared, of("node", "0 maps v", "3 hooks v>maps"),
				of("small:a", "1 chain v", "2 a v>chain"), of("small:b", "2 b v>maps")}
			r.loop.Change(parts, nil)
			r.run()
			r.sync(parts...)
			first, hooks := slices.IndexFunc(r.kernel.log, func(l string) bool { return strings.Contains(l, "large") }),
				slices.IndexFunc(r.kernel.log, func(l string) bool { return strings.Contains(l, "+hooks") })
			if last := len(r.kernel.log) - 1; !changesOver && (hooks != 0 || first != 1) || changesOver &&
				hooks != last {
				r.Errorf("changes over: %t: hooks come in Write %d of %d, the large Service in %d and later",
					changesOver, hooks, last, first)
			}
			if d := r.kernel.log[0]; !changesOver && d != "+maps +chain +a +b +hooks" &&
				d != "+maps +chain +b +a +hooks" {
				r.Error("first comes ", d)
			}
		})
	}
}

func TestNotServingWithoutTheBase(t *testing.T) {
	withPlane(t, tenants(Options[*part]{}), func(r *rig, _ bool) {
		node, web := of("node", "0 maps v", "3 hooks v>maps"), of("web:http", "1 pool v>maps", "2 front v>pool")
		r.refuse["hooks"] = errBusy
		r.loop.Change([]*part{node, web}, nil)
		if serving, why := r.loop.Serving(); serving || why != "" {
			r.Errorf("before it runs: %t %q", serving, why)
		}
		r.run()
		if err := r.outcome(); err == nil {
			r.Error("no error for refused hooks")
		}
		r.wants(of("node", "0 maps v"), web)
		if serving, why := r.loop.Serving(); serving || !strings.Contains(why, "hooks") ||
			!r.loop.Status().FirstSync.IsZero() {
			r.Errorf("with hooks refused: %t %q", serving, why)
		}
		select {
		case <-r.loop.Ready():
			r.Error("it says that it serves without hooks")
		default:
		}
		r.with(func() { clear(r.refuse) })
		r.later(time.Minute)
		r.sync(node, web)
		<-r.loop.Ready()
		if serving, why := r.loop.Serving(); !serving || why != "" {
			r.Errorf("with hooks: %t %q", serving, why)
		}

		// Others take the hooks away, and they can't be written again.
		r.with(func() { r.refuse["hooks"] = errBusy })
		r.drift(key{3, "hooks"}, "")
		r.later(time.Minute)
		if serving, why := r.loop.Serving(); serving || !strings.Contains(why, "hooks") {
			r.Errorf("hooks are gone: %t %q", serving, why)
		}
	})
}
