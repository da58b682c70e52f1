package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
)

// fake is an API server with one namespace, and the kubelets of its nodes: they run pods' programs in this process.
type fake struct {
	mu       sync.Mutex
	pods     map[string]*running
	services map[string]*corev1.Service
	used     map[string]bool // verbs and resources
	forbid   string          // a resource, or a verb and a resource
	created  func(*corev1.Pod)
	wg       sync.WaitGroup
}

type running struct {
	*corev1.Pod
	log  *buffer
	stop func()
}

// buffer is a log that is written and read at once.
type buffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *buffer) text() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.Bytes())
}

func open(t *testing.T) (*fake, *API) {
	t.Helper()
	f := &fake{pods: map[string]*running{}, services: map[string]*corev1.Service{}, used: map[string]bool{}}
	s := httptest.NewServer(f)
	a, err := Open(&rest.Config{Host: s.URL}, "lab")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		for _, p := range f.pods {
			p.stop()
		}
		f.wg.Wait()
	})
	return f, a
}

// ServeHTTP implements http.Handler.
func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/namespaces/lab/"), "/")
	verb := map[string]string{"POST": "create", "DELETE": "delete", "GET": "get"}[r.Method]
	resource := path[0]
	if len(path) == 1 && verb == "get" {
		verb = "list"
	}
	if len(path) == 3 {
		resource += "/" + path[2]
	}
	f.used[verb+" "+resource] = true
	answer := func(code int, v any) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(v)
	}
	fits := func(m metav1.ObjectMeta) bool {
		for s := range strings.SplitSeq(r.URL.Query().Get("labelSelector"), ",") {
			if k, v, set := strings.Cut(s, "="); set && m.Labels[k] != v || m.Labels[k] == "" {
				return false
			}
		}
		return true
	}
	switch {
	case f.forbid == resource, f.forbid == verb+" "+resource:
		answer(http.StatusForbidden, metav1.Status{Message: "forbidden"})
	case verb == "list" && resource == "pods":
		var l corev1.PodList
		for _, p := range f.pods {
			if fits(p.ObjectMeta) {
				l.Items = append(l.Items, *p.Pod)
			}
		}
		answer(http.StatusOK, l)
	case verb == "list":
		var l corev1.ServiceList
		for _, s := range f.services {
			if fits(s.ObjectMeta) {
				l.Items = append(l.Items, *s)
			}
		}
		answer(http.StatusOK, l)
	case verb == "create" && resource == "services":
		var s corev1.Service
		json.NewDecoder(r.Body).Decode(&s)
		s.Spec.ClusterIP = "127.0.0.2"
		f.services[s.Name] = &s
		answer(http.StatusCreated, s)
	case verb == "create":
		var p corev1.Pod
		json.NewDecoder(r.Body).Decode(&p)
		f.run(&p)
		answer(http.StatusCreated, p)
	case resource == "services":
		delete(f.services, path[1])
		answer(http.StatusOK, metav1.Status{})
	case f.pods[path[1]] == nil:
		answer(http.StatusNotFound, metav1.Status{Message: path[1] + " not found"})
	case verb == "delete":
		f.pods[path[1]].stop()
		delete(f.pods, path[1])
		answer(http.StatusOK, metav1.Status{})
	case resource == "pods/log":
		w.Write(f.pods[path[1]].log.text())
	default:
		answer(http.StatusOK, f.pods[path[1]].Pod)
	}
}

// run runs a pod's program, as its kubelet would.
func (f *fake) run(p *corev1.Pod) {
	ctx, stop := context.WithCancel(context.Background())
	x := &running{Pod: p, log: &buffer{}, stop: stop}
	f.pods[p.Name] = x
	p.CreationTimestamp = metav1.Now()
	p.Status.Phase, p.Status.PodIP, p.Spec.NodeName = corev1.PodRunning, "127.0.0.1", "n1"
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{ImageID: "docker.io/fairlead@sha256:0123456789abcdef"}}
	if p.Spec.HostNetwork {
		p.Status.PodIP = "127.0.0.3"
	}
	if f.created != nil {
		f.created(p)
	}
	args := p.Spec.Containers[0].Args
	f.wg.Go(func() {
		var err error
		if args[2] == "serve" {
			var port uint16
			fmt.Sscan(args[4], &port)
			err = Serve(ctx, port, x.log)
		} else {
			var j Job
			if err = json.Unmarshal([]byte(args[3]), &j); err == nil {
				err = Measure(ctx, j, x.log)
			}
		}
		phase := corev1.PodSucceeded
		if err != nil {
			phase = corev1.PodFailed
			fmt.Fprintln(x.log, err)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		p.Status.Phase = phase
	})
}

// left returns how many objects there are.
func (f *fake) left() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pods) + len(f.services)
}

// options returns those of a short run, at ports that are free.
func options(t *testing.T) Options {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return Options{Image: "fairlead", Network: "bridge, kube-proxy",
		Placements: []Placement{OtherNode, SameNode, HostNet}, Samples: 50, Rounds: 5, Seed: 1,
		Port: uint16(min(l.Addr().(*net.TCPAddr).Port, 65000)), Out: t.TempDir(), Output: io.Discard}
}

func TestRun(t *testing.T) {
	f, a := open(t)
	dir, err := Run(t.Context(), a, options(t))
	if err != nil {
		t.Fatal(err)
	}
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, b := range r.Blocks {
		count[b.Arm]++
		if b.Measure != stream && b.Ops != 50 || b.Hist == "" {
			t.Errorf("%s of %s: %d operations", b.Measure, b.Arm, b.Ops)
		}
	}
	for _, arm := range []string{"across", "across-service", "same", "same-service", "host", "again"} {
		if count[arm] != 3*5 {
			t.Errorf("%s: %d blocks, want 15", arm, count[arm])
		}
	}
	if v := r.Manifest.Versions; !slices.Equal(v, []string{"network bridge, kube-proxy",
		"image fairlead, sha256:0123456789ab", "server on node n1"}) {
		t.Errorf("it was measured with %q", v)
	}
	if r.Manifest.Machine.Kernel == "" || r.Manifest.Outcome != "" {
		t.Errorf("machine %q, outcome %q", r.Manifest.Machine.Kernel, r.Manifest.Outcome)
	}
	reported(t, dir)
	if n := f.left(); n > 0 {
		t.Errorf("%d objects are left", n)
	}
	granted := map[string]bool{}
	for _, doc := range strings.Split(RBAC("lab", false), "---\n") {
		var role rbacv1.Role
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			for _, v := range rule.Verbs {
				for _, x := range rule.Resources {
					granted[v+" "+x] = true
				}
			}
		}
	}
	for u := range f.used {
		if !granted[u] {
			t.Errorf("the run did %s, which --print-rbac doesn't grant", u)
		}
	}
}

// Whatever ends a run, nothing of it is left in the cluster.
func TestNothingIsLeft(t *testing.T) {
	f, a := open(t)
	ctx, stop := context.WithCancel(t.Context())
	f.created = func(p *corev1.Pod) {
		if strings.Contains(p.Name, "-client-") {
			stop()
		}
	}
	if _, err := Run(ctx, a, options(t)); ctx.Err() == nil || err == nil || f.left() > 0 {
		t.Errorf("interrupted: %v; %d objects are left", err, f.left())
	}
	f.created = func(p *corev1.Pod) {
		p.Spec.Containers[0].Args = []string{"lab", "endpoint", "measure", "nonsense"}
	}
	if _, err := Run(t.Context(), a, options(t)); err == nil || f.left() > 0 ||
		!strings.Contains(err.Error(), "invalid character") {
		t.Errorf("the server's program fails: %v; %d objects are left", err, f.left())
	}
}

// What a killed run left is removed by the next; another run at work is not.
func TestSweep(t *testing.T) {
	f, a := open(t)
	dead := &run{Options: Options{Image: "x"}, api: a, id: "dead", owner: "1-1"}
	dead.host = "here"
	for _, p := range []*corev1.Pod{dead.server(), dead.hostServer()} {
		if err := a.create(t.Context(), "pods", p, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.create(t.Context(), "services", dead.service(), nil); err != nil {
		t.Fatal(err)
	}
	next := &run{api: a, host: dead.host, poll: time.Millisecond}
	if err := next.sweep(t.Context()); err != nil || f.left() > 0 {
		t.Errorf("%v; %d objects are left", err, f.left())
	}
	dead.host = "another machine"
	if err := a.create(t.Context(), "pods", dead.server(), nil); err != nil {
		t.Fatal(err)
	}
	if err := next.sweep(t.Context()); err == nil || !strings.Contains(err.Error(), "another machine") || f.left() != 1 {
		t.Errorf("a run of another machine: %v; %d objects are left", err, f.left())
	}
}

// A run that can't remove what it made says how to, also where it was interrupted.
func TestWhatIsLeftIsNamed(t *testing.T) {
	f, a := open(t)
	ctx, stop := context.WithCancel(t.Context())
	f.forbid = "delete pods"
	f.created = func(p *corev1.Pod) {
		if strings.Contains(p.Name, "-client-") {
			stop()
		}
	}
	_, err := Run(ctx, a, options(t))
	left, ok := errors.AsType[*LeftError](err)
	if !ok || !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	want := "kubectl delete pods,services -n lab -l " + labelRun + "=" + left.Run
	if !strings.Contains(left.Error(), want) ||
		!strings.Contains(left.Error(), "delete pods/fairlead-lab-") {
		t.Errorf("%q lacks %q, or the pod", left, want)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	f, a := open(t)
	run := func(name string, a *API, want ...string) {
		t.Helper()
		_, err := Run(t.Context(), a, options(t))
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %q", name, err, w)
			}
		}
	}
	f.forbid = "pods"
	run("forbidden", a, "list pods", "in namespace lab", "--print-rbac with the same")
	f.forbid = ""
	f.created = func(p *corev1.Pod) { *p = waitingFor(p, "ErrImageNeverPull") }
	run("an image that is never pulled", a, "fairlead-lab-server-", "ErrImageNeverPull: no such image", "--image")
	if n := f.left(); n > 0 {
		t.Errorf("%d objects are left", n)
	}
	answer := func(code int, text string) *API {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			io.WriteString(w, text)
		}))
		t.Cleanup(s.Close)
		a, err := Open(&rest.Config{Host: s.URL}, "lab")
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	run("unauthorized", answer(http.StatusUnauthorized, `{"message":"Unauthorized"}`), "Unauthorized", "renew the token")
	run("another server", answer(http.StatusOK, "<html>"), "<html>", "see whether it is a Kubernetes API server")
	gone := answer(http.StatusOK, "")
	gone.base = "http://127.0.0.1:1"
	run("nothing there", gone, "list pods", "http://127.0.0.1:1: connect: connection refused", "see whether it runs")
}

// waitingFor returns a pod that doesn't start for the reason.
func waitingFor(p *corev1.Pod, reason string) corev1.Pod {
	out := *p
	out.Status = corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "no such image"}}}}}
	return out
}

func TestWhatAPodWaitsFor(t *testing.T) {
	unscheduled := func(node string) corev1.Pod {
		p := corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes"}}}}
		if node != "" {
			p.Spec.NodeSelector = map[string]string{hostname: node}
		}
		return p
	}
	for name, c := range map[string]struct {
		pod   corev1.Pod
		want  string
		limit time.Duration
	}{
		"image":          {waitingFor(&corev1.Pod{}, "ImagePullBackOff"), "Off: no such image; --image", pullTimeout},
		"no such image":  {waitingFor(&corev1.Pod{}, "InvalidImageName"), "--image", 0},
		"network":        {waitingFor(&corev1.Pod{}, "ContainerCreating"), "ing: no such image", startTimeout},
		"no such node":   {unscheduled("n9"), "--nodes wants a node with the label " + hostname + "=n9", startTimeout},
		"one node alone": {unscheduled(""), "--placements same", startTimeout},
		"running":        {corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning}}, "", time.Hour},
	} {
		if got := waiting(&c.pod); !strings.Contains(got, c.want) || name == "network" && strings.Contains(got, "--image") {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if got := patienceWith(&c.pod, time.Hour); got != c.limit {
			t.Errorf("%s: it is waited for %v, want %v", name, got, c.limit)
		}
	}
}

func TestPodsHaveNoRights(t *testing.T) {
	_, a := open(t)
	r := &run{Options: Options{Image: "x", Nodes: []string{"n1", "n2"}}, api: a, id: "1"}
	client, err := r.client(OtherNode, Job{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []*corev1.Pod{r.server(), client} {
		c := p.Spec.Containers[0].SecurityContext
		if p.Spec.HostNetwork || *p.Spec.AutomountServiceAccountToken || *c.AllowPrivilegeEscalation ||
			!slices.Equal(c.Capabilities.Drop, []corev1.Capability{"ALL"}) || *p.Spec.ActiveDeadlineSeconds != lifetime {
			t.Errorf("%s: %+v", p.Name, p.Spec)
		}
	}
	if n := client.Spec.NodeSelector[hostname]; n != "n2" {
		t.Errorf("a client on another node is on %q", n)
	}
}

// Logs are others' text: only what was asked for is recorded.
func FuzzReadBlocks(f *testing.F) {
	j := Job{Targets: []Target{{Arm: "same"}}}
	f.Add([]byte(`{"measure":"rr","arm":"same","ops":1}` + "\n" + `{"measure":"rr","arm":"other","ops":1}`))
	f.Fuzz(func(t *testing.T, log []byte) {
		l, err := readBlocks(log, j)
		for _, b := range l {
			if b.Arm != "same" || b.Ops == 0 {
				t.Errorf("%+v is recorded: %v", b, err)
			}
		}
	})
}

// reported builds a run's report, which the raw files alone make again, byte for byte.
func reported(t *testing.T, dir string) {
	t.Helper()
	copied := t.TempDir()
	for _, name := range []string{result.ManifestFile, result.BlocksFile} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err := errors.Join(err, os.WriteFile(filepath.Join(copied, name), b, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(report.Build(dir), report.Build(copied)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{report.HTMLFile, report.MarkdownFile} {
		a, aerr := os.ReadFile(filepath.Join(dir, name))
		b, berr := os.ReadFile(filepath.Join(copied, name))
		if err := errors.Join(aerr, berr); err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s is another when made from the raw files alone: %v", name, err)
		}
	}
}
