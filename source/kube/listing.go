package kube

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// listing passes on a watch that begins with a streamed list (KEP-3157). The reflector holds all of such a list until
// it is whole; so what a budget leaves out is not passed on, or, where it was, passed on as deleted.
type listing struct {
	watch.Interface
	resource
	budget *budget
	words  *strip.Words
	events chan watch.Event
	done   chan struct{}
	stop   func()
}

func newListing(w watch.Interface, r resource, b *budget, words *strip.Words) *listing {
	l := &listing{Interface: w, resource: r, budget: b, words: words,
		events: make(chan watch.Event), done: make(chan struct{})}
	l.stop = sync.OnceFunc(func() { close(l.done) })
	go l.run()
	return l
}

// ResultChan implements watch.Interface.
func (l *listing) ResultChan() <-chan watch.Event { return l.events }

// Stop implements watch.Interface.
func (l *listing) Stop() {
	l.stop()
	l.Interface.Stop()
}

func (l *listing) run() {
	defer close(l.events)
	whole := false
	for e := range l.Interface.ResultChan() {
		events := []watch.Event{e}
		if !whole {
			events = l.admit(e)
			whole = e.Type == watch.Bookmark && isEnd(e.Object)
		}
		for _, e := range events {
			select {
			case l.events <- e:
			case <-l.done:
				return
			}
		}
	}
}

// isEnd reports whether a bookmark says that a streamed list is whole.
func isEnd(o runtime.Object) bool {
	m, ok := o.(metav1.Object)
	return ok && m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

// admit returns what of an event of the list is passed on.
func (l *listing) admit(e watch.Event) []watch.Event {
	o, ok := e.Object.(source.Object)
	switch {
	case !ok:
	case e.Type == watch.Deleted:
		l.budget.remove(nameOf(o))
	case e.Type == watch.Added || e.Type == watch.Modified:
		version, name := o.GetResourceVersion(), nameOf(o)
		l.words.Strip(o)
		o.SetResourceVersion(version)
		events, out := []watch.Event{e}, l.budget.put(name, holding(o, versionOf(o)), e.Type == watch.Added)
		for _, n := range out {
			events = append(events, watch.Event{Type: watch.Deleted, Object: l.named(n, version)})
			if n == name {
				events[0].Type = watch.Deleted
			}
		}
		if events[0].Type == watch.Deleted {
			events = events[1:]
		}
		return events
	}
	return []watch.Event{e}
}

// named returns an object without content.
func (l *listing) named(n types.NamespacedName, version string) runtime.Object {
	o := l.object.DeepCopyObject()
	m := o.(source.Object)
	m.SetNamespace(n.Namespace)
	m.SetName(n.Name)
	m.SetResourceVersion(version)
	return o
}
