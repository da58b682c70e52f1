package test_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/apiserver"
)

// dashboard has a series for each expression of kubernetes-mixin's "Kubernetes / Proxy" (dashboards/proxy.libsonnet),
// and for the alert KubeVersionMismatch. Of the codes of rest_client_requests_total it has 2xx.
var dashboard = []string{
	`kubeproxy_sync_proxy_rules_duration_seconds_count\{`,
	`kubeproxy_sync_proxy_rules_duration_seconds_bucket\{.*le=`,
	`kubeproxy_network_programming_duration_seconds_count\{`,
	`kubeproxy_network_programming_duration_seconds_bucket\{.*le=`,
	`rest_client_requests_total\{code="200",host="127.0.0.1:\d+",method="GET"\} [1-9]`,
	`rest_client_request_duration_seconds_bucket\{host="127.0.0.1:\d+",verb="POST",le="\+Inf"\} [1-9]`,
	`rest_client_request_duration_seconds_bucket\{host="127.0.0.1:\d+",verb="GET",le="\+Inf"\} [1-9]`,
	`process_resident_memory_bytes `,
	`process_cpu_seconds_total `,
	`go_goroutines `,
	`kubernetes_build_info\{.*git_version="v1\.37\.\d+\+fairlead",.*major="1",minor="37",.*\} 1`,
	`kubernetes_feature_enabled\{name="AllowServiceExternalIPs",stage=""\} 1`,
}

// eventLog is an API server that keeps the Events it was sent.
type eventLog struct {
	*apiserver.Server
	mu     sync.Mutex
	events []eventsv1.Event
}

// ServeHTTP implements http.Handler.
func (e *eventLog) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/events") {
		b, _ := io.ReadAll(r.Body)
		var v eventsv1.Event
		if json.Unmarshal(b, &v) == nil {
			e.mu.Lock()
			e.events = append(e.events, v)
			e.mu.Unlock()
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
	}
	e.Server.ServeHTTP(w, r)
}

// has reports whether an Event of a type and a reason is about an object, and its note holds a text.
func (e *eventLog) has(kind, reason string, about corev1.ObjectReference, text string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, v := range e.events {
		if v.Type == kind && v.Reason == reason && v.Regarding == about && strings.Contains(v.Note, text) {
			return true
		}
	}
	return false
}

// TestDashboardOfKubeProxyHasData runs an agent beside an API server: every panel of kube-proxy's common dashboard has
// data, and the cluster has the Events of kube-proxy's that tell of a start and of a health check that has no port.
func TestDashboardOfKubeProxyHasData(t *testing.T) {
	name := fmt.Sprintf("mtr-%x", time.Now().UnixNano()%(1<<28))
	ns, err := netns.New(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()
	must(t, "ip", "-n", name, "link", "set", "lo", "up")
	listen := func(address string) (l net.Listener) {
		if err := ns.Do(func() (err error) { l, err = net.Listen("tcp4", address); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	listen("0.0.0.0:30999")
	api := &eventLog{Server: apiserver.New(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 30999,
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}})}
	l := listen("127.0.0.1:0")
	server := &http.Server{Handler: api}
	go server.Serve(l)
	defer server.Close()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	run := exec.Command("ip", "netns", "exec", name, fairlead, "run", "--master", "http://"+l.Addr().String(),
		"--node", "a")
	run.Stdout, run.Stderr = log, log
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { run.Process.Kill(); run.Wait() }()
	web := &http.Client{Transport: &http.Transport{DialContext: func(_ context.Context, network,
		address string) (c net.Conn, err error) {
		err = ns.Do(func() (err error) { c, err = net.Dial(network, address); return err })
		return c, err
	}}}
	var missing []string
	complete := func() bool {
		r, err := web.Get("http://127.0.0.1:10249/metrics")
		if err != nil {
			missing = []string{err.Error()}
			return false
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		missing = nil
		for _, d := range dashboard {
			if !regexp.MustCompile(`(?m)^` + d).Match(text) {
				missing = append(missing, d)
			}
		}
		if len(missing) > 0 && r.StatusCode != http.StatusOK {
			missing = append(missing, string(text))
		}
		return len(missing) == 0
	}
	defer func() {
		if b, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("no series for %q; the log:\n%s", missing, b)
		}
	}()
	eventually(t, "all panels have data", complete)
	eventually(t, "the Events Starting and FailedToStartServiceHealthcheck are there", func() bool {
		return api.has("Normal", "Starting", corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: "a", UID: "a"},
			"nftables") && api.has("Warning", "FailedToStartServiceHealthcheck", corev1.ObjectReference{Kind: "Service",
			APIVersion: "v1", Namespace: "shop", Name: "web"}, "30999")
	})
}
