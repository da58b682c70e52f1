package kube

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

func nameIn(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// names returns what a namespace holds.
func (b *budget) names(namespace string) []string {
	return slices.Sorted(maps.Keys(maps.Collect(b.space(namespace).held.all())))
}

// consistent checks that a budget is within its bounds and that its sums are right.
func (b *budget) consistent(t *testing.T) {
	t.Helper()
	all := 0
	for name, s := range b.spaces {
		sum := 0
		for n, h := range s.held.all() {
			sum += h.weight
			if a := (age{h.created, n}); s.left().count > 0 && s.left().first.compare(a) <= 0 {
				t.Errorf("%s/%s is held and younger than %v, which is left out", name, n, s.left().first)
			}
		}
		if sum != s.weight || sum > b.each {
			t.Errorf("%s weighs %d, %d recorded, %d allowed", name, sum, s.weight, b.each)
		}
		if all += sum; (b.over[name] != nil) != (s.left().count > 0 || s.left().stale) {
			t.Errorf("%s: over %v with %d left out", name, b.over[name] != nil, s.left().count)
		}
	}
	if all != b.weight || all > b.total {
		t.Errorf("all weighs %d, %d recorded, %d allowed", all, b.weight, b.total)
	}
}

// Whatever the order in which a namespace's objects come, the oldest stay, up to the first that doesn't fit.
func TestBudgetRetainsOldest(t *testing.T) {
	const n = 40
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		objects := make([]held, n)
		for i := range objects {
			objects[i] = held{created: int64(rnd.IntN(n)), weight: 1 + rnd.IntN(20)}
		}
		name := func(i int) string { return fmt.Sprintf("o%02d", i) }
		order := rnd.Perm(n)
		b := newBudget(100, 1000)
		for _, i := range order {
			b.put(nameIn("a", name(i)), objects[i], true)
			b.consistent(t)
		}
		slices.SortFunc(order, func(x, y int) int {
			return age{objects[x].created, name(x)}.compare(age{objects[y].created, name(y)})
		})
		var want []string
		for sum := 0; sum <= b.each; {
			i := order[len(want)]
			if sum += objects[i].weight; sum <= b.each {
				want = append(want, name(i))
			}
		}
		slices.Sort(want)
		if got := b.names("a"); !slices.Equal(got, want) || b.space("a").left().count != n-len(want) {
			t.Fatalf("seed %d: %q and %d left out, want %q", seed, got, b.space("a").left().count, want)
		}
	}
}

// What all namespaces share goes to the small ones first.
func TestBudgetTotalEvictsFromHeaviest(t *testing.T) {
	b := newBudget(60, 100)
	for i := range 60 {
		b.put(nameIn("a", fmt.Sprint(i)), held{created: int64(i), weight: 1}, true)
		b.put(nameIn("b", fmt.Sprint(i)), held{created: int64(i), weight: 1}, true)
		b.consistent(t)
	}
	for i := range 10 {
		out := b.put(nameIn("small", fmt.Sprint(i)), held{created: 1000, weight: 1}, true)
		if len(out) != 1 || out[0].Namespace == "small" {
			t.Fatalf("left out for a small namespace: %v", out)
		}
		b.consistent(t)
	}
	if x, y := b.space("a").weight, b.space("b").weight; x != 45 || y != 45 {
		t.Errorf("%d and %d for two that are alike", x, y)
	}
}

// Freed weight makes a namespace due as soon as the oldest object left out fits, and not before.
func TestBudgetDue(t *testing.T) {
	b := newBudget(10, 100)
	for i := range 5 {
		b.put(nameIn("a", fmt.Sprint(i)), held{created: int64(i), weight: 3}, true)
	}
	s := b.space("a")
	if s.left().count != 2 || s.left().first.name != "3" || b.due(s) {
		t.Fatalf("%d left out, first %v, due %v", s.left().count, s.left().first, b.due(s))
	}
	b.put(nameIn("a", "0"), held{created: 0, weight: 1}, false)
	if !b.due(s) {
		t.Error("not due though the oldest fits")
	}
	b.put(nameIn("a", "0"), held{created: 0, weight: 3}, false)
	if b.due(s) {
		t.Error("due though the oldest doesn't fit")
	}
	b.remove(nameIn("a", "4"))
	if b.due(s) || s.left().count != 1 {
		t.Errorf("due %v with %d left out", b.due(s), s.left().count)
	}
	b.remove(nameIn("a", "3"))
	if !b.due(s) {
		t.Error("not due though what was left out is gone")
	}
}

// A list of a namespace says what is there, but for what was seen of it since.
func TestBudgetReplace(t *testing.T) {
	put := func(b *budget, names string) {
		for _, n := range strings.Fields(names) {
			b.put(nameIn("x", n), held{created: int64(n[0]), weight: 1}, true)
		}
	}
	b := newBudget(4, 100)
	put(b, "a b c d e f")
	b.remove(nameIn("x", "a"))
	list := b.empty()
	put(list, "b c d e f") // as of now; then:
	b.remove(nameIn("x", "c"))
	b.replace("x", list, map[string]bool{"c": false})
	b.consistent(t)
	if got := b.names("x"); !slices.Equal(got, []string{"b", "d", "e"}) || !b.due(b.space("x")) {
		t.Errorf("%q, due %v", got, b.due(b.space("x")))
	}
	list = b.empty()
	put(list, "b d e f")
	b.replace("x", list, map[string]bool{"new": true}) // which was left out meanwhile
	b.consistent(t)
	if got := b.names("x"); !slices.Equal(got, []string{"b", "d", "e", "f"}) || !b.due(b.space("x")) {
		t.Errorf("%q, due %v", got, b.due(b.space("x")))
	}
	list = b.empty()
	put(list, "b d e f")
	b.replace("x", list, nil)
	b.consistent(t)
	if len(b.over) > 0 {
		t.Errorf("%d left out of a list that fits", b.space("x").left().count)
	}
}

// Any order of changes and lists leaves the sums right.
func TestBudgetStaysConsistent(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	b := newBudget(50, 120)
	object := func() (types.NamespacedName, held) {
		n := nameIn(fmt.Sprint(rnd.IntN(4)), fmt.Sprint(rnd.IntN(30)))
		return n, held{created: int64(rnd.IntN(5)), weight: 1 + rnd.IntN(10)}
	}
	for range 20_000 {
		switch n, h := object(); rnd.IntN(5) {
		case 0:
			b.remove(n)
		case 1:
			list := b.empty()
			for range rnd.IntN(30) {
				other, h := object()
				list.put(nameIn(n.Namespace, other.Name), h, true)
			}
			b.replace(n.Namespace, list, map[string]bool{n.Name: rnd.IntN(2) > 0})
		default:
			b.put(n, h, rnd.IntN(2) > 0)
		}
		b.consistent(t)
	}
}

// What is held of a streamed list never weighs more than the bound, also where the oldest objects come last: neither of
// the first list, which is delivered as it comes, nor of a later one, of which what differs waits.
func TestListingIsBounded(t *testing.T) {
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("first=%v", first), func(t *testing.T) { testListing(t, first) })
	}
}

func testListing(t *testing.T, first bool) {
	r := resources("a", "")[1]
	n := newUpdates([]resource{r})
	s := newStream(r, nil, n, strip.New(), newBudget(100<<10, 1<<20))
	if !first {
		s.begin(t.Context())
		if err := s.Replace(nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	w := watch.NewFake()
	l := newListing(t.Context(), w, s)
	defer l.Stop()
	there := func() (names []string, weight int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for name, o := range s.incoming.differs {
			names, weight = append(names, name.Name), weight+weigh(o)
		}
		for _, c := range n.changes {
			if c.Object != nil {
				names, weight = append(names, c.Key.Name), weight+weigh(c.Object)
			}
		}
		slices.Sort(names)
		return names, weight
	}
	const count = 200
	for i := range count {
		w.Add(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: fmt.Sprint(i),
			CreationTimestamp: metav1.Unix(int64(count-i), 0)}, Endpoints: make([]discoveryv1.Endpoint, 100)})
		if _, weight := there(); weight > s.budget.each {
			t.Fatalf("%d bytes at a time, %d allowed", weight, s.budget.each)
		}
	}
	end := &discoveryv1.EndpointSlice{}
	end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	go w.Action(watch.Bookmark, end)
	if e := <-l.ResultChan(); e.Type != watch.Bookmark {
		t.Errorf("%v passed on: want the end of the list alone", e.Type)
	}
	if got, _ := there(); !slices.Equal(got, s.incoming.budget.names("x")) || !slices.Contains(got, "199") ||
		slices.Contains(got, "0") {
		t.Errorf("%q taken in, %q recorded", got, s.incoming.budget.names("x"))
	}
}

// A list that is too large for one answer comes in pages, which get smaller until they fit.
func TestListInPages(t *testing.T) {
	api := apiserver.New()
	const n = 1500
	for i := range n {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprint("n", i%3), Name: fmt.Sprint("s", i)}}
		s.Annotations = map[string]string{"a": strings.Repeat("x", 1000)}
		api.Apply(source.Change{Key: source.KeyOf(s), Object: s})
	}
	web := httptest.NewServer(api)
	defer web.Close()
	c := &client{access: Access{Master: web.URL}, largest: 200_000}
	if err := c.renew(); err != nil {
		t.Fatal(err)
	}
	for namespace, want := range map[string]int{"": n, "n1": n / 3} {
		seen := map[types.NamespacedName]int{}
		version, err := c.each(t.Context(), resources("a", "")[0], namespace, metav1.ListOptions{ResourceVersion: "0"},
			func(o source.Object) { seen[nameOf(o)]++ })
		if err != nil || len(seen) != want || version == "" {
			t.Errorf("namespace %q: %d of %d, version %q, %v", namespace, len(seen), want, version, err)
		}
		for name, times := range seen {
			if times != 1 {
				t.Errorf("%s came %d times", name, times)
			}
		}
	}
	c = &client{access: c.access, largest: 500}
	if err := c.renew(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.each(t.Context(), resources("a", "")[0], "", metav1.ListOptions{},
		func(source.Object) {}); err == nil {
		t.Error("an object larger than any answer may be was read")
	}
}

// Objects weigh at least what they take of memory.
func TestWeighs(t *testing.T) {
	s := &discoveryv1.EndpointSlice{Endpoints: make([]discoveryv1.Endpoint, 1000)}
	for i := range s.Endpoints {
		s.Endpoints[i].Addresses = []string{"10.0.0.1"}
	}
	long := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"a": strings.Repeat("x",
		1<<18)}}}
	ports := &corev1.Service{Spec: corev1.ServiceSpec{Ports: make([]corev1.ServicePort, 1000)}}
	ranges := &corev1.Service{}
	ranges.Spec.LoadBalancerSourceRanges = slices.Repeat([]string{"10.0.0.0/8"}, 100_000)
	for o, least := range map[source.Object]int{
		s:                 1000 * (96 + 16 + 8),
		&corev1.Service{}: 500,
		long:              1 << 18,
		ports:             1000 * 80,
		ranges:            2_600_000,
	} {
		if got := weigh(o); got < least || got > 2*least+2000 {
			t.Errorf("%T: %d, want at least %d", o, got, least)
		}
	}
}

// What came and went while nothing could be delivered yet leaves nothing behind.
func TestPendingIsBounded(t *testing.T) {
	n := newUpdates(resources("a", ""))
	s := newStream(n.kinds[0], nil, n, strip.New(), newBudget(1<<20, 1<<20))
	s.begin(t.Context())
	if err := s.Replace(nil, ""); err != nil {
		t.Fatal(err)
	}
	for i := range 10_000 {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: fmt.Sprint(i)}}
		s.Add(o)
		s.Update(o)
		if i > 0 {
			s.Delete(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: fmt.Sprint(i - 1)}})
		}
	}
	if len(n.changes) != 1 || len(n.at) != 1 {
		t.Errorf("%d changes wait, of one object", len(n.changes))
	}
	s.budget = newBudget(10_000, 1<<20)
	for i := range 1000 {
		s.Add(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "y", Name: fmt.Sprint(i)}})
	}
	if len(n.changes) > 20 || s.budget.len() != len(n.changes)-1 {
		t.Errorf("%d changes wait, of %d objects", len(n.changes), s.budget.len())
	}
}

// A namespace is listed again only once something fits, and not at once.
func TestRefetchWaits(t *testing.T) {
	n := newUpdates(resources("a", ""))
	s := newStream(n.kinds[0], nil, n, strip.New(), newBudget(2, 100))
	for i := range 3 {
		s.budget.put(nameIn("x", fmt.Sprint(i)), held{weight: 1}, true)
	}
	now := time.Now()
	if _, _, ok := s.nextBackoff(now); ok {
		t.Error("listed again though nothing fits")
	}
	s.budget.remove(nameIn("x", "0"))
	name, at, ok := s.nextBackoff(now)
	if !ok || name != "x" || at.Sub(now) != firstPause {
		t.Errorf("%q after %v, %v", name, at.Sub(now), ok)
	}
	if _, again, _ := s.nextBackoff(now.Add(time.Second)); again != at {
		t.Error("the turn was put off")
	}
}

// len returns the number of objects held.
func (b *budget) len() (n int) {
	for _, s := range b.spaces {
		n += s.held.len()
	}
	return n
}
