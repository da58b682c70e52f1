package kube

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
)

// How long a namespace of which objects are left out is not listed again: at first, at most, and until that is
// forgotten.
const (
	firstPause   = 10 * time.Second
	longestPause = 5 * time.Minute
	forget       = time.Hour
)

// fetchTimeout bounds a list of one namespace.
const fetchTimeout = 30 * time.Second

// backoff returns when a namespace may be listed again.
type backoff struct {
	at    time.Time
	pause time.Duration
}

// refetch lists namespaces again in which objects may fit that were left out, until ctx ends.
func (s *stream) refetch(ctx context.Context) {
	for {
		name, at, ok := s.nextBackoff(time.Now())
		var timer <-chan time.Time
		if ok {
			timer = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer:
			s.fetch(ctx, name)
		}
	}
}

// nextBackoff returns the namespace to list next, and when.
func (s *stream) nextBackoff(now time.Time) (name string, at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, t := range s.backoffs {
		if s.budget.over[n] == nil && now.Sub(t.at) > forget {
			delete(s.backoffs, n)
		}
	}
	for n, space := range s.budget.over {
		if !s.budget.due(space) {
			continue
		}
		t, known := s.backoffs[n]
		if !known {
			t = backoff{at: now.Add(s.pause), pause: s.pause}
			s.backoffs[n] = t
		}
		if !ok || t.at.Before(at) {
			name, at, ok = n, t.at, true
		}
	}
	return name, at, ok
}

// fetch lists a namespace again and delivers what differs. What changes meanwhile is newer than the list.
func (s *stream) fetch(ctx context.Context, namespace string) {
	s.mu.Lock()
	s.fetching, s.seen = namespace, map[string]bool{}
	fresh := s.budget.empty()
	s.mu.Unlock()
	limited, stop := context.WithTimeout(ctx, fetchTimeout)
	objects, _, err := s.gather(limited, namespace, metav1.ListOptions{}, fresh)
	stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.backoffs[namespace]
	t.at, t.pause = time.Now().Add(t.pause), min(2*t.pause, longestPause)
	s.backoffs[namespace] = t
	if err == nil && s.seen != nil && s.incoming == nil { // no whole list has come since, nor comes one
		s.updates.put(append(s.merge(namespace, fresh, objects), s.substitutes()...)...)
		s.report()
	}
	s.seen = nil
}

// merge takes what a list of a namespace says, and returns what differs from what was delivered.
func (s *stream) merge(namespace string, fresh *budget, objects map[types.NamespacedName]source.Object) (
	changes []update) {
	was := s.budget.space(namespace).held
	out := s.budget.replace(namespace, fresh, s.seen)
	for name, h := range s.budget.space(namespace).held.all() {
		n := types.NamespacedName{Namespace: namespace, Name: name}
		before, there := was.get(name)
		if o := objects[n]; o != nil && (!there || before.version != h.version || h.version == 0) {
			if _, newer := s.seen[name]; !newer {
				s.words.Strip(o)
				changes = append(changes, update{source.Change{Key: s.key(n), Object: o}, !there})
			}
		}
	}
	for name := range was.all() {
		n := types.NamespacedName{Namespace: namespace, Name: name}
		if _, there := s.budget.get(n); !there {
			changes = append(changes, update{Change: source.Change{Key: s.key(n)}})
		}
	}
	for _, n := range out {
		if n.Namespace != namespace {
			changes = append(changes, update{Change: source.Change{Key: s.key(n)}})
		}
	}
	return changes
}

// gather lists what there is of a namespace, "" for all, and returns what a budget that was empty lets in.
func (s *stream) gather(ctx context.Context, namespace string, o metav1.ListOptions, into *budget) (
	objects map[types.NamespacedName]source.Object, version string, err error) {
	objects = map[types.NamespacedName]source.Object{}
	version, err = s.each(ctx, s.resource, namespace, o, func(o source.Object) {
		version, name := o.GetResourceVersion(), nameOf(o)
		s.words.Strip(o)
		o.SetResourceVersion(version)
		objects[name] = o
		for _, n := range into.put(name, holding(o, versionOf(o)), true) {
			delete(objects, n)
		}
	})
	return objects, version, err
}
