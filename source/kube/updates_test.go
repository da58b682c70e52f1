package kube

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// While the consumer is busy, changes of one object are one: the latest, at the place of the first.
func TestCoalesces(t *testing.T) {
	n := newUpdates(resources("a", ""))
	for _, r := range n.kinds {
		n.replace(r.kind, nil)
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
