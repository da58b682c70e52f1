package event

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/events"

	"fairlead.dev/fairlead/source"
)

var _ Recorder = events.EventRecorder(nil)

func problem(i int) source.Problem {
	return source.Problem{Object: source.Key{Kind: source.Service, Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}, Field: "spec.ports[0]", Reason: "Odd", Message: "is odd"}
}

// heard empties a fake recorder.
func heard(f *events.FakeRecorder) (l []string) {
	for {
		select {
		case e := <-f.Events:
			l = append(l, e)
		default:
			return l
		}
	}
}

func TestEachProblemIsToldOnce(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	now := time.Now()
	x := New(to, slog.New(slog.DiscardHandler))
	x.now = func() time.Time { return now }
	some := []source.Problem{problem(1), problem(2), {Reason: "Broken", Message: "a file is about no object"}}
	x.Tell(some)
	if l := heard(to); len(l) != 2 || !strings.Contains(l[0], "Warning Odd spec.ports[0]: is odd") {
		t.Fatalf("first: %q", l)
	}
	x.Tell(some)
	x.Tell(nil)
	x.Tell(some) // it came back soon
	if l := heard(to); len(l) != 0 {
		t.Errorf("again: %q", l)
	}
	x.Tell(nil)
	now = now.Add(quiet + time.Second)
	x.Tell(nil)
	x.Tell(some)
	if l := heard(to); len(l) != 2 {
		t.Errorf("after a long time: %q", l)
	}
}

func TestManyAreHeldBackNotLost(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	x := New(to, slog.New(slog.DiscardHandler))
	var many []source.Problem
	for i := range 3 * burst {
		many = append(many, problem(i))
	}
	x.Tell(many)
	first := len(heard(to))
	if first < burst || first > 2*burst {
		t.Fatalf("%d Events at once, of %d problems", first, len(many))
	}
	if len(x.told) != first {
		t.Errorf("%d count as told, of %d", len(x.told), first)
	}
}

// Objects that don't match for a moment are not told of; those that stay so are, without another call.
func TestMismatchesMustStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := events.NewFakeRecorder(1000)
		x := New(to, slog.New(slog.DiscardHandler))
		p, q := problem(1), problem(2)
		p.Reason, q.Reason = source.NoEndpoints, source.NoEndpoints
		x.Tell([]source.Problem{p, q})
		time.Sleep(settling / 2)
		x.Tell([]source.Problem{q})
		time.Sleep(settling/2 - 1)
		synctest.Wait()
		if l := heard(to); len(l) != 0 {
			t.Errorf("at once: %q", l)
		}
		time.Sleep(1)
		synctest.Wait()
		if l := heard(to); len(l) != 1 || !strings.Contains(l[0], q.Object.Name) && !strings.Contains(l[0], q.Message) {
			t.Errorf("later: %q", l)
		}
	})
}

func TestNotesFit(t *testing.T) {
	p := problem(1)
	p.Message = strings.Repeat("ä", 5000)
	if n := note(p); len(n) > 1024 {
		t.Errorf("a note of %d bytes", len(n))
	}
}
