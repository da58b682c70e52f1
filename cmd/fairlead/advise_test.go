package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// adviseBy runs advise on an API server with objects, of which some requests are answered by answer, and returns what
// it prints. It must fail before it measures.
func adviseBy(t *testing.T, objects []source.Object, answer func(http.ResponseWriter, *http.Request) bool,
	args ...string) string {
	t.Helper()
	s := apiserver.New(objects...)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answer == nil || !answer(w, r) {
			s.ServeHTTP(w, r)
		}
	}))
	defer api.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig(api.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	text, code := command(t, append([]string{"advise", "--quick", "--kubeconfig", kubeconfig}, args...)...)
	if code != 1 {
		t.Errorf("exit status %d: %s", code, text)
	}
	return text
}

// What an API server answers wrongly is named before anything is measured.
func TestAdviseNamesWrongAnswers(t *testing.T) {
	objects := generate.Cluster(2, 1)
	on := func(resource string, f http.HandlerFunc) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "/"+resource) {
				return false
			}
			f(w, r)
			return true
		}
	}
	forbid := func(resource string) func(http.ResponseWriter, *http.Request) bool {
		return on(resource, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,`+
				`"message":"%s is forbidden"}`, resource)
		})
	}
	for name, c := range map[string]struct {
		answer func(http.ResponseWriter, *http.Request) bool
		args   []string
		want   []string
	}{
		"no policies": {forbid("networkpolicies"), nil, []string{"list networkpolicies.networking.k8s.io: ",
			"networkpolicies is forbidden", "let a ClusterRole allow the verb list on networkpolicies.networking.k8s.io"}},
		"policies are left out": {forbid("networkpolicies"), []string{"--policy-mode", "Ignore", "--node", "b"},
			[]string{`no Node "b" in the source: there are ["a"]`}},
		"no nodes": {func(w http.ResponseWriter, r *http.Request) bool {
			return forbid("nodes")(w, r) || on("services", func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, `{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
			})(w, r)
		}, nil, []string{"warning: not part of the measurement: ", "nodes is forbidden",
			"the Kubernetes API has no Service"}},
		"it vanishes": {on("endpointslices", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `{"kind":"EndpointSliceList"`)
		}), nil, []string{"list endpointslices.discovery.k8s.io: ", "EOF", "see whether it runs"}},
		"garbage": {on("services", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }), nil,
			[]string{"list services: ", "see whether the address is that of a Kubernetes API server"}},
	} {
		t.Run(name, func(t *testing.T) {
			text := adviseBy(t, objects, c.answer, append([]string{"--node", "a"}, c.args...)...)
			for _, s := range c.want {
				if !strings.Contains(text, s) {
					t.Errorf("%q is missing in: %s", s, text)
				}
			}
		})
	}
	text, code := command(t, "advise", "--quick", "--node", "a", "--kubeconfig", "/no/such/file")
	if code != 1 || !strings.Contains(text, "kubeconfig /no/such/file: ") {
		t.Errorf("exit status %d: %s", code, text)
	}
}

// What can't come to anything ends before it measures.
func TestAdviseRefusesAtOnce(t *testing.T) {
	empty, report := t.TempDir(), filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(filepath.Join(empty, "a.yaml"), []byte("kind: [Service\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--source", empty, "--report", report}, empty + " has no Service"},
		{[]string{"--source", empty}, "a.yaml"},
		{[]string{"--source", filepath.Join(empty, "none")}, "none: no such file"},
		{[]string{"--source", empty, "--output", "table"}, `invalid --output "table": use json`},
		{[]string{"--time", "1s"}, "invalid --time 1s: use at least 5s"},
		{[]string{"--source", empty, "--report", empty}, "--report can't be written: open " + empty + ": is a directory"},
		{[]string{"--source", empty, "--report", filepath.Join(empty, "none", "x.html")}, "its folder must exist"},
	} {
		if text, code := command(t, append([]string{"advise", "--node", "a"}, c.args...)...); code != 1 ||
			!strings.Contains(text, c.want) {
			t.Errorf("%q: exit status %d: %s, want %q", c.args, code, text, c.want)
		}
	}
	if _, err := os.Stat(report); err == nil {
		t.Error("a report that was not made is there")
	}
}

func TestWarnLost(t *testing.T) {
	l := []source.Problem{{Reason: manifest.KindNotRead}}
	for i := range 7 {
		l = append(l, source.Problem{Reason: "Broken", Object: source.Key{Kind: source.Service, Name: fmt.Sprint("s", i)}})
	}
	var b strings.Builder
	warnLost(&b, l)
	if s := b.String(); strings.Count(s, "\n") != 6 || !strings.Contains(s, "s4") || strings.Contains(s, "s5") ||
		!strings.Contains(s, "2 more; fairlead show names them") {
		t.Errorf("%s", s)
	}
}
