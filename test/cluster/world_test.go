package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// The cluster that all tests share.
var (
	box   *sandbox.Cluster
	plane control
)

// The ports of its API servers.
const first, second = controlplane.First, controlplane.Second

// control is the control plane, in the client outside's namespace.
type control struct{ *controlplane.Plane }

// api queries one of its API servers.
func (c control) api(port int, method, path string, body, into any) error {
	return c.Call(context.Background(), port, method, path, body, into)
}

// must queries the first API server, and must succeed.
func (c control) must(t testing.TB, method, path string, body, into any) {
	t.Helper()
	if err := c.api(first, method, path, body, into); err != nil {
		t.Fatal(err)
	}
}

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	for _, v := range []string{"CONTROL_PLANE", "FAIRLEAD"} {
		if _, err := os.Stat(os.Getenv(v)); err != nil {
			return 1, fmt.Errorf("%s must be the path of a file: %w: run `make -C test/cluster test`, which builds it", v, err)
		}
	}
	dir, err := os.MkdirTemp("", "fairlead-cluster-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	imageDir = filepath.Join(dir, "image")
	if box, err = sandbox.Up(context.Background(), sandbox.Options{Objects: machines(), Serve: true}); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, box.Down()) }()
	defer leaveInTime(dir)()
	begin := time.Now()
	external := box.External()
	four := external.Addresses[slices.IndexFunc(external.Addresses, netip.Addr.Is4)]
	plane.Plane, err = controlplane.Start(context.Background(),
		controlplane.Options{Program: os.Getenv("CONTROL_PLANE"), Host: external, Address: four, Dir: dir})
	defer plane.Close()
	if err == nil {
		err = errors.Join(plane.StartControllers(), furnish())
	}
	if err != nil {
		return 1, fmt.Errorf("%w\n%s", err, plane.Logs())
	}
	fmt.Printf("control plane ready after %v\n", time.Since(begin).Round(10*time.Millisecond))
	return m.Run(), nil
}

// leaveInTime takes everything down before Go's own limit, which ends the process on the spot, and on a signal. It
// returns a function that calls that off.
func leaveInTime(dir string) (off func()) {
	leave := func(why any) {
		fmt.Fprintln(os.Stderr, "cluster: ends early:", why)
		if plane.Plane != nil { // else what was started ends with this process
			plane.Close()
		}
		box.Down()
		os.RemoveAll(dir)
		os.Exit(1)
	}
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	var limit <-chan time.Time
	if d := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); d > 0 {
		limit = time.After(d - min(10*time.Second, d/4))
	}
	go func() {
		select {
		case s := <-signals:
			leave(s)
		case <-limit:
			leave("the time limit is near")
		case <-done:
		}
	}()
	return func() { close(done) }
}

// machines are two nodes and pods that answer with their names.
func machines() (l []source.Object) {
	for i, name := range []string{"a", "b"} {
		l = append(l, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{
			PodCIDR: fmt.Sprintf("10.128.%d.0/24", i+1), PodCIDRs: []string{fmt.Sprintf("10.128.%d.0/24", i+1)}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("172.18.0.%d", 11+i)}}}})
	}
	return append(l, pod("client", "a", "10.128.1.9"), pod("web-1", "a", web1), pod("web-2", "b", web2))
}

// The addresses of the pods that serve.
const web1, web2 = "10.128.1.11", "10.128.2.12"

func pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default",
		Labels: map[string]string{"app": strings.SplitN(name, "-", 2)[0]}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: "c", Image: "none", Ports: []corev1.ContainerPort{{ContainerPort: 8080, Protocol: corev1.ProtocolTCP}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}}
}

// furnish reports the API server of the machines, and what the agent may read.
func furnish() (err error) {
	for _, o := range machines() {
		err = errors.Join(err, plane.Create(context.Background(), o))
	}
	post := func(path string, body any) { err = errors.Join(err, plane.api(first, "POST", path, body, nil)) }
	for user, endpoints := range map[string]string{"fairlead": "endpointslices", "blind": "nothing"} {
		post("/apis/rbac.authorization.k8s.io/v1/clusterroles",
			map[string]any{"metadata": map[string]any{"name": "test-" + user}, "rules": []any{
				map[string]any{"apiGroups": []string{""}, "resources": []string{"services", "nodes", "pods"},
					"verbs": []string{"list", "watch"}},
				map[string]any{"apiGroups": []string{"networking.k8s.io"}, "resources": []string{"servicecidrs"},
					"verbs": []string{"list", "watch"}},
				map[string]any{"apiGroups": []string{"discovery.k8s.io"}, "resources": []string{endpoints},
					"verbs": []string{"list", "watch"}}}})
		post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
			map[string]any{"metadata": map[string]any{"name": "test-" + user},
				"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "test-" + user},
				"subjects": []any{map[string]any{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}}})
	}
	return err
}

// service makes a Service of the pods' port, and an EndpointSlice of endpoints where some are given, and returns its
// address.
func service(t testing.TB, name string, endpoints ...string) netip.AddrPort {
	t.Helper()
	var made corev1.Service
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}
	if endpoints == nil {
		s.Spec.Selector = map[string]string{"app": "web"}
	}
	plane.must(t, "POST", "/api/v1/namespaces/default/services", s, &made)
	if endpoints != nil {
		plane.must(t, "POST", sliceList, slice(name, endpoints...), nil)
	}
	t.Cleanup(func() {
		plane.must(t, "DELETE", "/api/v1/namespaces/default/services/"+name, nil, nil)
		if endpoints != nil {
			plane.must(t, "DELETE", sliceList+"/"+name, nil, nil)
		}
	})
	return netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
}

const sliceList = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"

func slice(name string, endpoints ...string) *discoveryv1.EndpointSlice {
	port, none := int32(8080), ""
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &none, Port: &port}}}
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{e}})
	}
	return s
}

// patch returns the change that leaves a slice with these endpoints.
func patch(endpoints ...string) any {
	return map[string]any{"endpoints": slice("", endpoints...).Endpoints}
}

// running is an agent on node a.
type running struct {
	cmd   *exec.Cmd
	exec  func(args ...string) *exec.Cmd // a command in its container, if it has one
	host  *sandbox.Host
	log   *safe
	web   *http.Client
	alive bool
}

// safe is a buffer that may be read while it is written.
type safe struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safe) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safe) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// startAgent starts the shipped agent on node a as a user, with further flags.
func startAgent(t testing.TB, user, mode string, flags ...string) *running {
	t.Helper()
	kubeconfig, err := plane.Kubeconfig(user, first)
	check(t, err)
	h, err := box.Node("a")
	check(t, err)
	args := []string{"run", "--kubeconfig", kubeconfig, "--node", "a", "--mode", mode, "--status-address",
		"127.0.0.1:10249"}
	return follow(t, h, exec.Command(os.Getenv("FAIRLEAD"), append(args, flags...)...))
}

// follow starts an agent by a command on a host. When the test ends, nothing of it is left in the kernel.
func follow(t testing.TB, h *sandbox.Host, cmd *exec.Cmd) *running {
	t.Helper()
	a := &running{host: h, log: &safe{}, alive: true, cmd: cmd}
	a.cmd.Stdout, a.cmd.Stderr = a.log, a.log
	check(t, h.Do(a.cmd.Start))
	a.web = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = h.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		}}}
	t.Cleanup(func() {
		a.kill(unix.SIGTERM)
		if t.Failed() {
			t.Logf("the agent's log:\n%s", a.log)
		}
		clean := exec.Command(os.Getenv("FAIRLEAD"), "clean")
		var out bytes.Buffer
		clean.Stdout, clean.Stderr = &out, &out
		if err := errors.Join(h.Do(clean.Start), clean.Wait()); err != nil {
			t.Errorf("clean: %v: %s", err, &out)
		}
	})
	return a
}

// kill ends the agent.
func (a *running) kill(s os.Signal) {
	if a.alive {
		a.cmd.Process.Signal(s)
		a.cmd.Wait()
		a.alive = false
	}
}

// state queries the agent for its status.
func (a *running) state() (s agent.State, err error) {
	r, err := a.web.Get("http://127.0.0.1:10249/status")
	if err != nil {
		return s, err
	}
	defer r.Body.Close()
	return s, json.NewDecoder(r.Body).Decode(&s)
}

// serving waits until the agent has the first state in the kernel.
func (a *running) serving(t testing.TB) {
	t.Helper()
	until(t, "the agent is ready", func() error {
		s, err := a.state()
		if err == nil && !s.Ready {
			err = fmt.Errorf("status: %+v", s)
		}
		return err
	})
}

// problem waits until the agent's status names a reason, and returns what it says; "" waits until there is none.
func (a *running) problem(t testing.TB, reason string) (p source.Problem) {
	t.Helper()
	until(t, "the agent's problem is "+reason, func() error {
		s, err := a.state()
		if err != nil {
			return err
		}
		for _, p = range s.Problems {
			if p.Reason == reason {
				return nil
			}
		}
		if reason == "" && len(s.Problems) == 0 {
			return nil
		}
		return fmt.Errorf("problems: %v", s.Problems)
	})
	return p
}

// fairlead runs a command on node a.
func fairlead(t testing.TB, args ...string) string {
	t.Helper()
	kubeconfig, err := plane.Kubeconfig("fairlead", first)
	check(t, err)
	h, err := box.Node("a")
	check(t, err)
	cmd := exec.Command(os.Getenv("FAIRLEAD"), append(args, "--kubeconfig", kubeconfig, "--node", "a")...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := errors.Join(h.Do(cmd.Start), cmd.Wait()); err != nil {
		t.Fatalf("fairlead %v: %v: %s", args, err, &out)
	}
	return out.String()
}

// request connects from a pod on node a and returns who answers.
func request(to netip.AddrPort) (pod string, err error) {
	h, err := box.Pod("default", "client")
	if err != nil {
		return "", err
	}
	return requestFrom(h, to)
}

// requestFrom connects from a host and returns the name of the pod that replies.
func requestFrom(h *sandbox.Host, to netip.AddrPort) (pod string, err error) {
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
	defer stop()
	err = h.Do(func() error {
		a, err := echo.Request(ctx, model.TCP, to, echo.Options{})
		pod = a.Pod
		return err
	})
	return pod, err
}

// reaches waits until connections come to a pod, and returns how long that took.
func reaches(t testing.TB, to netip.AddrPort, pod string) time.Duration {
	t.Helper()
	begin := time.Now()
	until(t, fmt.Sprintf("%s leads to %s", to, pod), func() error {
		got, err := request(to)
		if err == nil && got != "default/"+pod {
			err = fmt.Errorf("it leads to %s", got)
		}
		return err
	})
	return time.Since(begin)
}

// until tries until there is no error.
func until(t testing.TB, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it never came to be that %s: %v", what, err)
		}
	}
}

func check(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// traffic connects to a Service without end.
type traffic struct {
	stop  context.CancelFunc
	done  sync.WaitGroup
	count int
	fails []error
}

// flow starts traffic from a pod on node a.
func flow(to netip.AddrPort) *traffic {
	return flowOf(func() error {
		_, err := request(to)
		return err
	})
}

// flowOf starts traffic: one connection after another.
func flowOf(connect func() error) *traffic {
	ctx, stop := context.WithCancel(context.Background())
	f := &traffic{stop: stop}
	f.done.Go(func() {
		for ctx.Err() == nil {
			if err := connect(); err != nil {
				f.fails = append(f.fails, err)
			}
			f.count++
		}
	})
	return f
}

// end stops the traffic; no connection may have failed.
func (f *traffic) end(t testing.TB) {
	t.Helper()
	f.stop()
	f.done.Wait()
	if len(f.fails) > 0 || f.count == 0 {
		t.Errorf("%d of %d connections failed: %v", len(f.fails), f.count, errors.Join(f.fails...))
	}
	t.Logf("%d connections, %d failed", f.count, len(f.fails))
}

// openFlows is connections that stay open and are asked in turn, without a rest, until end.
type openFlows struct {
	traffic
	mu   sync.Mutex
	open []*echo.Flow
}

// newFlows begins to ask.
func newFlows() *openFlows {
	ctx, stop := context.WithCancel(context.Background())
	k := &openFlows{traffic: traffic{stop: stop}}
	k.done.Go(func() {
		failed := map[*echo.Flow]bool{}
		for ctx.Err() == nil {
			k.mu.Lock()
			open := k.open
			k.mu.Unlock()
			for i, h := range open {
				if failed[h] {
					continue
				}
				ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
				if _, err := h.Request(ctx); err != nil {
					k.fails, failed[h] = append(k.fails, fmt.Errorf("connection %d: %w", i, err)), true
				}
				stop()
				k.count++
			}
		}
		for _, h := range k.open {
			h.Close()
		}
	})
	return k
}

// begin opens one more connection, from a host.
func (k *openFlows) begin(t testing.TB, from *sandbox.Host, to netip.AddrPort) {
	t.Helper()
	check(t, from.Do(func() error {
		h, err := echo.Open(t.Context(), model.TCP, to, echo.Options{})
		if err == nil {
			k.mu.Lock()
			k.open = append(k.open[:len(k.open):len(k.open)], h)
			k.mu.Unlock()
		}
		return err
	}))
}
