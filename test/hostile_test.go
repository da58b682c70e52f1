package test_test

import (
	"bufio"
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
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

var onlyKinds = flag.String("hostile", "", "kinds of hostile Services that TestHostileServices has, "+
	"comma-separated; empty: all")

// The bounds of a cold start beside hostile Services.
const (
	servedWithin  = time.Second // later than alone
	machineSlack  = 2           // a busy machine is so many times slower
	mostMemory    = 300 << 20   // resident, at any time
	mostFiles     = 128         // descriptors more, after connections to loops
	runawayMemory = 2 << 30     // where the agent is killed
	hostilePace   = 100 * time.Millisecond
	hostileWait   = 30 * time.Second // until a start counts as failed
)

// coldStart is node b of the shop, with an agent that starts on an empty kernel.
type coldStart struct {
	t       *testing.T
	mode    string
	flags   []string
	kinds   []hostileKind // beside the shop
	dir     string
	cluster *sandbox.Cluster
	node    *sandbox.Host
	web     http.Client
	cmd     *exec.Cmd
	pid     int
	ended   chan struct{}
	log     bytes.Buffer
}

// Hostile Services of other tenants that are there when an agent starts neither delay nor harm the shop: it is served
// about as soon as alone, with bounded memory; each rejection is named, and no address is taken from others.
func TestHostileServices(t *testing.T) {
	kinds := slices.DeleteFunc(slices.Clone(hostileKinds), func(k hostileKind) bool {
		return *onlyKinds != "" && !slices.Contains(strings.Split(*onlyKinds, ","), k.name)
	})
	for _, mode := range possibleModes(t) {
		t.Run(mode, func(t *testing.T) {
			c := newColdStart(t, mode, nil)
			alone := c.start()
			c.stop()
			c = newColdStart(t, mode, kinds)
			latency := c.start()
			if most := machineSlack * (alone + servedWithin); latency > most {
				t.Errorf("served after %s beside hostile Services, alone after %s: want %s at most", latency, alone, most)
			}
			t.Logf("served after %s alone, %s beside hostile Services", alone, latency)
			c.ready()
			c.named()
			c.captured()
			c.loops()
			c.late()
			c.memory()
		})
	}
}

// possibleModes returns the modes that this kernel supports, of iptables both variants.
func possibleModes(t *testing.T) (l []string) {
	c := newColdStart(t, "", nil)
	for _, m := range mode.All() {
		if err := c.node.Do(func() error { return m.Probe(t.Context()) }); err != nil {
			t.Logf("mode %s is not supported here: %v", m.Name, err)
		} else if m.Name != "iptables" {
			l = append(l, m.Name)
		}
	}
	return l
}

// newColdStart makes the shop's sandbox anew with more pods, and the folder of objects that an agent is to start with.
func newColdStart(t *testing.T, mode string, kinds []hostileKind, pods ...source.Object) *coldStart {
	c := &coldStart{t: t, mode: mode, kinds: kinds, dir: t.TempDir()}
	if err := os.CopyFS(c.dir, os.DirFS("../examples/shop")); err != nil {
		t.Fatal(err)
	}
	c.write("fixture.yaml", fixtureYAML+documents(t, pods))
	objects, problems, err := manifest.Load(c.dir)
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	for _, k := range kinds {
		c.write(k.name+".yaml", documents(t, k.objects(k.namespace())))
	}
	c.cluster, err = sandbox.Up(t.Context(),
		sandbox.Options{Name: fmt.Sprintf("hostile%x", time.Now().UnixNano()%(1<<28)), Objects: objects, Serve: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.cluster.Down(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(c.stop)
	c.node = c.host("node b")
	c.web.Timeout = 5 * time.Second
	c.web.Transport = &http.Transport{DialContext: func(ctx context.Context, network, address string) (n net.Conn,
		err error) {
		err = c.node.Do(func() error { n, err = new(net.Dialer).DialContext(ctx, network, address); return err })
		return n, err
	}}
	return c
}

func (k hostileKind) namespace() string { return "evil-" + k.name }

// documents returns objects as YAML documents.
func documents(t *testing.T, objects []source.Object) string {
	var out bytes.Buffer
	for _, o := range objects {
		b, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "---\n%s\n", b)
	}
	return out.String()
}

// write writes a file of the source at once.
func (c *coldStart) write(name, text string) {
	next := filepath.Join(c.dir, ".next")
	err := os.WriteFile(next, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(next, filepath.Join(c.dir, name))
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// host returns "outside", "node NAME" or a pod, "namespace/name".
func (c *coldStart) host(name string) (h *sandbox.Host) {
	var err error
	if node, ok := strings.CutPrefix(name, "node "); ok {
		h, err = c.cluster.Node(node)
	} else if ns, pod, ok := strings.Cut(name, "/"); ok {
		h, err = c.cluster.Pod(ns, pod)
	} else {
		h = c.cluster.External()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return h
}

// start starts the agent and returns how long it takes until all of the shop is served.
func (c *coldStart) start() time.Duration {
	c.t.Helper()
	c.cmd = exec.Command(fairlead, append([]string{"run", "--source", c.dir, "--node", "b", "--mode", c.mode},
		c.flags...)...)
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	began := time.Now()
	if err := c.node.Do(c.cmd.Start); err != nil {
		c.t.Fatal(err)
	}
	cmd, ended := c.cmd, make(chan struct{})
	c.pid, c.ended = cmd.Process.Pid, ended
	go func() { cmd.Wait(); close(ended) }()
	ctx, cancel := context.WithTimeoutCause(c.t.Context(), hostileWait, fmt.Errorf("not served within %s", hostileWait))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	unserved := make([]string, len(shopQueries()))
	for i, q := range shopQueries() {
		wg.Go(func() {
			if !c.await(ctx, q) {
				unserved[i] = q.String()
			}
		})
	}
	go c.watch(ctx, stop)
	wg.Wait()
	latency := time.Since(began)
	if unserved = slices.DeleteFunc(unserved, func(s string) bool { return s == "" }); len(unserved) == 0 {
		return latency
	}
	memory, peak := c.resident()
	c.stop()
	c.t.Fatalf("mode %s: %v; not served: %s; %d MB resident, %d at most; the log ends with:\n%s",
		c.mode, context.Cause(ctx), strings.Join(unserved, ", "), memory>>20, peak>>20, lastLines(c.log.String(), 3))
	return 0
}

// watch ends ctx when the agent does, or takes more memory than the machine can spare.
func (c *coldStart) watch(ctx context.Context, stop func(error)) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.ended:
			stop(errors.New("the agent ended"))
			return
		case <-tick.C:
		}
		if now, _ := c.resident(); now > runawayMemory {
			stop(fmt.Errorf("the agent has %d MB resident", now>>20))
			return
		}
	}
}

func lastLines(text string, n int) string {
	l := strings.Split(strings.TrimSpace(text), "\n")
	l = l[max(0, len(l)-n):]
	for i := range l {
		l[i] = l[i][:min(len(l[i]), 300)]
	}
	return strings.Join(l, "\n")
}

// stop kills the agent.
func (c *coldStart) stop() {
	if c.cmd == nil {
		return
	}
	c.cmd.Process.Kill()
	<-c.ended
	c.web.CloseIdleConnections()
	c.cmd = nil
}

// query is asked of a Service, and answered by pods of one name.
type query struct {
	from  string
	proto model.Protocol
	to    string
	by    string // how the names of pods begin that may answer
}

func (q query) String() string { return fmt.Sprintf("%s -> %s/%s", q.from, q.to, q.proto) }

// shopQueries are one for each way to the shop that leads through node b.
func shopQueries() []query {
	return []query{
		{"shop/client", model.TCP, webIP + ":80", "shop/web-"},
		{"shop/client", model.TCP, cartIP + ":7000", "shop/cart-"},
		{"shop/client", model.UDP, "10.96.0.53:53", "shop/dns-"},
		{"node b", model.TCP, webIP + ":80", "shop/web-"},
		{"outside", model.TCP, "172.18.0.12:30080", "shop/web-"},
	}
}

// probe queries once and returns the pod that answers.
func (c *coldStart) probe(ctx context.Context, q query, patience time.Duration) (pod string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = c.host(q.from).Do(func() error {
		a, err := echo.Request(ctx, q.proto, netip.MustParseAddrPort(q.to), echo.Options{})
		pod = a.Pod
		return err
	})
	return pod, err
}

// await queries until there is an answer by a pod that may, and reports whether there was one.
func (c *coldStart) await(ctx context.Context, q query) bool {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		if pod, err := c.probe(ctx, q, hostilePace); err == nil && strings.HasPrefix(pod, q.by) {
			return true
		}
		<-tick.C
	}
	return false
}

// replies wants so many answers to a question, each by a pod that may.
func (c *coldStart) replies(q query, times int) {
	c.t.Helper()
	for range times {
		pod, err := c.probe(c.t.Context(), q, time.Second)
		if err != nil || !strings.HasPrefix(pod, q.by) {
			c.t.Errorf("%s: answered by %q, %v: want %s…", q, pod, err, q.by)
			return
		}
	}
}

// ready wants the agent to be ready and healthy, once also large Services are in the kernel: iptables-nft-restore takes
// 10 to 16 s for chains by the ten thousand.
func (c *coldStart) ready() {
	for _, url := range []string{"http://127.0.0.1:10249/readyz", "http://127.0.0.1:10256/healthz"} {
		within(c.t, 2*time.Minute, url+" is 200", func() bool {
			r, err := c.web.Get(url)
			if err != nil {
				return false
			}
			r.Body.Close()
			return r.StatusCode == http.StatusOK
		})
	}
}

// shownState is what fairlead show prints as JSON.
type shownState struct {
	Frontends []struct{ Service, Kernel string }
	Problems  []source.Problem
}

// status returns the agent's page /status.
func (c *coldStart) status() (s agent.State, err error) {
	r, err := c.web.Get("http://127.0.0.1:10249/status")
	if err != nil {
		return s, err
	}
	defer r.Body.Close()
	err = json.NewDecoder(r.Body).Decode(&s)
	return s, err
}

// named wants a problem for each hostile Service of which not all is served, in /status and in what show prints.
func (c *coldStart) named() {
	status, err := c.status()
	if err != nil {
		c.t.Errorf("the page /status: %v", err)
	}
	var shown shownState
	show := exec.Command(fairlead, "show", "--source", c.dir, "--node", "b", "--mode", c.mode, "-o", "json")
	var out, errs bytes.Buffer
	show.Stdout, show.Stderr = &out, &errs
	err = c.node.Do(show.Run)
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &shown)
	}
	if err != nil {
		c.t.Errorf("fairlead show: %v: %.300s", err, &errs)
	}
	served := map[string]int{}
	for _, f := range shown.Frontends {
		name, _, _ := strings.Cut(f.Service, ":")
		if !strings.HasPrefix(f.Kernel, "lacks") {
			served[name]++
		}
	}
	for _, k := range c.kinds {
		for _, o := range k.objects(k.namespace()) {
			s, ok := o.(*corev1.Service)
			name := o.GetNamespace() + "/" + o.GetName()
			if !ok || k.mayPass || k.mayFit && served[name] == len(s.Spec.Ports)*(1+len(s.Spec.ExternalIPs)) {
				continue
			}
			for where, problems := range map[string][]source.Problem{"/status": status.Problems,
				"fairlead show": shown.Problems} {
				if !slices.ContainsFunc(problems, func(p source.Problem) bool { return isOf(p.Object, s) }) {
					c.t.Errorf("%s names no problem of %s, %d of its frontends are served", where, name, served[name])
				}
			}
		}
	}
}

// isOf reports whether a problem's object is a Service or one of its slices.
func isOf(k source.Key, s *corev1.Service) bool {
	return k.Namespace == s.Namespace && (k.Name == s.Name || k.Kind == source.EndpointSlice &&
		strings.HasPrefix(k.Name, s.Name+"-"))
}

// captured wants the addresses of others to lead where they did.
func (c *coldStart) captured() {
	for _, from := range []string{"shop/client", "node b", "outside"} {
		for i, ip := range webPods {
			c.replies(query{from, model.TCP, ip + ":8080", fmt.Sprintf("shop/web-%d", i+1)}, 4)
		}
		for i, ip := range apiEndpoints {
			c.replies(query{from, model.TCP, ip + ":6443", fmt.Sprint("kube-system/apiserver-",
				[]string{"a", "b"}[i])}, 4)
		}
		if from == "outside" { // its packets to ClusterIPs go to node a, which has no agent
			continue
		}
		c.replies(query{from, model.TCP, webIP + ":80", "shop/web-"}, 12)
		c.replies(query{from, model.TCP, "10.96.0.1:443", "kube-system/apiserver-"}, 12)
		for _, ip := range []string{webIP, cartIP} {
			if pod, err := c.probe(c.t.Context(), query{from: from, proto: model.TCP, to: ip + ":81"},
				hostilePace); err == nil {
				c.t.Errorf("%s -> %s:81 is answered by %s: the ClusterIP is another Service's", from, ip, pod)
			}
		}
	}
}

// loops connects to Services that are endpoints of each other, and wants the agent to be none the worse for it.
func (c *coldStart) loops() {
	before := c.files()
	for _, k := range c.kinds {
		if !slices.Contains([]string{"self", "mutual", "cross"}, k.name) {
			continue
		}
		for _, o := range k.objects(k.namespace()) {
			s, ok := o.(*corev1.Service)
			if !ok {
				continue
			}
			for _, p := range s.Spec.Ports {
				proto := map[corev1.Protocol]model.Protocol{corev1.ProtocolTCP: model.TCP,
					corev1.ProtocolUDP: model.UDP}[p.Protocol]
				q := query{from: "shop/client", proto: proto, to: fmt.Sprintf("%s:%d", s.Spec.ClusterIP, p.Port)}
				if pod, err := c.probe(c.t.Context(), q, 500*time.Millisecond); err == nil {
					c.t.Errorf("%s, which has no endpoint but itself, is answered by %s", q.to, pod)
				}
			}
		}
	}
	if after := c.files(); after > before+mostFiles {
		c.t.Errorf("the agent has %d descriptors after connections to loops, %d before", after, before)
	}
	for _, q := range shopQueries() {
		c.replies(q, 1)
	}
}

// files returns how many descriptors the agent has.
func (c *coldStart) files() int {
	l, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.pid))
	if err != nil {
		c.t.Error(err)
	}
	return len(l)
}

const lateYAML = `
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: late}
spec:
  clusterIP: 10.96.0.77
  clusterIPs: [10.96.0.77]
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: late-1, labels: {kubernetes.io/service-name: late}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.128.1.10], conditions: {ready: true}}]
`

// late adds a Service, which must be served too.
func (c *coldStart) late() {
	q := query{"shop/client", model.TCP, "10.96.0.77:80", "shop/web-1"}
	began := time.Now()
	c.write("late.yaml", lateYAML)
	eventually(c.t, "a Service that is added later is served", func() bool {
		pod, err := c.probe(c.t.Context(), q, hostilePace)
		return err == nil && strings.HasPrefix(pod, q.by)
	})
	c.t.Logf("a later Service was served after %s", time.Since(began).Round(time.Millisecond))
}

// memory wants the agent's resident memory to have stayed within bounds.
func (c *coldStart) memory() {
	now, peak := c.resident()
	if c.t.Logf("%d MB resident, %d at most", now>>20, peak>>20); peak == 0 || peak > mostMemory {
		c.t.Errorf("the agent had %d MB resident, want %d at most", peak>>20, mostMemory>>20)
	}
}

// resident returns the agent's resident memory, now and at most, in bytes.
func (c *coldStart) resident() (now, peak int) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", c.pid))
	if err != nil {
		return 0, 0
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		l := strings.Fields(in.Text())
		if len(l) != 3 {
			continue
		}
		kb, _ := strconv.Atoi(l[1])
		switch l[0] {
		case "VmRSS:":
			now = kb << 10
		case "VmHWM:":
			peak = kb << 10
		}
	}
	return now, peak
}
