package kube

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// While the consumer is busy, changes of one object are one: the latest, at the place of the first.
func TestCoalesces(t *testing.T) {
	n := newUpdates(resources("a", ""))
	for _, r := range n.kinds {
		n.replace(r.kind, nil, false)
	}
	if b, ok := n.collect(); !ok || b.Waiting || len(b.Changes) > 0 {
		t.Fatalf("the first batch is %v, %v", b, ok)
	}
	web, db := source.Key{Kind: source.Service, Name: "web"}, source.Key{Kind: source.Service, Name: "db"}
	last := &corev1.Service{}
	for range 500 {
		n.put(update{Change: source.Change{Key: web, Object: &corev1.Service{}}})
	}
	n.put(update{Change: source.Change{Key: db, Object: &corev1.Service{}}})
	n.put(update{Change: source.Change{Key: web, Object: last}})
	n.put(update{Change: source.Change{Key: db}})
	b, ok := n.collect()
	if !ok || len(b.Changes) != 2 || b.Changes[0].Object != last || b.Changes[1] != (source.Change{Key: db}) {
		t.Errorf("got %v", b.Changes)
	}
	if b, ok := n.collect(); ok {
		t.Errorf("told again: %v", b)
	}
}

// Policies' objects are delivered as a first list brings them, and it needn't come whole at once: what the next one has
// no more is gone. Of a list after that nothing is delivered before it is whole.
func TestFirstListIsDeliveredAsItComes(t *testing.T) {
	kinds := Options{Node: "a", Kinds: []source.Kind{source.Namespace, source.Pod}}.kinds()
	n := newUpdates(kinds)
	for _, r := range kinds[:4] {
		n.replace(r.kind, nil, false)
	}
	s := newStream(kinds[4], nil, n, strip.New(), newBudget(1<<20, 1<<20))
	admit := func(l *list, version string, names ...string) {
		for _, name := range names {
			s.admit(l, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version}}, true)
		}
	}
	delivered := func(want ...string) {
		t.Helper()
		b, _ := n.collect()
		var got []string
		for _, c := range b.Changes {
			name := c.Key.Name
			if c.Object == nil {
				name += " gone"
			}
			got = append(got, name)
		}
		if slices.Sort(got); !slices.Equal(got, want) || !slices.Contains(b.Unlisted, source.Pod) {
			t.Errorf("%q, of which %q are not whole: want %q", got, b.Unlisted, want)
		}
	}
	broken := s.begin(t.Context())
	admit(broken, "1", "x", "y")
	delivered("x", "y")
	admit(broken, "1", "z")
	whole := s.begin(t.Context())
	admit(broken, "1", "stale")
	admit(whole, "1", "x")
	admit(whole, "2", "y")
	delivered("z")
	s.Replace(nil, "")
	delivered("y", "z gone")
	later := s.begin(t.Context())
	admit(later, "3", "y", "w")
	s.withdraw(later, types.NamespacedName{Name: "w"})
	delivered()
	s.Replace(nil, "")
	delivered("x gone", "y")
}

// So are Services, before anything is known whole. What can be done without is delivered whole or not at all.
func TestServicesAreDeliveredAsTheyCome(t *testing.T) {
	kinds := resources("a", "")
	n := newUpdates(kinds)
	streams := map[source.Kind]*stream{}
	admit := func(o source.Object) {
		k := source.KeyOf(o).Kind
		s := streams[k]
		if s == nil {
			r := kinds[slices.IndexFunc(kinds, func(r resource) bool { return r.kind == k })]
			s = newStream(r, nil, n, strip.New(), newBudget(1<<20, 1<<20))
			s.begin(t.Context())
			streams[k] = s
		}
		s.admit(s.incoming, o, true)
	}
	delivered := func(waiting bool, want ...string) {
		t.Helper()
		b, _ := n.collect()
		var got []string
		for _, c := range b.Changes {
			got = append(got, c.Key.Name)
		}
		if slices.Sort(got); !slices.Equal(got, want) || b.Waiting != waiting {
			t.Errorf("%q, waiting %t: want %q, %t", got, b.Waiting, want, waiting)
		}
	}
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, ResourceVersion: "1"} }
	admit(&corev1.Service{ObjectMeta: meta("s1")})
	admit(&corev1.Node{ObjectMeta: meta("a")})
	delivered(true, "s1")
	admit(&corev1.Service{ObjectMeta: meta("s2")})
	streams[source.Service].Replace(nil, "")
	delivered(true, "s2")
	admit(&discoveryv1.EndpointSlice{ObjectMeta: meta("e1")})
	streams[source.EndpointSlice].Replace(nil, "")
	delivered(true, "e1")
	n.replace(source.ServiceCIDR, nil, true)
	delivered(true)
	streams[source.Node].Replace(nil, "")
	delivered(false, "a")
}

// One trouble of the server is one problem, since its begin, however many kinds meet it and however often.
func TestServerTroubleIsOne(t *testing.T) {
	n := newUpdates(resources("a", ""))
	n.ill(source.Service, Unreachable, "away")
	since := n.troubles[source.Service].since
	for range 3 {
		n.ill(source.EndpointSlice, Unreachable, "away")
		n.ill(source.Service, Unreachable, "away, in other words")
	}
	b, ok := n.collect()
	if !ok || !b.Waiting || len(b.Problems) != 1 || b.Problems[0].Since != since || b.Problems[0].Message != "away" {
		t.Errorf("got %v, %v", b, ok)
	}
	n.ill(source.Service, Unreachable, "away")
	if b, ok := n.collect(); ok {
		t.Errorf("told again: %v", b)
	}
}

// A server that begins to answer, if with errors, is not left alone for the time that it was away.
func TestTroubleChangesReason(t *testing.T) {
	n := newUpdates(resources("a", ""))
	n.ill(source.Service, Unreachable, "away")
	ago := time.Now().Add(-time.Hour)
	n.troubles[source.Service].since, n.troubles[source.Service].turned = ago, ago
	if got := n.ill(source.Service, Failing, "begins"); got.since != ago || !got.turned.After(ago) {
		t.Errorf("got %+v", got)
	}
}

// A failing server is left alone for up to half as long as it has failed.
func TestSpare(t *testing.T) {
	for lasted, most := range map[time.Duration]time.Duration{0: 50 * time.Millisecond,
		time.Second: 500 * time.Millisecond, time.Hour: longest} {
		for range 100 {
			if d := spare(lasted); d < most/2 || d > most {
				t.Errorf("after %v: %v", lasted, d)
			}
		}
	}
}
