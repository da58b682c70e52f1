package nodes

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/sandbox/kubernetes"
)

var mode = flag.String("mode", "nftables", "mode of the agents")

// TestMain is also the program of the test's pods.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "serve":
		fmt.Println(serve())
	case len(os.Args) > 1 && os.Args[1] == "connect":
		connect(os.Args[2])
	case len(os.Args) > 1 && os.Args[1] == "page":
		fmt.Println(page(os.Args[2]))
	case len(os.Args) > 1 && os.Args[1] == "get":
		for _, protocol := range []string{"tcp", "udp"} {
			name, err := get(protocol, os.Args[2])
			fmt.Println(protocol, name, err)
		}
	default:
		os.Exit(m.Run())
	}
}

// serve answers at port 8080 with the host name, by HTTP and by UDP. At SIGTERM it goes on for a while, as a server
// does until all clients know that it ends.
func serve() error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGTERM)
	datagrams, err := net.ListenPacket("udp", ":8080")
	if err != nil {
		return err
	}
	go func() {
		for b := make([]byte, 64); ; {
			if _, from, err := datagrams.ReadFrom(b); err == nil {
				datagrams.WriteTo([]byte(name), from)
			}
		}
	}()
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) })
	go http.ListenAndServe(":8080", nil)
	<-ends
	time.Sleep(5 * time.Second)
	return nil
}

// get returns the host name that answers at an address.
func get(protocol, address string) (string, error) {
	c, err := net.DialTimeout(protocol, address, 2*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	if protocol == "udp" {
		b := make([]byte, 64)
		if _, err := c.Write([]byte("?")); err != nil {
			return "", err
		}
		n, err := c.Read(b)
		return string(b[:n]), err
	}
	fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	var name string
	_, err = fmt.Fscan(r.Body, &name)
	return name, err
}

// page returns what a URL has.
func page(url string) (string, error) {
	r, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	return string(text), err
}

// connect requests a URL over and over, each time by a new connection, and prints a line for each reply.
func connect(url string) {
	web := &http.Client{Timeout: 500 * time.Millisecond, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: (&net.Dialer{}).DialContext}}
	for ; ; time.Sleep(50 * time.Millisecond) {
		r, err := web.Get(url)
		if err != nil {
			fmt.Println("failed", err)
			continue
		}
		var name string
		fmt.Fscan(r.Body, &name)
		r.Body.Close()
		fmt.Println("ok", name)
	}
}

// objects are pods that serve, one on each node, behind a Service, and pods that connect to it by name, one on each.
var objects = [][2]string{
	{"/api/v1/namespaces/default/services", `
{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}}`},
	{"/apis/apps/v1/namespaces/default/deployments", `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}
      containers:
      - {name: c, image: "fairlead.dev/test:1", imagePullPolicy: Never, args: [serve],
         ports: [{containerPort: 8080, hostPort: 8081}, {containerPort: 8080, hostPort: 8081, protocol: UDP}],
         readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}}`},
	{"/apis/apps/v1/namespaces/default/daemonsets", `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - {name: c, image: "fairlead.dev/test:1", imagePullPolicy: Never, args: [connect, "http://web/"]}`},
}

const policies = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"

// denied admits no pod to the pods that serve.
const denied = `
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: denied},
 spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]}}`

func TestPodsServicesPoliciesAndDrain(t *testing.T) {
	name := fmt.Sprintf("test%d", os.Getpid())
	a := up(t, name, "--", "--mode", *mode)
	a.serve(t)
	a.must(t, "POST", policies, denied)
	a.lines(t, "the policy drops", func(recent []string) bool { return !contains(recent, "ok") })
	pods, err := a.pods(t.Context(), "web")
	check(t, err)
	for _, p := range pods {
		if !p.ready() {
			t.Errorf("pod %s is not ready: the policy stopped its node's kubelet", p.Metadata.Name)
		}
	}
	a.must(t, "DELETE", policies+"/denied", "")
	a.lines(t, "clients reach the pods again", func(recent []string) bool { return !contains(recent, "failed") })
	a.hostPorts(t)
	a.drain(t)
	down(t, name)
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("cluster down left %q", left)
	}
}

// What Fairlead is compared with works here too.
func TestBridgeAndKubeProxy(t *testing.T) {
	name := fmt.Sprintf("bridge%d", os.Getpid())
	a := up(t, name, "--network", "bridge", "--proxy", "kube-proxy")
	a.serve(t)
	down(t, name)
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("cluster down left %q", left)
	}
}

// serve makes objects and waits until the clients on both nodes reach both pods that serve.
func (a api) serve(t *testing.T) {
	t.Helper()
	for _, o := range objects {
		a.must(t, "POST", o[0], o[1])
	}
	var web []string
	until(t, "two pods are ready, one on each node", func(ctx context.Context) error {
		pods, err := a.pods(ctx, "web")
		web = nil
		nodes := map[string]bool{}
		for _, p := range pods {
			if p.ready() {
				web, nodes[p.Spec.NodeName] = append(web, "ok "+p.Metadata.Name), true
			}
		}
		if err == nil && (len(web) != 2 || len(nodes) != 2) {
			err = fmt.Errorf("ready are %q on %v", web, nodes)
		}
		return err
	})
	a.lines(t, "clients on each node reach both pods", func(recent []string) bool {
		return slices.Contains(recent, web[0]) && slices.Contains(recent, web[1]) && !contains(recent, "failed")
	})
}

// up starts a cluster of two nodes with further arguments. It goes down with the test.
func up(t *testing.T, name string, args ...string) api {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	check(t, err)
	image := filepath.Join(t.TempDir(), "image.tar")
	check(t, kubernetes.WriteImage(image, "fairlead.dev/test:1", self))
	t.Cleanup(func() { down(t, name) })
	args = append([]string{"cluster", "up", "--name", name, "--nodes", "2", "--image", image}, args...)
	out, err := exec.Command(fairlead(t), args...).CombinedOutput()
	t.Logf("%s", out)
	check(t, err)
	a := dial(t, name)
	a.printed = string(out)
	return a
}

func down(t *testing.T, name string) {
	t.Helper()
	if out, err := exec.Command(fairlead(t), "cluster", "down", "--name", name).CombinedOutput(); err != nil {
		t.Errorf("cluster down: %v: %s", err, out)
	}
}

func fairlead(t *testing.T) string {
	t.Helper()
	return built(t, "FAIRLEAD")
}

// built returns the path of a file that the Makefile builds, which a variable has.
func built(t *testing.T, variable string) string {
	t.Helper()
	path := os.Getenv(variable)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s must be a file's path: %v: run `make test-cluster-nodes`, which builds it", variable, err)
	}
	return path
}

// leftovers returns what there is of a cluster: namespaces, cgroups, files, processes.
func leftovers(t *testing.T, name string) (l []string) {
	t.Helper()
	for _, pattern := range []string{"/run/netns/" + name + "-*", "/run/fairlead/sandbox/" + name + "*",
		"/var/lib/fairlead/clusters/" + name, "/sys/fs/cgroup/fairlead-" + name + "-*",
		"/sys/fs/cgroup/*/fairlead-" + name + "-*"} {
		found, err := filepath.Glob(pattern)
		check(t, err)
		l = append(l, found...)
	}
	if all, err := os.ReadDir("/var/lib/fairlead/clusters"); err == nil && len(all) == 0 {
		l = append(l, "/var/lib/fairlead/clusters")
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	check(t, err)
	for _, p := range processes {
		if text, err := os.ReadFile(p); err == nil && strings.Contains(string(text), "/clusters/"+name) {
			l = append(l, string(text))
		}
	}
	return l
}

// lines waits until a condition holds for the latest lines that each client on a node has printed.
func (a api) lines(t *testing.T, what string, holds func(recent []string) bool) {
	t.Helper()
	until(t, what, func(ctx context.Context) error {
		clients, err := a.pods(ctx, "client")
		if err == nil && len(clients) != 2 {
			err = fmt.Errorf("there are %d clients", len(clients))
		}
		for _, p := range clients {
			text, failed := a.call(ctx, "GET", "/api/v1/namespaces/default/pods/"+p.Metadata.Name+"/log?tailLines=10", "")
			recent := strings.Split(strings.TrimSpace(string(text)), "\n")
			if failed == nil && (len(recent) < 10 || !holds(recent)) {
				failed = fmt.Errorf("client on node %s prints %q", p.Spec.NodeName, recent)
			}
			err = errors.Join(err, failed)
		}
		return err
	})
}

func contains(lines []string, start string) bool {
	return slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, start) })
}

// until tries until there is no error.
func until(t *testing.T, what string, try func(context.Context) error) {
	t.Helper()
	begin := time.Now()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	for {
		err := try(ctx)
		if err == nil {
			t.Logf("%s after %s", what, time.Since(begin).Round(10*time.Millisecond))
			return
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("it never came to be that %s: %v", what, err)
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
