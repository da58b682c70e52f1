package kube_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

var policyKinds = []source.Kind{source.Namespace, source.Pod, source.NetworkPolicy, source.ClusterNetworkPolicy}

func policyObjects() []source.Object {
	deny := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "deny"}}
	deny.Spec = cnpv1.ClusterNetworkPolicySpec{Tier: cnpv1.AdminTier, Priority: 7,
		Subject: cnpv1.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}}}
	return []source.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "a"}}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "pod"}, Spec: corev1.PodSpec{NodeName: "b"},
			Status: corev1.PodStatus{PodIP: "10.0.0.1"}},
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "isolate"}}, deny,
	}
}

func TestFollowsPoliciesWhereWanted(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(append(policyObjects(), service("web", 80), node("a"))...)
	w.serve(s)
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "deny", "isolate", "pod", "shop", "web:80")
	w.reason("")
	w.mu.Lock()
	deny, ok := w.objects[source.Key{Kind: source.ClusterNetworkPolicy, Name: "deny"}].(*cnpv1.ClusterNetworkPolicy)
	if !ok || deny.Spec.Priority != 7 || deny.Spec.Subject.Namespaces == nil {
		t.Errorf("got %+v", deny)
	}
	w.mu.Unlock()
	deny = deny.DeepCopy()
	deny.Name = "other"
	s.Apply(put(deny), del(policyObjects()[2]))
	w.holds("a", "deny", "other", "pod", "shop", "web:80")

	without := newFixture(t)
	without.serve(s)
	without.follow(kube.Options{})
	without.holds("a", "web:80")
	for _, a := range without.requestLog() {
		if strings.Contains(a, "policies") || strings.Contains(a, "pods") || strings.Contains(a, "namespaces ") {
			t.Errorf("asked for: %s", a)
		}
	}
}

// A server without the CustomResourceDefinition of ClusterNetworkPolicies is no problem; once it has it, they count.
func TestClusterNetworkPoliciesMayComeLater(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(append(policyObjects(), node("a"))...)
	w.serve(s)
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "clusternetworkpolicies") {
			return false
		}
		http.NotFound(rw, r)
		return true
	})
	w.retry = 20 * time.Millisecond
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "isolate", "pod", "shop")
	w.reason("")
	once := kube.New(kube.Options{Access: kube.Access{Kubeconfig: w.kubeconfig}, Node: "a", Kinds: policyKinds})
	objects, problems, err := once.Load(t.Context(), false)
	if err != nil || len(problems) > 0 || len(objects) != 4 {
		t.Errorf("read once: %d objects, want 4: %v %v", len(objects), problems, err)
	}
	w.ill(nil)
	w.holds("a", "deny", "isolate", "pod", "shop")
	w.reason("")
}

// definitions answers for a server to which the CustomResourceDefinition of ClusterNetworkPolicies comes and goes.
type definitions struct {
	mu       sync.Mutex
	events   []string      // what a watch sends
	changed  chan struct{} // closed at each event
	served   bool          // the kind is
	versions []string      // of the kind, that are served
	list     string        // what a list has
}

const definitionText = `{"metadata":{"name":"clusternetworkpolicies.policy.networking.k8s.io"},"spec":{"versions":[
	{"name":"v1","served":%t},{"name":"v1alpha2","served":%t},{"name":"v1beta1","served":%t}]},"status":{"conditions":[
	{"type":"NamesAccepted","status":"True"},{"type":"Established","status":%q}]}}`

func (d *definitions) send(kind, established string, served bool, versions ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, fmt.Sprintf(`{"type":%q,"object":`+definitionText+"}", kind,
		slices.Contains(versions, "v1"), slices.Contains(versions, "v1alpha2"), slices.Contains(versions, "v1beta1"),
		established))
	d.served, d.versions = served, versions
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *definitions) answer(rw http.ResponseWriter, r *http.Request) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if strings.Contains(r.URL.Path, "clusternetworkpolicies") && !d.served {
		http.NotFound(rw, r)
		return true
	}
	if !strings.HasSuffix(r.URL.Path, "/customresourcedefinitions") {
		return false
	}
	switch {
	case r.URL.Query().Get("fieldSelector") != "metadata.name=clusternetworkpolicies.policy.networking.k8s.io":
		http.Error(rw, "forbidden", http.StatusForbidden)
		return true
	case r.URL.Query().Get("watch") == "":
		fmt.Fprint(rw, d.list)
		return true
	}
	rw.WriteHeader(http.StatusOK)
	for n := 0; ; {
		for ; n < len(d.events); n++ {
			fmt.Fprintln(rw, d.events[n])
		}
		rw.(http.Flusher).Flush()
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
		if d.mu.Lock(); r.Context().Err() != nil {
			return true
		}
	}
}

// TestClusterNetworkPoliciesCountOnceDefined has the definition come and go under a source that asks for the kind once
// a minute: they count within two seconds.
func TestClusterNetworkPoliciesCountOnceDefined(t *testing.T) {
	w := newFixture(t)
	s, deny := apiserver.New(append(policyObjects(), node("a"))...), policyObjects()[3]
	w.serve(s)
	d := &definitions{changed: make(chan struct{}), list: emptyList}
	w.ill(d.answer)
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "isolate", "pod", "shop")
	within := func(what string, names ...string) {
		t.Helper()
		begin := time.Now()
		if w.holds(names...); time.Since(begin) > 2*time.Second {
			t.Errorf("%s counts after %v", what, time.Since(begin))
		}
	}
	for range 2 {
		d.send("ADDED", "False", false)
		d.send("MODIFIED", "True", true)
		within("the definition", "a", "deny", "isolate", "pod", "shop")
		d.send("DELETED", "True", false)
		within("its end", "a", "isolate", "pod", "shop")
		s.Apply(del(deny)) // and another one comes
		s.Apply(put(deny))
	}
	w.reason("")
}

// versioned is a server that serves ClusterNetworkPolicies in some versions alone, as definitions has it, and ends the
// watches of one that it no longer serves.
type versioned struct {
	http.Handler
	*definitions
	watched chan string // the version of each watch that begins
}

func (v versioned) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/")
	if len(parts) != 5 || parts[4] != "clusternetworkpolicies" {
		v.Handler.ServeHTTP(rw, r)
		return
	}
	ctx, stop := context.WithCancel(r.Context())
	defer stop()
	v.mu.Lock()
	served := slices.Contains(v.versions, parts[3])
	go func() {
		v.mu.Lock()
		for slices.Contains(v.versions, parts[3]) && ctx.Err() == nil {
			changed := v.changed
			v.mu.Unlock()
			select {
			case <-changed:
			case <-ctx.Done():
			}
			v.mu.Lock()
		}
		v.mu.Unlock()
		stop()
	}()
	v.mu.Unlock()
	if !served {
		http.NotFound(rw, r)
		return
	}
	if r.URL.Query().Get("watch") != "" {
		v.watched <- parts[3]
	}
	r = r.Clone(ctx)
	r.URL.Path = strings.Replace(r.URL.Path, parts[3], cnpv1.GroupVersion.Version, 1)
	v.Handler.ServeHTTP(renamed{rw, parts[3]}, r)
}

// renamed writes objects in another version than the newest.
type renamed struct {
	http.ResponseWriter
	version string
}

func (r renamed) Write(b []byte) (int, error) {
	_, err := io.WriteString(r.ResponseWriter, strings.ReplaceAll(string(b), cnpv1.GroupVersion.String(),
		cnpv1.GroupName+"/"+r.version))
	return len(b), err
}

func (r renamed) Flush() { r.ResponseWriter.(http.Flusher).Flush() }

// TestNewestVersionIsFollowed has the definition of ClusterNetworkPolicies replaced, either way: the newest version
// that is served is watched, and no policy goes or comes again meanwhile.
func TestNewestVersionIsFollowed(t *testing.T) {
	w := newFixture(t)
	s, deny := apiserver.New(append(policyObjects(), node("a"))...), policyObjects()[3].(*cnpv1.ClusterNetworkPolicy)
	d := &definitions{changed: make(chan struct{}), served: true, versions: []string{"v1alpha2"},
		list: strings.Replace(emptyList, "[]", "["+fmt.Sprintf(definitionText, false, true, false, "True")+"]", 1)}
	v := versioned{s, d, make(chan string, 1000)}
	w.serve(v)
	w.ill(d.answer)
	w.follow(kube.Options{Kinds: policyKinds})
	want, version := []string{"a", "deny", "isolate", "pod", "shop"}, "v1alpha2"
	w.holds(want...)
	for i, served := range [][]string{{"v1alpha2", "v1beta1"}, {"v1beta1"}, {"v1alpha2"}, {"v1alpha2", "v1beta1"},
		{"v1alpha2"}, {"v1beta1"}} {
		d.send("MODIFIED", "True", true, served...)
		newest, deadline := slices.Max(served), time.After(30*time.Second)
		for version != newest {
			select {
			case version = <-v.watched:
			case <-deadline:
				t.Fatalf("%v are served: no watch of %s", served, newest)
			}
		}
		other := deny.DeepCopy()
		other.Name = fmt.Sprint("other-", i)
		s.Apply(put(other))
		want = append(want, other.Name)
		slices.Sort(want)
		w.holds(want...)
	}
	if n := w.notified()[source.KeyOf(deny)]; n != 1 {
		t.Errorf("deny was changed %d times", n-1)
	}
	w.reason("")
	once := kube.New(kube.Options{Access: kube.Access{Kubeconfig: w.kubeconfig}, Node: "a", Kinds: policyKinds})
	d.send("MODIFIED", "True", true, "v1alpha2")
	if objects, problems, err := once.Load(t.Context(), false); err != nil || len(problems) > 0 ||
		len(objects) != len(want) {
		t.Errorf("read once: %d objects, want %d: %v %v", len(objects), len(want), problems, err)
	}
}

// A server that has ClusterNetworkPolicies in versions alone that are not read has a problem, and the policies stay.
func TestVersionNotRead(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(append(policyObjects(), node("a"))...)
	d := &definitions{changed: make(chan struct{}), served: true, versions: []string{"v1beta1"},
		list: strings.Replace(emptyList, "[]", "["+fmt.Sprintf(definitionText, false, false, true, "True")+"]", 1)}
	w.serve(versioned{s, d, make(chan string, 1000)})
	w.ill(d.answer)
	w.retry = 20 * time.Millisecond
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "deny", "isolate", "pod", "shop")
	d.send("MODIFIED", "True", true, "v1")
	w.reason(kube.VersionNotRead, "clusternetworkpolicies.policy.networking.k8s.io in versions alone")
	w.holds("a", "deny", "isolate", "pod", "shop")
	d.send("MODIFIED", "True", true, "v1beta1")
	w.reason("")
	w.holds("a", "deny", "isolate", "pod", "shop")

	later := newFixture(t)
	d.send("MODIFIED", "True", true, "v1")
	later.serve(versioned{s, d, make(chan string, 1000)})
	later.ill(d.answer)
	later.follow(kube.Options{Kinds: policyKinds})
	later.holds("a", "isolate", "pod", "shop")
	later.reason(kube.VersionNotRead)
}

const emptyList = `{"kind":"CustomResourceDefinitionList","metadata":{"resourceVersion":"7"},"items":[]}`

// TestPoliciesOutliveAnotherAnswer has a server answer with something else than the definition: no policy goes.
func TestPoliciesOutliveAnotherAnswer(t *testing.T) {
	for _, list := range []string{`{}`, `{"kind":"Status","metadata":{}}`, `[]`, "no JSON",
		`{"kind":"CustomResourceDefinitionList","metadata":{}}`} {
		w := newFixture(t)
		w.serve(apiserver.New(append(policyObjects(), node("a"))...))
		d := &definitions{changed: make(chan struct{}), list: list, served: true}
		questions := make(chan struct{}, 100)
		w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, "/customresourcedefinitions") {
				questions <- struct{}{}
			}
			return d.answer(rw, r)
		})
		w.retry = 20 * time.Millisecond
		w.follow(kube.Options{Kinds: policyKinds})
		w.holds("a", "deny", "isolate", "pod", "shop")
		for range 3 { // the second question comes once the first answer was dealt with
			<-questions
		}
		w.holds("a", "deny", "isolate", "pod", "shop")
	}
}

// A namespace of more policies than the bound lets in is closed, not open, until they fit.
func TestPoliciesLeftOutCloseTheirNamespace(t *testing.T) {
	w := newFixture(t)
	objects := append(policyObjects(), node("a"))
	var hoard []source.Change
	for i := range 200 {
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: fmt.Sprintf("p-%03d", i)}}
		for range 100 {
			p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.
				NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "198.51.100.0/24"}}}})
		}
		hoard = append(hoard, put(p))
	}
	s := apiserver.New(objects...)
	w.serve(s)
	w.follow(kube.Options{Kinds: policyKinds, NamespaceBytes: 1 << 20})
	w.holds("a", "deny", "isolate", "pod", "shop")
	s.Apply(hoard...)
	substitute := source.Key{Kind: source.NetworkPolicy, Namespace: "tenant", Name: kube.Substitute}
	w.until("the namespace is closed", func() bool { return w.objects[substitute] != nil })
	w.reason(kube.NamespaceTooLarge, "networkpolicies.networking.k8s.io")
	p := w.objects[substitute].(*networkingv1.NetworkPolicy)
	if len(p.Spec.PodSelector.MatchLabels)+len(p.Spec.Ingress)+len(p.Spec.Egress) > 0 || len(p.Spec.PolicyTypes) != 2 {
		t.Errorf("it is closed by %v", p.Spec)
	}
	var gone []source.Change
	for _, c := range hoard {
		gone = append(gone, source.Change{Key: c.Key})
	}
	s.Apply(gone[10:]...)
	w.until("it is open again", func() bool { return w.objects[substitute] == nil && len(w.objects) == 15 })
	w.reason("")
}
