package service

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/agent/subsystem/subsystemtest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// still is a subsystem without planes, and with loops that don't run: what it is told stays on its way.
func still(t *testing.T) *Services {
	t.Helper()
	chosen, err := mode.Of("")
	if err != nil {
		t.Fatal(err)
	}
	return New(Options{Mode: chosen, Resolve: resolve.Config{Node: "a"}, Late: time.Minute,
		Log: slog.New(slog.DiscardHandler)}, &Planes{})
}

// update passes changes on.
func (s *Services) update(changes ...source.Change) {
	u, d := subsystem.Update{Changes: changes, Batch: true}, model.Delta{}
	s.Decide(u, &d)
	s.Change(u, d)
}

// say reports objects.
func (s *Services) say(objects ...source.Object) {
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	s.update(changes...)
}

func get(h http.Handler, path string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

// webObjects are a Service with endpoints elsewhere, and a traffic policy that wants them here.
func webObjects() []source.Object {
	local, port, tcp, name, remote := corev1.ServiceInternalTrafficPolicyLocal, int32(80), corev1.ProtocolTCP, "", "b"
	return []source.Object{
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
				InternalTrafficPolicy: &local, Type: corev1.ServiceTypeClusterIP,
				Ports: []corev1.ServicePort{{Port: 80, Protocol: tcp}}}},
		&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Second).Format(
				time.RFC3339Nano)}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, NodeName: &remote}}},
	}
}

func TestHealth(t *testing.T) {
	s := still(t)
	h := s.Handler()
	expect := func(when string, healthz, livez int) {
		t.Helper()
		for path, want := range map[string]int{"/healthz": healthz, "/livez": livez} {
			code, body := get(h, path)
			var keys map[string]any
			if err := json.Unmarshal([]byte(body), &keys); err != nil || code != want {
				t.Errorf("%s: %s is %d, want %d: %s %v", when, path, code, want, body, err)
			}
			_, eligible := keys["nodeEligible"]
			for _, k := range []string{"lastUpdated", "currentTime", "healthy"} {
				if _, ok := keys[k]; !ok || eligible != (path == "/healthz") {
					t.Errorf("%s: %s lacks %s, or has too much: %s", when, path, k, body)
				}
			}
		}
	}
	expect("without a Node", 503, 200)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	s.say(node)
	expect("with a Node", 200, 200)
	s.say(webObjects()...)
	s.progress.step(t.Context(), func(context.Context) bool { return true })
	expect("in the kernel", 200, 200)
	if _, body := get(h, "/healthz"); !strings.Contains(body, `"IPv4":{"lastUpdated":`) ||
		!strings.Contains(body, `"IPv6":`) {
		t.Errorf("it says nothing of the families: %s", body)
	}
	tainted := node.DeepCopy()
	tainted.Spec.Taints = []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}
	s.say(tainted)
	expect("tainted", 503, 200)
	deleting := node.DeepCopy()
	deleting.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	s.say(deleting)
	expect("being deleted", 503, 200)
	s.update(source.Change{Key: source.KeyOf(node)})
	expect("deleted", 503, 200)
	s.say(node)
	expect("there again", 200, 200)
	s.say(webObjects()...)
	if s.progress.step(t.Context(), func(context.Context) bool { return false }) {
		t.Error("a kernel that takes nothing counts as synced")
	}
	expect("a change on its way", 200, 200)
	s.progress.oldest = s.progress.oldest.Add(-time.Hour)
	expect("a change on its way for too long", 503, 503)
	if _, healthy := s.progress.health(time.Now()); healthy {
		t.Error("healthCheckNodePort servers would say that all is well")
	}
	s.progress.step(t.Context(), func(context.Context) bool { return true })
	expect("in the kernel at last", 200, 200)
}

// values returns the values of all metrics of the Services.
func (s *Services) values(t *testing.T) map[string]float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(s.Metrics()...)
	return subsystemtest.Values(t, r)
}

func TestMetrics(t *testing.T) {
	s := still(t)
	s.say(webObjects()...)
	is := s.values(t)
	for name, want := range map[string]float64{
		"kubeproxy_sync_proxy_rules_service_changes_total": 1, "kubeproxy_sync_proxy_rules_service_changes_pending": 1,
		"kubeproxy_sync_proxy_rules_endpoint_changes_total": 1, "kubeproxy_sync_proxy_rules_endpoint_changes_pending": 1,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total IPv4 internal": 1,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total IPv4 external": 0,
		"kubeproxy_proxy_healthz_total 503":                                 0,
	} {
		if got, ok := is[name]; !ok || got != want {
			t.Errorf("%s is %v (%t), want %v", name, got, ok, want)
		}
	}
	s.progress.step(t.Context(), func(context.Context) bool { return true })
	here := "a"
	moved := webObjects()
	moved[1].(*discoveryv1.EndpointSlice).Endpoints[0].NodeName = &here
	s.say(moved...)
	s.progress.step(t.Context(), func(context.Context) bool { return true })
	get(s.Handler(), "/livez")
	is = s.values(t)
	for name, want := range map[string]float64{
		"kubeproxy_sync_proxy_rules_service_changes_total": 2, "kubeproxy_sync_proxy_rules_endpoint_changes_pending": 0,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total IPv4 internal": 0, "kubeproxy_proxy_livez_total 200": 1,
		"kubeproxy_sync_proxy_rules_duration_seconds IPv4": 2, "kubeproxy_sync_proxy_rules_duration_seconds IPv6": 2,
		"kubeproxy_sync_full_proxy_rules_duration_seconds IPv4":    1,
		"kubeproxy_sync_partial_proxy_rules_duration_seconds IPv4": 1,
		"kubeproxy_network_programming_duration_seconds IPv4":      2,
	} {
		if got, ok := is[name]; !ok || got != want {
			t.Errorf("later %s is %v (%t), want %v", name, got, ok, want)
		}
	}
	if sum := is["kubeproxy_network_programming_duration_seconds IPv4 sum"]; sum < 0 {
		t.Errorf("the cluster's clock is ahead, and a counter falls: %v", sum) // as webObjects have it
	}
}

// rejected is a loop that can't write what all parts need: the kernel rejects it.
type rejected struct {
	reconcile.Runner[model.ServicePart]
}

func (rejected) Serving() (bool, string) { return false, "refused" }

// Pods that run may be cut off while Services are not served.
func TestPodsAreLimitedWithoutServices(t *testing.T) {
	s := &Services{planes: &Planes{planes: []*mode.Plane{{Runner: rejected{}}}}}
	if r := s.Readiness(); r != (subsystem.Readiness{Why: "not serving: refused", Limited: true}) {
		t.Errorf("%+v", r)
	}
}
