// Package event tells the users of a cluster what is wrong with their Services: each problem that comes to stand becomes a
// Kubernetes Event on the object that it is about. Events are for people: few, and never the same one again and again. The log
// and the status page have everything.
package event

import (
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/flowcontrol"

	"fairlead.dev/fairlead/source"
)

const (
	perSecond = 1  // Events, in the long run
	burst     = 25 // at once
	// quiet is how long a problem that has gone may come back without being told again: one that comes and goes is one.
	quiet = 10 * time.Minute
	// settling is how long objects that don't match must stay so to be told: they change one after the other.
	settling = 30 * time.Second
	// longest is how long a note may be: the API takes 1 kB.
	longest = 1000
)

// Recorder is client-go's events.EventRecorder: named here, so that a process that reads files isn't burdened with every client of
// the API (15 MiB).
type Recorder interface {
	Eventf(regarding, related runtime.Object, eventtype, reason, action, note string, args ...any)
}

// Teller tells of problems.
type Teller struct {
	to    Recorder
	log   *slog.Logger
	limit flowcontrol.PassiveRateLimiter
	now   func() time.Time

	mu   sync.Mutex
	told map[source.Problem]time.Time // when each was last seen standing
	new  map[source.Problem]time.Time // when each that is not told yet was first seen
	last []source.Problem             // of the last call
	next *time.Timer                  // tells them again, if some were not told
}

// New makes a Teller that knows of no problem yet.
func New(to Recorder, log *slog.Logger) *Teller {
	return &Teller{to: to, log: log, limit: flowcontrol.NewTokenBucketPassiveRateLimiter(perSecond, burst), now: time.Now,
		told: map[source.Problem]time.Time{}, new: map[source.Problem]time.Time{}}
}

// Tell takes all problems that stand now, and makes an Event of each that is new. Those that are too many at once, and
// those that may be over in a moment, are told later, if they stand then.
func (t *Teller) Tell(problems []source.Problem) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, late, was := t.now(), 0, t.new
	t.last, t.new = problems, map[source.Problem]time.Time{}
	for _, p := range problems {
		about := reference(p.Object)
		if about == nil {
			continue
		}
		if _, known := t.told[p]; !known {
			first, seen := was[p]
			if !seen {
				first = now
			}
			if t.new[p] = first; p.Reason == source.NoEndpoints && now.Sub(first) < settling {
				continue
			}
			if !t.limit.TryAccept() {
				late++
				continue
			}
			delete(t.new, p)
			t.to.Eventf(about, nil, corev1.EventTypeWarning, p.Reason, "Serve", "%s", note(p))
		}
		t.told[p] = now
	}
	for p, seen := range t.told {
		if now.Sub(seen) > quiet {
			delete(t.told, p)
		}
	}
	if len(t.new) > 0 && t.next == nil {
		t.next = time.AfterFunc(settling, t.again)
	}
	if late > 0 {
		t.log.Info("too many Events at once: the rest wait", "events", late)
	}
}

// again tells what stood at the last call.
func (t *Teller) again() {
	t.mu.Lock()
	t.next = nil
	problems := t.last
	t.mu.Unlock()
	t.Tell(problems)
}

// reference names the object of an Event: a Service, an EndpointSlice or a Node; nil for others.
func reference(k source.Key) *corev1.ObjectReference {
	r := &corev1.ObjectReference{APIVersion: "v1", Kind: string(k.Kind), Namespace: k.Namespace, Name: k.Name}
	switch k.Kind {
	case source.Service, source.Node:
	case source.EndpointSlice:
		r.APIVersion = "discovery.k8s.io/v1"
	default:
		return nil
	}
	return r
}

// note is what an Event says.
func note(p source.Problem) string {
	s := p.Message
	if p.Field != "" {
		s = p.Field + ": " + s
	}
	if r := []rune(s); len(s) > longest {
		s = string(r[:longest/4]) + "…" // runes have up to 4 bytes
	}
	return s
}
