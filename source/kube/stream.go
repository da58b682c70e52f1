package kube

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	networkingv1 "k8s.io/api/networking/v1"
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
	*updates
	words *strip.Words
	rest  time.Time // not to ask a server before, that answers with errors
	pause time.Duration
	wake  chan struct{} // holds one when refetch has to look again
	expected

	mu       sync.Mutex
	budget   *budget         // what was delivered
	incoming *list           // what the list that comes now has brought; nil: none comes
	over     bool            // a namespace was beyond the bound
	closed   map[string]bool // namespaces that have a substitute for policies that are left out
	backoffs map[string]backoff
	fetching string          // the namespace that is listed again
	seen     map[string]bool // what was seen of its objects since; nil while none is listed
}

func newStream(r resource, c *client, n *updates, words *strip.Words, b *budget) *stream {
	return &stream{resource: r, client: c, updates: n, words: words, pause: firstPause, wake: make(chan struct{}, 1),
		expected: expected{now: make(chan struct{}, 1)}, budget: b, backoffs: map[string]backoff{}}
}

// refused is how long to wait between attempts to connect: 0.1 to 0.8 s.
var refused = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 1 << 20,
	Cap: 400 * time.Millisecond}

// longest is how long to leave a server alone, that answers with errors.
const longest = 10 * time.Second

// unserved is how long to wait at most before a server that does not serve an optional kind is asked for it again.
const unserved = 10 * time.Minute

// run follows until ctx ends.
func (s *stream) run(ctx context.Context) {
	r := cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: s.listPage, WatchFuncWithContext: s.follow},
		s.object, s,
		cache.ReflectorOptions{Name: s.Resource, Backoff: &refused})
	var other sync.WaitGroup
	defer other.Wait()
	other.Go(func() { s.refetch(ctx) })
	if s.custom {
		other.Go(func() { s.followDefinition(ctx) })
	}
	r.RunWithContext(klog.NewContext(ctx, logr.Discard())) // ask and follow tell what goes wrong
}

// listPage lists. The reflector has nothing of it but its version: admit has taken the objects in.
func (s *stream) listPage(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	if err := s.pauses(ctx); err != nil {
		return nil, err
	}
	l := s.begin(ctx)
	version, err := s.each(ctx, s.resource, metav1.NamespaceAll, o, func(o source.Object) { s.admit(l, o, true) })
	if err != nil {
		s.failed(ctx, err)
		return nil, err
	}
	empty := s.resource.list()
	empty.(metav1.ListInterface).SetResourceVersion(version)
	return empty, nil
}

// follow watches.
func (s *stream) follow(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if err := s.pauses(ctx); err != nil {
		return nil, err
	}
	w, version, err := s.watches(ctx, s.resource, o)
	if err != nil {
		s.failed(ctx, err)
		return nil, err
	}
	s.well(s.kind)
	if o.SendInitialEvents != nil && *o.SendInitialEvents {
		w = newListing(ctx, w, s)
	}
	s.opened(w, version)
	return w, nil
}

// pauses waits until the server may be asked again.
func (s *stream) pauses(ctx context.Context) error {
	t := time.NewTimer(time.Until(s.rest))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.expected.now:
		return nil
	case <-t.C:
		return nil
	}
}

// failed reports of a failed request and makes ready for the next.
func (s *stream) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	reason := reasonOf(err)
	if s.mu.Lock(); reason == NotServed && s.unread {
		reason = VersionNotRead
	}
	s.mu.Unlock()
	message := problemOf(s.host(), s.resource, reason, err)
	if bad := s.renew(); bad != nil {
		reason, message = Misconfigured, bad.Error()+": the last state is used until it is fixed; "+message
	}
	if t := s.ill(s.kind, reason, message); t.reachable() {
		s.rest = time.Now().Add(spare(time.Since(t.turned)))
		if s.optional && (reason == NotServed || reason == VersionNotRead) {
			s.rest = time.Now().Add(s.retry/2 + rand.N(s.retry/2))
			if s.isDue() {
				s.rest = time.Now().Add(again)
			}
		}
	}
}

// spare returns how long to leave a server alone that has answered with errors for so long.
func spare(lasted time.Duration) time.Duration {
	d := min(max(lasted/2, 50*time.Millisecond), longest)
	return d/2 + rand.N(d/2)
}

// change reports that o is now so, and returns what is to be delivered: nothing where that is no news. created says
// that o is new.
func (s *stream) change(o source.Object, created bool) (changes []update) {
	name, version := nameOf(o), versionOf(o)
	before, there := s.budget.get(name)
	if there && before.version == version && version != 0 {
		return nil
	}
	s.words.Strip(o)
	fits := true
	for _, n := range s.budget.put(name, holding(o, version), created) {
		if n == name {
			fits = false
			if !there {
				continue
			}
		}
		changes = append(changes, update{Change: source.Change{Key: s.key(n)}})
	}
	if fits {
		changes = append(changes, update{source.Change{Key: s.key(name), Object: o}, !there})
	}
	return changes
}

func (s *stream) key(n types.NamespacedName) source.Key {
	return source.Key{Kind: s.kind, Namespace: n.Namespace, Name: n.Name}
}

func nameOf(o source.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// versionOf returns a resource version, which is a decimal number (KEP-5504), or 0.
func versionOf(o source.Object) uint64 {
	n, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Add implements cache.ReflectorStore.
func (s *stream) Add(o any) error { return s.set(o.(source.Object), true) }

// Update implements cache.ReflectorStore.
func (s *stream) Update(o any) error { return s.set(o.(source.Object), false) }

func (s *stream) set(o source.Object, created bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.see(nameOf(o), true)
	if changes := append(s.change(o, created), s.substitutes()...); len(changes) > 0 {
		s.put(changes...)
	}
	s.report()
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *stream) Delete(o any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := nameOf(o.(source.Object))
	s.see(name, false)
	changes := s.substitutes()
	if s.budget.remove(name) {
		changes = append(changes, update{Change: source.Change{Key: s.key(name)}})
	}
	if len(changes) > 0 {
		s.put(changes...)
	}
	s.report()
	return nil
}

// see records what is seen of a namespace while it is listed again.
func (s *stream) see(n types.NamespacedName, there bool) {
	if s.seen != nil && n.Namespace == s.fetching {
		s.seen[n.Name] = there
	}
}

// list is what a list has brought so far. The objects of a kind's first list are delivered as they come, so that they
// needn't all be in memory at a time. Of a later one what differs waits until it is whole.
type list struct {
	budget  *budget // of the first list the stream's own
	differs map[types.NamespacedName]source.Object
}

// begin begins a list, and ends one that was not whole. What a list brings whose ctx has ended is for nothing.
func (s *stream) begin(ctx context.Context) *list {
	first := !s.isListed(s.kind)
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		return &list{}
	}
	if s.incoming = (&list{budget: s.budget}); !first || len(s.budget.spaces) > 0 { // or the one before was not whole
		s.incoming = &list{budget: s.budget.empty(), differs: map[types.NamespacedName]source.Object{}}
	}
	return s.incoming
}

// admit takes in an object of the list l. created says that l has not had it before.
func (s *stream) admit(l *list, o source.Object, created bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l != s.incoming {
		return
	}
	if l.budget == s.budget {
		if changes := s.change(o, created); len(changes) > 0 {
			s.put(changes...)
		}
		return
	}
	name, version := nameOf(o), versionOf(o)
	s.words.Strip(o)
	if before, there := s.budget.get(name); there && before.version == version && version != 0 {
		delete(l.differs, name)
	} else {
		l.differs[name] = o
	}
	for _, n := range l.budget.put(name, holding(o, version), created) {
		delete(l.differs, n)
	}
}

// withdraw takes in that an object of the list l is gone.
func (s *stream) withdraw(l *list, n types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l != s.incoming {
		return
	}
	delete(l.differs, n)
	if l.budget.remove(n) && l.budget == s.budget {
		s.put(update{Change: source.Change{Key: s.key(n)}})
	}
}

// Replace implements cache.ReflectorStore: the list is whole. Only what differs is told.
func (s *stream) Replace([]any, string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, l := s.budget, s.incoming
	s.budget, s.incoming = l.budget, nil
	s.seen, s.fetching = nil, ""
	changes := make([]update, 0, len(l.differs))
	for name, o := range l.differs {
		_, there := was.get(name)
		changes = append(changes, update{source.Change{Key: s.key(name), Object: o}, !there})
	}
	s.replace(s.kind, append(append(changes, s.gone(was)...), s.substitutes()...), len(s.budget.spaces) == 0)
	s.well(s.kind)
	s.report()
	return nil
}

// gone returns the end of what there was before and is no more.
func (s *stream) gone(was *budget) (changes []update) {
	if was == s.budget {
		return nil
	}
	for namespace, space := range was.spaces {
		for name := range space.held.all() {
			n := types.NamespacedName{Namespace: namespace, Name: name}
			if _, there := s.budget.get(n); !there {
				changes = append(changes, update{Change: source.Change{Key: s.key(n)}})
			}
		}
	}
	return changes
}

// Substitute is the name of the NetworkPolicy that a namespace has in place of those that are left out: it isolates
// every pod there. No object of an API server can have it.
const Substitute = "LeftOut"

// substitutes returns what makes namespaces closed of which policies are left out, and open again once none is.
func (s *stream) substitutes() (out []update) {
	if s.kind != source.NetworkPolicy || len(s.budget.over) == 0 && len(s.closed) == 0 {
		return nil
	}
	key := func(namespace string) source.Key {
		return s.key(types.NamespacedName{Namespace: namespace, Name: Substitute})
	}
	for namespace := range s.budget.over {
		if s.closed[namespace] {
			continue
		}
		if s.closed == nil {
			s.closed = map[string]bool{}
		}
		s.closed[namespace] = true
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: Substitute}}
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
		out = append(out, update{source.Change{Key: key(namespace), Object: p}, true})
	}
	for namespace := range s.closed {
		if s.budget.over[namespace] == nil {
			delete(s.closed, namespace)
			out = append(out, update{Change: source.Change{Key: key(namespace)}})
		}
	}
	return out
}

// report reports which namespaces are beyond the bound, and has those looked at of which more may fit by now.
func (s *stream) report() {
	if len(s.budget.over) == 0 && !s.over {
		return
	}
	s.over = len(s.budget.over) > 0
	s.exceeds(s.kind, s.budget.problems(s.resource))
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Resync implements cache.ReflectorStore. There is none.
func (s *stream) Resync() error { return nil }

var _ cache.ReflectorStore = (*stream)(nil)
