// Package event tells the users of a cluster what is wrong with their Services: each problem that comes to stand
// becomes a Kubernetes Event on the object that it is about. Events are for people: few, never the same one again and
// again, and without names of other namespaces (source.Problem.Public). Namespaces take turns, so that none keeps
// others from theirs. The log and the status page have everything.
package event

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

const (
	perSecond = 1  // Events, in the long run
	burst     = 25 // at once
	perObject = 10 // within quiet
	// quiet is how long a problem that has gone may come back without being told again: one that comes and goes is one.
	quiet = 10 * time.Minute
	// settling is how long objects that don't match must stay so to be told: they change one after the other.
	settling = 30 * time.Second
	// longest is how long a note may be: the API takes 1 kB.
	longest = 1000
)

// Recorder is client-go's events.EventRecorder: named here, so that a process that reads files isn't burdened with
// every client of the API (15 MiB).
type Recorder interface {
	Eventf(regarding, related runtime.Object, eventtype, reason, action, message string, args ...any)
}

// Reporter reports of problems.
type Reporter struct {
	to    Recorder
	log   *slog.Logger
	limit flowcontrol.PassiveRateLimiter
	now   func() time.Time

	mu       sync.Mutex
	reported map[said]time.Time // when each was last seen standing
	served   map[string]uint64  // the last turn of each namespace
	round    uint64
	new      map[said]time.Time // when those that must settle and are not told yet were first seen
	last     []source.Problem   // of the last call
	next     *time.Timer        // tells them again, if some were not told
}

// said is what an Event says, and of what.
type said struct {
	object          source.Key
	reason, message string
}

// New makes a Teller that knows of no problem yet.
func New(to Recorder, log *slog.Logger) *Reporter {
	limit := flowcontrol.NewTokenBucketPassiveRateLimiter(perSecond, burst)
	return &Reporter{to: to, log: log, limit: limit, now: time.Now,
		reported: map[said]time.Time{}, served: map[string]uint64{}, new: map[said]time.Time{}}
}

// Report takes all problems that stand now, and makes an Event of each that is new. Those that are too many at once are
// told with a later call, if they stand then, as are those that may be over in a moment; of one object no more than
// perObject are.
func (t *Reporter) Report(problems []source.Problem) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	t.last = problems
	fresh := t.fresh(problems, now)
	late := 0
	for namespaces := t.order(fresh); len(namespaces) > 0; {
		n := namespaces[0]
		if !t.limit.TryAccept() {
			for _, n := range namespaces {
				late += len(fresh[n])
			}
			break
		}
		s := fresh[n][0]
		t.to.Eventf(reference(s.object), nil, corev1.EventTypeWarning, s.reason, "Serve", "%s", s.message)
		t.reported[s] = now
		delete(t.new, s)
		t.round++
		t.served[n] = t.round
		if namespaces, fresh[n] = namespaces[1:], fresh[n][1:]; len(fresh[n]) > 0 {
			namespaces = append(namespaces, n)
		}
	}
	t.forget(now)
	if len(t.new)+late > 0 && t.next == nil {
		t.next = time.AfterFunc(settling, t.again)
	}
	if late > 0 {
		t.log.Info("Event rate limit reached; Events are delayed", "events", late)
	}
}

// Starting reports that a node's Services are served from now on.
func (t *Reporter) Starting(node, message string) {
	t.to.Eventf(reference(source.Key{Kind: source.Node, Name: node}), nil, corev1.EventTypeNormal, "Starting", "Start",
		"%s", message)
}

// fresh returns by namespace what is to be said that was not, in the problems' order, and notes that the rest stands
// still.
func (t *Reporter) fresh(problems []source.Problem, now time.Time) map[string][]said {
	of := map[source.Key]int{}
	for s := range t.reported {
		of[s.object]++
	}
	fresh, seen, was := map[string][]said{}, map[said]bool{}, t.new
	t.new = map[said]time.Time{}
	for _, p := range problems {
		s := said{p.Object, p.Reason, message(p)}
		if reference(p.Object) == nil || seen[s] {
			continue
		}
		seen[s] = true
		if _, known := t.reported[s]; known {
			t.reported[s] = now
		} else if p.Reason == source.NoEndpoints && !t.settled(s, was, now) {
			continue
		} else if of[p.Object]++; of[p.Object] <= perObject {
			fresh[p.Object.Namespace] = append(fresh[p.Object.Namespace], s)
		}
	}
	return fresh
}

// settled reports whether s was there for long enough, by when those before were first seen.
func (t *Reporter) settled(s said, before map[said]time.Time, now time.Time) bool {
	first, seen := before[s]
	if !seen {
		first = now
	}
	t.new[s] = first
	return now.Sub(first) >= settling
}

// again reports what stood at the last call.
func (t *Reporter) again() {
	t.mu.Lock()
	t.next = nil
	problems := t.last
	t.mu.Unlock()
	t.Report(problems)
}

// forget drops problems that have gone for long, and namespaces without any.
func (t *Reporter) forget(now time.Time) {
	left := map[string]bool{}
	for s, seen := range t.reported {
		if now.Sub(seen) > quiet {
			delete(t.reported, s)
		} else {
			left[s.object.Namespace] = true
		}
	}
	maps.DeleteFunc(t.served, func(n string, _ uint64) bool { return !left[n] })
}

// order returns the namespaces, those first whose last turn is longest ago.
func (t *Reporter) order(fresh map[string][]said) []string {
	return slices.SortedFunc(maps.Keys(fresh), func(a, b string) int {
		return cmp.Or(cmp.Compare(t.served[a], t.served[b]), cmp.Compare(a, b))
	})
}

// reference names the object of an Event, of the kinds that have problems; nil for others.
func reference(k source.Key) *corev1.ObjectReference {
	r := &corev1.ObjectReference{APIVersion: "v1", Kind: string(k.Kind), Namespace: k.Namespace, Name: k.Name}
	switch k.Kind {
	case source.Service, source.Namespace:
	case source.Node:
		r.UID = types.UID(k.Name) // by which kubectl describe looks for a Node's Events
	case source.EndpointSlice:
		r.APIVersion = "discovery.k8s.io/v1"
	case source.NetworkPolicy:
		r.APIVersion = "networking.k8s.io/v1"
	case source.ClusterNetworkPolicy:
		r.APIVersion = cnpv1.GroupVersion.String()
	default:
		return nil
	}
	return r
}

// message is what an Event says.
func message(p source.Problem) string {
	s := cmp.Or(p.Public, p.Message)
	if p.Field != "" {
		s = p.Field + ": " + s
	}
	if r := []rune(s); len(s) > longest {
		s = string(r[:longest/4]) + "…" // runes have up to 4 bytes
	}
	return s
}
