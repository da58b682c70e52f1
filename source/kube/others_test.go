package kube_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// otherServer answers in a server's place for kinds of policies that Fairlead doesn't evaluate: by path, whose query
// "continue" is behind a "?".
type otherServer map[string]string

func (o otherServer) answer(rw http.ResponseWriter, r *http.Request) bool {
	path := r.URL.Path
	if next := r.URL.Query().Get("continue"); next != "" {
		path += "?" + next
	}
	text, ok := o[path]
	if !ok {
		return false
	}
	rw.Header().Set("Content-Type", "application/json")
	if text == "" {
		rw.WriteHeader(http.StatusForbidden)
		text = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`
	}
	fmt.Fprint(rw, text)
	return true
}

// othersServed is a server with AdminNetworkPolicies, which can be listed as BaselineAdminNetworkPolicies can, Calico's
// policies in both groups, which can't be, and Cilium's, of which there are none.
func othersServed() otherServer {
	group := func(name string, versions ...string) string {
		for i, v := range versions {
			versions[i] = fmt.Sprintf(`{"groupVersion":"%s/%s","version":%[2]q}`, name, v)
		}
		return fmt.Sprintf(`{"name":%q,"versions":[%s]}`, name, strings.Join(versions, ","))
	}
	resources := func(names ...string) string {
		for i, n := range names {
			names[i] = fmt.Sprintf(`{"name":%q}`, n)
		}
		return `{"kind":"APIResourceList","resources":[` + strings.Join(names, ",") + `]}`
	}
	const admin, calico = "/apis/policy.networking.k8s.io/v1alpha1", "/apis/crd.projectcalico.org/v1"
	return otherServer{
		"/apis": `{"kind":"APIGroupList","groups":[` + strings.Join([]string{group("apps", "v1"),
			group("policy.networking.k8s.io", "v1beta1", "v1alpha1"), group("crd.projectcalico.org", "v1"),
			group("projectcalico.org", "v3"), group("cilium.io", "v2")}, ",") + "]}",
		admin: resources("adminnetworkpolicies", "baselineadminnetworkpolicies"),
		admin + "/adminnetworkpolicies": `{"kind":"PartialObjectMetadataList","metadata":{"continue":"more"},"items":[
			{"metadata":{"name":"a"}}]}`,
		admin + "/adminnetworkpolicies?more":       `{"items":[{"metadata":{"name":"b"}}]}`,
		admin + "/baselineadminnetworkpolicies":    `{"items":[]}`,
		calico:                                     resources("ippools", "networkpolicies", "globalnetworkpolicies"),
		calico + "/networkpolicies":                "",
		calico + "/globalnetworkpolicies":          `{"items":[{"metadata":{"name":"g"}}]}`,
		"/apis/projectcalico.org/v3":               resources("networkpolicies", "globalnetworkpolicies"),
		"/apis/cilium.io/v2":                       resources("ciliumnetworkpolicies"),
		"/apis/cilium.io/v2/ciliumnetworkpolicies": `{"items":[]}`,
	}
}

func TestOtherPoliciesAreFound(t *testing.T) {
	w := newFixture(t)
	w.serve(apiserver.New(append(policyObjects(), node("a"))...))
	served := othersServed()
	w.ill(served.answer)
	s := kube.New(kube.Options{Access: kube.Access{Kubeconfig: w.kubeconfig}, Node: "a", Kinds: policyKinds})
	load := func() (out []string) {
		t.Helper()
		_, problems, err := s.Load(t.Context(), false)
		check(t, err)
		for _, p := range problems {
			out = append(out, p.Reason+" "+p.Object.String())
		}
		return out
	}
	want := []string{"PolicyNotEvaluated AdminNetworkPolicy a", "PolicyNotEvaluated AdminNetworkPolicy b",
		"PoliciesNotListed NetworkPolicy.crd.projectcalico.org ",
		"PolicyNotEvaluated GlobalNetworkPolicy.crd.projectcalico.org g"}
	if got := load(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	served["/apis/crd.projectcalico.org/v1/globalnetworkpolicies"] = "no JSON" // one kind is no reason to pass over others
	if got := load(); !slices.Equal(got, want[:3]) {
		t.Errorf("without a list: got %q, want %q", got, want[:3])
	}
	served["/apis"] = "" // discovery is no reason to read nothing
	if got := load(); got != nil {
		t.Errorf("without discovery: %q", got)
	}
}

// AdminNetworkPolicies are a problem of the Node as long as there are any; the log has a line of other policies.
func TestOtherPoliciesAreAProblemOfTheNode(t *testing.T) {
	w := newFixture(t)
	w.serve(apiserver.New(append(policyObjects(), node("a"))...))
	served := othersServed()
	w.ill(served.answer)
	w.retry = 20 * time.Millisecond
	var log lines
	w.follow(kube.Options{Kinds: policyKinds, Log: slog.New(slog.NewTextHandler(&log, nil))})
	p := w.reason(kube.PoliciesNotEnforced, "3 policies of kinds that Fairlead doesn't evaluate: 2 AdminNetworkPolicy, "+
		"1 GlobalNetworkPolicy.crd.projectcalico.org; ", "fairlead policy convert")
	if want := (source.Key{Kind: source.Node, Name: "a"}); p.Object != want {
		t.Errorf("it is of %s, want %s", p.Object, want)
	}
	less := othersServed()
	less["/apis/policy.networking.k8s.io/v1alpha1/adminnetworkpolicies"] = `{"items":[]}`
	w.ill(less.answer)
	w.reason("")
	w.holds("a", "deny", "isolate", "pod", "shop")
	if got := log.text(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "1 policy of a kind") {
		t.Errorf("the log has %q", got)
	}
	without := othersServed()
	without["/apis/policy.networking.k8s.io/v1alpha1/adminnetworkpolicies"] = ""
	w.ill(without.answer)
	w.reason(kube.PoliciesNotEnforced, "may not list", "AdminNetworkPolicy")
}

// lines is a log that is written and read by several.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
