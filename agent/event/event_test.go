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
	return source.Problem{Object: source.Key{Kind: source.Service, Namespace: "shop", Name: fmt.Sprintf("web-%d", i)},
		Field: "spec.ports[0]", Reason: "Odd", Message: "is odd"}
}

// recorded empties a fake recorder.
func recorded(f *events.FakeRecorder) (l []string) {
	for {
		select {
		case e := <-f.Events:
			l = append(l, e)
		default:
			return l
		}
	}
}

func TestEachProblemIsReportedOnce(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	now := time.Now()
	x := New(to, slog.New(slog.DiscardHandler))
	x.now = func() time.Time { return now }
	some := []source.Problem{problem(1), problem(2), {Reason: "Broken", Message: "a file is about no object"}}
	x.Report(some)
	if l := recorded(to); len(l) != 2 || !strings.Contains(l[0], "Warning Odd spec.ports[0]: is odd") {
		t.Fatalf("first: %q", l)
	}
	x.Report(some)
	x.Report(nil)
	x.Report(some) // it came back soon
	if l := recorded(to); len(l) != 0 {
		t.Errorf("again: %q", l)
	}
	x.Report(nil)
	now = now.Add(quiet + time.Second)
	x.Report(nil)
	x.Report(some)
	if l := recorded(to); len(l) != 2 {
		t.Errorf("after a long time: %q", l)
	}
}

func TestManyAreDelayedNotLost(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	x := New(to, slog.New(slog.DiscardHandler))
	var many []source.Problem
	for i := range 3 * burst {
		many = append(many, problem(i))
	}
	x.Report(many)
	first := len(recorded(to))
	if first < burst || first > 2*burst {
		t.Fatalf("%d Events at once, of %d problems", first, len(many))
	}
	if len(x.reported) != first {
		t.Errorf("%d count as told, of %d", len(x.reported), first)
	}
}

// Objects that don't match for a moment are not told of; those that stay so are, without another call.
func TestMismatchesMustStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := events.NewFakeRecorder(1000)
		x := New(to, slog.New(slog.DiscardHandler))
		p, q := problem(1), problem(2)
		p.Reason, q.Reason = source.NoEndpoints, source.NoEndpoints
		x.Report([]source.Problem{p, q})
		time.Sleep(settling / 2)
		x.Report([]source.Problem{q})
		time.Sleep(settling/2 - 1)
		synctest.Wait()
		if l := recorded(to); len(l) != 0 {
			t.Errorf("at once: %q", l)
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if l := recorded(to); len(l) != 1 || !strings.Contains(l[0], q.Object.Name) && !strings.Contains(l[0], q.Message) {
			t.Errorf("later: %q", l)
		}
	})
}

func TestMessagesFitEventLimit(t *testing.T) {
	p := problem(1)
	p.Message = strings.Repeat("ä", 5000)
	if n := message(p); len(n) > 1024 {
		t.Errorf("a note of %d bytes", len(n))
	}
}

// Who has many problems does not keep others from being told of theirs, however its namespace sorts.
func TestNamespacesShareTheRateLimit(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	now := time.Now()
	x := New(to, slog.New(slog.DiscardHandler))
	x.now = func() time.Time { return now }
	tokens := burst
	x.limit = tokensOf{&tokens}
	var all []source.Problem
	for i := range 1000 {
		p := problem(i)
		p.Object.Namespace = "a-flood"
		all = append(all, p)
	}
	of := func(namespace string) source.Problem {
		p := problem(1)
		p.Object.Namespace, p.Message = namespace, "of "+namespace
		return p
	}
	all = append(all, of("b"), of("c"))
	x.Report(all)
	if l := strings.Join(recorded(to), "\n"); !strings.Contains(l, "of b") || !strings.Contains(l, "of c") {
		t.Errorf("at once: %s", l)
	}
	all = append(all, of("d"), of("e"))
	for _, want := range []string{"of d", "of e"} { // one Event a second now
		tokens = 1
		x.Report(all)
		if l := recorded(to); len(l) != 1 || !strings.Contains(l[0], want) {
			t.Errorf("later: %q, want %q", l, want)
		}
	}
	tokens = 1
	if x.Report(all); len(recorded(to)) != 1 {
		t.Error("the flood is told of no more")
	}
}

// tokensOf is a limiter of that many Events.
type tokensOf struct{ left *int }

func (l tokensOf) TryAccept() bool {
	*l.left--
	return *l.left >= 0
}
func (tokensOf) Stop()        {}
func (tokensOf) QPS() float32 { return perSecond }

func TestObjectHasFewEvents(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	x := New(to, slog.New(slog.DiscardHandler))
	var many []source.Problem
	for i := range burst {
		p := problem(1)
		p.Field = fmt.Sprintf("spec.ports[%d]", i)
		many = append(many, p)
	}
	x.Report(many)
	x.Report(many[perObject:])
	if n := len(recorded(to)); n != perObject {
		t.Errorf("%d Events of one object, want %d", n, perObject)
	}
}

// An Event says what its namespace may know, once.
func TestEventSaysWhatIsPublic(t *testing.T) {
	to := events.NewFakeRecorder(1000)
	x := New(to, slog.New(slog.DiscardHandler))
	p := problem(1)
	p.Message, p.Public = "another Service, bank/vault, has 192.0.2.1:80", "a Service of another namespace has "+
		"192.0.2.1:80"
	x.Report([]source.Problem{p})
	p.Message = "another Service, bank/safe, has 192.0.2.1:80"
	x.Report([]source.Problem{p})
	if l := recorded(to); len(l) != 1 || strings.Contains(l[0], "bank") ||
		!strings.Contains(l[0], "Odd spec.ports[0]: a Service of another namespace has") {
		t.Errorf("the Events say %q", l)
	}
}

// A start is an Event of its own kind, on the Node.
func TestStartIsReported(t *testing.T) {
	to := events.NewFakeRecorder(1)
	New(to, slog.New(slog.DiscardHandler)).Starting("a", "serves Services")
	if l := recorded(to); len(l) != 1 || l[0] != "Normal Starting serves Services" {
		t.Errorf("%q", l)
	}
}
