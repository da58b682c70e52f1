package attach

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/dataplane/network/attachment"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/sandbox/echo"
)

var plugin string // the built plugin's folder

func TestMain(m *testing.M) {
	flag.Parse()
	if plugin = *built; plugin != "" {
		os.Exit(m.Run())
	}
	folder, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	plugin = folder
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(folder, "fairlead-cni"),
		"fairlead.dev/fairlead/cmd/fairlead-cni")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintln(os.Stderr, string(out))
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(folder)
	os.Exit(code)
}

// node is a node with its agent.
type node struct {
	*testing.T
	ns          *netns.Namespace
	folder      string
	cni         *libcni.CNIConfig
	network     model.Network
	agent       *agent        // the process that runs, nil: none
	early       bool          // its line doesn't begin by itself
	pods        *held         // the agent is chained behind another plugin, and pods need this; nil: it connects them
	releasedFor time.Duration // of its agent; 0: the default
	statusWait  time.Duration // likewise

	ready atomic.Pointer[cni.Error] // why its agent attaches no pod, nil: it does
	calls atomic.Int32              // of that
}

// agent is what one process of the agent has.
type agent struct {
	plane  *attachment.Plane
	loop   *reconcile.Loop[model.NetworkPart, attachment.Key, attachment.Value]
	server *Server
	pool   *ipam.Pool
	stop   func()
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

var ranges = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:1::/64")}

func newNode(t *testing.T) *node {
	n := prepare(t)
	n.start("boot 1")
	return n
}

// newChained makes a node with an agent behind another plugin.
func newChained(t *testing.T, pods *held) *node {
	n := prepare(t)
	n.pods = pods
	n.start("boot 1")
	return n
}

// prepare makes a node without an agent.
func prepare(t *testing.T) *node {
	n := &node{T: t, ns: netnstest.New(t), folder: t.TempDir(), network: model.Network{Ranges: ranges, MTU: 1450},
		statusWait: time.Millisecond}
	n.must(sysctl.Set(n.ns, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
		sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"}))
	l, err := link.Dial(n.ns)
	n.must(err)
	defer l.Close()
	n.must(errors.Join(l.Up(1), l.AddAddress(1, netip.MustParsePrefix("192.168.0.1/32")),
		l.AddAddress(1, netip.MustParsePrefix("fd99::1/128"))))
	// Many goroutines share the client, and without one it would set its executor at its first use.
	executor := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{plugin}, filepath.Join(n.folder, "cache"), executor)
	t.Cleanup(func() {
		if n.agent != nil {
			n.agent.stop()
		}
	})
	return n
}

type testWriter struct{ *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// start starts the node's agent.
func (n *node) start(boot string) {
	n.Helper()
	a := &agent{}
	log := slog.New(slog.NewTextHandler(testWriter{n.T}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	n.must(n.ns.Do(func() (err error) {
		if a.pool, err = ipam.Open(filepath.Join(n.folder, "records"), boot); err != nil {
			return err
		}
		if a.plane, err = attachment.New(); err != nil {
			return err
		}
		a.loop = reconcile.New[model.NetworkPart, attachment.Key, attachment.Value](a.plane,
			reconcile.Options[model.NetworkPart]{Owner: model.NetworkOwner, Label: model.NetworkLabel, Log: log,
				Backoff: func(int) time.Duration { return 20 * time.Millisecond }})
		o := Options{Pool: a.pool, Line: a.loop, Differs: attachment.Differs, Log: log, ReleasedFor: n.releasedFor,
			StatusWait: n.statusWait, Ready: n.isReady}
		if n.pods != nil {
			o.Line, o.Pods, o.Chained = nothing{}, n.pods, true
		}
		a.server, err = New(o)
		return err
	}))
	if !n.early {
		a.server.Begin(nil, nil)
	}
	a.server.SetNetwork(&n.network)
	l, err := cni.Listen(filepath.Join(n.folder, "cni.sock"))
	n.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{a.loop.Run, a.server.Follow,
		func(ctx context.Context) error { return a.server.Serve(ctx, l) }} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				n.Error(err)
			}
		})
	}
	a.stop = func() {
		cancel()
		running.Wait()
		a.server.Close()
		a.plane.Close()
	}
	n.agent = a
	if !n.early && n.pods == nil {
		n.must(a.loop.Sync(n.Context()))
	}
}

// isReady returns why the agent attaches no pod.
func (n *node) isReady() error {
	n.calls.Add(1)
	if e := n.ready.Load(); e != nil {
		return e
	}
	return nil
}

// kill ends the agent and leaves everything as it is.
func (n *node) kill() {
	n.agent.stop()
	n.agent = nil
}

// list returns the network configuration of a version.
func (n *node) list(version string) *libcni.NetworkConfigList {
	n.Helper()
	l, err := libcni.ConfListFromBytes(fmt.Appendf(nil, `{"cniVersion":%q,"name":"fairlead","plugins":[
		{"type":"fairlead-cni","capabilities":{"bandwidth":true,"ips":true},"socket":%q,"records":%q}]}`, version,
		filepath.Join(n.folder, "cni.sock"), filepath.Join(n.folder, "records")))
	n.must(err)
	return l
}

// pod is a pod's network namespace.
type pod struct {
	ns        *netns.Namespace
	conf      *libcni.RuntimeConf
	addresses []netip.Addr
}

func (n *node) newPod(name string) *pod {
	n.Helper()
	ns := netnstest.New(n)
	return &pod{ns: ns, conf: &libcni.RuntimeConf{ContainerID: "c-" + name, NetNS: filepath.Join(netns.Dir, ns.Name),
		IfName: "eth0", Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"},
			{"K8S_POD_NAME", name}}}}
}

// do runs f where the runtime is: in the node's namespace.
func (n *node) do(f func() error) error { return n.ns.Do(f) }

// add attaches a pod as the runtime does.
func (n *node) add(version string, p *pod) error { return n.addTo(n.list(version), p) }

func (n *node) addTo(l *libcni.NetworkConfigList, p *pod) error {
	return n.do(func() error {
		r, err := n.cni.AddNetworkList(n.Context(), l, p.conf)
		if err != nil {
			return err
		}
		result, err := current.NewResultFromResult(r)
		if err != nil {
			return err
		}
		p.addresses = nil
		for _, ip := range result.IPs {
			a, _ := netip.AddrFromSlice(ip.Address.IP)
			p.addresses = append(p.addresses, a.Unmap())
		}
		return nil
	})
}

func (n *node) del(p *pod) error {
	return n.do(func() error { return n.cni.DelNetworkList(n.Context(), n.list("1.1.0"), p.conf) })
}

// request sends a request and returns the client that the server saw.
func (n *node) request(from *netns.Namespace, to netip.Addr) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(n.Context(), 3*time.Second)
	defer cancel()
	var reply echo.Reply
	err := from.Do(func() (err error) {
		reply, err = echo.Request(ctx, model.TCP, netip.AddrPortFrom(to, 80), echo.Options{})
		return err
	})
	return reply.Client.Addr(), err
}

// serve runs a server in a namespace, at once: an address that can't be bound yet is an error.
func (n *node) serve(ns *netns.Namespace) {
	n.Helper()
	n.must(ns.Do(func() error {
		s, err := echo.Serve("shop/x", []echo.Port{{Number: 80, Protocol: model.TCP}})
		if err == nil {
			n.Cleanup(func() { s.Close() })
		}
		return err
	}))
}

// left returns what the node has of attachments.
func (n *node) left() (l []string) {
	n.Helper()
	records, err := filepath.Glob(filepath.Join(n.folder, "records", "attachment-*"))
	n.must(err)
	var plane *attachment.Plane
	n.must(n.ns.Do(func() (err error) {
		plane, err = attachment.New()
		return err
	}))
	defer plane.Close()
	facts, err := plane.Read(n.Context())
	n.must(err)
	for _, f := range facts {
		l = append(l, f.Key.String())
	}
	return append(l, records...)
}

func TestPodsAreAttached(t *testing.T) {
	n := newNode(t)
	n.serve(n.ns)
	var pods []*pod
	for i, version := range cni.Versions {
		p := n.newPod(fmt.Sprint("web-", i))
		n.must(n.add(version, p))
		if len(p.addresses) != 2 {
			t.Fatalf("%v", p.addresses)
		}
		n.must(p.ns.Do(func() error { // no duplicate address detection
			s, err := net.Listen("tcp6", net.JoinHostPort(p.addresses[1].String(), "81"))
			if err == nil {
				s.Close()
			}
			return err
		}))
		n.serve(p.ns)
		pods = append(pods, p)
	}
	for _, from := range pods {
		for _, to := range pods {
			for i, a := range to.addresses {
				if saw, err := n.request(from.ns, a); err != nil || saw != from.addresses[i] {
					t.Errorf("%s to %s: from %s, %v", from.conf.ContainerID, a, saw, err)
				}
			}
		}
		for _, a := range []string{"192.168.0.1", "fd99::1"} {
			if _, err := n.request(from.ns, netip.MustParseAddr(a)); err != nil {
				t.Errorf("to the node: %v", err)
			}
		}
		for _, a := range from.addresses {
			if _, err := n.request(n.ns, a); err != nil {
				t.Errorf("from the node: %v", err)
			}
		}
	}
	for _, p := range pods {
		n.must(errors.Join(n.del(p), n.del(p)))
	}
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

func TestAddTwiceIsTheSame(t *testing.T) {
	n := newNode(t)
	p := n.newPod("web")
	n.must(n.add("1.1.0", p))
	was := p.addresses
	n.must(n.add("1.1.0", p))
	if fmt.Sprint(was) != fmt.Sprint(p.addresses) {
		t.Errorf("%v, then %v", was, p.addresses)
	}
	// The runtime's namespace is another one: a DEL was lost.
	q := n.newPod("web")
	n.must(n.add("1.1.0", q))
	n.serve(q.ns)
	if _, err := n.request(n.ns, q.addresses[0]); err != nil {
		t.Error(err)
	}
}

// TestInterfaceThatIsThere has ADDs whose interface another program has made, another container has, and one that was
// deleted has left.
func TestInterfaceThatIsThere(t *testing.T) {
	n := prepare(t)
	n.releasedFor = time.Hour
	n.start("boot 1")
	another, web := n.newPod("other"), n.newPod("web")
	l, err := link.Dial(another.ns)
	n.must(err)
	defer l.Close()
	bridge, err := l.AddBridge("eth0")
	n.must(errors.Join(err, n.add("1.1.0", web)))
	loopback, second := n.newPod("loopback"), *web
	loopback.conf.IfName = "lo"
	conf := *web.conf
	conf.ContainerID, second.conf = "c-second", &conf
	for _, p := range []*pod{another, loopback, &second} {
		var e *types.Error
		if err := n.add("1.1.0", p); !errors.As(err, &e) || e.Code != cni.CodeEnvironment || !strings.Contains(e.Msg,
			fmt.Sprintf("CNI_IFNAME is %q", p.conf.IfName)) || !strings.Contains(e.Msg, p.conf.NetNS) {
			t.Errorf("%s: %v", p.conf.ContainerID, err)
		}
		n.must(n.del(p))
	}
	n.must(another.ns.Do(func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil && i.Index != bridge {
			t.Errorf("another program's interface %d is %d now", bridge, i.Index)
		}
		return err
	}))
	n.serve(web.ns)
	if _, err := n.request(n.ns, web.addresses[0]); err != nil {
		t.Errorf("the container that has the interface: %v", err)
	}
	n.must(errors.Join(n.del(web), n.add("1.1.0", &second)))
	n.must(errors.Join(n.del(&second), n.add("1.1.0", &second)))
}

// TestResultsHaveMTU has the results of the versions that have it say the MTU of both ends.
func TestResultsHaveMTU(t *testing.T) {
	n := newNode(t)
	for version, want := range map[string]int{"1.0.0": 0, "1.1.0": 1450} {
		p := n.newPod("web-" + strings.ReplaceAll(version, ".", "-"))
		for range 2 { // the second has the same
			n.must(n.do(func() error {
				r, err := n.cni.AddNetworkList(t.Context(), n.list(version), p.conf)
				if err != nil {
					return err
				}
				result, err := current.NewResultFromResult(r)
				if err == nil && (len(result.Interfaces) != 2 || result.Interfaces[0].Mtu != want ||
					result.Interfaces[1].Mtu != want) {
					t.Errorf("%s: %v, want MTU %d", version, result.Interfaces, want)
				}
				return err
			}))
		}
	}
}

func TestDeletesSucceedWhateverIsMissing(t *testing.T) {
	n := newNode(t)
	p := n.newPod("never")
	n.must(n.del(p))
	p.conf.NetNS = ""
	n.must(n.del(p))
	q := n.newPod("web")
	n.must(n.add("1.1.0", q))
	q.conf.NetNS = "/run/netns/gone"
	n.must(n.del(q))
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

func TestDeleteWithoutTheAgent(t *testing.T) {
	n := newNode(t)
	p, q := n.newPod("web"), n.newPod("db")
	n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q)))
	n.kill()
	n.must(n.del(p))
	n.start("boot 1")
	n.serve(q.ns)
	if _, err := n.request(n.ns, q.addresses[1]); err != nil {
		t.Error(err)
	}
	n.must(n.del(q))
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

// TestDeleteBeforeTheLineBegins has a pod go while an agent that has just started knows no Node yet.
func TestDeleteBeforeTheLineBegins(t *testing.T) {
	n := newNode(t)
	gone, stays := n.newPod("gone"), n.newPod("stays")
	n.must(errors.Join(n.add("1.1.0", gone), n.add("1.1.0", stays)))
	n.kill()
	n.early = true
	n.start("boot 1")
	n.must(errors.Join(n.del(gone), n.del(gone)))
	n.agent.server.Begin(nil, nil)
	n.must(n.agent.loop.Sync(t.Context()))
	if l := strings.Join(n.left(), " "); strings.Contains(l, cni.Device("c-gone/eth0")) ||
		!strings.Contains(l, cni.Device("c-stays/eth0")) {
		t.Errorf("left: %s", l)
	}
	n.must(n.del(stays))
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

// TestDevicesOfPodsThatHaveGone has pods go before their namespaces do: their ends are down at once, their IDs may come
// back here and elsewhere, and the kernel forgets the devices later, but not another's of the same group.
func TestDevicesOfPodsThatHaveGone(t *testing.T) {
	n := prepare(t)
	n.releasedFor = time.Hour
	n.start("boot 1")
	s, err := netlink.OpenIn(n.ns, unix.NETLINK_ROUTE)
	n.must(err)
	defer s.Close()
	gone := func() (names []string) {
		veths, err := link.Veths(s, "")
		n.must(err)
		for _, v := range veths {
			if v.Group == link.ReleasedGroup && !v.Up {
				names = append(names, v.Name)
			}
		}
		slices.Sort(names)
		return names
	}
	forgotten := func() {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); len(gone()) > 1; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("still there: %v", gone())
			}
		}
		if l := gone(); !slices.Equal(l, []string{"x"}) {
			t.Errorf("released: %v", l)
		}
	}
	var other netlink.Batch
	link.AddPair(&other, link.Veth{Kind: link.KindVeth, Name: "x", MAC: [6]byte{2, 1}, MTU: 1500},
		link.Veth{Name: "y", MAC: [6]byte{2, 2}, MTU: 1500}, n.ns.FD())
	link.Release(&other, "x")
	n.must(s.Apply(&other))
	p, q := n.newPod("p"), n.newPod("q")
	n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q), n.del(p), n.del(q)))
	if l := gone(); len(l) != 3 {
		t.Errorf("released: %v", l)
	}
	n.must(n.add("1.1.0", p))
	q.conf.NetNS = n.newPod("r").conf.NetNS
	n.must(n.add("1.1.0", q))
	if l := gone(); !slices.Equal(l, []string{"x"}) {
		t.Errorf("released: %v", l)
	}
	n.must(n.del(p))
	n.kill()
	n.releasedFor = time.Millisecond
	n.start("boot 1") // which deletes what is left
	forgotten()
	n.must(n.del(q))
	forgotten()
}

func TestAddWaitsForTheAgent(t *testing.T) {
	n := newNode(t)
	n.kill()
	added := make(chan error)
	p := n.newPod("web")
	go func() { added <- n.add("1.1.0", p) }()
	time.Sleep(300 * time.Millisecond) // the plugin finds no agent
	n.start("boot 1")
	n.must(<-added)
}

func TestAnotherBootForgetsRecords(t *testing.T) {
	n := newNode(t)
	p := n.newPod("web")
	n.must(n.add("1.1.0", p))
	n.kill()
	n.start("boot 2")
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
	q := n.newPod("web2")
	n.must(n.add("1.1.0", q))
	if q.addresses[0] != p.addresses[0] {
		t.Errorf("%v", q.addresses)
	}
}

func TestNamespaceThatDiesFreesItsAddress(t *testing.T) {
	n := newNode(t)
	ns, err := netns.New(fmt.Sprintf("flgone%d", os.Getpid()))
	n.must(err)
	p := &pod{ns: ns, conf: &libcni.RuntimeConf{ContainerID: "c-gone", NetNS: filepath.Join(netns.Dir, ns.Name),
		IfName: "eth0"}}
	n.must(n.add("1.1.0", p))
	n.must(errors.Join(ns.Close(), netns.Delete(ns.Name)))
	begin := time.Now()
	for len(n.left()) > 0 {
		if time.Since(begin) > 10*time.Second {
			t.Fatalf("left: %v", n.left())
		}
	}
	t.Logf("freed after %s", time.Since(begin).Round(time.Millisecond))
}

func TestDeviceThatIsDeletedComesBack(t *testing.T) {
	n := newNode(t)
	p := n.newPod("web")
	n.must(n.add("1.1.0", p))
	n.serve(p.ns)
	device := cni.Device(cni.Key(p.conf.ContainerID, "eth0"))
	for name, command := range map[string]string{"deleted": "ip link del DEV", "down": "ip link set DEV down",
		"MAC": "ip link set DEV address 02:00:00:00:00:09", "MTU": "ip link set DEV mtu 1300",
		"forwarding": "sysctl -qw net.ipv4.conf.DEV.forwarding=0", "all forwarding": "sysctl -qw net.ipv4.ip_forward=0",
		"routes": "ip route flush proto 251; ip -6 route flush proto 251", "neighbours": "ip neigh flush dev DEV nud " +
			"permanent"} {
		n.must(n.do(func() error {
			out, err := exec.Command("sh", "-c", strings.ReplaceAll(command, "DEV", device)).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}))
		begin := time.Now()
		for whole := false; !whole; {
			plan, err := n.agent.loop.Plan(t.Context())
			whole = err == nil && len(plan.Put)+len(plan.Del) == 0
			if time.Since(begin) > 10*time.Second {
				t.Fatalf("%s: not repaired: %v %v", name, plan, err)
			}
		}
		for _, a := range p.addresses {
			if _, err := n.request(n.ns, a); err != nil {
				t.Errorf("%s: %s: %v", name, a, err)
			}
		}
	}
}

func TestCheckFindsWhatChanged(t *testing.T) {
	n := newNode(t)
	check := func(p *pod) error {
		return n.do(func() error { return n.cni.CheckNetworkList(t.Context(), n.list("1.1.0"), p.conf) })
	}
	for i, c := range []struct{ command, want string }{{"true", ""}, {"ip addr del $A/32 dev eth0", "has no address"},
		{"ip route del default", "default route"}, {"ip link set eth0 down", "is down"},
		{"ip neigh flush dev eth0 nud permanent", "neighbour"}, {"ip link set eth0 address 02:00:00:00:00:08",
			"link-layer"}} {
		p := n.newPod(fmt.Sprint("web-", i))
		n.must(errors.Join(n.add("1.1.0", p), p.ns.Do(func() error {
			return exec.Command("sh", "-c", strings.ReplaceAll(c.command, "$A", p.addresses[0].String())).Run()
		})))
		if err := check(p); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.command, err)
		}
	}
}

func TestCollectAndStatus(t *testing.T) {
	n := newNode(t)
	p, q := n.newPod("web"), n.newPod("db")
	n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q)))
	gc := func(valid ...types.GCAttachment) {
		n.must(n.do(func() error {
			return n.cni.GCNetworkList(t.Context(), n.list("1.1.0"), &libcni.GCArgs{ValidAttachments: valid})
		}))
	}
	gc(types.GCAttachment{ContainerID: "c-db", IfName: "eth0"}, types.GCAttachment{ContainerID: "unknown", IfName: "eth0"})
	if l := n.agent.pool.Records(); len(l) != 1 || l[0].Pod != "shop/db" {
		t.Errorf("%v", l)
	}
	gc()
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
	status := func() error {
		return n.do(func() error { return n.cni.GetStatusNetworkList(t.Context(), n.list("1.1.0")) })
	}
	n.must(status())
	n.agent.server.SetNetwork(&model.Network{Ranges: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/30")}, MTU: 1450})
	one, two := n.newPod("one"), n.newPod("two")
	n.must(n.add("1.1.0", one))
	var e *types.Error
	if err := n.add("1.1.0", two); !errors.As(err, &e) || e.Code != cni.CodeTryAgain || !strings.Contains(e.Msg,
		"10.9.0.0/30") {
		t.Errorf("%v", err)
	}
	if err := status(); err != nil {
		t.Errorf("all addresses are in use: %v", err)
	}
	n.must(errors.Join(n.del(one), n.add("1.1.0", two)))
	n.agent.server.SetNetwork(nil)
	if err := status(); !errors.As(err, &e) || e.Code != cni.CodeUnavailable {
		t.Errorf("%v", err)
	}
	n.ready.Store(cni.Errorf(cni.CodeLimited, "pods are not connected"))
	if err := status(); !errors.As(err, &e) || e.Code != cni.CodeLimited {
		t.Errorf("%v", err)
	}
}

// TestWrittenList has a runtime use the list that the agent writes: it calls GC, which frees what a DEL that was lost
// has left, and STATUS, which waits until an agent that has just started can attach pods.
func TestWrittenList(t *testing.T) {
	n := newNode(t)
	n.must(WriteConfig(n.folder, filepath.Join(n.folder, "cni.sock"), filepath.Join(n.folder, "records")))
	b, err := os.ReadFile(filepath.Join(n.folder, ConfigFile))
	n.must(err)
	var older struct{ CNIVersion string } // as libcni before 1.2 reads it
	if err := json.Unmarshal(b, &older); err != nil || older.CNIVersion != "1.0.0" {
		t.Errorf("a runtime that knows 1.0.0 alone has %q, %v", older.CNIVersion, err)
	}
	l, err := libcni.ConfListFromBytes(b)
	n.must(err)
	if l.CNIVersion != "1.1.0" {
		t.Errorf("the runtime uses %s", l.CNIVersion)
	}
	lost, stays := n.newPod("lost"), n.newPod("stays")
	n.must(errors.Join(n.addTo(l, lost), n.addTo(l, stays)))
	n.must(os.RemoveAll(filepath.Join(n.folder, "cache"))) // else libcni would send a DEL itself
	n.must(n.do(func() error {
		return n.cni.GCNetworkList(t.Context(), l, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{
			{ContainerID: stays.conf.ContainerID, IfName: "eth0"}}})
	}))
	if l := n.agent.pool.Records(); len(l) != 1 || l[0].Pod != "shop/stays" {
		t.Errorf("after GC: %v", l)
	}
	n.statusWait = 30 * time.Second
	n.kill()
	status := make(chan error, 1)
	go func() { status <- n.do(func() error { return n.cni.GetStatusNetworkList(t.Context(), l) }) }()
	n.ready.Store(cni.Errorf(cni.CodeUnavailable, "not yet"))
	n.start("boot 1")
	n.awaited(func() bool { return n.calls.Load() > 1 })
	select {
	case err := <-status:
		t.Errorf("STATUS of an agent that has just started: %v", err)
	default:
	}
	n.ready.Store(nil)
	n.must(<-status)
}

// awaited waits until f is true.
func (n *node) awaited(f func() bool) {
	n.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			n.Fatal("not within 20 s")
		}
	}
}

// TestReusedAddressForgetsConnections has a client's flow, translated to a pod, outlive it until another one has its
// address: the client's next packet must not reach that.
func TestReusedAddressForgetsConnections(t *testing.T) {
	n := newNode(t)
	n.agent.server.SetNetwork(&model.Network{Ranges: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/30")}, MTU: 1450})
	command := func(text string) {
		n.must(n.do(func() error {
			out, err := exec.Command("sh", "-c", text).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}))
	}
	p, q := n.newPod("web"), n.newPod("db")
	n.must(n.add("1.1.0", p))
	n.must(p.ns.Do(func() error {
		s, err := echo.Serve("shop/web", []echo.Port{{Number: 53, Protocol: model.UDP}})
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	}))
	command(fmt.Sprintf(`nft 'add table ip x; add chain ip x out { type nat hook output priority -100; };
		add rule ip x out ip daddr 10.96.0.10 dnat to %s'; ip route add 10.96.0.10 dev lo`, p.addresses[0]))
	n.must(n.do(func() error {
		_, err := echo.Request(t.Context(), model.UDP, netip.MustParseAddrPort("10.96.0.10:53"), echo.Options{})
		return err
	}))
	n.must(n.del(p))
	command("nft flush chain ip x out") // the Service's endpoint has gone
	n.must(n.add("1.1.0", q))
	if q.addresses[0] != p.addresses[0] {
		t.Fatalf("%v after %v", q.addresses, p.addresses)
	}
	n.must(n.do(func() error {
		flows, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer flows.Close()
		left, err := flows.Cut(func(f conntrack.Flow) bool { return f.ReplySource.Addr() == p.addresses[0] })
		if left > 0 {
			t.Errorf("%d flows of the pod before lead to the pod that has its address now", left)
		}
		return err
	}))
}

// TestManyPodsAndKills is what must hold of addresses: none twice, none lost.
func TestManyPodsAndKills(t *testing.T) {
	n := newNode(t)
	const pods, rounds = 6, 4
	var all []*pod
	for i := range pods {
		all = append(all, n.newPod(fmt.Sprint("web-", i)))
	}
	for round := range rounds {
		var wg sync.WaitGroup
		for _, p := range all {
			wg.Go(func() {
				if err := n.add("1.1.0", p); err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		if round%2 == 0 {
			n.kill()
			n.start("boot 1")
		}
		wg.Wait()
		owner := map[netip.Addr]string{}
		for _, p := range all {
			for _, a := range p.addresses {
				if o := owner[a]; o != "" {
					t.Errorf("round %d: %s is %s's and %s's", round, a, o, p.conf.ContainerID)
				}
				owner[a] = p.conf.ContainerID
			}
			if len(p.addresses) != 2 {
				t.Errorf("%v", p.addresses)
			}
		}
		for _, p := range all {
			wg.Go(func() {
				if err := n.del(p); err != nil {
					t.Error(err)
				}
			})
		}
		if round%2 == 1 {
			n.kill()
			n.start("boot 1")
		}
		wg.Wait()
	}
	n.kill()
	n.start("boot 1")
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

// TestSourcesFollow has what a pod may send from change before it is attached, while it is, and go.
func TestSourcesFollow(t *testing.T) {
	n := newNode(t)
	one := []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	sources := func() []netip.Prefix {
		n.must(n.agent.loop.Sync(t.Context()))
		l := n.agent.server.Attached()
		if len(l) != 1 {
			t.Fatalf("attached: %v", l)
		}
		return l[0].Sources
	}
	n.agent.server.SetSources(map[string][]netip.Prefix{"shop/web": one, "shop/db": nil})
	p := n.newPod("web")
	n.must(n.add("1.1.0", p))
	if got := sources(); !slices.Equal(got, one) {
		t.Errorf("%v", got)
	}
	n.agent.server.SetSources(nil)
	if got := sources(); got != nil {
		t.Errorf("%v", got)
	}
	n.agent.server.SetSources(map[string][]netip.Prefix{"shop/web": one})
	n.kill()
	n.start("boot 1")
	n.agent.server.SetSources(map[string][]netip.Prefix{"shop/web": one})
	if got := sources(); !slices.Equal(got, one) {
		t.Errorf("%v", got)
	}
	n.must(n.del(p))
	if l := n.left(); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	n := newNode(t)
	n.must(os.Chmod(n.folder, 0o777))
	socket := filepath.Join(n.folder, "cni.sock")
	n.must(os.Chmod(socket, 0o777))
	c := exec.Command(filepath.Join(plugin, "fairlead-cni"))
	c.Env = []string{"CNI_COMMAND=STATUS"}
	c.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion":"1.1.0","name":"x","type":"fairlead-cni","socket":%q}`, socket))
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	n.must(os.Chmod(plugin, 0o755))
	for f := filepath.Dir(n.folder); f != "/tmp"; f = filepath.Dir(f) {
		n.must(os.Chmod(f, 0o755))
	}
	if out, err := c.Output(); err == nil || !strings.Contains(string(out), "may not use this socket") {
		t.Errorf("%s, %v", out, err)
	}
}

// TestLoopback has the installed plugin bring a pod's loopback device up, as a runtime does before the pod's network.
func TestLoopback(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "opt", "bin") // which isn't there
	other := filepath.Join(folder, "loopback")
	for range 2 { // again is an upgrade
		if out, err := exec.Command(filepath.Join(plugin, "fairlead-cni"), "install", folder).CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
	}
	pod := netnstest.New(t)
	call := func(command, more string) (string, error) {
		c := exec.Command(other)
		c.Env = []string{"CNI_COMMAND=" + command, "CNI_CONTAINERID=c-1", "CNI_IFNAME=lo", "CNI_NETNS=" +
			filepath.Join(netns.Dir, pod.Name)}
		c.Stdin = strings.NewReader(`{"cniVersion":"1.1.0","name":"lo","type":"loopback"` + more + `}`)
		out, err := c.Output()
		return string(out), err
	}
	up := func() (is bool) {
		pod.Do(func() error {
			i, err := net.InterfaceByIndex(1)
			is = err == nil && i.Flags&net.FlagUp != 0
			return err
		})
		return is
	}
	if err := pod.Do(func() error { return exec.Command("ip", "link", "set", "lo", "down").Run() }); err != nil {
		t.Fatal(err)
	}
	if out, err := call("CHECK", `,"prevResult":{}`); err == nil || !strings.Contains(out, "is down") || up() {
		t.Errorf("CHECK: %s, %v", out, err)
	}
	if out, err := call("ADD", ""); err != nil || !strings.Contains(out, "127.0.0.1/8") || !strings.Contains(out,
		`"mtu":65536`) || !up() {
		t.Errorf("ADD: %s, %v", out, err)
	}
	if out, err := call("CHECK", `,"prevResult":{}`); err != nil {
		t.Errorf("CHECK: %s, %v", out, err)
	}
	if out, err := call("DEL", ""); err != nil || out != "" {
		t.Errorf("DEL: %s, %v", out, err)
	}
	if err := errors.Join(os.Remove(other), os.WriteFile(other, []byte("another's"), 0o755)); err != nil {
		t.Fatal(err)
	}
	exec.Command(filepath.Join(plugin, "fairlead-cni"), "install", folder).Run()
	if b, err := os.ReadFile(other); err != nil || string(b) != "another's" {
		t.Errorf("another loopback plugin was replaced: %v", err)
	}
}

// TestFirstPacketsNeedNoNeighbourDiscovery has pods reach each other and the node as soon as they are attached, and
// counts what their devices carry: no ARP, no neighbour or router discovery, no duplicate address detection.
func TestFirstPacketsNeedNoNeighbourDiscovery(t *testing.T) {
	n := newNode(t)
	n.serve(n.ns)
	capture := -1
	n.must(n.do(func() (err error) { // of all devices, also those to come
		capture, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC,
			int(htons(unix.ETH_P_ALL)))
		return err
	}))
	defer unix.Close(capture)
	p, q := n.newPod("web"), n.newPod("db")
	n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q)))
	n.serve(q.ns)
	for i, a := range q.addresses {
		for _, from := range []*netns.Namespace{p.ns, n.ns} {
			if _, err := n.request(from, a); err != nil {
				t.Error(err)
			}
		}
		if _, err := n.request(p.ns, netip.MustParseAddr([]string{"192.168.0.1", "fd99::1"}[i])); err != nil {
			t.Error(err)
		}
	}
	seen := map[string]int{}
	for b := make([]byte, 2048); ; {
		length, _, err := unix.Recvfrom(capture, b, 0)
		if err != nil {
			break
		}
		seen[kindOf(b[:length])]++
	}
	t.Logf("packets by kind: %v", seen)
	if seen["IPv4"] == 0 || seen["IPv6"] == 0 {
		t.Errorf("packets of both families were not seen: %v", seen)
	}
	for _, kind := range []string{"ARP", "neighbour discovery"} {
		if seen[kind] > 0 {
			t.Errorf("%d packets of %s", seen[kind], kind)
		}
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// kindOf returns what a packet behind an Ethernet header is: ARP, neighbour discovery (ICMPv6 types 133 to 137, with
// duplicate address detection), IPv4, IPv6, or its EtherType.
func kindOf(b []byte) string {
	const header, v6 = 14, 40
	if len(b) < header {
		return "none"
	}
	switch kind := uint16(b[12])<<8 | uint16(b[13]); kind {
	case unix.ETH_P_ARP:
		return "ARP"
	case unix.ETH_P_IP:
		return "IPv4"
	case unix.ETH_P_IPV6:
		if len(b) > header+v6 && b[header+6] == unix.IPPROTO_ICMPV6 && b[header+v6] >= 133 && b[header+v6] <= 137 {
			return "neighbour discovery"
		}
		return "IPv6"
	default:
		return fmt.Sprintf("%#x", kind)
	}
}

// TestReversePathFilters has pods connect whatever the node's reverse path filter is.
func TestReversePathFilters(t *testing.T) {
	n := newNode(t)
	for _, value := range []string{"1", "2"} {
		n.must(sysctl.Set(n.ns, sysctl.Setting{Name: "net/ipv4/conf/all/rp_filter", Value: value},
			sysctl.Setting{Name: "net/ipv4/conf/default/rp_filter", Value: value}))
		p, q := n.newPod("web-"+value), n.newPod("db-"+value)
		n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q)))
		n.serve(q.ns)
		for _, from := range []*netns.Namespace{p.ns, n.ns} {
			if _, err := n.request(from, q.addresses[0]); err != nil {
				t.Errorf("rp_filter %s: %v", value, err)
			}
		}
	}
}

// TestNewDevicesForward has pods connect where devices that are made forward nothing by default.
func TestNewDevicesForward(t *testing.T) {
	n := newNode(t)
	n.must(sysctl.Set(n.ns, sysctl.Setting{Name: "net/ipv4/conf/default/forwarding", Value: "0"}))
	p, q := n.newPod("web"), n.newPod("db")
	n.must(errors.Join(n.add("1.1.0", p), n.add("1.1.0", q)))
	n.serve(q.ns)
	for _, a := range q.addresses {
		if _, err := n.request(p.ns, a); err != nil {
			t.Errorf("%s: %v", a, err)
		}
	}
}

// TestOneFamily has pods of a node with ranges of one family, and with another one in its place later.
func TestOneFamily(t *testing.T) {
	n := newNode(t)
	for i, r := range ranges {
		n.agent.server.SetNetwork(&model.Network{Ranges: []netip.Prefix{r}, MTU: 1450})
		p := n.newPod(fmt.Sprint("web-", i))
		n.must(n.add("1.1.0", p))
		n.serve(p.ns)
		if len(p.addresses) != 1 || !r.Contains(p.addresses[0]) {
			t.Fatalf("%v of %s", p.addresses, r)
		}
		if _, err := n.request(n.ns, p.addresses[0]); err != nil {
			t.Error(err)
		}
	}
}
