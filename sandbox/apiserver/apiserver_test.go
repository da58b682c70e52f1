package apiserver

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// codecs are those of client-go: what they can read is what a client can.
var codecs = func() serializer.CodecFactory {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme,
		networkingv1.AddToScheme, eventsv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return serializer.NewCodecFactory(s)
}()

// medias are what clients ask for.
var medias = []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf}

func check(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// start serves at a loopback address until the test ends.
func start(t testing.TB, objects ...source.Object) (*Server, string) {
	t.Helper()
	s := New(objects...)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		check(t, <-done)
	})
	return s, "http://" + l.Addr().String()
}

// fetch returns the answer to a GET.
func fetch(t testing.TB, url, accept string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	check(t, err)
	r.Header.Set("Accept", accept)
	a, err := http.DefaultClient.Do(r)
	check(t, err)
	t.Cleanup(func() { a.Body.Close() })
	return a
}

// get reads a whole answer as a client does.
func get(t testing.TB, url, accept string) (runtime.Object, int) {
	t.Helper()
	a := fetch(t, url, accept)
	b, err := io.ReadAll(a.Body)
	check(t, err)
	o, _, err := codecs.UniversalDeserializer().Decode(b, nil, nil)
	if err != nil {
		t.Fatalf("GET %s: %s: %v: %q", url, a.Status, err, b[:min(len(b), 200)])
	}
	return o, a.StatusCode
}

func service(namespace, name, ip string, labels map[string]string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
		Spec: corev1.ServiceSpec{ClusterIP: ip}}
}

func put(o source.Object) source.Change  { return source.Change{Key: source.KeyOf(o), Object: o} }
func gone(o source.Object) source.Change { return source.Change{Key: source.KeyOf(o)} }

func TestObjectsArriveAsTheyWerePut(t *testing.T) {
	objects := generate.Cluster(3, 10)
	_, base := start(t, objects...)
	for _, media := range medias {
		for path, want := range map[string]source.Object{
			"/api/v1/nodes/a": objects[0],
			"/api/v1/namespaces/large-00000/services/svc-000001":                           objects[3],
			"/apis/discovery.k8s.io/v1/namespaces/large-00000/endpointslices/svc-000002-0": objects[6],
		} {
			o, code := get(t, base+path, media)
			got := o.(source.Object)
			created := got.GetCreationTimestamp()
			if code != http.StatusOK || got.GetUID() == "" || got.GetResourceVersion() == "" || created.IsZero() {
				t.Errorf("%s as %s: %d %v", path, media, code, got)
			}
			got.SetUID("")
			got.SetResourceVersion("")
			got.SetCreationTimestamp(metav1.Time{})
			o.GetObjectKind().SetGroupVersionKind(want.(runtime.Object).GetObjectKind().GroupVersionKind())
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s as %s (-put +got):\n%s", path, media, d)
			}
		}
	}
}

func TestListsAndSelectors(t *testing.T) {
	_, base := start(t,
		service("a", "one", "10.96.0.1", nil), service("a", "two", corev1.ClusterIPNone, map[string]string{"x": "y"}),
		service("b", "one", "10.96.0.2", nil),
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "p"}, Spec: corev1.PodSpec{NodeName: "n"}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	for path, want := range map[string]string{
		"/api/v1/services":                                      "a/one a/two b/one",
		"/api/v1/services?limit=1":                              "a/one",
		"/api/v1/services?limit=2&continue=a%00one":             "a/two b/one",
		"/api/v1/services?limit=1&resourceVersion=0":            "a/one a/two b/one",
		"/api/v1/namespaces/a/services":                         "a/one a/two",
		"/api/v1/namespaces/c/services":                         "",
		"/api/v1/services?fieldSelector=spec.clusterIP!%3DNone": "a/one b/one",
		"/api/v1/services?labelSelector=!x":                     "a/one b/one",
		"/api/v1/services?labelSelector=x+in+(y,z)":             "a/two",
		"/api/v1/services?fieldSelector=metadata.name%3Done":    "a/one b/one",
		"/api/v1/pods?fieldSelector=spec.nodeName%3Dn":          "a/p",
		"/api/v1/nodes?fieldSelector=metadata.name%3Dm":         "",
		"/api/v1/nodes": "/n",
		"/apis/networking.k8s.io/v1/servicecidrs":                            "",
		"/apis/discovery.k8s.io/v1/endpointslices?labelSelector=!a&limit=10": "",
	} {
		for _, media := range medias {
			o, code := get(t, base+path, media)
			var names []string
			check(t, meta.EachListItem(o, func(o runtime.Object) error {
				names = append(names, o.(metav1.Object).GetNamespace()+"/"+o.(metav1.Object).GetName())
				return nil
			}))
			list, err := meta.ListAccessor(o)
			if got := strings.Join(names, " "); code != http.StatusOK || got != want || err != nil ||
				list.GetResourceVersion() != "6" {
				t.Errorf("%s as %s: %d %q, want %q, at version %s", path, media, code, got, want, list.GetResourceVersion())
			}
		}
	}
}

func TestRejections(t *testing.T) {
	_, base := start(t, service("a", "one", "10.96.0.1", nil))
	for path, want := range map[string]struct {
		code   int
		reason metav1.StatusReason
	}{
		"/api/v1/namespaces/a/services/two":                                         {404, metav1.StatusReasonNotFound},
		"/api/v1/secrets":                                                           {404, metav1.StatusReasonNotFound},
		"/api/v2/services":                                                          {404, metav1.StatusReasonNotFound},
		"/api/v1/namespaces/a/services/one/status":                                  {404, metav1.StatusReasonNotFound},
		"/apis/apps/v1/deployments":                                                 {404, metav1.StatusReasonNotFound},
		"/nothing":                                                                  {404, metav1.StatusReasonNotFound},
		"/api/v1/namespaces/a/nodes":                                                {404, metav1.StatusReasonNotFound},
		"/api/v1/services?fieldSelector=spec.nodeName%3Da":                          {400, metav1.StatusReasonBadRequest},
		"/api/v1/services?fieldSelector=x":                                          {400, metav1.StatusReasonBadRequest},
		"/api/v1/services?labelSelector=%3D%3D":                                     {400, metav1.StatusReasonBadRequest},
		"/api/v1/services?watch=true&timeoutSeconds=x":                              {400, metav1.StatusReasonBadRequest},
		"/api/v1/services?watch=true&resourceVersion=x":                             {400, metav1.StatusReasonBadRequest},
		"/api/v1/services?watch=true&sendInitialEvents=true":                        {422, metav1.StatusReasonInvalid},
		"/api/v1/services?sendInitialEvents=true&resourceVersionMatch=NotOlderThan": {422, metav1.StatusReasonInvalid},
	} {
		for _, media := range medias {
			o, code := get(t, base+path, media)
			if s, ok := o.(*metav1.Status); !ok || code != want.code || int(s.Code) != code || s.Reason != want.reason ||
				s.Message == "" {
				t.Errorf("%s as %s: %d %v, want %d %s", path, media, code, o, want.code, want.reason)
			}
		}
	}
	const tables = "text/plain, application/json;as=Table;v=v1"
	if _, code := get(t, base+"/api/v1/services", tables); code != http.StatusNotAcceptable {
		t.Errorf("a client that takes nothing of ours got %d", code)
	}
	a, err := http.Post(base+"/api/v1/namespaces/a/services", runtime.ContentTypeJSON, strings.NewReader("{}"))
	check(t, err, a.Body.Close())
	if a.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("a write got %s", a.Status)
	}
}

// watching is a watch as client-go has it.
type watching struct {
	t      *testing.T
	events streaming.Decoder
}

func watchAt(t *testing.T, url, media string) watching {
	t.Helper()
	a := fetch(t, url, media)
	if a.StatusCode != http.StatusOK || !strings.HasPrefix(a.Header.Get("Content-Type"), media) {
		t.Fatalf("GET %s: %s, %s", url, a.Status, a.Header.Get("Content-Type"))
	}
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	if !ok {
		t.Fatalf("no serializer for %s", media)
	}
	return watching{t, streaming.NewDecoder(info.StreamSerializer.Framer.NewFrameReader(a.Body),
		info.StreamSerializer.Serializer)}
}

// next reads an event and says it in a word or two.
func (w watching) next() string {
	w.t.Helper()
	var e metav1.WatchEvent
	if _, _, err := w.events.Decode(nil, &e); err != nil {
		return "end: " + err.Error()
	}
	o, _, err := codecs.UniversalDeserializer().Decode(e.Object.Raw, nil, nil)
	if err != nil {
		w.t.Fatalf("decode the object of %s: %v", e.Type, err)
	}
	if s, ok := o.(*metav1.Status); ok {
		return fmt.Sprint(e.Type, " ", s.Reason)
	}
	m := o.(metav1.Object)
	text := strings.TrimSpace(fmt.Sprintf("%s %T %s@%s", e.Type, o, m.GetName(), m.GetResourceVersion()))
	if m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
		text += " end of initial events"
	}
	return text
}

func (w watching) expect(want ...string) {
	w.t.Helper()
	for _, s := range want {
		if got := w.next(); got != s {
			w.t.Fatalf("event %q, want %q", got, s)
		}
	}
}

const watchList = "watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"

func TestWatchList(t *testing.T) {
	for _, media := range medias {
		one, two := service("a", "one", "10.96.0.1", nil), service("a", "two", "10.96.0.2", nil)
		s, base := start(t, one)
		w := watchAt(t, base+"/api/v1/services?"+watchList, media)
		w.expect("ADDED *v1.Service one@2", "BOOKMARK *v1.Service @2 end of initial events")
		s.Apply(put(two))
		s.Apply(put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}), put(one), gone(two), gone(two))
		w.expect("ADDED *v1.Service two@3", "MODIFIED *v1.Service one@5", "DELETED *v1.Service two@6")
		if s.Watchers() != 1 {
			t.Errorf("%d watches are open", s.Watchers())
		}
		empty := watchAt(t, base+"/apis/networking.k8s.io/v1/servicecidrs?"+watchList, media)
		empty.expect("BOOKMARK *v1.ServiceCIDR @6 end of initial events")
	}
}

func TestWatchFromVersion(t *testing.T) {
	for _, media := range medias {
		one, two := service("a", "one", "10.96.0.1", nil), service("a", "two", "10.96.0.2", nil)
		s, base := start(t, one, two)
		s.Apply(put(two), gone(one))
		url := base + "/api/v1/services?watch=1&resourceVersion="
		watchAt(t, url+"3", media).expect("MODIFIED *v1.Service two@4", "DELETED *v1.Service one@5")
		watchAt(t, url+"4", media).expect("DELETED *v1.Service one@5")
		watchAt(t, url, media).expect("ADDED *v1.Service two@4")
		watchAt(t, url+"0", media).expect("ADDED *v1.Service two@4")
		watchAt(t, url+"6", media).expect("ERROR Expired", "end: EOF")
		watchAt(t, url+"5&timeoutSeconds=1", media).expect("end: EOF")
	}
}

func TestWatchSeesObjectsComeAndGoByTheirLabels(t *testing.T) {
	s, base := start(t, service("a", "one", "10.96.0.1", nil))
	w := watchAt(t, base+"/api/v1/services?labelSelector=!hidden&"+watchList, runtime.ContentTypeProtobuf)
	w.expect("ADDED *v1.Service one@2", "BOOKMARK *v1.Service @2 end of initial events")
	hidden := service("a", "one", "10.96.0.1", map[string]string{"hidden": ""})
	s.Apply(put(hidden), put(hidden), put(service("a", "one", "10.96.0.1", nil)))
	w.expect("DELETED *v1.Service one@3", "ADDED *v1.Service one@5")
}

func TestExpiredWatchGetsAnError(t *testing.T) {
	one := service("a", "one", "10.96.0.1", nil)
	s, base := start(t, one)
	for range 2 * history {
		s.Apply(put(one))
	}
	url := base + "/api/v1/services?watch=true&resourceVersion="
	watchAt(t, url+"2", runtime.ContentTypeJSON).expect("ERROR Expired", "end: EOF")
	reached := uint64(2*history + 2)
	watchAt(t, fmt.Sprint(url, reached-1), runtime.ContentTypeJSON).expect(
		fmt.Sprintf("MODIFIED *v1.Service one@%d", reached))
}

func TestServeEndsWatches(t *testing.T) {
	s := New()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	w := watchAt(t, "http://"+l.Addr().String()+"/api/v1/services?"+watchList, runtime.ContentTypeJSON)
	w.expect("BOOKMARK *v1.Service @1 end of initial events")
	cancel()
	check(t, <-done)
	if got := w.next(); !strings.HasPrefix(got, "end: ") {
		t.Errorf("after the server's end: %s", got)
	}
}

func TestEventsAreStored(t *testing.T) {
	s, base := start(t)
	for _, media := range medias {
		info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
		sent := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e"}, Reason: "Starting"}
		var b bytes.Buffer
		check(t, codecs.EncoderForVersion(info.Serializer, eventsv1.SchemeGroupVersion).Encode(sent, &b))
		a, err := http.Post(base+"/apis/events.k8s.io/v1/namespaces/default/events", media, &b)
		check(t, err)
		defer a.Body.Close()
		back, err := io.ReadAll(a.Body)
		check(t, err)
		o, _, err := codecs.UniversalDeserializer().Decode(back, nil, nil)
		if got, ok := o.(*eventsv1.Event); a.StatusCode != http.StatusCreated || err != nil || !ok ||
			got.Reason != "Starting" {
			t.Errorf("as %s: %s %v %v", media, a.Status, o, err)
		}
	}
	if s.Events() != len(medias) {
		t.Errorf("%d Events were counted", s.Events())
	}
}

func TestDiscovery(t *testing.T) {
	_, base := start(t)
	for path, want := range map[string]string{
		"/version": `"gitVersion":"` + Version.GitVersion, "/api": `"versions":["v1"]`,
		"/apis":   `"groupVersion":"discovery.k8s.io/v1"`,
		"/api/v1": `"name":"services"`, "/apis/discovery.k8s.io/v1": `"kind":"EndpointSlice"`, "/readyz": "ok",
	} {
		a := fetch(t, base+path, "*/*")
		b, err := io.ReadAll(a.Body)
		check(t, err)
		if a.StatusCode != http.StatusOK || !strings.Contains(string(b), want) {
			t.Errorf("%s: %s %s, want %s", path, a.Status, b, want)
		}
	}
}

func TestKubeconfig(t *testing.T) {
	var c struct {
		Clusters []struct {
			Cluster struct{ Server string }
		}
		Current string `json:"current-context"`
	}
	check(t, yaml.Unmarshal(Kubeconfig("http://127.0.0.1:1"), &c))
	if len(c.Clusters) != 1 || c.Clusters[0].Cluster.Server != "http://127.0.0.1:1" || c.Current != "lab" {
		t.Errorf("%+v", c)
	}
}

func TestNegotiate(t *testing.T) {
	for accept, want := range map[string]string{
		"": formats[0].media, "*/*": formats[0].media, "application/json": formats[0].media,
		"application/vnd.kubernetes.protobuf":                           formats[1].media,
		"application/vnd.kubernetes.protobuf,application/json":          formats[1].media,
		"application/vnd.kubernetes.protobuf, */*":                      formats[1].media,
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json": formats[0].media,
		"application/cbor,application/json;q=0.9":                       formats[0].media, "text/html": "", ";;;": "",
	} {
		got := ""
		if f := negotiate(accept); f != nil {
			got = f.media
		}
		if got != want {
			t.Errorf("%q: %q, want %q", accept, got, want)
		}
	}
}

// FuzzRequest: whatever is asked, the answer is one of those that the API knows, and never a panic.
func FuzzRequest(f *testing.F) {
	f.Add("/api/v1/services", "labelSelector=!x&fieldSelector=spec.clusterIP!=None", "application/json")
	f.Add("/apis/discovery.k8s.io/v1/namespaces/a/endpointslices/b", "resourceVersion=7",
		"application/vnd.kubernetes.protobuf")
	f.Add("/api/v1/namespaces", "sendInitialEvents=true", "*/*")
	s := New(generate.Cluster(2, 2)...)
	f.Fuzz(func(t *testing.T, path, query, accept string) {
		q, err := url.ParseQuery(query)
		if err != nil || on(q, "watch") {
			return
		}
		r := &http.Request{Method: http.MethodGet, URL: &url.URL{Path: path, RawQuery: query},
			Header: http.Header{"Accept": {accept}}}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r.WithContext(context.Background()))
		switch w.Code {
		case 200, 400, 404, 406, 422:
		default:
			t.Errorf("GET %s?%s: %d %s", path, query, w.Code, w.Body)
		}
	})
}

// BenchmarkWatchList streams what kube-proxy asks for at its start.
func BenchmarkWatchList(b *testing.B) {
	s := New(generate.Cluster(10_000, 10)...)
	for _, path := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"} {
		b.Run(path, func(b *testing.B) {
			for b.Loop() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Nanosecond) // the initial events come first, whatever
				r := httptest.NewRequest(http.MethodGet, path+"?"+watchList, nil).WithContext(ctx)
				r.Header.Set("Accept", runtime.ContentTypeProtobuf)
				w := httptest.NewRecorder()
				s.ServeHTTP(w, r)
				cancel()
				b.SetBytes(int64(w.Body.Len()))
			}
		})
	}
}
