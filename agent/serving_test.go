package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	bpf "fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// refusing is a plane on a kernel that refuses some facts: a Write that has any of them is not made.
type refusing[K dataplane.Key, V comparable] struct {
	mode.ServicePlane[K, V]
	refuses func(K) bool
}

func (r refusing[K, V]) Write(ctx context.Context, put, del []dataplane.Fact[K, V]) error {
	for _, f := range put {
		if r.refuses(f.Key) {
			return errors.New("refused by the test")
		}
	}
	return r.ServicePlane.Write(ctx, put, del)
}

// rejectParts has a plane refuse all facts that bad parts need and good ones don't.
func rejectParts[K dataplane.Key, V comparable, P mode.ServicePlane[K, V]](open func() (P, error), good,
	bad []model.ServicePart) func() (mode.ServicePlane[K, V], error) {
	return func() (mode.ServicePlane[K, V], error) {
		p, err := open()
		if err != nil {
			return nil, err
		}
		refused := map[K]bool{}
		for _, part := range bad {
			for _, f := range p.Render(part) {
				refused[f.Key] = true
			}
		}
		for _, part := range good {
			for _, f := range p.Render(part) {
				delete(refused, f.Key)
			}
		}
		return refusing[K, V]{p, func(k K) bool { return refused[k] }}, nil
	}
}

// inNode runs f in a network namespace and a cgroup of its own, with an echo server at 10.244.0.1:8080, and cleans up.
func inNode(t *testing.T, f func(ctx context.Context) error) {
	t.Helper()
	name := "fl-node-" + rand.Text()[:8]
	ns, err := netns.New(name)
	if err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	home, err := cgroup.New(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(ns.Close(), netns.Delete(name), cgroup.Delete(home)); err != nil {
			t.Error(err)
		}
	}()
	c, err := link.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	to := netip.MustParsePrefix("10.96.0.0/12") // a route, so that packets come to where they are translated
	if err := errors.Join(c.Up(1), c.AddAddress(1, netip.MustParsePrefix("10.244.0.1/32")),
		route.PutIn(ns, route.Route{To: to, Dev: 1})); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	err = cgroup.Do(home, func() error {
		return ns.Do(func() error {
			s, err := echo.Serve("web", []echo.Port{{Number: 8080, Protocol: model.TCP}})
			if err != nil {
				return err
			}
			defer s.Close()
			return errors.Join(f(ctx), mode.Clean(ctx))
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// probeServices opens a connection to each of n Services, that they are served.
func probeServices(ctx context.Context, n int) error {
	for i := range n {
		ctx, stop := context.WithTimeout(ctx, 5*time.Second)
		_, err := echo.Request(ctx, model.TCP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + i)}), 80),
			echo.Options{})
		stop()
		if err != nil {
			return fmt.Errorf("Service %d: %w", i, err)
		}
	}
	return nil
}

// portOf makes a port of a Service, which the echo server serves.
func portOf(namespace, name, port string, id uint64, entry string) []model.ServicePart {
	owner, service := model.Owner{Kind: model.KindService, Namespace: namespace, Name: name}, namespace+"/"+name+":"+port
	pool := &model.Pool{ID: id, Name: service + " tcp ipv4 cluster", Owner: owner, Service: service, Protocol: model.TCP,
		Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.244.0.1:8080")}}}
	at, to := netip.MustParseAddrPort(entry), model.Target{Pool: pool}
	return []model.ServicePart{pool, &model.Frontend{Owner: owner, Service: service, Via: "ClusterIP",
		Entry: model.Entry{Addr: at.Addr(),
			Port: at.Port(), Protocol: model.TCP}, Internal: to, External: to}}
}

// Every plane serves at a cold start what the kernel doesn't refuse, though it refuses all facts of three Services of
// thirty ports each.
func TestRefusedServicesDoNotBlockOthers(t *testing.T) {
	node := &model.ServiceNode{Node: &model.Node{Name: "a", Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}}
	const services = 20
	good, bad := []model.ServicePart{node}, []model.ServicePart{}
	for i := range services {
		good = append(good, portOf("shop", fmt.Sprint("s", i), "http", uint64(1+i)<<8, fmt.Sprintf("10.96.0.%d:80",
			1+i))...)
	}
	for i := range 90 {
		bad = append(bad, portOf("evil", fmt.Sprint("s", i%3), fmt.Sprint("p", i), uint64(1+i)<<16,
			fmt.Sprintf("10.97.0.%d:%d",
				1+i%3, 1000+i))...)
	}
	for _, m := range []mode.Mode{
		mode.Alone(nftables.Capabilities, rejectParts(nftables.New, good, bad)),
		mode.Alone(iptables.CapabilitiesOf(iptables.NFT),
			rejectParts(func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.NFT) }, good, bad)),
		mode.Alone(iptables.CapabilitiesOf(iptables.Legacy),
			rejectParts(func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.Legacy) }, good, bad)),
		mode.Alone(userspace.Capabilities, rejectParts(userspace.New, good, bad)),
		mode.WithFallback(ebpf.Capabilities(), rejectParts(ebpf.New, good, bad), nftables.Capabilities, nftables.New,
			ebpf.Leaves),
	} {
		t.Run(m.Name, func(t *testing.T) {
			inNode(t, func(ctx context.Context) error {
				s, err := service.OpenPlanes(m, slog.New(slog.DiscardHandler))
				if err != nil {
					return err
				}
				s.Change(append(bad[:len(bad):len(bad)], good...), nil)
				owner := func(namespace string) model.Owner {
					return model.Owner{Kind: model.KindService, Namespace: namespace, Name: "s0"}
				}
				if err := s.SyncOwner(ctx, owner("shop")); err != nil {
					t.Errorf("a Service of which nothing is refused: %v", err)
				}
				if err := s.SyncOwner(ctx, owner("evil")); err == nil {
					t.Error("a Service that is refused counts as served")
				}
				if err := s.Sync(ctx); err == nil {
					t.Error("nothing is refused")
				}
				s.WaitReady(ctx)
				if serving, why := s.Serving(); !serving {
					t.Errorf("not serving: %s", why)
				}
				if err := probeServices(ctx, services); err != nil {
					t.Error(err)
				}
				for owner := range s.Status()[m.Planes()[len(m.Planes())-1]].Failing {
					if !strings.HasPrefix(owner, "evil/") {
						t.Errorf("%s is refused", owner)
					}
				}
				return s.Close()
			})
		})
	}
}

// webAt makes a Service with one port that the echo server serves, and more at addresses outside.
func webAt(namespace, name, clusterIP string, ports int, externalIPs ...string) []source.Object {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, ExternalIPs: externalIPs}}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-1",
		Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.1"}}}}
	for i := range ports {
		port, target, tcp := fmt.Sprint("p", i), int32(8080), corev1.ProtocolTCP
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: port, Port: int32(80 + i), Protocol: tcp})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &port, Port: &target, Protocol: &tcp})
	}
	return []source.Object{svc, slice}
}

// runAgent has an agent of a mode serve objects in the calling thread's network namespace, from a cold start. It
// returns the planes too.
func runAgent(t *testing.T, ctx context.Context, m mode.Mode, objects ...source.Object) (*Agent, *service.Planes) {
	planes, err := service.OpenPlanes(m, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(ctx)
	a := stillWith(t, Options{Mode: m}, planes)
	a.batches.count = 0
	t.Cleanup(func() {
		stop()
		a.ended.Wait()
		if err := planes.Close(); err != nil {
			t.Error(err)
		}
	})
	a.say(ctx, objects...)
	return a, planes
}

// decidedFor returns what objects come to in a mode on the node of runAgent.
func decidedFor(m mode.Mode, objects []source.Object) *model.Snapshot {
	r := resolve.New(m.Resolve(resolve.Config{Node: "a"}))
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	r.Apply(changes)
	return r.Services()
}

// until queries a page until it answers with a code.
func until(ctx context.Context, h http.Handler, page string, want int) (body string, err error) {
	for ctx.Err() == nil {
		var code int
		if code, body = get(h, page); code == want {
			return body, nil
		}
		time.Sleep(time.Millisecond)
	}
	return body, fmt.Errorf("%s never answers %d: %s", page, want, body)
}

// At a cold start in mode ebpf, Services that don't fit into the kernel's maps keep no other from being served, and the
// node from nothing: it is ready, and their rejection is told, ten ports of each Service and the number of the others.
func TestReadyWithServicesThatDoNotFit(t *testing.T) {
	open := func() (*ebpf.Plane, error) { // without Capabilities.Frontends and Slots, or resolve would refuse them first
		return ebpf.Open(ebpf.Options{Sizes: bpf.Sizes{Frontends: 2048, Pools: 4096, Slots: 8192}})
	}
	m := mode.WithFallback(ebpf.Capabilities(), open, nftables.Capabilities, nftables.New, ebpf.Leaves)
	var externalIPs []string
	for i := range 90 {
		externalIPs = append(externalIPs, fmt.Sprintf("203.0.113.%d", 1+i))
	}
	objects := append(webAt("evil", "wide", "10.97.0.1", 50, externalIPs...), webAt("shop", "web", "10.96.0.1", 1)...)
	objects = append(objects, webAt("shop", "cart", "10.96.0.2", 1)...)
	mag := webAt("evil", "mag", "10.97.0.2", 80)
	mag[0].(*corev1.Service).Annotations = map[string]string{"fairlead.dev/scheduler": "maglev"}
	objects = append(objects, mag...)
	inNode(t, func(ctx context.Context) error {
		a, _ := runAgent(t, ctx, m, objects...)
		h := a.handler()
		if _, err := until(ctx, h, "/readyz", http.StatusOK); err != nil {
			return err
		}
		if err := probeServices(ctx, 2); err != nil {
			t.Error(err)
		}
		notified := map[string]int{}
		for _, p := range a.activeProblems() {
			if p.Reason == "Refused" {
				notified[p.Object.Namespace+"/"+p.Object.Name]++
			}
		}
		if notified["evil/wide"] != mostPerService+1 || notified["evil/mag"] != mostPerService+1 ||
			notified["shop/web"]+notified["shop/cart"] != 0 {
			t.Errorf("refusals told: %v", notified)
		}
		if _, body := get(h, "/status"); strings.Count(body, `"evil/wide:`) > mostPerService+1 ||
			!strings.Contains(body, " more") {
			t.Errorf("/status: %s", body)
		}
		return nil
	})
}

// Without hooks nothing is served: the node is not ready, load balancers learn it, and there is a problem of the Node.
// It is ready as soon as they are attached.
func TestNotReadyWithoutHooks(t *testing.T) {
	var refuses atomic.Bool
	refuses.Store(true)
	open := func() (mode.ServicePlane[ebpf.Key, string], error) {
		p, err := ebpf.New()
		return refusing[ebpf.Key, string]{p,
			func(k ebpf.Key) bool { return k.Kind == ebpf.KindHooks && refuses.Load() }}, err
	}
	m := mode.WithFallback(ebpf.Capabilities(), open, nftables.Capabilities, nftables.New, ebpf.Leaves)
	inNode(t, func(ctx context.Context) error {
		objects := webAt("shop", "web", "10.96.0.1", 1)
		a, planes := runAgent(t, ctx, m, objects...)
		h := a.handler()
		if err := planes.Sync(ctx); err == nil {
			t.Error("hooks that are rejected count as attached")
		}
		if code, body := get(h, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "hooks") {
			t.Errorf("/readyz: %d %s", code, body)
		}
		if code, _ := get(a.health, "/healthz"); code != http.StatusServiceUnavailable {
			t.Errorf("/healthz: %d", code)
		}
		found := false
		for _, p := range a.activeProblems() {
			found = found || p.Object.Kind == source.Node && p.Object.Name == "a" &&
				strings.Contains(p.Message, "hooks")
		}
		if !found {
			t.Errorf("no problem of the Node: %v", a.activeProblems())
		}
		attached := func() int {
			services := decidedFor(m, objects)
			audit, err := mode.Check(ctx, m, services)
			if err != nil {
				t.Fatal(err)
			}
			missing, _ := audit.Attached(services.ServiceNode)
			return missing
		}
		if n := attached(); n != 1 {
			t.Errorf("%d facts of the node are missing, want the hooks alone", n)
		}
		refuses.Store(false)
		if _, err := until(ctx, h, "/readyz", http.StatusOK); err != nil {
			return err
		}
		if n := attached(); n != 0 {
			t.Errorf("%d facts of the node are missing", n)
		}
		return probeServices(ctx, 1)
	})
}
