package kube_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// fixture is an API server that can be ill, and what a source makes of it.
type fixture struct {
	t          *testing.T
	address    string
	kubeconfig string
	retry      time.Duration // how long the source waits for a kind that isn't served; 0: as long as usual
	stop       func()        // of the server that runs
	tls        func(*http.Server, net.Listener) error

	mu       sync.Mutex
	before   func(http.ResponseWriter, *http.Request) bool // answers a request in the server's place
	requests []string                                      // requests: path and selectors
	objects  map[source.Key]source.Object
	last     source.Batch
	counts   map[source.Key]int // changes seen
	batches  int
	begun    bool
	changed  chan struct{} // closed at each batch
}

// newFixture reserves an address; nothing listens there yet.
func newFixture(t *testing.T) *fixture {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	w := &fixture{t: t, address: l.Addr().String(), stop: func() {}, objects: map[source.Key]source.Object{},
		counts: map[source.Key]int{}, changed: make(chan struct{})}
	check(t, l.Close())
	w.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	check(t, os.WriteFile(w.kubeconfig, apiserver.Kubeconfig("http://"+w.address), 0o600))
	t.Cleanup(func() { w.stop() })
	return w
}

// serve lets s answer at the world's address.
func (w *fixture) serve(s http.Handler) {
	w.t.Helper()
	w.stop()
	l, err := net.Listen("tcp", w.address)
	check(w.t, err)
	web := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		q := r.URL.Query()
		w.requests = append(w.requests, strings.Join([]string{r.URL.Path, q.Get("labelSelector"), q.Get("fieldSelector"),
			r.Header.Get("Accept")}, " "))
		before := w.before
		w.mu.Unlock()
		if before == nil || !before(rw, r) {
			s.ServeHTTP(rw, r)
		}
	})}
	run := web.Serve
	if w.tls != nil {
		run = func(l net.Listener) error { return w.tls(web, l) }
	}
	ended := make(chan struct{})
	go func() {
		run(l)
		close(ended)
	}()
	w.stop = sync.OnceFunc(func() {
		web.Close()
		<-ended
	})
}

// ill has f answer in the server's place, as long as it says so.
func (w *fixture) ill(f func(http.ResponseWriter, *http.Request) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before = f
}

// follow starts a source.
func (w *fixture) follow(o kube.Options) {
	if o.Access == (kube.Access{}) {
		o.Kubeconfig = w.kubeconfig
	}
	if o.Node == "" {
		o.Node = "a"
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := kube.New(o)
	s.RefetchAfter(50 * time.Millisecond)
	s.RetryAfter(w.retry)
	go func() { done <- s.Run(ctx, w.collect) }()
	w.t.Cleanup(func() {
		cancel()
		check(w.t, <-done)
	})
}

// collect keeps a batch.
func (w *fixture) collect(b source.Batch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range b.Changes {
		w.counts[c.Key]++
		if w.objects[c.Key] = c.Object; c.Object == nil {
			delete(w.objects, c.Key)
		}
	}
	if b.Waiting && w.begun {
		w.t.Error("waiting after it has begun")
	}
	w.begun = w.begun || !b.Waiting
	w.last = b
	w.batches++
	close(w.changed)
	w.changed = make(chan struct{})
}

// until waits until ok, which sees the world locked, holds after some batch.
func (w *fixture) until(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.After(30 * time.Second); ; {
		w.mu.Lock()
		good, changed := ok(), w.changed
		state := fmt.Sprintf("%q, problems %v", w.names(), w.last.Problems)
		w.mu.Unlock()
		if good {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			w.t.Fatalf("it never came to be that %s: there is %s", what, state)
		}
	}
}

// holds waits until the source has told these objects, by name with the Service's first port, and no others.
func (w *fixture) holds(want ...string) {
	w.t.Helper()
	w.until(fmt.Sprintf("there is %q", want), func() bool { return w.begun && slices.Equal(w.names(), want) })
}

// names are those of what is there.
func (w *fixture) names() (l []string) {
	for _, o := range w.objects {
		switch o := o.(type) {
		case *corev1.Service:
			l = append(l, fmt.Sprintf("%s:%d", o.Name, o.Spec.Ports[0].Port))
		default:
			l = append(l, o.GetName())
		}
	}
	slices.Sort(l)
	return l
}

// reason waits until the only problem has that reason and says the texts, and gives it; "" waits until all is well.
func (w *fixture) reason(reason string, texts ...string) (p source.Problem) {
	w.t.Helper()
	w.until("the problem is "+reason, func() bool {
		if reason == "" {
			return len(w.last.Problems) == 0
		}
		if len(w.last.Problems) != 1 || w.last.Problems[0].Reason != reason {
			return false
		}
		p = w.last.Problems[0]
		return true
	})
	for _, s := range texts {
		if !strings.Contains(p.Message, s) {
			w.t.Errorf("the problem does not say %q: %s", s, p.Message)
		}
	}
	return p
}

// notified returns how often each object was told so far.
func (w *fixture) notified() map[source.Key]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.counts)
}

func check(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func service(name string, port int32) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
			Ports: []corev1.ServicePort{{Port: port, Protocol: corev1.ProtocolTCP}}}}
}

func slice(name, of string, addresses ...string) *discoveryv1.EndpointSlice {
	port, tcp, none := int32(8080), corev1.ProtocolTCP, ""
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop",
		Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &none, Port: &port, Protocol: &tcp}}}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// labelled returns o labels more.
func labelled[T source.Object](o T, pairs ...string) T {
	l := maps.Clone(o.GetLabels())
	if l == nil {
		l = map[string]string{}
	}
	for i := 0; i < len(pairs); i += 2 {
		l[pairs[i]] = pairs[i+1]
	}
	o.SetLabels(l)
	return o
}

func put(o source.Object) source.Change { return source.Change{Key: source.KeyOf(o), Object: o} }

func del(o source.Object) source.Change { return source.Change{Key: source.KeyOf(o)} }
