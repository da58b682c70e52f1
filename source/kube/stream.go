package kube

import (
	"context"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// stream follows one kind of object. For its reflector it is both the server and the store.
type stream struct {
	resource
	*client
	*news
	words *strip.Words
	known map[types.NamespacedName]uint64 // resource versions of what is there
	rest  time.Time                       // not to ask a server before, that answers with errors
}

// refused is how long to wait between attempts to connect: 0.1 to 0.8 s.
var refused = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 1 << 20, Cap: 400 * time.Millisecond}

// longest is how long to leave a server alone, that answers with errors.
const longest = 10 * time.Second

// run follows until ctx ends.
func (s *stream) run(ctx context.Context) {
	r := cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: s.ask, WatchFuncWithContext: s.follow}, s.object, s,
		cache.ReflectorOptions{Name: s.Resource, Backoff: &refused})
	r.RunWithContext(klog.NewContext(ctx, logr.Discard())) // ask and follow tell what goes wrong
}

// ask lists.
func (s *stream) ask(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	if err := s.pause(ctx); err != nil {
		return nil, err
	}
	l, err := s.lists(ctx, s.resource, o)
	if err != nil {
		s.failed(ctx, err)
	}
	return l, err
}

// follow watches.
func (s *stream) follow(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if err := s.pause(ctx); err != nil {
		return nil, err
	}
	w, err := s.watches(ctx, s.resource, o)
	if err != nil {
		s.failed(ctx, err)
		return nil, err
	}
	s.well(s.kind)
	return w, nil
}

// pause waits until the server may be asked again.
func (s *stream) pause(ctx context.Context) error {
	t := time.NewTimer(time.Until(s.rest))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// failed tells of a failed request and makes ready for the next.
func (s *stream) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	reason := reasonOf(err)
	message := problemOf(s.host(), s.resource, reason, err)
	if bad := s.renew(); bad != nil {
		reason, message = Misconfigured, bad.Error()+": until it is mended, what was read before is used; "+message
	}
	if t := s.ill(s.kind, reason, message); t.answered() {
		s.rest = time.Now().Add(spare(time.Since(t.turned)))
	}
}

// spare gives how long to leave a server alone that has answered with errors for so long.
func spare(lasted time.Duration) time.Duration {
	d := min(max(lasted/2, 50*time.Millisecond), longest)
	return d/2 + rand.N(d/2)
}

// Transformer strips what a reflector keeps until a streamed list is whole.
func (s *stream) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		if o, ok := o.(source.Object); ok {
			version := o.GetResourceVersion()
			s.words.Strip(o)
			o.SetResourceVersion(version)
		}
		return o, nil
	}
}

// change says that o is now so. It is not ok where that is no news.
func (s *stream) change(o source.Object) (c source.Change, ok bool) {
	name, version := nameOf(o), versionOf(o)
	if before, there := s.known[name]; there && before == version && version != 0 {
		return c, false
	}
	s.known[name] = version
	s.words.Strip(o)
	return source.Change{Key: s.key(name), Object: o}, true
}

func (s *stream) key(n types.NamespacedName) source.Key {
	return source.Key{Kind: s.kind, Namespace: n.Namespace, Name: n.Name}
}

func nameOf(o source.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// versionOf gives a resource version, which is a decimal number (KEP-5504), or 0.
func versionOf(o source.Object) uint64 {
	n, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Add implements cache.ReflectorStore.
func (s *stream) Add(o any) error { return s.Update(o) }

// Update implements cache.ReflectorStore.
func (s *stream) Update(o any) error {
	if c, ok := s.change(o.(source.Object)); ok {
		s.put(c)
	}
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *stream) Delete(o any) error {
	name := nameOf(o.(source.Object))
	delete(s.known, name)
	s.put(source.Change{Key: s.key(name)})
	return nil
}

// Replace implements cache.ReflectorStore. Only what differs is told.
func (s *stream) Replace(list []any, _ string) error {
	gone := s.known
	s.known = make(map[types.NamespacedName]uint64, len(list))
	var changes []source.Change
	for _, o := range list {
		o := o.(source.Object)
		name := nameOf(o)
		if before, there := gone[name]; there {
			s.known[name] = before
			delete(gone, name)
		}
		if c, ok := s.change(o); ok {
			changes = append(changes, c)
		}
	}
	for name := range gone {
		changes = append(changes, source.Change{Key: s.key(name)})
	}
	s.replace(s.kind, changes)
	s.well(s.kind)
	return nil
}

// Resync implements cache.ReflectorStore. There is none.
func (s *stream) Resync() error { return nil }

var _ cache.TransformingStore = (*stream)(nil)
