package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// unreadWorld is a node of three pods, of which one is isolated, and a Service of another.
const unreadWorld = `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: [10.244.1.0/24]}
status: {addresses: [{type: InternalIP, address: 192.168.77.1}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop, labels: {app: client}}
spec: {nodeName: a, containers: [{name: c}]}
status: {podIPs: [{ip: 10.244.1.2}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {nodeName: a, containers: [{name: c, ports: [{containerPort: 80}]}]}
status: {podIPs: [{ip: 10.244.1.3}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, labels: {app: db}}
spec: {nodeName: a, containers: [{name: c, ports: [{containerPort: 80}]}]}
status: {podIPs: [{ip: 10.244.1.4}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIPs: [10.96.0.10], selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.3]}]
ports: [{name: "", port: 80, protocol: TCP}]
`

// sentBatches is a source of batches that a test sends.
type sentBatches chan source.Batch

func (s sentBatches) Run(ctx context.Context, deliver func(source.Batch)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case b := <-s:
			deliver(b)
		}
	}
}

// While a kind can't be read that policies need, Services are served as they are now, policies stay as an agent before
// left them in the kernel, and the node isn't ready. Once it is read, policies are as they are now.
func TestServicesGoOnWhilePoliciesAreUnread(t *testing.T) {
	for _, pair := range [][2]string{{"nftables", "nftables"}, {"iptables-nft", "iptables"}, {"ebpf", "ebpf"},
		{"userspace", "nftables"}, {"nftables", "ebpf"}} {
		t.Run(strings.Join(pair[:], "/"), func(t *testing.T) {
			t.Parallel()
			servicesGoOn(t, pair[0], pair[1])
		})
	}
}

// worldBed is a world, and an agent of its node a.
type worldBed struct {
	testing.TB
	objects  []source.Object
	cluster  *sandbox.Cluster
	node     *sandbox.Host
	services mode.Mode
	engine   mode.Engine  // of no name: no policies
	further  []netip.Addr // of the node
}

func (b *worldBed) must(err error) {
	if b.Helper(); err != nil {
		b.Fatal(err)
	}
}

func newWorldBed(t testing.TB, world, services, engine string) *worldBed {
	b := &worldBed{TB: t}
	file := filepath.Join(t.TempDir(), "world.yaml")
	b.must(os.WriteFile(file, []byte(world), 0o600))
	var problems []source.Problem
	var err error
	if b.objects, problems, err = manifest.Load(file); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	b.services, err = mode.Of(services)
	b.must(err)
	if engine != "" {
		b.engine, err = mode.EngineOf(engine)
		b.must(err)
	}
	b.cluster, err = sandbox.Up(t.Context(), sandbox.Options{Objects: b.objects, Serve: true})
	b.must(err)
	b.node, err = b.cluster.Node("a")
	b.must(err)
	t.Cleanup(func() {
		b.must(errors.Join(b.node.Do(func() error { return mode.Clean(context.Background()) }), b.cluster.Down()))
	})
	return b
}

// start starts an agent of what is sent. It is ready once that is closed.
func (b *worldBed) start() (send sentBatches, ready chan struct{}, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	send, ready = make(sentBatches), make(chan struct{})
	ended := make(chan error, 1)
	addresses := append(slices.Clone(b.node.Addresses), b.further...)
	o := Options{Mode: b.services, Source: send, Log: slog.New(slog.DiscardHandler),
		Servers: Servers{Metrics: "127.0.0.1:10249"}, Resolve: resolve.Config{Node: "a", Addresses: addresses},
		OnReady: func(context.Context) { close(ready) }}
	if b.engine.Name != "" {
		o.Mode = o.Mode.With(mode.Options{Policies: true})
		o.Policies = &PolicyOptions{Engine: b.engine, Resolve: policy.Config{Node: "a", Addresses: addresses}}
	}
	go func() { ended <- b.node.Do(func() error { return Run(ctx, o) }) }()
	return send, ready, func() { cancel(); b.must(<-ended) }
}

// of returns a batch of the objects of some kinds.
func (b *worldBed) of(kinds ...source.Kind) (l source.Batch) {
	for _, o := range b.objects {
		if k := source.KeyOf(o); slices.Contains(kinds, k.Kind) {
			l.Changes = append(l.Changes, source.Change{Key: k, Object: o})
		}
	}
	return l
}

// answers waits until the client's connection to an address fares so.
func (b *worldBed) answers(to string, want error) {
	b.Helper()
	client, err := b.cluster.Pod("shop", "client")
	b.must(err)
	for end := time.Now().Add(20 * time.Second); ; {
		var is error
		b.must(client.Do(func() error {
			ctx, cancel := context.WithTimeout(b.Context(), 300*time.Millisecond)
			defer cancel()
			_, is = echo.Request(ctx, model.TCP, netip.MustParseAddrPort(to), echo.Options{})
			return nil
		}))
		if is == want || want != nil && errors.Is(is, want) {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("%s: %v, want %v", to, is, want)
		}
	}
}

// readyz returns what the page of that name says.
func (b *worldBed) readyz() (text string) {
	b.Helper()
	b.must(b.node.Do(func() error {
		c, err := net.Dial("tcp", "127.0.0.1:10249")
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET /readyz HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		page, err := io.ReadAll(c)
		text = string(page)
		return err
	}))
	return text
}

func servicesGoOn(t *testing.T, services, engine string) {
	b := newWorldBed(t, unreadWorld, services, engine)
	send, ready, stop := b.start()
	send <- b.of(source.Kinds()...)
	<-ready
	b.answers("10.96.0.10:80", nil)
	b.answers("10.244.1.4:80", echo.Timeout)
	stop()

	i := slices.IndexFunc(b.objects, func(o source.Object) bool { return source.KeyOf(o).Kind == source.Service })
	moved := b.objects[i].(*corev1.Service).DeepCopy()
	moved.Spec.ClusterIPs = []string{"10.96.0.11"}
	b.objects[i] = moved
	send, ready, stop = b.start()
	first := b.of(source.Node, source.Service, source.EndpointSlice)
	first.Unlisted = []source.Kind{source.NetworkPolicy}
	send <- first
	b.answers("10.96.0.11:80", nil)
	b.answers("10.244.1.4:80", echo.Timeout)
	if text := b.readyz(); !strings.Contains(text, "503") || !strings.Contains(text, "NetworkPolicy") {
		t.Errorf("/readyz says %q", text)
	}
	send <- b.of(source.Namespace, source.Pod) // the policy is gone
	<-ready
	b.answers("10.244.1.4:80", nil)
	stop()
}
