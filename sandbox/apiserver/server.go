package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
)

// Server holds objects and serves them.
type Server struct {
	mu          sync.RWMutex
	number      uint64 // the latest resource version
	collections map[source.Kind]*collection
	changed     chan struct{} // closed at each change

	events, watchers atomic.Int64
}

// New returns a server of these objects.
func New(objects ...source.Object) *Server {
	s := &Server{number: 1, collections: map[source.Kind]*collection{}, changed: make(chan struct{})}
	for _, r := range resources() {
		s.collections[r.kind] = &collection{resource: r, objects: map[types.NamespacedName]*state{}}
	}
	changes := source.Put(objects...)
	s.Apply(changes...)
	return s
}

// Events is how many Events it was sent.
func (s *Server) Events() int { return int(s.events.Load()) }

// Watchers is how many watches are open.
func (s *Server) Watchers() int { return int(s.watchers.Load()) }

// Serve serves on l until ctx ends, then closes every connection. The listener's network namespace is the caller's
// choice.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	web := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	defer context.AfterFunc(ctx, func() { web.Close() })()
	if err := web.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the Kubernetes API at %s: %w", l.Addr(), err)
	}
	return nil
}

// Netns is where to listen: Do runs a function inside a network namespace.
type Netns interface{ Do(func() error) error }

// Start serves at an address inside a place, of a port of the kernel's choice where that is 0, until stop is called. It
// returns the URL for Kubeconfig.
func (s *Server) Start(in Netns, address string) (url string, stop func() error, err error) {
	var l net.Listener
	err = in.Do(func() (err error) {
		l, err = net.Listen("tcp4", address)
		return err
	})
	if err != nil {
		return "", nil, fmt.Errorf("serve the Kubernetes API: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	return "http://" + l.Addr().String(), func() error {
		cancel()
		return <-done
	}, nil
}

// Kubeconfig is a client's configuration for a server at a URL such as http://127.0.0.1:8080.
func Kubeconfig(url string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters:
- {name: lab, cluster: {server: %q}}
users:
- {name: lab, user: {}}
contexts:
- {name: lab, context: {cluster: lab, user: lab}}
current-context: lab
`, url)
}

// ServeHTTP answers a request of the Kubernetes API.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch path := strings.Trim(r.URL.Path, "/"); {
	case path == "healthz" || path == "livez" || path == "readyz":
		io.WriteString(w, "ok")
	case discover(w, path):
	default:
		s.serve(w, r, path)
	}
}

// serve answers requests for objects.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, path string) {
	f := negotiate(r.Header.Get("Accept"))
	if f == nil {
		fail(w, formats[0], reject(http.StatusNotAcceptable, metav1.StatusReasonNotAcceptable,
			fmt.Sprintf("only %s and %s are served", formats[0].media, formats[1].media)))
		return
	}
	at, err := s.locate(path)
	if at.collection != nil && at.custom() {
		f = formats[0]
	}
	switch {
	case r.Method == http.MethodPost && at.resource == "events":
		s.event(w, r)
	case err != nil:
		fail(w, f, err)
	case r.Method != http.MethodGet:
		fail(w, f, apierrors.NewMethodNotSupported(at.GroupResource(), r.Method))
	default:
		s.read(w, r, f, at)
	}
}

// resourcePath is what a path leads to.
type resourcePath struct {
	*collection
	resource, namespace, name string
}

// locate reads api/v1/… or apis/GROUP/VERSION/…, then [namespaces/NAMESPACE/]RESOURCE[/NAME].
func (s *Server) locate(path string) (at resourcePath, err error) {
	parts, group := strings.Split(path, "/"), ""
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[1:]
	case len(parts) > 3 && parts[0] == "apis":
		group, parts = parts[1], parts[2:]
	default:
		return at, notFound(path)
	}
	version, parts := parts[0], parts[1:]
	if parts[0] == "namespaces" && len(parts) > 2 {
		at.namespace, parts = parts[1], parts[2:]
	}
	if at.resource = parts[0]; len(parts) > 1 {
		at.name = parts[1]
	}
	for _, c := range s.collections {
		if c.Resource == at.resource && c.Group == group && c.Version == version && len(parts) < 3 &&
			(c.namespaced || at.namespace == "") {
			at.collection = c
			return at, nil
		}
	}
	return at, notFound(path)
}

func notFound(path string) error {
	return reject(http.StatusNotFound, metav1.StatusReasonNotFound, fmt.Sprintf("nothing is served at /%s", path))
}

func reject(code int32, reason metav1.StatusReason, message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason,
		Message: message}}
}

// event takes an Event and gives it back, as a server does that has stored it.
func (s *Server) event(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		fail(w, formats[0], apierrors.NewBadRequest(err.Error()))
		return
	}
	s.events.Add(1)
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.WriteHeader(http.StatusCreated)
	w.Write(b)
}

// read returns an object, a list or a watch.
func (s *Server) read(w http.ResponseWriter, r *http.Request, f *format, at resourcePath) {
	q, err := parse(r.URL.Query(), at)
	switch {
	case err != nil:
		fail(w, f, err)
	case q.watch:
		s.watch(w, r, f, at.collection, q)
	case at.name != "":
		l, _ := s.list(at.collection, q.sees)
		if len(l) == 0 {
			fail(w, f, apierrors.NewNotFound(at.GroupResource(), at.name))
			return
		}
		reply(w, f, http.StatusOK, l[0].whole(f))
	default:
		l, number := s.list(at.collection, q.sees)
		meta := metav1.ListMeta{ResourceVersion: strconv.FormatUint(number, 10)}
		l, meta.Continue = q.page(l)
		items := make([][]byte, len(l))
		for i, v := range l {
			items[i] = v.item(f)
		}
		reply(w, f, http.StatusOK, f.list(at.typeMeta("List"), meta, items))
	}
}

// page returns the part of a sorted list that a request wants, and the key behind which the next page begins, "" if
// none.
func (q query) page(l []*state) (page []*state, next string) {
	if q.after != "" {
		l = l[sort.Search(len(l), func(i int) bool { return l[i].key() > q.after }):]
	}
	if q.limit == 0 || len(l) <= q.limit {
		return l, ""
	}
	return l[:q.limit], l[q.limit-1].key()
}

func reply(w http.ResponseWriter, f *format, code int, b []byte) {
	w.Header().Set("Content-Type", f.media)
	w.WriteHeader(code)
	w.Write(b)
}

// fail answers with a Status.
func fail(w http.ResponseWriter, f *format, err error) {
	s := status(err)
	reply(w, f, int(s.Code), encode(f, s.TypeMeta, s))
}

// status is an error as the API words it.
func status(err error) *metav1.Status {
	var e apierrors.APIStatus
	if !errors.As(err, &e) {
		e = apierrors.NewInternalError(err)
	}
	s := e.Status()
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	return &s
}

func encode(f *format, t metav1.TypeMeta, o any) []byte { return f.object(t, must(f.item(o))) }
