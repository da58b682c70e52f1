package policies

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// addAdditions adds the steps that count what one policy more takes.
func (r *trial) addAdditions(l *experiment.Plan) {
	large := r.profile.Large
	for _, e := range r.grid.Engines {
		l.Add(fmt.Sprintf("adding one to %s policies, %s", experiment.Thousands(large.Pods*3/4), e.Name),
			time.Duration(large.Pods)*60*time.Microsecond, func(ctx context.Context) error { return r.addPolicies(ctx, e) })
	}
}

// additionMeasures are those of one policy more.
func (r *trial) additionMeasures() (l []result.Measure) {
	const title = "one NetworkPolicy more: "
	for _, m := range []struct{ id, title string }{{"resolve", "resolver"}, {"write", "engine's write"}} {
		what := fmt.Sprintf("a NetworkPolicy that selects a pod of the node, beside %s of %s pods; of the lab's process",
			experiment.Thousands(r.profile.Large.Pods*3/4), experiment.Thousands(r.profile.Large.Pods))
		l = append(l,
			result.Measure{ID: "add-" + m.id, Title: title + m.title, Unit: "µs", Stat: result.Value,
				Counted: what + " and the commands that an engine runs"},
			result.Measure{ID: "add-" + m.id + "-allocations", Title: title + "allocations, " + m.title, Stat: result.Value,
				Text: what})
	}
	return l
}

// addPolicies adds a policy to those of a large cluster, over and over, and counts what the resolver and the engine's
// write take. The first time doesn't count.
func (r *trial) addPolicies(ctx context.Context, e mode.Engine) error {
	return r.within(ctx, "one policy more", e, func(ctx context.Context, x *testbed.Enforcer) error {
		c := generate.NewPolicyCluster(r.profile.Large)
		p, change, _, _ := decide(c)
		if _, err := x.Apply(ctx, change); err != nil {
			return err
		}
		added := c.Policy(c.Namespaces) // one that allows an app
		added.Namespace, added.Name = c.Pods[0].Namespace, "added"
		added.Spec.PodSelector = metav1.LabelSelector{MatchLabels: c.Pods[0].Labels}
		for i := range r.profile.Added + 1 {
			spent, err := r.addPolicy(ctx, p, x, testbed.Put(added))
			if err != nil {
				return err
			}
			for id, n := range spent {
				if i > 0 {
					err = errors.Join(err, r.out.AddValue(result.Block{Arm: e.Name, Round: i - 1,
						Params: experiment.PolicyParams(r.profile.Large.Pods * 3 / 4)}, id, n))
				}
			}
			if err != nil {
				return err
			}
			if _, err := x.Apply(ctx, p.Apply([]source.Change{{Key: source.KeyOf(added)}})); err != nil {
				return err
			}
		}
		return nil
	})
}

// addPolicy applies changes and returns what that took, by measure.
func (r *trial) addPolicy(ctx context.Context, p *policy.Resolver, x *testbed.Enforcer,
	changes []source.Change) (map[string]float64, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	var before, between, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	begun := r.bed.Clock()
	change := p.Apply(changes)
	resolved := r.bed.Clock()
	if len(change.Put) == 0 {
		return nil, errors.New("one policy more changes nothing")
	}
	runtime.ReadMemStats(&between)
	resumed := r.bed.Clock()
	if _, err := x.Apply(ctx, change); err != nil {
		return nil, err
	}
	written := r.bed.Clock()
	runtime.ReadMemStats(&after)
	return map[string]float64{"add-resolve": float64(resolved - begun), "add-write": float64(written - resumed),
		"add-resolve-allocations": float64(between.Mallocs - before.Mallocs),
		"add-write-allocations":   float64(after.Mallocs - between.Mallocs)}, nil
}
