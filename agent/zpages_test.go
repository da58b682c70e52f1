package agent

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"go.yaml.in/yaml/v3"
)

// probe gets a page by Accept.
func probe(h http.Handler, path, accept string) *httptest.ResponseRecorder {
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil)
	r.Header.Set("Accept", accept)
	h.ServeHTTP(w, r)
	return w
}

// /flagz and /statusz are negotiated as Kubernetes' components do it.
func TestZPagesByAccept(t *testing.T) {
	a := still(t, Options{Servers: Servers{Flags: map[string]string{"v": "2"}, Version: "abc", Emulates: "1.37"}})
	h := a.handler()
	for _, c := range []struct{ accept, media, version string }{
		{"", mediaText, ""},
		{"*/*", mediaText, ""},
		{"text/*", mediaText, ""},
		{"text/plain", mediaText, ""},
		{"text/html, text/plain;q=0.5", mediaText, ""},
		{"text/plain;as=KIND", "", ""},
		{"text/html", "", ""},
		{"application/json", "", ""},
		{"application/json;as=KIND;g=config.k8s.io", "", ""},
		{"application/json;as=KIND;v=v2;g=config.k8s.io", "", ""},
		{"application/json;as=Otherz;v=v1beta1;g=config.k8s.io", "", ""},
		{"application/json;as=KIND;v=v1beta1;g=config.k8s.io", mediaJSON, "v1beta1"},
		{"application/json;as=KIND;v=v1alpha1;g=config.k8s.io", mediaJSON, "v1alpha1"},
		{"application/yaml;as=KIND;v=v1beta1;g=config.k8s.io", mediaYAML, "v1beta1"},
		{"application/*;as=KIND;v=v1beta1;g=config.k8s.io", mediaJSON, "v1beta1"},
		{"application/json, text/plain", mediaText, ""},
		{"application/vnd.kubernetes.protobuf;as=KIND;v=v1beta1;g=config.k8s.io", "", ""},
	} {
		for path, kind := range map[string]string{"/flagz": "Flagz", "/statusz": "Statusz"} {
			accept := strings.ReplaceAll(c.accept, "KIND", kind)
			w := probe(h, path, accept)
			o := map[string]any{}
			media, _, _ := strings.Cut(w.Header().Get("Content-Type"), ";")
			switch c.media {
			case mediaText:
				if media != mediaText || !strings.Contains(w.Body.String(), "fairlead "+strings.ToLower(kind)+"\nWarning: ") {
					t.Errorf("%s %q: %s\n%s", path, accept, media, w.Body)
				}
				continue
			case "":
				if err := json.Unmarshal(w.Body.Bytes(), &o); err != nil || w.Code != http.StatusNotAcceptable ||
					o["kind"] != "Status" || o["reason"] != "NotAcceptable" || !strings.Contains(o["message"].(string),
					"application/yaml;as="+kind+";v=v1beta1;g=config.k8s.io") {
					t.Errorf("%s %q: %d %s, %v", path, accept, w.Code, w.Body, err)
				}
				continue
			case mediaJSON:
				if err := json.Unmarshal(w.Body.Bytes(), &o); err != nil {
					t.Error(err)
				}
			case mediaYAML:
				if err := yaml.Unmarshal(w.Body.Bytes(), &o); err != nil || strings.Contains(w.Body.String(), "{") {
					t.Errorf("%v: %s", err, w.Body)
				}
			}
			if w.Code != http.StatusOK || media != c.media || o["kind"] != kind ||
				o["apiVersion"] != "config.k8s.io/"+c.version || (c.version == "v1alpha1") != (w.Header().Get("Warning") != "") {
				t.Errorf("%s %q: %d %v\n%s", path, accept, w.Code, w.Header(), w.Body)
			}
			flags, _ := o["flags"].(map[string]any)
			if kind == "Flagz" && flags["v"] != "2" || kind == "Statusz" && (o["binaryVersion"] != "abc" ||
				o["emulationVersion"] != "1.37" || o["goVersion"] == "" || o["startTime"] == nil || o["uptimeSeconds"] == nil) {
				t.Errorf("%s %q: %s", path, accept, w.Body)
			}
		}
	}
}

// Whatever a client accepts, the answer is text, an object, or 406.
func FuzzAccept(f *testing.F) {
	for _, s := range []string{"", "*/*", "application/json;as=Flagz;v=v1beta1;g=config.k8s.io;q=0.1, a/b;c", ";;/,"} {
		f.Add(s)
	}
	z := zpage{kind: "Flagz"}
	f.Fuzz(func(t *testing.T, accept string) {
		media, version := z.negotiate(accept)
		object := media == mediaJSON || media == mediaYAML
		if object != (version != "") || !object && media != mediaText && media != "" {
			t.Errorf("%q: %q, %q", accept, media, version)
		}
	})
}

// /metrics/slis counts the checks of the pages.
func TestSLIs(t *testing.T) {
	h := still(t, Options{}).handler()
	get(h, "/healthz")
	get(h, "/readyz")
	get(h, "/readyz")
	_, text := get(h, "/metrics/slis")
	for _, line := range []string{
		`kubernetes_healthcheck{name="ping",type="healthz"} 1`,
		`kubernetes_healthcheck{name="serving",type="readyz"} 0`,
		`kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 1`,
		`kubernetes_healthchecks_total{name="serving",status="error",type="readyz"} 2`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%s is missing in\n%s", line, text)
		}
	}
}

// Histograms are there before a first sample, as classic ones in text and with native buckets in protobuf.
func TestHistogramsAreClassicAndNative(t *testing.T) {
	h := still(t, Options{}).handler()
	if _, text := get(h, "/metrics"); !strings.Contains(text,
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv6",le="0.25"} 0`) {
		t.Errorf("before a sample there is no histogram:\n%s", text)
	}
	w := probe(h, "/metrics", string(expfmt.NewFormat(expfmt.TypeProtoDelim)))
	families := map[string]bool{}
	for d := expfmt.NewDecoder(w.Body, expfmt.ResponseFormat(w.Header())); ; {
		var f dto.MetricFamily
		if d.Decode(&f) != nil {
			break
		}
		for _, m := range f.Metric {
			if x := m.Histogram; x != nil {
				families[f.GetName()] = x.Schema != nil && len(x.Bucket) > 0
			}
		}
	}
	if len(families) < 5 {
		t.Errorf("histograms: %v", families)
	}
	for name, both := range families {
		if !both {
			t.Errorf("%s lacks classic or native buckets", name)
		}
	}
}

// An object of YAML or JSON controls no terminal either.
func TestObjectsEscapeForeignText(t *testing.T) {
	a := still(t, Options{Servers: Servers{Flags: map[string]string{"v": "\u009b31m, \u202e, \x1b[2J"}}})
	for _, media := range []string{mediaJSON, mediaYAML} {
		w := probe(a.handler(), "/flagz", media+";as=Flagz;v=v1beta1;g=config.k8s.io")
		if b := w.Body.String(); w.Code != http.StatusOK ||
			strings.ContainsFunc(b, func(r rune) bool { return r != '\n' && !unicode.IsGraphic(r) }) {
			t.Errorf("%d %q", w.Code, b)
		}
	}
}

func TestRootListsPages(t *testing.T) {
	a := still(t, Options{})
	for path, want := range map[string]int{"/": http.StatusOK, "/none": http.StatusNotFound} {
		w := httptest.NewRecorder()
		a.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want || (want == http.StatusOK) != strings.Contains(w.Body.String(), "\n/metrics\n") {
			t.Errorf("%s: %d\n%s", path, w.Code, w.Body)
		}
	}
}
