package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// node is a Node with these InternalIPs.
func node(name string, ips ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, ip := range ips {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}
	return n
}

// pod is a Pod "shop/name" with these addresses and ports 80 TCP, 53 UDP and 99 SCTP.
func pod(name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.PodSpec{NodeName: node}}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	p.Spec.Containers = []corev1.Container{{Name: "main", Ports: []corev1.ContainerPort{
		{ContainerPort: 80}, {ContainerPort: 53, Protocol: corev1.ProtocolUDP},
		{ContainerPort: 99, Protocol: corev1.ProtocolSCTP},
	}}}
	return p
}

var ports = []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP},
	{Number: 99, Protocol: model.SCTP}}

// up makes a cluster for the test, and sees at its end that nothing is left of it.
func up(t testing.TB, o Options) *Cluster {
	t.Helper()
	c, err := Up(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(); err != nil {
			t.Error(err)
		}
		gone(t, c.Name)
	})
	return c
}

// gone sees that nothing is left of a cluster.
func gone(t testing.TB, name string) {
	t.Helper()
	left, err := State{Name: name}.Namespaces()
	if err != nil || len(left) > 0 {
		t.Errorf("namespaces %v are left, %v", left, err)
	}
	if s, err := StateOf(name); err == nil {
		t.Errorf("state %+v is left", s)
	}
}

func probe(t testing.TB, from *Host, p echo.Port, to netip.Addr) (a echo.Reply, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	err = from.Do(func() (err error) {
		a, err = echo.Request(ctx, p.Protocol, netip.AddrPortFrom(to, p.Number), echo.Options{})
		return err
	})
	return a, err
}

// shop is two nodes of unlike networks with three pods.
func shop() []source.Object {
	return []source.Object{
		node("a", "172.18.0.2", "fc00:f853::2"), node("b", "10.9.8.7", "2a00:1:2::3"),
		pod("web-1", "a", "10.128.0.4", "fd00:10::4"), pod("web-2", "a", "10.128.0.5", "fd00:10::5"),
		pod("web-3", "b", "10.200.0.4", "fd00:20::4"),
	}
}

func TestEverybodyReachesEveryPod(t *testing.T) {
	objects := shop()
	host := pod("agent", "b")
	host.Spec.HostNetwork = true
	c := up(t, Options{Objects: append(objects, host), Serve: true})
	requested := 0
	for _, from := range c.Hosts() {
		for _, to := range c.Hosts() {
			if to.Role != Pod {
				continue
			}
			for _, a := range to.Addresses {
				for _, p := range ports {
					requested++
					got, err := probe(t, from, p, a)
					if err != nil {
						t.Errorf("from %s to %s: %v", from.Name, to.Name, err)
						continue
					}
					want := from.source(a)
					if from.box == to.box {
						want = a // within one host, its address asks itself
					}
					if "pod "+got.Pod != to.Name || got.Client.Addr() != want || got.Server != netip.AddrPortFrom(a, p.Number) {
						t.Errorf("from %s to %s by %s: %+v, want client %s", from.Name, to.Name, p, got, want)
					}
				}
			}
		}
	}
	if requested != 7*4*2*3 {
		t.Errorf("asked %d times", requested)
	}
}

func TestRefusedAndDropped(t *testing.T) {
	c := up(t, Options{Objects: shop(), Serve: true})
	for _, from := range c.Hosts() {
		for _, p := range ports {
			closed := echo.Port{Number: p.Number + 1, Protocol: p.Protocol}
			for _, to := range []string{"10.128.0.5", "fd00:20::4", "172.18.0.2", "2a00:1:2::3", "192.0.2.1", "2001:db8:1::1"} {
				if p.Protocol == model.SCTP && slices.Contains(from.Addresses, netip.MustParseAddr(to)) {
					continue // see echo.Request
				}
				if got, err := probe(t, from, closed, netip.MustParseAddr(to)); !errors.Is(err, echo.Refused) {
					t.Errorf("from %s to closed port of %s: %+v, %v", from.Name, to, got, err)
				}
			}
			for _, to := range []string{"10.96.0.1", "10.128.0.77", "fd00:96::1"} {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				err := from.Do(func() error {
					_, err := echo.Request(ctx, p.Protocol, netip.AddrPortFrom(netip.MustParseAddr(to), p.Number), echo.Options{})
					return err
				})
				cancel()
				if !errors.Is(err, echo.Timeout) {
					t.Errorf("from %s to %s, which no pod has: %v", from.Name, to, err)
				}
			}
		}
	}
}

// answering returns a host further addresses and a server that says the host's name.
func answering(t *testing.T, h *Host, addrs ...netip.Addr) {
	t.Helper()
	var s *echo.Server
	err := h.box.dial(func(c *link.Conn) error {
		for _, a := range addrs {
			if err := c.AddAddress(1, netip.PrefixFrom(a, a.BitLen())); err != nil {
				return err
			}
		}
		return c.Await(t.Context(), 1, addrs...)
	})
	if err == nil {
		err = h.Do(func() (err error) {
			s, err = echo.Serve(h.Name, []echo.Port{{Number: 8080, Protocol: model.TCP}})
			return err
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
}

func TestExternalHostRoutesByFirstNodeOrRoute(t *testing.T) {
	c := up(t, Options{Objects: shop()})
	first, second := must(t)(c.Node("a")), must(t)(c.Node("b"))
	service4, service6 := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")
	for _, h := range []*Host{first, second} {
		answering(t, h, service4, service6)
	}
	expect := func(to netip.Addr, want *Host) {
		t.Helper()
		got, err := probe(t, c.External(), echo.Port{Number: 8080, Protocol: model.TCP}, to)
		if err != nil || got.Pod != want.Name || got.Client.Addr() != c.External().source(to) {
			t.Errorf("%s: %+v, %v, want %s", to, got, err, want.Name)
		}
	}
	expect(service4, first)
	expect(service6, first)
	if err := c.External().Route(netip.MustParsePrefix("10.96.0.0/12"), second.Addresses[0]); err != nil {
		t.Fatal(err)
	}
	expect(service4, second)
	expect(service6, first)
	if err := c.Update(t.Context(), append(shop(), node("0", "10.1.1.1", "fd01::1"))); err != nil {
		t.Fatal(err)
	}
	expect(service4, second) // as asked
	zero := must(t)(c.Node("0"))
	answering(t, zero, service6)
	expect(service6, zero) // the first node now
	if err := c.Update(t.Context(), shop()); err != nil {
		t.Fatal(err)
	}
	expect(service6, first)
	if err := c.External().Route(netip.MustParsePrefix("10.96.0.0/12"), second.Addresses[1]); err == nil {
		t.Error("an IPv4 route by way of an IPv6 address is taken")
	}
}

// must returns a value that came with no error.
func must(t *testing.T) func(*Host, error) *Host {
	return func(h *Host, err error) *Host {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
}

func TestUpdate(t *testing.T) {
	c := up(t, Options{Objects: shop(), Serve: true})
	web1, external := must(t)(c.Pod("shop", "web-1")), c.External()
	node3 := node("c", "172.18.0.9", "fc00:f853::9")
	hostPod := pod("host", "b")
	hostPod.Spec.HostNetwork = true
	gone := pod("web-3", "b", "10.200.0.4", "fd00:20::4")
	gone.Status.Phase = corev1.PodSucceeded
	moved := node("b", "10.9.8.6", "2a00:1:2::3")
	base := shop()[:3] // nodes a and b, pod web-1
	steps := []struct {
		what    string
		objects []source.Object
	}{
		{"one pod less", shop()[:4]},
		{"one pod more", append(shop(), pod("web-4", "b", "10.200.0.5", "fd00:20::5"))},
		{"a pod moves with its address", append(slices.Clone(base), pod("web-2", "b", "10.128.0.5", "fd00:10::5"))},
		{"two pods swap addresses", append(slices.Clone(base), pod("web-2", "b", "10.200.0.4"),
			pod("web-3", "b", "10.128.0.5"))},
		{"a new node with a pod", append(slices.Clone(base), node3, pod("web-3", "c", "10.200.0.4", "fd00:20::4"))},
		{"that node goes", base},
		{"a pod on the host network", append(slices.Clone(base), hostPod)},
		{"its node's address changes", append([]source.Object{base[0], base[2]}, moved, hostPod,
			pod("web-3", "b", "10.200.0.4"))},
		{"a pod ends", append(slices.Clone(base), gone)},
		{"as it was", shop()},
	}
	for _, s := range steps {
		if err := c.Update(t.Context(), s.objects); err != nil {
			t.Fatalf("%s: %v", s.what, err)
		}
		want, err := newLayout(s.objects, external.Addresses)
		if err != nil {
			t.Fatal(err)
		}
		hosts := c.Hosts()
		if len(hosts) != len(want.specs) {
			t.Errorf("%s: %d hosts, want %d", s.what, len(hosts), len(want.specs))
		}
		for _, from := range hosts {
			for _, to := range hosts {
				if !from.spec.shared && to.Role == Pod {
					for _, a := range to.Addresses {
						if !from.source(a).IsValid() {
							continue
						}
						if got, err := probe(t, from, ports[1], a); err != nil || "pod "+got.Pod != to.Name ||
							got.Client.Addr() != from.source(a) && from.box != to.box {
							t.Errorf("%s: from %s to %s: %+v, %v", s.what, from.Name, to.Name, got, err)
						}
					}
				}
			}
		}
		if must(t)(c.Pod("shop", "web-1")) != web1 {
			t.Errorf("%s: pod web-1 was made anew", s.what)
		}
		if left, _ := (State{Name: c.Name}).Namespaces(); len(left) != 1+len(hosts)-sharing(hosts) {
			t.Errorf("%s: namespaces %v for %d hosts", s.what, left, len(hosts))
		}
	}
	err := c.Update(t.Context(), append(shop(), pod("web-9", "nowhere", "10.1.1.1")))
	if err == nil || len(c.Hosts()) != 6 {
		t.Errorf("bad objects: %v, %d hosts", err, len(c.Hosts()))
	}
}

func sharing(hosts []*Host) (n int) {
	for _, h := range hosts {
		if h.spec.shared {
			n++
		}
	}
	return n
}

func TestLayoutErrors(t *testing.T) {
	onHost := func(name, node string) *corev1.Pod {
		p := pod(name, node)
		p.Spec.HostNetwork = true
		return p
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: corev1.ServiceSpec{ClusterIP: "192.0.2.1"}}
	odd := pod("odd", "a", "10.1.1.1")
	odd.Spec.Containers[0].Ports[0].ContainerPort = 65536
	for _, c := range []struct {
		what     string
		objects  []source.Object
		external []netip.Addr
		want     []string // all in the error
	}{
		{what: "one address twice", objects: []source.Object{node("a", "10.0.0.1"), pod("x", "a", "10.1.1.1"),
			pod("y", "a", "10.1.1.1")},
			want: []string{"Pod shop/y", "10.1.1.1", "Pod shop/x"}},
		{what: "a pod with its node's address", objects: []source.Object{pod("x", "a", "10.0.0.1"), node("a", "10.0.0.1")},
			want: []string{"Pod shop/x", "10.0.0.1", "Node a"}},
		{what: "no such node", objects: []source.Object{pod("x", "b", "10.1.1.1")}, want: []string{"Pod shop/x", "Node b"}},
		{what: "no pod address", objects: []source.Object{node("a", "10.0.0.1"), pod("x", "a")},
			want: []string{"Pod shop/x", "status.podIPs"}},
		{what: "no node address", objects: []source.Object{node("a")}, want: []string{"Node a", "InternalIP"}},
		{what: "no such family", objects: []source.Object{node("a", "10.0.0.1"), pod("x", "a", "fd00::1")},
			want: []string{"Pod shop/x", "fd00::1", "Node a"}},
		{what: "no address", objects: []source.Object{node("a", "10.0.0")}, want: []string{"Node a", "10.0.0"}},
		{what: "loopback", objects: []source.Object{node("a", "127.0.0.1")}, want: []string{"Node a", "127.0.0.1"}},
		{what: "link-local", objects: []source.Object{node("a", "fe80::1")}, want: []string{"Node a", "fe80::1"}},
		{what: "twice", objects: []source.Object{node("a", "10.0.0.1"), node("a", "10.0.0.2")},
			want: []string{"Node a", "twice"}},
		{what: "a host port twice", objects: []source.Object{node("a", "10.0.0.1"), onHost("x", "a"), onHost("y", "a")},
			want: []string{"pod shop/x", "pod shop/y", "80/tcp", "node a"}},
		{what: "no port", objects: []source.Object{node("a", "10.0.0.1"), odd},
			want: []string{"Pod shop/odd", "main", "65536"}},
		{what: "the outside client's", objects: []source.Object{service},
			external: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
			want:     []string{"Service shop/web", "192.0.2.1", "outside"}},
		{what: "all at once", objects: []source.Object{node("a"), pod("x", "b")}, want: []string{"Node a", "Pod shop/x"}},
	} {
		_, err := newLayout(c.objects, c.external)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want it to name %s", c.what, err, w)
			}
		}
	}
}

func TestLayout(t *testing.T) {
	n := node("a", "10.0.0.1", "fd00::1", "10.0.0.1")
	n.Status.Addresses = append([]corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
		{Type: corev1.NodeHostName, Address: "a.example"}}, n.Status.Addresses...)
	old := pod("old", "a")
	old.Status.PodIP = "::ffff:10.1.0.1"
	waiting := pod("waiting", "")
	twice := pod("twice", "a", "10.1.0.2")
	twice.Spec.Containers = append(twice.Spec.Containers, twice.Spec.Containers...)
	slice := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.2"}}}}
	service := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "None", ExternalIPs: []string{"192.0.2.3"}}}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "2001:db8::1"}}
	l, err := newLayout([]source.Object{twice, slice, service, waiting, old, n}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range l.sorted() {
		got = append(got, fmt.Sprintf("%s %v %v", s.host.Name, s.host.Addresses, s.ports))
	}
	want := []string{
		"outside [192.0.2.4 198.51.100.1 2001:db8::2 2001:db8:1::1] []",
		"node a [10.0.0.1 fd00::1 192.0.2.1] []",
		"pod shop/old [10.1.0.1] [53/udp 80/tcp 99/sctp]",
		"pod shop/twice [10.1.0.2] [53/udp 80/tcp 99/sctp]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestUpCleansUpAfterFailure(t *testing.T) {
	name := randomName()
	ctx, cancel := context.WithCancel(t.Context())
	o := Options{Name: name, Objects: shop(), Serve: true, Progress: func(done, total int) {
		if done == 5 {
			cancel()
		}
	}}
	if _, err := Up(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
	gone(t, name)
	if _, err := Up(t.Context(), Options{Name: name, Objects: append(shop(), pod("x", "nowhere"))}); err == nil {
		t.Error("bad objects make a cluster")
	}
	gone(t, name)
}

func TestNames(t *testing.T) {
	c := up(t, Options{Objects: shop()})
	if _, err := Up(t.Context(), Options{Name: c.Name}); err == nil || !strings.Contains(err.Error(), "up already") {
		t.Errorf("a name that is taken: %v", err)
	}
	if err := DownByName(c.Name); err == nil {
		t.Error("a cluster that is held is taken down by name")
	}
	if err := DownByName("nosuchname"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a cluster that isn't there: %v", err)
	}
	for _, bad := range []string{"a-b", "1", "Shop", "a/b", "..", strings.Repeat("a", 33)} {
		if _, err := Up(t.Context(), Options{Name: bad}); err == nil {
			t.Errorf("name %q is taken", bad)
		}
	}
	long := pod(strings.Repeat("x", 253), "a", "10.128.0.9")
	if err := c.Update(t.Context(), append(shop(), long)); err != nil {
		t.Errorf("a long name: %v", err)
	}
	if _, err := c.Pod("shop", "nosuchpod"); err == nil {
		t.Error("a pod that isn't there is found")
	}
}

func TestForeignNamespacesAreLeftAlone(t *testing.T) {
	name := randomName()
	ns, err := netns.New(name + "-wire")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name + "-wire")
	defer ns.Close()
	other, err := netns.New(name + "-other")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name + "-other")
	defer other.Close()
	if _, err := Up(t.Context(), Options{Name: name}); err == nil || !strings.Contains(err.Error(), name+"-wire") ||
		strings.Contains(err.Error(), name+"-other") {
		t.Errorf("%v, want an error that names the foreign namespace", err)
	}
	if left, _ := netns.List(name); len(left) != 2 {
		t.Errorf("left: %v", left)
	}
	if _, err := StateOf(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("state is left: %v", err)
	}
}

func TestNothingInTheCallersNamespace(t *testing.T) {
	links := func() string {
		l, err := net.Interfaces()
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(l)
	}
	before := links()
	up(t, Options{Objects: shop()})
	if after := links(); after != before {
		t.Errorf("interfaces were %s, are %s", before, after)
	}
}

// TestMain lets the test binary be the process that holds a cluster and is killed.
func TestMain(m *testing.M) {
	if name := os.Getenv("FAIRLEAD_TEST_HOLD"); name != "" {
		if _, err := Up(context.Background(), Options{Name: name, Objects: shop(), Serve: true}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("up")
		select {}
	}
	os.Exit(m.Run())
}

func TestLeftoversOfAKilledProcess(t *testing.T) {
	name := randomName()
	hold := exec.Command(os.Args[0])
	hold.Env = append(os.Environ(), "FAIRLEAD_TEST_HOLD="+name)
	out, err := hold.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := hold.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "up\n" {
		t.Fatalf("%s, %v", line, err)
	}
	s, err := StateOf(name)
	if err != nil || !s.Alive() || s.PID != hold.Process.Pid || len(s.Hosts) != 6 {
		t.Errorf("state while held: %+v, %v", s, err)
	}
	if err := DownByName(name); err == nil {
		t.Error("a cluster that another process holds is taken down")
	}
	for _, n := range []string{"pod shop/web-1", "pod/shop/web-1", "shop/web-1"} { // its hosts can be used all the same
		h, err := s.Host(n)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := probe(t, &h, ports[0], netip.MustParseAddr("10.200.0.4")); err != nil ||
			got.Client.Addr() != h.Addresses[0] {
			t.Errorf("from %s: %+v, %v", n, got, err)
		}
		if err := h.Route(netip.MustParsePrefix("10.0.0.0/8"), h.Addresses[0]); err == nil {
			t.Error("a route is set in another process's cluster")
		}
	}
	if _, err := s.Host("shop/nosuchpod"); err == nil || !strings.Contains(err.Error(), "shop/web-1") {
		t.Errorf("a host that isn't there: %v, want to be told which are", err)
	}
	hold.Process.Kill()
	hold.Wait()
	left, err := Leftovers()
	if err != nil || !slices.ContainsFunc(left, func(s State) bool { return s.Name == name }) {
		t.Errorf("leftovers %+v, %v, want %s among them", left, err, name)
	}
	if _, err := Up(t.Context(), Options{Name: name}); err == nil || !strings.Contains(err.Error(), "left over") {
		t.Errorf("a name that is left over: %v", err)
	}
	if err := DownByName(name); err != nil {
		t.Error(err)
	}
	gone(t, name)
	if err := up(t, Options{Name: name, Objects: shop()}).Down(); err != nil { // and again
		t.Error(err)
	}
}

// pods is n pods over three nodes.
func pods(n int) []source.Object {
	objects := []source.Object{node("a", "10.0.0.1", "fd00::1"), node("b", "10.0.0.2", "fd00::2"),
		node("c", "10.0.0.3", "fd00::3")}
	for i := range n {
		objects = append(objects, pod(fmt.Sprintf("web-%d", i), string(rune('a'+i%3)),
			fmt.Sprintf("10.1.%d.%d", i/250, i%250+1), fmt.Sprintf("fd00:1::%x", i+1)))
	}
	return objects
}

// A conformance run's cluster: 3 nodes and 6 pods that serve.
func BenchmarkUpDown6(b *testing.B) { benchmark(b, pods(6)) }

func BenchmarkUpDown200(b *testing.B) { benchmark(b, pods(200)) }

func benchmark(b *testing.B, objects []source.Object) {
	var ups, downs time.Duration
	for b.Loop() {
		start := time.Now()
		c, err := Up(b.Context(), Options{Objects: objects, Serve: true})
		if err != nil {
			b.Fatal(err)
		}
		ups += time.Since(start)
		start = time.Now()
		if err := c.Down(); err != nil {
			b.Fatal(err)
		}
		downs += time.Since(start)
	}
	b.ReportMetric(float64(ups.Microseconds())/1000/float64(b.N), "ms-up")
	b.ReportMetric(float64(downs.Microseconds())/1000/float64(b.N), "ms-down")
}
