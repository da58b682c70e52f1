package kube_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

const proxyName = "service.kubernetes.io/service-proxy-name"

func TestFollows(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a"), node("b"))
	w.serve(s)
	w.follow(kube.Options{})
	w.holds("a", "web-1", "web:80")
	s.Apply(put(service("web", 81)))
	w.holds("a", "web-1", "web:81")
	s.Apply(put(service("db", 5432)), del(slice("web-1", "web")))
	w.holds("a", "db:5432", "web:81")
	s.Apply(del(node("a")), del(service("web", 0)))
	w.holds("db:5432")
	w.reason("")
}

// Only what may count crosses the wire, as protobuf; what is kept is stripped.
func TestRequestsFewObjects(t *testing.T) {
	headless := service("none", 1)
	headless.Spec.ClusterIP, headless.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	web := service("web", 80)
	web.ManagedFields = nil
	web.UID, web.ResourceVersion = "x", "7"
	objects := []source.Object{
		web, headless, labelled(service("headless", 2), corev1.IsHeadlessService, ""),
		labelled(service("theirs", 3), proxyName, "other"),
		labelled(slice("none-1", "none"), corev1.IsHeadlessService, ""),
		labelled(slice("theirs-1", "theirs"), proxyName, "other"),
		slice("web-1", "web"), node("a"), node("b"),
	}
	w := newFixture(t)
	w.serve(apiserver.New(objects...))
	w.follow(kube.Options{})
	w.holds("a", "headless:2", "theirs-1", "theirs:3", "web-1", "web:80") // theirs has an address that is allocated
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.objects[source.KeyOf(web)]
	if o.GetUID() != "" || o.GetResourceVersion() != "" {
		t.Errorf("not stripped: %v", o)
	}
	for _, a := range w.requests {
		if !strings.Contains(a, "application/vnd.kubernetes.protobuf") {
			t.Errorf("not as protobuf: %s", a)
		}
	}
	if len(w.requests) != 4 {
		t.Errorf("%d requests for four streams: %q", len(w.requests), w.requests)
	}

	t.Run("by proxy name", func(t *testing.T) {
		w := newFixture(t)
		w.serve(apiserver.New(objects...))
		w.follow(kube.Options{ProxyName: "other"})
		w.holds("a", "theirs-1", "theirs:3", "web-1")
	})
	t.Run("all Nodes", func(t *testing.T) {
		w := newFixture(t)
		w.serve(apiserver.New(objects...))
		w.follow(kube.Options{Nodes: true})
		w.holds("a", "b", "headless:2", "theirs-1", "theirs:3", "web-1", "web:80")
	})
}

// A server that is killed and comes back, with other objects, or with a history that does not reach back: what differs
// is told, and nothing else.
func TestServerGoesAndComes(t *testing.T) {
	w := newFixture(t)
	old := apiserver.New(service("web", 80), service("db", 1), slice("web-1", "web", "10.0.0.1"), node("a"))
	w.serve(old)
	w.follow(kube.Options{})
	w.holds("a", "db:1", "web-1", "web:80")
	before := w.notified()
	w.stop()
	p := w.reason(kube.Unreachable, w.address, "connection refused", "stays as it was seen last")
	if age := time.Since(p.Since); p.Since.IsZero() || age < 0 || age > time.Minute {
		t.Errorf("since %v", p.Since)
	}
	w.holds("a", "db:1", "web-1", "web:80")
	old.Apply(put(service("web", 81)))
	w.serve(old) // which knows what has changed since
	w.holds("a", "db:1", "web-1", "web:81")
	w.reason("")
	w.stop()
	w.reason(kube.Unreachable)
	w.serve(apiserver.New(service("web", 81), service("new", 2), slice("web-1", "web", "10.0.0.1"), node("a"))) // too old
	w.holds("a", "new:2", "web-1", "web:81")
	w.reason("")
	after := w.notified()
	for k, n := range map[source.Key]int{source.KeyOf(service("db", 0)): 1, source.KeyOf(service("new", 0)): 1} {
		if after[k]-before[k] != n {
			t.Errorf("%s was told %d times, want %d", k, after[k]-before[k], n)
		}
	}
}

// After another list, objects of the same resource version are not told again.
func TestRelistReportsDifferences(t *testing.T) {
	w := newFixture(t)
	objects := []source.Object{service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a")}
	first := apiserver.New(objects...)
	w.serve(first)
	w.follow(kube.Options{})
	w.holds("a", "web-1", "web:80")
	before := w.notified()
	w.stop()
	w.reason(kube.Unreachable)
	second := apiserver.New(objects...) // numbers objects alike
	expired := map[string]bool{}
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		if from := r.URL.Query().Get("resourceVersion"); from != "" && from != "0" && !expired[r.URL.Path] {
			w.mu.Lock()
			defer w.mu.Unlock()
			expired[r.URL.Path] = true
			rw.Header().Set("Content-Type", "application/json")
			rw.WriteHeader(http.StatusGone)
			fmt.Fprint(rw,
				`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old"}`)
			return true
		}
		return false
	})
	w.serve(second)
	w.reason("")
	second.Apply(put(service("new", 2)))
	w.holds("a", "new:2", "web-1", "web:80")
	after := w.notified()
	delete(after, source.KeyOf(service("new", 0)))
	for k, n := range after {
		if n != before[k] {
			t.Errorf("%s was told again", k)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(expired) != 4 {
		t.Errorf("410 was met by %v only", expired)
	}
}

// Without an API server nothing is told but that; then, everything at once.
func TestStartWithoutServer(t *testing.T) {
	w := newFixture(t)
	w.follow(kube.Options{})
	w.reason(kube.Unreachable, "connection refused")
	w.mu.Lock()
	if !w.last.Waiting {
		t.Error("the batch is not Waiting")
	}
	w.mu.Unlock()
	w.serve(apiserver.New(service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a")))
	w.until("the first batch holds all", func() bool { return w.begun })
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.names(); len(l) != 3 {
		t.Errorf("the first batch holds %q", l)
	}
}

// refuse answers requests for a resource as an API server without a permission.
func refuse(rw http.ResponseWriter, r *http.Request, resource string) bool {
	if !strings.HasSuffix(r.URL.Path, "/"+resource) {
		return false
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusForbidden)
	fmt.Fprintf(rw,
		`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s is forbidden: User \"eve\" cannot list resource"}`, resource)
	return true
}

func TestForbidden(t *testing.T) {
	objects := []source.Object{service("web", 80), slice("web-1", "web", "10.0.0.1"), node("a")}
	t.Run("a kind that traffic needs", func(t *testing.T) {
		w := newFixture(t)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuse(rw, r, "endpointslices") })
		w.serve(apiserver.New(objects...))
		w.follow(kube.Options{})
		w.reason(kube.Forbidden, `User "eve"`, "verbs list and watch on endpointslices.discovery.k8s.io")
		w.mu.Lock()
		if w.begun {
			t.Error("it began with Services without endpoints")
		}
		w.mu.Unlock()
		w.ill(nil)
		w.holds("a", "web-1", "web:80")
		w.reason("")
	})
	t.Run("the Node", func(t *testing.T) {
		w := newFixture(t)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuse(rw, r, "nodes") })
		s := apiserver.New(objects...)
		w.serve(s)
		w.follow(kube.Options{})
		w.reason(kube.Forbidden, "verbs list and watch on nodes")
		w.holds("web-1", "web:80")
		w.ill(nil)
		w.holds("a", "web-1", "web:80")
		w.reason("")
	})
	t.Run("later", func(t *testing.T) {
		w := newFixture(t)
		s := apiserver.New(objects...)
		w.serve(s)
		w.follow(kube.Options{})
		w.holds("a", "web-1", "web:80")
		w.stop()
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuse(rw, r, "endpointslices") })
		w.serve(s)
		w.reason(kube.Forbidden, "endpointslices.discovery.k8s.io")
		s.Apply(put(service("web", 81)), del(slice("web-1", "web")))
		w.holds("a", "web-1", "web:81")
		w.ill(nil)
		w.holds("a", "web:81")
	})
}

// ServiceCIDRs are read where the server knows them and lets them be read. Without them all else begins at once.
func TestServiceCIDRs(t *testing.T) {
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}}
	objects := []source.Object{service("web", 80), node("a"), cidr}
	t.Run("served", func(t *testing.T) {
		w := newFixture(t)
		s := apiserver.New(objects...)
		w.serve(s)
		w.follow(kube.Options{})
		w.holds("a", "kubernetes", "web:80")
		s.Apply(del(cidr))
		w.holds("a", "web:80")
		w.reason("")
	})
	t.Run("unknown to the server", func(t *testing.T) {
		w := newFixture(t)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "/servicecidrs") {
				return false
			}
			http.NotFound(rw, r)
			return true
		})
		w.serve(apiserver.New(objects...))
		start := time.Now()
		w.follow(kube.Options{})
		w.holds("a", "web:80")
		if d := time.Since(start); d > kube.Patience {
			t.Errorf("it begins after %s", d)
		}
		w.reason("")
		w.mu.Lock()
		defer w.mu.Unlock()
		requests := 0
		for _, a := range w.requests {
			if strings.Contains(a, "servicecidrs") {
				requests++
			}
		}
		if requests > 2 {
			t.Errorf("asked %d times: %q", requests, w.requests)
		}
	})
	t.Run("forbidden", func(t *testing.T) {
		w := newFixture(t)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuse(rw, r, "servicecidrs") })
		w.serve(apiserver.New(objects...))
		w.follow(kube.Options{})
		w.holds("a", "web:80")
		w.reason(kube.Forbidden, "verbs list and watch on servicecidrs.networking.k8s.io")
		w.ill(nil)
		w.holds("a", "kubernetes", "web:80")
		w.reason("")
	})
}

// A server that takes its time is waited for, and named.
func TestSlow(t *testing.T) {
	w := newFixture(t)
	free := make(chan struct{})
	w.ill(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, "/services") {
			<-free
		}
		return false
	})
	w.serve(apiserver.New(service("web", 80), node("a")))
	w.follow(kube.Options{})
	w.reason(kube.Slow, "services")
	close(free)
	w.holds("a", "web:80")
	w.reason("")
}

// A server that answers with errors is named with what it says.
func TestFailingServer(t *testing.T) {
	w := newFixture(t)
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, "/services") {
			http.Error(rw, "etcd is away", http.StatusInternalServerError)
			return true
		}
		return false
	})
	w.serve(apiserver.New(service("web", 80), node("a")))
	w.follow(kube.Options{})
	w.reason(kube.Failing, "etcd is away", "services")
	w.ill(nil)
	w.holds("a", "web:80")
	w.reason("")
}

func TestWrongAccess(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		name = filepath.Join(dir, name)
		check(t, os.WriteFile(name, []byte(text), 0o600))
		return name
	}
	const config = `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://127.0.0.1:1", certificate-authority: none.crt}}], users: [{name: u, user: {}}], contexts: [{name: x, context: {cluster: c, user: u}}], current-context: %s}`
	for _, c := range []struct {
		access kube.Access
		want   []string
	}{
		{kube.Access{}, []string{"service account", "name a kubeconfig"}},
		{kube.Access{Kubeconfig: filepath.Join(dir, "absent")}, []string{"absent", "no such file"}},
		{kube.Access{Kubeconfig: file("broken", "{")}, []string{"kubeconfig " + dir + "/broken"}},
		{kube.Access{Kubeconfig: file("empty", "")}, []string{"kubeconfig " + dir + "/empty"}},
		{kube.Access{Kubeconfig: file("context", fmt.Sprintf(config, "other"))}, []string{"other"}},
		{kube.Access{Kubeconfig: file("ca", fmt.Sprintf(config, "x"))}, []string{"none.crt"}},
		{kube.Access{Master: "::"}, []string{"API server ::"}},
	} {
		err := kube.New(kube.Options{Access: c.access, Node: "a"}).Run(context.Background(),
			func(source.Batch) { t.Error("something was told") })
		if err == nil {
			t.Errorf("%v: no error", c.access)
			continue
		}
		for _, s := range c.want {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%v: %v: it does not say %q", c.access, err, s)
			}
		}
	}
}
