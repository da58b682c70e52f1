package kube_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source/kube"
)

// status answers with a failure as the API words it.
func status(code int, reason metav1.StatusReason, message string) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		rw.WriteHeader(code)
		json.NewEncoder(rw).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: message})
	}
}

// body answers with a text.
func body(media, text string) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", media)
		io.WriteString(rw, text)
	}
}

// Every wrong answer is an error that names the server, the kind, the reason and what to do; none is taken for a
// cluster without such objects.
func TestLoadNamesWrongAnswers(t *testing.T) {
	const media, elsewhere = "application/json", "see whether the address is that of a Kubernetes API server"
	forbidden := status(http.StatusForbidden, metav1.StatusReasonForbidden, `endpointslices is forbidden: User "x"`)
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"forbidden": {forbidden, "let a ClusterRole allow the verb list on endpointslices.discovery.k8s.io"},
		"credentials": {status(http.StatusUnauthorized, metav1.StatusReasonUnauthorized, "Unauthorized"),
			"renew the token or certificate"},
		"a page":          {body("text/html", "<html>Welcome</html>"), elsewhere},
		"no page":         {http.NotFound, elsewhere},
		"garbage":         {body(media, "\x00\xff\x17{"), elsewhere},
		"an empty object": {body(media, "{}"), elsewhere},
		"another kind": {body(media, `{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`),
			"the answer is not a list of endpointslices"},
		"an end in the middle": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", media)
			rw.Header().Set("Content-Length", "1000")
			io.WriteString(rw, `{"kind":"EndpointSliceList"`)
		}, "unexpected EOF: see whether it runs"},
		"an end before the answer": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
			"there was no whole answer in time: try again"}, // client-go tries again itself
		"no answer": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			"there was no whole answer in time: try again"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			w.serve(apiserver.New(node("a"), service("x", 80)))
			w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, "/endpointslices") {
					return false
				}
				c.answer(rw, r)
				return true
			})
			w.loadFails(t, 2*time.Second, "list endpointslices.discovery.k8s.io: ", c.want)
		})
	}
	w := newFixture(t)
	w.loadFails(t, time.Minute, "list services: ", "connection refused: see whether it runs")
	w.secure(newAuthority(t).server(time.Hour), nil)
	w.serve(apiserver.New())
	w.loadFails(t, time.Minute, "https", "list services: ", "correct the certificate authority")
}

// loadFails reads once, which must fail with such an error.
func (w *fixture) loadFails(t *testing.T, within time.Duration, want ...string) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), within)
	defer stop()
	access := kube.Access{Kubeconfig: w.kubeconfig}
	if want[0] == "https" {
		access = kube.Access{Master: "https://" + w.address}
	}
	objects, _, err := kube.New(kube.Options{Access: access, Node: "a"}).Load(ctx, false)
	if err == nil {
		t.Fatalf("no error, and %d objects", len(objects))
	}
	for _, s := range append(want, "API server ", w.address) {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q is missing in: %v", s, err)
		}
	}
}

// What a node can do without is a problem by name, and the rest is read.
func TestLoadWithoutNodes(t *testing.T) {
	w := newFixture(t)
	w.serve(apiserver.New(node("a"), service("x", 80), &corev1.Pod{}))
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/nodes") {
			return false
		}
		status(http.StatusForbidden, metav1.StatusReasonForbidden, "nodes is forbidden")(rw, r)
		return true
	})
	access := kube.Access{Kubeconfig: w.kubeconfig}
	objects, problems, err := kube.New(kube.Options{Access: access, Node: "a"}).Load(t.Context(), false)
	if err != nil || len(objects) != 1 || len(problems) != 1 || problems[0].Reason != kube.Forbidden {
		t.Errorf("%d objects, problems %v, error %v", len(objects), problems, err)
	}
}
