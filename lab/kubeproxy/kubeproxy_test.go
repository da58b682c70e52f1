package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/source"
)

// asFake makes this test's program a kube-proxy for what Start and Clean need of one.
const asFake = "FAIRLEAD_FAKE_KUBE_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asFake) == "" {
		os.Exit(m.Run())
	}
	if err := fake(os.Args[1:]); err != nil {
		fmt.Println("fake:", err)
		os.Exit(1)
	}
}

// fake queries the API server for its Node, says what it found around it, and serves metrics, which show a sync from
// the third look on, until it is told to end. It leaves a child behind.
func fake(args []string) error {
	if args[0] == "--cleanup" {
		return os.WriteFile(filepath.Join(filepath.Dir(args[2]), "cleaned"), nil, 0o644)
	}
	var c configuration
	text, err := os.ReadFile(args[1])
	if err := errors.Join(err, yaml.UnmarshalStrict(text, &c)); err != nil {
		return err
	}
	server, err := os.ReadFile(c.ClientConnection["kubeconfig"])
	if err != nil {
		return err
	}
	_, url, _ := strings.Cut(string(server), `server: "`)
	url, _, _ = strings.Cut(url, `"`)
	node, err := http.Get(url + "/api/v1/nodes/" + c.HostnameOverride)
	if err != nil {
		return err
	}
	if node.StatusCode != http.StatusOK {
		return fmt.Errorf("node %s: %s", c.HostnameOverride, node.Status)
	}
	iptables, _ := exec.LookPath("iptables")
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		return err
	}
	fmt.Println("lock", os.Getenv("XTABLES_LOCKFILE"))
	fmt.Println("iptables", iptables)
	fmt.Println("child", child.Process.Pid)
	l, err := net.Listen("tcp", c.MetricsBindAddress)
	if err != nil {
		return err
	}
	scrapes := 0
	go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if scrapes++; scrapes > 2 {
			fmt.Fprintf(w, "# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge\n"+
				"kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} %f\n", float64(time.Now().UnixMicro())/1e6)
		}
		if scrapes > 4 {
			io.WriteString(w, "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram\n"+
				"kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family=\"IPv4\"} "+
				"0.001\nkubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1\n")
		}
	}))
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGTERM)
	<-end
	return nil
}

// space makes a namespace with its loopback up and some addresses on it.
func space(t *testing.T, addrs ...string) *netns.Namespace {
	t.Helper()
	ns := netnstest.New(t)
	c, err := link.Dial(ns)
	check(t, err)
	defer c.Close()
	check(t, c.Up(1))
	for _, a := range addrs {
		check(t, c.AddAddress(1, netip.PrefixFrom(netip.MustParseAddr(a), 32)))
	}
	return ns
}

func check(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

var nodeA = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}

// options are for a fake kube-proxy in a namespace of its own.
func options(t *testing.T) Options {
	t.Helper()
	t.Setenv(asFake, "1")
	ns := space(t)
	self, err := os.Executable()
	check(t, err)
	return Options{Binary: self, Mode: NFTables, Namespace: ns, Node: "a", Dir: filepath.Join(t.TempDir(), "kp")}
}

func TestStartMeasureStopClean(t *testing.T) {
	o := options(t)
	ctx := deadline(t)
	p, cold, err := NewNode(ctx, o, nodeA)
	check(t, err)
	if cold.Wall <= 0 || cold.Sync != time.Millisecond || cold.Resident <= 0 || cold.Peak < cold.Resident {
		t.Errorf("cold sync: %+v", cold)
	}
	said := words(t, o)
	if said["lock"] != o.path("xtables.lock") {
		t.Errorf("it takes the lock %q", said["lock"])
	}
	child, err := strconv.Atoi(said["child"])
	check(t, err)
	if used, err := p.CPU(); used <= 0 || err != nil {
		t.Errorf("it used %v, %v", used, err)
	}
	check(t, unix.Kill(child, 0), p.Close())
	await(t, "the child to end", func() bool { return !alive(child) })
	if alive(p.child.PID) {
		t.Error("it lives on after Close")
	}
	check(t, Clean(ctx, o))
	if _, err := os.Stat(o.path("cleaned")); err != nil {
		t.Errorf("Clean did not run the program: %v", err)
	}
}

// words are what a fake has said, by the first word of the line.
func words(t *testing.T, o Options) map[string]string {
	t.Helper()
	b, err := os.ReadFile(o.path("log"))
	check(t, err)
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		first, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		m[first] = rest
	}
	return m
}

// alive reports whether a process is there and no zombie.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for limit := time.After(30 * time.Second); !is(); {
		select {
		case <-time.After(time.Millisecond):
		case <-limit:
			t.Fatal("waited in vain for ", what)
		}
	}
}

func TestVariantIsFirstInThePath(t *testing.T) {
	o := options(t)
	o.Mode, o.Variant = IPTables, Legacy
	p, _, err := NewNode(deadline(t), o, nodeA)
	check(t, err)
	check(t, p.Close())
	got := words(t, o)["iptables"]
	if to, err := os.Readlink(got); err != nil || filepath.Dir(got) != o.path("bin") ||
		filepath.Base(to) != "xtables-legacy-multi" {
		t.Errorf("iptables is %s -> %s, %v", got, to, err)
	}
}

func TestFailuresSayWhy(t *testing.T) {
	o := options(t)
	o.Node = "nobody"
	if _, _, err := NewNode(deadline(t), o, nodeA); err == nil || !strings.Contains(err.Error(), "node nobody: 404") {
		t.Errorf("a kube-proxy that ends by itself: %v", err)
	}
	o.Binary = "/nonexistent"
	if _, err := Start(deadline(t), o); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
	o = options(t)
	p, err := Start(deadline(t), o)
	check(t, err)
	defer p.Stop()
	short, cancel := context.WithTimeout(context.Background(), time.Nanosecond)
	defer cancel()
	if _, err := p.Ready(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no time to wait: %v", err)
	}
}

func TestConfiguration(t *testing.T) {
	o := Options{Mode: NFTables, Node: "n", Dir: t.TempDir(), Server: "http://127.0.0.1:1",
		MinSyncPeriod: 100 * time.Millisecond}
	check(t, o.write())
	got, err := os.ReadFile(o.path("config.yaml"))
	check(t, err)
	want := `apiVersion: kubeproxy.config.k8s.io/v1alpha1
clientConnection:
  kubeconfig: ` + o.path("kubeconfig") + `
clusterCIDR: 10.128.0.0/9
conntrack:
  maxPerCore: 0
  min: 0
  tcpCloseWaitTimeout: 0s
  tcpEstablishedTimeout: 0s
detectLocalMode: ClusterCIDR
healthzBindAddress: 127.0.0.1:10256
hostnameOverride: "n"
iptables:
  minSyncPeriod: 100ms
ipvs:
  minSyncPeriod: 100ms
kind: KubeProxyConfiguration
metricsBindAddress: 127.0.0.1:10249
mode: nftables
nftables:
  minSyncPeriod: 100ms
oomScoreAdj: 0
`
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestParseMetrics(t *testing.T) {
	text := `# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram
kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="+Inf"} 3
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 0.5
kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 3
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv6"} 7
kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"} 9
# TYPE kubeproxy_network_programming_duration_seconds histogram
kubeproxy_network_programming_duration_seconds_sum{ip_family="IPv4"} 1.25
kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"} 2
# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1.7e+09
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 1.8e+09
# TYPE kubeproxy_sync_proxy_rules_nftables_sync_failures_total counter
kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 4
`
	got, err := ParseMetrics([]byte(text))
	check(t, err)
	want := Metrics{Syncs: Times{3, 500 * time.Millisecond}, Programming: Times{2, 1250 * time.Millisecond},
		Last: time.Unix(1_700_000_000, 0), Failures: 4}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if _, err := ParseMetrics([]byte("kubeproxy_x{")); err == nil {
		t.Error("half a line was taken")
	}
}

func TestTimesOfAProcess(t *testing.T) {
	user, system, err := times([]byte("7 (a ) b) S 1 7 7 0 -1 4194560 10 20 0 0 100 20 3 4 20 0 9 0 500 1000 200"))
	if user != 1030*time.Millisecond || system != 240*time.Millisecond || err != nil {
		t.Errorf("%v, %v, %v", user, system, err)
	}
	const stat = "7 (a ) b) S 1 7 7 0 -1 4194560 10 20 0 0 100 20 3 4 20 0 9"
	if d, err := children([]byte(stat)); d != 70*time.Millisecond || err != nil {
		t.Errorf("of children: %v, %v", d, err)
	}
	if u, err := UsageOf(os.Getpid()); err != nil || u.Resident < 1<<20 || u.Peak < u.Resident {
		t.Errorf("of this process: %+v, %v", u, err)
	}
	if _, err := UsageOf(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of no process: %v", err)
	}
}

func FuzzTimes(f *testing.F) {
	f.Add([]byte("7 (a ) b) S 1 7 7 0 -1 4194560 10 20 0 0 100 20 3 4 20 0 9"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, stat []byte) { times(stat) })
}

// TestProbe has a forwarder in the place of a data plane: it hears of a change at once, and heeds it a little later.
func TestProbe(t *testing.T) {
	ns := space(t, "10.96.0.1", "10.64.0.2", "10.64.0.3")
	var l net.Listener
	check(t, ns.Do(func() (err error) {
		l, err = net.Listen("tcp4", "10.96.0.1:80")
		return err
	}))
	address := func(a string) netip.AddrPort { return netip.MustParseAddrPort(a + ":8080") }
	p, err := NewProbe(ns, ns, netip.MustParseAddrPort("10.96.0.1:80"),
		[2]netip.AddrPort{address("10.64.0.2"), address("10.64.0.3")})
	check(t, err)
	defer func() { check(t, p.Close()) }()
	var target atomic.Value
	target.Store(endpoint(p.Slice()))
	var forwarder sync.WaitGroup
	forwarder.Go(func() { forward(ns, l, &target) })
	defer forwarder.Wait()
	defer l.Close()
	ctx := deadline(t)
	check(t, p.Reach(ctx))
	const later = 30 * time.Millisecond
	for range 3 {
		elapsed, err := p.Move(ctx, func(o source.Object) error {
			s := o.(*discoveryv1.EndpointSlice)
			time.AfterFunc(later, func() { target.Store(endpoint(s)) })
			return nil
		})
		if err != nil || elapsed < later {
			t.Errorf("moved in %v, %v", elapsed, err)
		}
	}
	broken := errors.New("broken")
	if _, err := p.Move(ctx, func(source.Object) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("nothing was notified: %v", err)
	}
}

func endpoint(s *discoveryv1.EndpointSlice) string {
	return fmt.Sprintf("%s:%d", s.Endpoints[0].Addresses[0], *s.Ports[0].Port)
}

func forward(ns *netns.Namespace, l net.Listener, target *atomic.Value) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		ns.Do(func() error {
			out, err := net.Dial("tcp4", target.Load().(string))
			if err == nil {
				io.Copy(in, out)
				out.Close()
			}
			return err
		})
		in.Close()
	}
}
