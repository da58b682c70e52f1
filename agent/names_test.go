package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

const namesWorld = `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: [10.244.1.0/24, "fd00:10:244:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.77.1}, {type: InternalIP, address: "fd00:77::1"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop, labels: {app: client}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.10}, {ip: "fd00:10:244:1::10"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: mute, namespace: shop, labels: {app: mute}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.11}]}
---
apiVersion: v1
kind: Pod
metadata: {name: flood, namespace: shop, labels: {app: client}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.12}, {ip: "fd00:10:244:1::12"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: dns, namespace: kube-system, labels: {app: dns}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.53}, {ip: "fd00:10:244:1::53"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: evil, namespace: shop, labels: {app: evil}}
spec: {nodeName: a, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.66}, {ip: "fd00:10:244:1::66"}]}
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{name: u, port: 53, targetPort: 5353, protocol: UDP}, {name: t, port: 53, targetPort: 5353}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-1, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports: [{name: u, port: 5353, protocol: UDP}, {name: t, port: 5353}]
endpoints: [{addresses: [10.244.1.53], nodeName: a, conditions: {ready: true}, targetRef: {kind: Pod, namespace: kube-system, name: dns}}]
---
apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: egress}
spec:
  tier: Admin
  priority: 1
  subject: {pods: {podSelector: {matchLabels: {app: client}}}}
  egress:
  - {action: Accept, to: [{pods: {podSelector: {matchExpressions: [{key: app, operator: In, values: [dns, evil]}]}}}]}
  - {action: Accept, to: [{networks: [192.168.77.1/32, 10.244.2.53/32]}]}
  - {action: Accept, to: [{domainNames: [example.com, "*.example.com", other.org]}]}
  - {action: Deny, to: [{networks: [0.0.0.0/0, "::/0"]}]}
---
apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: mute}
spec:
  tier: Admin
  priority: 2
  subject: {pods: {podSelector: {matchLabels: {app: mute}}}}
  egress:
  - {action: Accept, to: [{domainNames: [example.com]}]}
  - {action: Deny, to: [{networks: [0.0.0.0/0, "::/0"]}]}
`

// namesBed is a node with pods, a resolver, and an agent.
type namesBed struct {
	*testing.T
	cluster *sandbox.Cluster
	objects []source.Object
	mode    string
	engine  string
	stop    func()

	resolvers []netip.AddrPort // beside the Service
	folder    string           // of the CNI configuration, where the agent connects the pods; "": wires do

	mu      sync.Mutex // for the rest, which the resolvers read
	records map[string][]record
	forged  string // an address that an answer with another ID has, which comes before each answer; "": none comes
}

// silent is a name that resolvers don't answer about.
const silent = "silent.example.com"

// record is what a resolver answers with.
type record struct {
	address string // or the name that follows in a chain
	ttl     uint32
}

func newNamesBed(t *testing.T, services, engine string) *namesBed {
	return newNamesBedOf(t, services, engine, namesWorld, "")
}

// newNamesBedOf returns one of a world, whose pods the agent connects, with its configuration in a folder, or wires.
func newNamesBedOf(t *testing.T, services, engine, world, folder string) *namesBed {
	file := filepath.Join(t.TempDir(), "world.yaml")
	if err := os.WriteFile(file, []byte(world), 0o600); err != nil {
		t.Fatal(err)
	}
	objects, problems, err := manifest.Load(file)
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	b := &namesBed{T: t, objects: objects, mode: services, engine: engine, folder: folder,
		records: map[string][]record{}, stop: func() {}}
	o := sandbox.Options{Objects: objects}
	if folder != "" {
		o.CNI = func(string) string { return folder }
	}
	b.cluster, err = sandbox.Up(t.Context(), o)
	b.must(err)
	t.Cleanup(func() {
		b.stop()
		node, err := b.cluster.Node("a")
		b.must(errors.Join(err, node.Do(func() error {
			return errors.Join(mode.Clean(context.Background()), mode.CleanNetwork(context.Background()))
		}), b.cluster.Down()))
	})
	b.serve("kube-system", "dns", ":5353")
	b.serve("shop", "evil", ":53")
	var l net.Listener
	b.must(b.cluster.External().Do(func() (err error) {
		addresses := []string{"198.51.100.2"}
		for i := range 20 {
			addresses = append(addresses, fmt.Sprintf("192.0.2.%d", 100+i))
		}
		for _, a := range addresses {
			err = errors.Join(err, exec.Command("ip", "address", "add", a, "dev", "lo").Run())
		}
		if err == nil {
			l, err = net.Listen("tcp", ":80")
		}
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	return b
}

func (b *namesBed) must(err error) {
	if b.Helper(); err != nil {
		b.Fatal(err)
	}
}

// start starts an agent, in place of the one before, and waits until it serves.
func (b *namesBed) start() {
	b.Helper()
	b.stop()
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	node, err := b.cluster.Node("a")
	b.must(err)
	services, err := mode.Of(b.mode)
	b.must(err)
	engine, err := mode.EngineOf(b.engine)
	b.must(err)
	c := policy.Config{Node: "a", Addresses: node.Addresses, ImpliedNamespaces: true, CutMark: 1 << 31}
	o := Options{Mode: services, Source: sourceOf(b.objects), Log: slog.New(slog.DiscardHandler),
		Resolve:  resolve.Config{Node: "a", Addresses: node.Addresses},
		Policies: &PolicyOptions{Engine: engine, Resolve: c, NameFloor: 4 * time.Second, NameHold: 10 * time.Second},
		OnReady:  func(context.Context) { close(ready) }}
	o.Policies.Resolvers.Addresses = b.resolvers
	o.Policies.Resolvers.Services = []model.Owner{{Kind: model.KindService, Namespace: "kube-system", Name: "kube-dns"}}
	go func() {
		ended <- node.Do(func() error {
			if b.folder == "" {
				return Run(ctx, o)
			}
			return b.runNetwork(ctx, o)
		})
	}()
	b.stop = func() {
		stop()
		b.must(<-ended)
		b.stop = func() {}
	}
	select {
	case <-ready:
	case err := <-ended:
		b.Fatal(err)
	}
	if b.folder != "" {
		b.must(b.cluster.Attach(ctx))
	}
}

// runNetwork runs an agent that connects the pods too.
func (b *namesBed) runNetwork(ctx context.Context, o Options) error {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return err
	}
	defer interfaces.Close()
	socket, records := filepath.Join(b.folder, "cni.sock"), filepath.Join(b.folder, "records")
	o.Mode = o.Mode.With(mode.Options{Policies: true, PodNetwork: true})
	o.Network = &NetworkOptions{Resolve: network.Config{Node: "a"}, Socket: socket, Records: records, Boot: "x",
		Follow: func(ctx context.Context, notify func([]network.Device, bool)) error {
			return followInterfaces(ctx, interfaces, notify)
		},
		OnReady: func() error { return attach.WriteConfig(b.folder, socket, records) }}
	return Run(ctx, o)
}

// serve answers queries at a port of a pod, over UDP and TCP.
func (b *namesBed) serve(namespace, name, address string) {
	b.Helper()
	pod, err := b.cluster.Pod(namespace, name)
	b.must(err)
	b.serveOn(pod, address)
}

// serveOn answers queries at an address of a host, over UDP and TCP.
func (b *namesBed) serveOn(pod *sandbox.Host, address string) {
	b.Helper()
	var u net.PacketConn
	var l net.Listener
	b.must(pod.Do(func() (err error) {
		if u, err = net.ListenPacket("udp", address); err == nil {
			l, err = net.Listen("tcp", address)
		}
		return err
	}))
	b.Cleanup(func() { u.Close(); l.Close() })
	go func() {
		for p := make([]byte, 512); ; {
			n, from, err := u.ReadFrom(p)
			if err != nil {
				return
			}
			for _, answer := range b.answers(p[:n]) {
				u.WriteTo(answer, from)
			}
		}
	}()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p := make([]byte, 512)
			if n, err := c.Read(p); err == nil && n > 2 {
				for _, answer := range b.answers(p[2:n]) {
					c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
				}
			}
			c.Close()
		}
	}()
}

// answers returns the answer to a query, behind a forged one if there is to be one.
func (b *namesBed) answers(query []byte) (l [][]byte) {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	name := strings.TrimSuffix(q.Name.String(), ".")
	if name == silent {
		return nil
	}
	if b.forged != "" {
		l = append(l, b.answer(h.ID+1, q, []record{{b.forged, 3600}}))
	}
	return append(l, b.answer(h.ID, q, b.records[name]))
}

func (b *namesBed) answer(id uint16, q dnsmessage.Question, records []record) []byte {
	m := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: id, Response: true})
	err := errors.Join(m.StartQuestions(), m.Question(q), m.StartAnswers())
	at := q.Name
	for _, r := range records {
		h := dnsmessage.ResourceHeader{Name: at, Class: dnsmessage.ClassINET, TTL: r.ttl}
		a, bad := netip.ParseAddr(r.address)
		switch {
		case bad != nil:
			at = dnsmessage.MustNewName(r.address)
			err = errors.Join(err, m.CNAMEResource(h, dnsmessage.CNAMEResource{CNAME: at}))
		case a.Is4() && q.Type == dnsmessage.TypeA:
			err = errors.Join(err, m.AResource(h, dnsmessage.AResource{A: a.As4()}))
		case a.Is6() && q.Type == dnsmessage.TypeAAAA:
			err = errors.Join(err, m.AAAAResource(h, dnsmessage.AAAAResource{AAAA: a.As16()}))
		}
	}
	out, err2 := m.Finish()
	if err = errors.Join(err, err2); err != nil {
		b.Error(err)
	}
	return out
}

// set has the resolvers answer so.
func (b *namesBed) set(name string, records ...record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records[name] = records
}

// forge has a forged answer with this address come before each answer from now on; "" ends that.
func (b *namesBed) forge(address string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forged = address
}

// Bounds of what may take its time on a busy machine: of an answer, and of a first packet, short of the second that the
// next is sent after.
const (
	answerWithin = 10 * time.Second
	packetWithin = 900 * time.Millisecond
)

// query has a pod query a resolver, and reports whether the right answer came.
func (b *namesBed) query(pod, network, resolver, name string, kind dnsmessage.Type) bool {
	return b.queryWithin(answerWithin, pod, network, resolver, name, kind)
}

func (b *namesBed) queryWithin(bound time.Duration, pod, network, resolver, name string, kind dnsmessage.Type) bool {
	b.Helper()
	const id = 4242
	m := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: id, RecursionDesired: true})
	b.must(errors.Join(m.StartQuestions(), m.Question(dnsmessage.Question{Name: dnsmessage.MustNewName(name + "."),
		Type: kind, Class: dnsmessage.ClassINET})))
	query, err := m.Finish()
	b.must(err)
	c := b.dial(pod, network, resolver)
	if c == nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(bound))
	if network == "tcp" {
		query = append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	}
	if _, err := c.Write(query); err != nil {
		b.Fatal(err)
	}
	for p := make([]byte, 512); ; {
		n, err := c.Read(p)
		if err != nil {
			return false
		}
		answer := p[:n]
		if network == "tcp" {
			answer = p[2:n]
		}
		if binary.BigEndian.Uint16(answer) == id {
			return true
		}
	}
}

// lookup has the client query the Service of the resolver for both families.
func (b *namesBed) lookup(name string) {
	b.Helper()
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		if !b.query("client", "udp", "10.96.0.10:53", name, kind) {
			b.Fatalf("no answer about %s", name)
		}
	}
}

// dial returns a connection of a pod, nil where its first packet has no answer.
func (b *namesBed) dial(pod, network, to string) (c net.Conn) {
	b.Helper()
	host, err := b.cluster.Pod("shop", pod)
	b.must(err)
	b.must(host.Do(func() error {
		d := net.Dialer{Timeout: packetWithin}
		c, err = d.Dial(network, to)
		return nil
	}))
	if err != nil {
		return nil
	}
	return c
}

// passes checks whether the client may connect to an address.
func (b *namesBed) passes(to string, want bool) {
	b.Helper()
	c := b.dial("client", "tcp", to)
	if c != nil {
		c.Close()
	}
	if got := c != nil; got != want {
		b.Errorf("to %s: %t, want %t", to, got, want)
	}
}

// open opens a connection of the client that is to last.
func (b *namesBed) open(to string) (c net.Conn) {
	b.Helper()
	if c = b.dial("client", "tcp", to); c == nil {
		b.Fatalf("to %s: dropped", to)
	}
	b.Cleanup(func() { c.Close() })
	return c
}

// lives checks that a connection still carries data.
func (b *namesBed) lives(c net.Conn) {
	b.Helper()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	_, err := c.Write([]byte("word"))
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 4))
	}
	if err != nil {
		b.Errorf("the connection to %s is cut: %v", c.RemoteAddr(), err)
	}
}

// closes waits until the client may no longer connect to an address.
func (b *namesBed) closes(to string) {
	b.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		c := b.dial("client", "tcp", to)
		if c == nil {
			return
		}
		b.must(c.(*net.TCPConn).SetLinger(0)) // an open connection to it lets an address live on
		c.Close()
	}
	b.Errorf("to %s: it passes still", to)
}

// TestDomainNames has an agent learn from the answers of a resolver: cases 60 and 61 of the policies' corner cases,
// forged answers, and a restart; by every engine, and with every mode that proxies or translates queries to a
// resolver's Service in a way of its own.
func TestDomainNames(t *testing.T) {
	pairs := [][2]string{{"iptables-nft", "iptables"}, {"userspace", "nftables"}, {"ebpf", "ebpf"}, {"ebpf", "iptables"}}
	for _, engine := range mode.EngineNames() {
		pairs = append(pairs, [2]string{"nftables", engine})
	}
	for _, p := range pairs {
		t.Run(p[0]+"/"+p[1], func(t *testing.T) {
			t.Parallel()
			testDomainNames(newNamesBed(t, p[0], p[1]))
		})
	}
}

func testDomainNames(b *namesBed) {
	b.set("example.com", record{"192.0.2.1", 3600}, record{"2001:db8::1", 3600})
	b.start()
	b.passes("192.0.2.1:80", false)
	b.lookup("example.com")
	b.passes("192.0.2.1:80", true)
	b.passes("[2001:db8::1]:80", true)
	b.passes("198.51.100.1:80", false)
	for i := range 20 { // the first packet after each answer passes
		name, address := fmt.Sprintf("n%d.example.com", i), fmt.Sprintf("192.0.2.%d", 100+i)
		b.set(name, record{fmt.Sprintf("cdn%d.example.net.", i), 30}, record{address, 30})
		if b.lookup(name); b.dial("client", "tcp", address+":80") == nil {
			b.Errorf("the first packet to %s was dropped", name)
		}
	}

	b.set("evil.example.com", record{"198.51.100.1", 3600})
	if !b.query("client", "udp", "10.244.1.66:53", "evil.example.com", dnsmessage.TypeA) {
		b.Error("another resolver's answer doesn't pass")
	}
	b.passes("198.51.100.1:80", false) // it is no configured resolver's
	b.set("example.net", record{"198.51.100.1", 3600})
	b.lookup("example.net")
	b.passes("198.51.100.1:80", false) // no rule names it
	b.forge("198.51.100.1")
	b.lookup("example.com")
	b.forge("")
	b.passes("198.51.100.1:80", false) // no query waited for it

	if b.queryWithin(packetWithin, "mute", "udp", "10.96.0.10:53", "example.com", dnsmessage.TypeA) {
		b.Error("a name lets queries for it pass")
	}
	if c := b.dial("mute", "tcp", "192.0.2.1:80"); c == nil {
		b.Error("what one pod has learned another may not use")
	}

	// two names share an address, which is over TCP once
	b.set("other.org", record{"198.51.100.1", 1})
	b.set("x.example.com", record{"198.51.100.1", 1})
	b.lookup("other.org")
	if !b.query("client", "tcp", "10.96.0.10:53", "x.example.com", dnsmessage.TypeA) {
		b.Error("no answer over TCP")
	}
	held := b.open("198.51.100.1:80")
	b.lives(held)
	lasting := b.open("192.0.2.1:80")
	b.start() // another agent
	b.lives(held)
	b.lives(lasting)
	b.passes("192.0.2.1:80", true)
	b.set("short.example.com", record{"198.51.100.2", 1})
	b.lookup("short.example.com")
	b.passes("198.51.100.2:80", true)
	b.closes("198.51.100.2:80") // which was learned after what the connections hold
	b.lives(held)
	b.passes("198.51.100.1:80", true)
	held.Close()
	b.closes("198.51.100.1:80")
	b.lives(lasting)
	b.passes("192.0.2.1:80", true)
}
