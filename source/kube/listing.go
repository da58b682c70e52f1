package kube

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/source"
)

// listing passes on a watch that begins with a streamed list (KEP-3157), but for the objects of the list: the reflector
// would hold all of them until it is whole.
type listing struct {
	watch.Interface
	stream *stream
	list   *list
	events chan watch.Event
	done   chan struct{}
	stop   func()
}

func newListing(ctx context.Context, w watch.Interface, s *stream) *listing {
	l := &listing{Interface: w, stream: s, list: s.begin(ctx), events: make(chan watch.Event),
		done: make(chan struct{})}
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
		if !whole && l.admit(e) {
			continue
		}
		whole = whole || e.Type == watch.Bookmark && isEnd(e.Object)
		select {
		case l.events <- e:
		case <-l.done:
			return
		}
	}
}

// isEnd reports whether a bookmark says that a streamed list is whole.
func isEnd(o runtime.Object) bool {
	m, ok := o.(metav1.Object)
	return ok && m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

// admit takes in an event of the list, and reports whether it was one of an object.
func (l *listing) admit(e watch.Event) bool {
	o, ok := e.Object.(source.Object)
	switch {
	case !ok:
		return false
	case e.Type == watch.Deleted:
		l.stream.withdraw(l.list, nameOf(o))
	case e.Type == watch.Added || e.Type == watch.Modified:
		l.stream.admit(l.list, o, e.Type == watch.Added)
	default:
		return false
	}
	return true
}
