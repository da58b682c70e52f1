package kube_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// hoard returns a tenant's slices, of 100 endpoints each, the one of the highest number first.
func hoard(n int) (objects []source.Object) {
	for i := range n {
		s := slice(fmt.Sprintf("s-%04d", n-1-i), "hoard")
		s.Namespace, s.CreationTimestamp = "tenant", metav1.Unix(int64(1000+i), 0)
		for j := range 100 {
			address := fmt.Sprintf("10.1.%d.%d", 100+i%100, 100+j)
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{address}})
		}
		objects = append(objects, s)
	}
	return objects
}

// tenant returns how many of the tenant's slices are there, and whether those are the oldest of what there is.
func (w *fixture) tenant(all []source.Object) (n int, oldest bool) {
	oldest = true
	missing := false
	for _, o := range all {
		if _, there := w.objects[source.KeyOf(o)]; there {
			oldest = oldest && !missing
			n++
		} else {
			missing = true
		}
	}
	return n, oldest
}

// A namespace of more slices than the bound lets in takes nothing from others, by a streamed list and by another; once
// there is room, what was left out comes.
func TestNamespaceIsBounded(t *testing.T) {
	const slices, least, most = 2000, 120, 170 // 12.6 kB each
	for name, streamed := range map[string]bool{"streamed": true, "listed": false} {
		t.Run(name, func(t *testing.T) {
			all := hoard(slices)
			w := newFixture(t)
			if !streamed {
				w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuseStream(rw, r) })
			}
			s := apiserver.New(append(all, service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a"))...)
			w.serve(s)
			w.follow(kube.Options{NamespaceBytes: 2 << 20, Bytes: 3 << 20})
			w.until("the others' objects are there", func() bool { return w.begun && len(w.objects) > 3 })
			p := w.reason(kube.NamespaceTooLarge, "more than 1000 of its endpointslices.discovery.k8s.io", "s-",
				"2 MiB")
			if p.Object != (source.Key{Kind: source.Namespace, Name: "tenant"}) {
				t.Errorf("the problem is of %v", p.Object)
			}
			w.mu.Lock()
			n, oldest := w.tenant(all)
			for _, o := range []source.Object{service("web", 80), slice("web-1", "web"), node("a")} {
				if w.objects[source.KeyOf(o)] == nil {
					t.Errorf("%v is missing", source.KeyOf(o))
				}
			}
			w.mu.Unlock()
			if n < least || n > most || !oldest {
				t.Fatalf("%d slices came, the oldest: %v", n, oldest)
			}

			gone := make([]source.Change, 100)
			for i := range gone {
				gone[i] = del(all[i])
			}
			s.Apply(gone...)
			s.Apply(put(service("db", 1)))
			w.until("others come in place of those that went", func() bool {
				now, oldest := w.tenant(all[100:])
				return now == n && oldest && w.objects[source.KeyOf(service("db", 1))] != nil
			})
			w.reason(kube.NamespaceTooLarge)
			gone = gone[:0]
			for _, o := range all[200:] {
				gone = append(gone, del(o))
			}
			s.Apply(gone...)
			w.until("all that is left is there", func() bool {
				now, _ := w.tenant(all)
				return now == 100 && len(w.last.Problems) == 0
			})
			for _, a := range w.requestLog() {
				if strings.Contains(a, "/namespaces/") && !strings.Contains(a, "/namespaces/tenant/") {
					t.Errorf("asked for %s", a)
				}
			}
		})
	}
}

// requestLog returns the requests so far.
func (w *fixture) requestLog() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.requests...)
}

// refuseStream answers as a server that streams no lists.
func refuseStream(rw http.ResponseWriter, r *http.Request) bool {
	if r.URL.Query().Get("sendInitialEvents") == "" {
		return false
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusUnprocessableEntity)
	fmt.Fprint(rw, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422,`+
		`"message":"sendInitialEvents is forbidden"}`)
	return true
}

// A namespace at its bound that changes all the time doesn't hold up others, and what it changes is seen.
func TestBoundedNamespaceIsFollowed(t *testing.T) {
	all := hoard(300)
	w := newFixture(t)
	s := apiserver.New(append(all, service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a"))...)
	w.serve(s)
	w.follow(kube.Options{NamespaceBytes: 2 << 20, Bytes: 3 << 20})
	w.reason(kube.NamespaceTooLarge)
	young := hoard(1)[0].(*discoveryv1.EndpointSlice)
	young.Name, young.CreationTimestamp = "young", metav1.Unix(1_000_000, 0)
	small := all[0].(*discoveryv1.EndpointSlice).DeepCopy()
	small.Endpoints = small.Endpoints[:1]
	s.Apply(put(young), put(small), put(service("web", 81)))
	w.until("the change of an old slice is seen, and one more fits", func() bool {
		o, _ := w.objects[source.KeyOf(small)].(*discoveryv1.EndpointSlice)
		n, oldest := w.tenant(all)
		return o != nil && len(o.Endpoints) == 1 && n > 0 && oldest && w.objects[source.KeyOf(young)] == nil
	})
	s.Apply(put(all[0]), del(young))
	w.until("it grows again", func() bool {
		o, _ := w.objects[source.KeyOf(small)].(*discoveryv1.EndpointSlice)
		_, oldest := w.tenant(all)
		return o != nil && len(o.Endpoints) == 100 && oldest
	})
	gone := []source.Change{}
	for _, o := range all {
		gone = append(gone, del(o))
	}
	s.Apply(gone...)
	w.holds("a", "web-1", "web:81")
	w.reason("")
}
