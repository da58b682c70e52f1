package kube_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// faults are the ways in which a kind can't be read: each answers a request for it, until the request or the test ends.
var faults = map[string]func(t *testing.T, resource string, rw http.ResponseWriter, r *http.Request){
	"forbidden": func(t *testing.T, resource string, rw http.ResponseWriter, _ *http.Request) {
		status := apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", nil).ErrStatus
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		rw.Header().Set("Content-Type", "application/json")
		rw.WriteHeader(http.StatusForbidden)
		json.NewEncoder(rw).Encode(status)
	},
	"failing": func(_ *testing.T, _ string, rw http.ResponseWriter, _ *http.Request) {
		http.Error(rw, "etcd is away", http.StatusInternalServerError)
	},
	"garbage": func(_ *testing.T, _ string, rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		rw.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":`))
	},
	"hanging": func(t *testing.T, _ string, _ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-t.Context().Done():
		}
	},
}

// unread are the kinds, by their resource: whether all waits for the first list of it, or what policies decide alone.
var unread = []struct {
	resource string
	options  kube.Options
	all      bool
	kind     source.Kind
}{
	{"services", kube.Options{Kinds: policyKinds}, true, source.Service},
	{"endpointslices", kube.Options{Kinds: policyKinds}, true, source.EndpointSlice},
	{"pods", kube.Options{Kinds: policyKinds, Pods: true}, true, source.Pod}, // which have host ports
	{"pods", kube.Options{Pods: true}, true, source.Pod},
	{"pods", kube.Options{Kinds: policyKinds}, false, source.Pod},
	{"namespaces", kube.Options{Kinds: policyKinds}, false, source.Namespace},
	{"networkpolicies", kube.Options{Kinds: policyKinds}, false, source.NetworkPolicy},
	{"clusternetworkpolicies", kube.Options{Kinds: policyKinds}, false, source.ClusterNetworkPolicy},
	{"clusternetworkpolicies", kube.Options{Kinds: policyKinds, Pods: true}, false, source.ClusterNetworkPolicy},
}

// A kind that can't be read holds up what needs it, and nothing else: at first, and when it was read before.
func TestUnreadKindHoldsUpWhatNeedsIt(t *testing.T) {
	for name, fault := range faults {
		for _, u := range unread {
			of := "without pods"
			if u.options.Pods {
				of = "with pods"
			}
			t.Run(name+"/"+u.resource+"/"+of, func(t *testing.T) {
				t.Parallel()
				w := newFixture(t)
				ill := func(rw http.ResponseWriter, r *http.Request) bool {
					is := strings.HasSuffix(r.URL.Path, "/"+u.resource)
					if is {
						fault(t, u.resource, rw, r)
					}
					return is
				}
				w.ill(ill)
				objects := append(policyObjects(), service("web", 80), node("a"))
				objects[1].(*corev1.Pod).Spec.NodeName = "a"
				server := apiserver.New(objects...)
				w.serve(server)
				w.follow(u.options)
				reason := map[string]string{"forbidden": kube.Forbidden, "hanging": kube.Slow}[name]
				if reason == "" {
					reason = kube.Failing
				}
				w.reason(reason, u.resource)
				begun := slices.DeleteFunc([]string{"a", "deny", "isolate", "pod", "shop", "web:80"}, func(name string) bool {
					return name == map[source.Kind]string{source.Pod: "pod", source.Namespace: "shop",
						source.NetworkPolicy: "isolate", source.ClusterNetworkPolicy: "deny"}[u.kind]
				})
				w.until("what doesn't need it has begun", func() bool {
					if u.all {
						return w.last.Waiting && !w.begun
					}
					return slices.Equal(w.names(), begun) && slices.Equal(w.last.Unlisted, []source.Kind{u.kind})
				})
				w.ill(nil)
				w.serve(server) // which ends what hangs
				whole := func(service string) func() bool {
					names := []string{"a", "deny", "isolate", "pod", "shop", service}
					if u.options.Kinds == nil {
						names = []string{"a", "pod", service}
					}
					slices.Sort(names)
					return func() bool { return w.begun && len(w.last.Unlisted) == 0 && slices.Equal(w.names(), names) }
				}
				w.until("all is there", whole("web:80"))
				w.ill(ill)
				w.serve(server)
				server.Apply(del(objects[4]), put(service("other", 80)))
				is := "other:80"
				if u.kind == source.Service {
					is = "web:80"
				}
				w.until("the others are followed", whole(is))
			})
		}
	}
}
