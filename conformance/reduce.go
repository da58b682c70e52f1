package conformance

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/verdict"

	resolve "fairlead.dev/fairlead/resolve/service"
)

// finding is something that went wrong on a walk, at the end of the scenes: a packet's fate, or, without a line, else.
type finding struct {
	wrong  string
	scenes []*scene
	line   *packetLine
}

// reduceTime is how long a finding is made smaller.
const reduceTime = time.Minute

// reduce returns the finding as a case, as small as it got in a minute.
func (f *finding) reduce(ctx context.Context, s Implementation) string {
	last := len(f.scenes) - 1
	for n := 1; n < 64; n *= 2 { // so many scenes of the walk's end
		scenes := f.scenes[max(0, last+1-n):]
		if f.seenAgain(ctx, s, scenes) {
			return f.format(ctx, s, f.smaller(ctx, s, scenes), "Found on a random walk. This is as small as it got.")
		}
	}
	return f.format(ctx, s, f.scenes[last:],
		"Found on a random walk. It was not seen again in a sandbox of its own: this is where the walk was.")
}

// seenAgain reports whether the finding is seen in a sandbox of its own too, after these scenes.
func (f *finding) seenAgain(ctx context.Context, s Implementation, scenes []*scene) bool {
	w, err := newTestbed(ctx, s, scenes[0].Config)
	if err != nil {
		return false
	}
	defer w.close()
	w.patience = s.within(time.Second) // what is found may be no answer: there are many to wait for
	before := &scene{Config: scenes[0].Config}
	for _, sc := range scenes {
		if err := w.enter(ctx, before, sc); err != nil {
			return f.line == nil
		}
		before = sc
	}
	for range 3 {
		if f.line == nil {
			return false
		}
		if _, wrong := w.fares(ctx, f.line, true); wrong != "" {
			return true
		}
	}
	return false
}

// smaller takes away what the finding doesn't need, one thing after the other, until nothing more can go or time is up.
func (f *finding) smaller(ctx context.Context, s Implementation, scenes []*scene) []*scene {
	end := time.Now().Add(reduceTime)
	retain := func(fewer []*scene) bool {
		if time.Now().After(end) || reflect.DeepEqual(fewer, scenes) || !f.seenAgain(ctx, s, fewer) {
			return false
		}
		scenes = fewer
		return true
	}
	for n := len(scenes) / 2; n > 0; n /= 2 { // of the way, longer parts first
		for i := 0; i+n < len(scenes); {
			if !retain(slices.Delete(slices.Clone(scenes), i, i+n)) {
				i += n
			}
		}
	}
	for again := true; again; {
		again = false
		for _, cut := range cuts() {
			fewer := make([]*scene, len(scenes))
			for i := range scenes {
				fewer[i] = scenes[i].copy()
				cut(fewer[i])
			}
			again = retain(fewer) || again
		}
	}
	return scenes
}

func (s *scene) copy() *scene {
	n := &scene{Config: s.Config, Restart: s.Restart, Hosts: s.Hosts, isolation: s.isolation}
	for i, a := range s.Apps {
		n.Apps[i].Service = a.Service.DeepCopy()
		for _, e := range a.Slices {
			n.Apps[i].Slices = append(n.Apps[i].Slices, e.DeepCopy())
		}
	}
	return n
}

// cuts are the ways to make a scene smaller, the coarse ones first.
func cuts() []func(*scene) {
	var l []func(*scene)
	each := func(cut func(*app)) {
		for i := range (scene{}).Apps {
			l = append(l, func(s *scene) {
				if s.Apps[i].Service != nil {
					cut(&s.Apps[i])
				}
			})
		}
	}
	each(func(a *app) { *a = app{} })
	l = append(l, isolationCuts()...)
	l = append(l, func(s *scene) { s.Restart = nil },
		func(s *scene) { s.Config = Config{} },
		func(s *scene) { s.Hosts = false },
		func(s *scene) { s.Config.MasqueradeAll = false },
		func(s *scene) { s.Config.ExternalIPs = "" },
		func(s *scene) { s.Config.Limits = resolve.Limits{} },
		func(s *scene) { s.Config.ClusterCIDRs = nil },
		func(s *scene) { s.Config.PodInterfaces = "" },
		func(s *scene) { s.Config.NodePortAddresses = nil })
	for _, cut := range []func(*corev1.ServiceSpec){
		func(s *corev1.ServiceSpec) { s.ExternalIPs = nil },
		func(s *corev1.ServiceSpec) { s.LoadBalancerSourceRanges = nil },
		func(s *corev1.ServiceSpec) { s.ExternalTrafficPolicy = "" },
		func(s *corev1.ServiceSpec) { s.InternalTrafficPolicy = nil },
		func(s *corev1.ServiceSpec) { s.SessionAffinity = "" },
		func(s *corev1.ServiceSpec) { s.TrafficDistribution = nil },
		func(s *corev1.ServiceSpec) { s.Ports = s.Ports[min(1, len(s.Ports)-1):] },
		func(s *corev1.ServiceSpec) { s.Ports = s.Ports[:max(1, len(s.Ports)-1)] },
		func(s *corev1.ServiceSpec) { s.ClusterIPs = s.ClusterIPs[:1] },
	} {
		each(func(a *app) { cut(&a.Service.Spec) })
	}
	each(func(a *app) { a.Service.Status.LoadBalancer.Ingress = nil })
	for i := range 4 {
		each(func(a *app) { a.Slices = leave(a.Slices, i) })
		each(func(a *app) {
			for _, e := range a.Slices {
				e.Endpoints = leave(e.Endpoints, i)
			}
		})
		each(func(a *app) { eachEndpoint(a, i, func(e *discoveryv1.Endpoint) { e.Hints = nil }) })
		each(func(a *app) {
			eachEndpoint(a, i, func(e *discoveryv1.Endpoint) { e.Conditions = discoveryv1.EndpointConditions{} })
		})
	}
	return l
}

// leave returns the list without its i-th.
func leave[T any](l []T, i int) []T {
	if i >= len(l) {
		return l
	}
	return slices.Delete(l, i, i+1)
}

// eachEndpoint does something to the i-th endpoint of each slice.
func eachEndpoint(a *app, i int, do func(*discoveryv1.Endpoint)) {
	for _, e := range a.Slices {
		if i < len(e.Endpoints) {
			do(&e.Endpoints[i])
		}
	}
}

// format returns scenes and the finding's packet as a case. What it expects is what verdict says.
func (f *finding) format(ctx context.Context, s Implementation, scenes []*scene, comment string) string {
	w, err := newTestbed(ctx, s, scenes[0].Config)
	if err != nil {
		return err.Error()
	}
	defer w.close()
	text := comment + "\n\n"
	before := &scene{}
	for i, sc := range scenes {
		if !equalConfig(sc.Config, before.Config) {
			text += "-- config --\n" + asYAML(sc.Config)
		}
		if len(sc.Restart) > 0 {
			text += "-- restart --\n" + strings.Join(sc.Restart, " ") + "\n"
		}
		text += formatChanges(sc, before)
		_ = w.enter(ctx, before, sc) // how the subject fares is known: this is for resolve and verdict
		if before = sc; i == len(scenes)-1 && f.line != nil {
			text += "-- packets --\n" + w.format(f.line) + "\n"
		}
		text += "-- problems --\n" + strings.Join(append(w.problems(), ""), "\n")
	}
	return text
}

func formatChanges(sc, before *scene) string {
	var put, del string
	for _, c := range sc.changesFrom(before) {
		switch {
		case c.Object == nil:
			del += c.Key.String() + "\n"
		case put == "":
			put = asYAML(c.Object)
		default:
			put += "---\n" + asYAML(c.Object)
		}
	}
	if del != "" {
		del = "-- remove --\n" + del
	}
	if put != "" {
		put = "-- cluster.yaml --\n" + put
	}
	return del + put
}

func asYAML(o any) string {
	b, err := yaml.Marshal(o)
	if err != nil {
		return "# " + err.Error() + "\n"
	}
	return string(b)
}

// format returns a drawn line as text, with what verdict says of it.
func (w *testbed) format(l *packetLine) string {
	c := l.Clients[0]
	j := w.assess(c, l.To, l.Proto, l.Via)
	o := j.outcome
	from := c.Name
	if c.Addr != memberNamed(c.Name).addr(l.To.Addr().Is6()) {
		from = fmt.Sprintf("%s(%s)", c.Name, c.Addr)
	}
	text, options := fmt.Sprintf("%s -> %s/%s =", from, l.To, l.Proto), " via="+w.entrance(l.To.Addr(), l.Via)
	if l.Size > 0 {
		options += fmt.Sprint(" size=", l.Size)
	}
	if o.Action != verdict.Forward {
		return fmt.Sprintf("%s %s%s", text, o.Action, options)
	}
	for _, v := range o.Candidates {
		text += " " + j.show(v)
	}
	if o.Frontend.Target(o.Origin).Pool.Affinity > 0 {
		text += " sticks=it"
	}
	return text + options
}
