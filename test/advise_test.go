package test_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// Advice is found for a cluster that a live API server has, which is only read. It counts how often endpoints change,
// and goes on where the server goes away meanwhile.
func TestAdviseByAPI(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: generate.Namespace(0), Name: "web",
		Labels: map[string]string{"app": "web"}}}
	pod.Spec.NodeName, pod.Status.Phase, pod.Status.PodIP = "a", corev1.PodRunning, "10.200.0.9"
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: "closed"}}
	policy.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	objects := generate.Cluster(31, 3)
	server := apiserver.New(append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: pod.Namespace}}, pod,
		policy)...)
	var gone atomic.Bool
	var mu sync.Mutex
	var written []string
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			mu.Lock()
			written = append(written, r.Method+" "+r.URL.Path)
			mu.Unlock()
		}
		if gone.Load() {
			panic(http.ErrAbortHandler)
		}
		server.ServeHTTP(w, r)
	}))
	defer api.Close()
	dir := t.TempDir()
	kubeconfig, page := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "advice.html")
	if err := os.WriteFile(kubeconfig, apiserver.Kubeconfig(api.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	run := exec.Command(fairlead, "advise", "--kubeconfig", kubeconfig, "--node", "a", "--mode", "nftables",
		"--policy-engine", "nftables", "--time", "6s", "--report", page, "-o", "json")
	run.Stdout, run.Stderr = &out, log
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- run.Wait() }()
	slice, n := objects[len(objects)-1].(*discoveryv1.EndpointSlice), 0
	defer run.Process.Kill()
	within(t, time.Minute, "rounds are measured", func() bool {
		o := slice.DeepCopy()
		n++
		o.Endpoints[0].Addresses = []string{fmt.Sprintf("10.201.%d.%d", n/250, n%250+1)}
		server.Apply(source.Change{Key: source.KeyOf(o), Object: o})
		b, _ := os.ReadFile(log.Name())
		return bytes.Contains(b, []byte("measuring")) || len(ended) > 0
	})
	gone.Store(true)
	api.CloseClientConnections()
	if err := <-ended; err != nil {
		b, _ := os.ReadFile(log.Name())
		t.Fatalf("%v: %s", err, b)
	}
	var got struct {
		Outcome, Recommended, Current any
		PerSecond                     float64 `json:"changes_per_second"`
		Remarks                       []string
		Cluster                       map[string]int
		Options                       []struct {
			Mode, Engine string
			Failed       int
			Figures      []struct{ ID string }
		}
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	if c := got.Cluster; c["services"] != 20 || c["policies"] != 1 || c["policies_of_the_pod"] != 1 ||
		c["pods_on_node"] != 1 {
		t.Errorf("the cluster is %v", c)
	}
	if got.Outcome == "unfit" || got.Outcome == "none" || fmt.Sprint(got.Current) != "map[engine:nftables mode:nftables]" {
		t.Errorf("%v: from %v to %v", got.Outcome, got.Current, got.Recommended)
	}
	for _, o := range got.Options {
		if o.Mode == "nftables" && (o.Failed > 0 || len(o.Figures) < 4) {
			t.Errorf("%+v", o)
		}
	}
	if got.PerSecond <= 0 || !strings.Contains(strings.Join(got.Remarks, " "), "Endpoints changed ") {
		t.Errorf("%v changes a second: %q", got.PerSecond, got.Remarks)
	}
	if len(written) > 0 {
		t.Errorf("it wrote to the API: %q", written)
	}
	if b, err := os.ReadFile(page); err != nil || !bytes.Contains(b, []byte("<svg")) {
		t.Errorf("the report: %d bytes, %v", len(b), err)
	}
}
