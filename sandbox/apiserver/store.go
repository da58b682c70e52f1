package apiserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/source"
)

// history is how many changes of each kind are kept at least, for watches that begin in the past or fall behind.
const history = 1 << 14

// state is an object at a time. It never changes.
type state struct {
	number uint64 // its resource version
	object source.Object
	meta   metav1.TypeMeta
	bytes  [2]struct { // by format.index
		once sync.Once
		item []byte
	}
}

// key orders objects by namespace and name.
func (v *state) key() string { return v.object.GetNamespace() + "\x00" + v.object.GetName() }

// item is the object as a list holds it.
func (v *state) item(f *format) []byte {
	b := &v.bytes[f.index]
	b.once.Do(func() { b.item = must(f.item(v.object)) })
	return b.item
}

// whole is the object by itself.
func (v *state) whole(f *format) []byte { return f.object(v.meta, v.item(f)) }

// change is a new state of an object, or, with gone, its last.
type change struct {
	now, before *state // before is nil where the object is new
	gone        bool
}

// event returns what a change means to a watcher that sees part of the objects; "" means nothing.
func (c change) event(sees func(*state) bool) watch.EventType {
	before, now := c.before != nil && sees(c.before), !c.gone && sees(c.now)
	switch {
	case before && now:
		return watch.Modified
	case before:
		return watch.Deleted
	case now:
		return watch.Added
	}
	return ""
}

// collection is all objects of a kind.
type collection struct {
	resource
	objects map[types.NamespacedName]*state
	changes []change // the latest, oldest first
	lost    uint64   // the number of the last change that is no longer among them
}

// add keeps a change. Old ones go, many at a time.
func (c *collection) add(n change) {
	if c.changes = append(c.changes, n); len(c.changes) < 2*history {
		return
	}
	c.lost = c.changes[history-1].now.number
	c.changes = slices.Clone(c.changes[history:])
}

// Apply makes changes true, each with a resource version of its own. Watches see them at once. The objects are copied.
func (s *Server) Apply(changes ...source.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range changes {
		s.apply(c)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// Encode encodes in advance all that is there, as protobuf, so that the first client does not wait for it.
func (s *Server) Encode() {
	for _, c := range s.collections {
		if c.custom() {
			continue
		}
		l, _ := s.list(c, func(*state) bool { return true })
		for _, v := range l {
			v.item(formats[1])
		}
	}
}

func (s *Server) apply(update source.Change) {
	c := s.collections[update.Key.Kind]
	if c == nil {
		panic(fmt.Sprintf("apiserver: %s is of a kind that is not served", update.Key))
	}
	name := types.NamespacedName{Namespace: update.Key.Namespace, Name: update.Key.Name}
	before := c.objects[name]
	if update.Object == nil && before == nil {
		return
	}
	s.number++
	now := &state{number: s.number, meta: c.typeMeta("")}
	if update.Object == nil {
		now.object = s.stamp(before.object, before, c)
		delete(c.objects, name)
	} else {
		now.object = s.stamp(update.Object, before, c)
		c.objects[name] = now
	}
	c.add(change{now, before, update.Object == nil})
}

// stamp returns a copy of an object with what an API server adds.
func (s *Server) stamp(o source.Object, before *state, c *collection) source.Object {
	o = o.(runtime.Object).DeepCopyObject().(source.Object)
	o.(runtime.Object).GetObjectKind().SetGroupVersionKind(c.GroupVersion().WithKind(string(c.kind)))
	o.SetResourceVersion(strconv.FormatUint(s.number, 10))
	if before != nil {
		o.SetUID(before.object.GetUID())
		o.SetCreationTimestamp(before.object.GetCreationTimestamp())
		return o
	}
	if o.GetUID() == "" {
		o.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012x", s.number)))
	}
	if t := o.GetCreationTimestamp(); t.IsZero() {
		o.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
	}
	return o
}

// list returns what is seen of a collection in the order of names, and the resource version that it is true at.
func (s *Server) list(c *collection, sees func(*state) bool) (l []*state, number uint64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, v := range c.objects {
		if sees(v) {
			l = append(l, v)
		}
	}
	slices.SortFunc(l, func(a, b *state) int {
		return strings.Compare(a.key(), b.key())
	})
	return l, s.number
}

// since returns the changes after a resource version, the version that is reached with them, and a channel that is
// closed at the next change of whatever kind. It is not ok where changes have been lost, or the version is none of
// ours.
func (s *Server) since(c *collection, number uint64) (l []change, reached uint64, next <-chan struct{}, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if number < c.lost || number > s.number {
		return nil, 0, nil, false
	}
	i, _ := slices.BinarySearchFunc(c.changes, number+1,
		func(a change, n uint64) int { return int(int64(a.now.number) - int64(n)) })
	return slices.Clone(c.changes[i:]), s.number, s.changed, true
}
