package revoke

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

const bit = 1 << 31

// cluster is node n1 with three pods, and one that is no pod of it.
const cluster = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
spec: {podCIDRs: [10.0.1.0/24, "fd00:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.0.1}, {type: InternalIP, address: "fd99::1"}]}
` + client + `
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec:
  nodeName: n1
  containers: [{name: c, ports: [{containerPort: 53, protocol: UDP}, {containerPort: 80, protocol: SCTP}]}]
status: {phase: Running, podIPs: [{ip: 10.0.1.3}, {ip: "fd00:1::3"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, labels: {app: db}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.0.1.4}, {ip: "fd00:1::4"}]}
`

// client is the pod client, which policies allow.
const client = `
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop, labels: {app: client}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.0.1.2}, {ip: "fd00:1::2"}]}
`

// allow isolates web and lets in pods of an app.
const allow = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: %s}}}]}]
`

// bed is node n1 with an engine, and what runs before it.
type bed struct {
	testing.TB
	*sandbox.Cluster
	node     *sandbox.Host
	resolver *policy.Resolver
	runner   reconcile.Runner[model.PolicyPart]
	marker   *conntrack.Conn
	*Revoker
	bit       uint32
	stop      func()
	additions time.Duration // how long changes that only add wait, if not 0
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// newBed builds the cluster, without an engine.
func newBed(t testing.TB) *bed {
	b := &bed{TB: t, bit: bit}
	var err error
	b.Cluster, err = sandbox.Up(t.Context(), sandbox.Options{Objects: b.load(cluster), Serve: true})
	b.must(err)
	t.Cleanup(func() { b.must(b.Down()) })
	b.node, err = b.Node("n1")
	b.must(err)
	b.must(b.node.Do(func() (err error) {
		b.marker, err = conntrack.Open()
		return err
	}))
	t.Cleanup(func() { b.marker.Close() })
	return b
}

// start starts an agent's part with the given policies; the one before ends.
func (b *bed) start(texts ...string) {
	b.Helper()
	if b.stop != nil {
		b.stop()
	}
	b.must(b.node.Do(func() error {
		plane, err := nftables.New()
		if err != nil {
			return err
		}
		b.runner = reconcile.New(plane, reconcile.Options[model.PolicyPart]{
			Base: func(p model.PolicyPart) bool { _, ok := p.(*model.PolicyNode); return ok }})
		b.Revoker, err = Open(b.runner, slog.New(slog.NewTextHandler(b.Output(), nil)))
		if _, bench := b.TB.(*testing.B); bench && err == nil {
			b.times.burst = time.Hour
		}
		if b.additions != 0 && err == nil {
			b.times.calm = b.additions
		}
		return err
	}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- b.Run(ctx) }()
	b.stop = func() {
		cancel()
		b.must(<-ended)
		b.must(b.Close())
		b.stop = nil
	}
	b.Cleanup(func() {
		if b.stop != nil {
			b.stop()
		}
	})
	b.resolver = policy.New(policy.Config{Node: "n1", CutMark: b.bit})
	b.apply(append(texts, cluster)...)
}

// load reads YAML texts.
func (b *bed) load(texts ...string) []source.Object {
	b.Helper()
	dir := b.TempDir()
	for i, text := range texts {
		b.must(os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600))
	}
	objects, faults, err := manifest.Load(dir)
	if err != nil || len(faults) > 0 {
		b.Fatal(err, faults)
	}
	return objects
}

// apply changes objects and waits until what they deny is cut.
func (b *bed) apply(texts ...string) {
	b.Helper()
	b.change(changesOf(b.load(texts...)))
}

func changesOf(objects []source.Object) (changes []source.Change) {
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	return changes
}

// delete deletes objects, and waits as apply does.
func (b *bed) delete(texts ...string) {
	b.Helper()
	var changes []source.Change
	for _, o := range b.load(texts...) {
		changes = append(changes, source.Change{Key: source.KeyOf(o)})
	}
	b.change(changes)
}

func (b *bed) change(changes []source.Change) {
	b.Helper()
	c := b.resolver.Apply(changes)
	b.Change(c.Put, c.Del)
	b.must(b.SyncCut(b.Context()))
}

// pod returns a pod's namespace and address.
func (b *bed) pod(name string, six bool) (*sandbox.Host, netip.Addr) {
	b.Helper()
	h, err := b.Pod("shop", name)
	b.must(err)
	suffix := map[string]string{"client": "2", "web": "3", "db": "4"}[name]
	if six {
		return h, netip.MustParseAddr("fd00:1::" + suffix)
	}
	return h, netip.MustParseAddr("10.0.1." + suffix)
}

// connection is both ends of one of TCP.
type connection struct{ client, server *net.TCPConn }

// connect opens a connection from a pod to another, which listens at port, by way of an address.
func (b *bed) connect(from, to string, six bool, port int, via string) (c connection) {
	b.Helper()
	src, _ := b.pod(from, six)
	dst, addr := b.pod(to, six)
	var l net.Listener
	b.must(dst.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, uint16(port)).String())
		return err
	}))
	defer l.Close()
	if via == "" {
		via = l.Addr().String()
	}
	b.must(src.Do(func() error {
		conn, err := net.DialTimeout("tcp", via, 10*time.Second)
		if err == nil {
			c.client = conn.(*net.TCPConn)
			b.Cleanup(func() { conn.Close() })
		}
		return err
	}))
	conn, err := l.Accept()
	b.must(err)
	c.server = conn.(*net.TCPConn)
	b.Cleanup(func() { conn.Close() })
	b.must(errors.Join(say(c.client, c.server), say(c.server, c.client)))
	return c
}

// say sends a word from one end to the other, and returns what becomes of it: nil, or the error of either end.
func say(from, to net.Conn) error {
	if _, err := from.Write([]byte("word")); err != nil {
		return err
	}
	ends := make(chan error, 2)
	for _, c := range []net.Conn{from, to} {
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		go func() {
			_, err := c.Read(make([]byte, 9))
			ends <- err
		}()
	}
	err := <-ends
	from.SetReadDeadline(time.Unix(0, 1)) // ends the other read
	to.SetReadDeadline(time.Unix(0, 1))
	<-ends
	return err
}

func (c connection) lives(t testing.TB) {
	t.Helper()
	if err := errors.Join(say(c.client, c.server), say(c.server, c.client)); err != nil {
		t.Error("the connection does not go on:", err)
	}
}

// speak sends a word from an end and returns the error that it hears of.
func speak(c net.Conn) error {
	_, err := c.Write([]byte("word"))
	if err == nil {
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err = c.Read(make([]byte, 9))
	}
	return err
}

// isCut fails unless both ends hear of a reset when they speak.
func (c connection) isCut(t testing.TB, serverFirst bool) {
	t.Helper()
	ends := []net.Conn{c.client, c.server}
	if serverFirst {
		slices.Reverse(ends)
	}
	for _, end := range ends {
		if err := speak(end); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a connection that is denied: %v, want a reset", err)
		}
	}
}

// streams writes and reads at both ends until they fail, and sends the errors of each.
func (c connection) streams() (ended chan error) {
	ended = make(chan error, 2)
	for _, c := range []*net.TCPConn{c.client, c.server} {
		c.SetDeadline(time.Now().Add(20 * time.Second))
		errs := make(chan error, 2)
		for _, do := range []func([]byte) (int, error){c.Write, c.Read} {
			go func() {
				for b := make([]byte, 4096); ; {
					if _, err := do(b); err != nil {
						errs <- err
						return
					}
				}
			}()
		}
		go func() { ended <- errors.Join(<-errs, <-errs) }()
	}
	return ended
}

func TestWithdrawnPermissionCuts(t *testing.T) {
	b := newBed(t)
	b.start(fmt.Sprintf(allow, "client"))
	var idle []connection
	var packets []*echo.Flow
	for _, six := range []bool{false, true} {
		idle = append(idle, b.connect("client", "web", six, 0, ""), b.connect("client", "web", six, 0, ""))
		src, _ := b.pod("client", six)
		_, web := b.pod("web", six)
		for _, p := range []echo.Port{{Number: 53, Protocol: model.UDP}, {Number: 80, Protocol: model.SCTP}} {
			b.must(src.Do(func() error {
				f, err := echo.Open(t.Context(), p.Protocol, netip.AddrPortFrom(web, p.Number), echo.Options{})
				packets = append(packets, f)
				return err
			}))
			_, err := packets[len(packets)-1].Request(t.Context())
			b.must(err)
		}
	}
	busy := b.connect("client", "web", false, 0, "").streams()
	other := b.connect("client", "db", false, 0, "")
	b.apply(fmt.Sprintf(allow, "nobody"))
	for range 2 {
		if err := <-busy; !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a busy connection that is denied: %v, want a reset", err)
		}
	}
	for i, c := range idle {
		c.isCut(t, i%2 == 1)
	}
	for _, f := range packets {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if _, err := f.Request(ctx); !errors.Is(err, echo.Timeout) {
			t.Errorf("%s: %v, want silence", f.Local(), err)
		}
		cancel()
	}
	other.lives(t)
	if s := b.Cuts(); s.Cut != 9 || s.Problem != "" {
		t.Errorf("status %+v, want 9 cut", s)
	}
	_, err := b.marker.Remark(b.bit, func(conntrack.Tracked) uint32 { return 0 })
	b.must(err)
	b.pass(t.Context(), false) // as after what was let in while the rules changed
	marked := 0
	_, err = b.marker.Remark(0, func(c conntrack.Tracked) uint32 {
		if c.Mark&b.bit != 0 {
			marked++
		}
		return 0
	})
	if b.must(err); marked < len(packets) {
		t.Errorf("a second pass marks %d connections, want at least %d", marked, len(packets))
	}
	b.apply(fmt.Sprintf(allow, "client"))
	for _, f := range packets {
		if _, err := f.Request(t.Context()); err != nil {
			t.Errorf("%s: allowed again: %v", f.Local(), err)
		}
		f.Close()
	}
	if s := b.Cuts(); s.Marked != 0 || b.holds("cut-forward") {
		t.Errorf("nothing is denied, but the status is %+v and the kernel cuts: %v", s, b.holds("cut-forward"))
	}
}

// holds reports whether the table of the engine has a chain.
func (b *bed) holds(chain string) (yes bool) {
	b.Helper()
	b.must(b.node.Do(func() error {
		out, err := exec.Command("nft", "list", "table", "inet", nftables.Table).CombinedOutput()
		yes = strings.Contains(string(out), "chain "+chain+" {")
		return err
	}))
	return yes
}

// TestAdditionsWait has a pod come, and a permission go that must be withdrawn at once: both are evaluated together.
func TestAdditionsWait(t *testing.T) {
	b := newBed(t)
	b.additions = time.Hour
	policy := fmt.Sprintf(allow, "client")
	b.start(policy)
	b.mu.Lock()
	passing, count := b.passing, b.count
	b.mu.Unlock()
	comes := b.resolver.Apply(changesOf(b.load(`apiVersion: v1
kind: Pod
metadata: {name: another, namespace: shop, labels: {app: web}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.0.1.9}, {ip: "fd00:1::9"}]}
`)))
	b.Change(comes.Put, comes.Del)
	b.until(func() bool { return len(b.notified) == 0 })
	goes := b.resolver.Apply(changesOf(b.load(fmt.Sprintf(allow, "nobody"))))
	if len(comes.Put) == 0 || len(comes.Del) > 0 || len(goes.Del) == 0 {
		t.Fatalf("%+v, %+v", comes, goes)
	}
	b.Change(goes.Put, goes.Del)
	select {
	case <-passing:
	case <-time.After(20 * time.Second):
		t.Fatal("what is withdrawn waits")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.passed != count+2 {
		t.Errorf("evaluated up to change %d, want %d: the pod has a pass of its own", b.passed, count+2)
	}
}

func TestUnrelatedChangesCutNothing(t *testing.T) {
	b := newBed(t)
	policy := fmt.Sprintf(allow, "client")
	b.start(policy)
	c := b.connect("client", "web", false, 0, "")
	elsewhere := strings.ReplaceAll(strings.ReplaceAll(policy, "app: web", "app: db"), "name: web", "name: db")
	for range 2 {
		b.delete(policy) // made again with the same content
		b.apply(policy)
		b.apply(elsewhere)
		c.lives(t)
	}
	b.delete(policy)
	c.lives(t)
	if s := b.Cuts(); s.Cut != 0 {
		t.Errorf("status %+v, want none cut", s)
	}
}

// service translates a ClusterIP to web, and masquerades its clients.
const service = `table ip t {
	chain c {
		type nat hook prerouting priority -100
		ip daddr 10.96.0.10 tcp dport 80 dnat to 10.0.1.3:8080
	}
	chain d {
		type nat hook postrouting priority 100
		ct original ip daddr 10.96.0.10 masquerade
	}
}`

func TestBackendOfAServiceCounts(t *testing.T) {
	b := newBed(t)
	b.must(b.node.Do(func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader(service)
		out, err := c.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}))
	b.start(fmt.Sprintf(allow, "client"))
	c := b.connect("client", "web", false, 8080, "10.96.0.10:80")
	d := b.connect("client", "web", false, 8080, "10.96.0.10:80")
	b.apply(fmt.Sprintf(allow, "client")) // nothing
	c.lives(t)
	b.apply(fmt.Sprintf(allow, "nobody"))
	c.isCut(t, false)
	d.isCut(t, true)
	b.apply(fmt.Sprintf(allow, "none"))
	if s := b.Cuts(); s.Marked != 0 || b.holds("cut-forward") {
		t.Errorf("connections were reset, but the status is %+v and the kernel cuts: %v", s, b.holds("cut-forward"))
	}
}

func TestRunningConnectionsOutliveInstallation(t *testing.T) {
	b := newBed(t)
	var clear, unclear []connection // by their ports, which end opened them
	for _, six := range []bool{false, true} {
		for range 2 {
			clear = append(clear, b.connect("client", "web", six, 8080, ""))
			unclear = append(unclear, b.connect("client", "web", six, 40000, ""))
		}
	}
	all := slices.Concat(clear, unclear)
	denied := b.connect("db", "web", false, 8080, "")
	b.start(fmt.Sprintf(allow, "client"))
	for i, c := range all {
		if i%2 == 0 { // the kernel sees the server's packets first
			b.must(say(c.server, c.client))
		}
		c.lives(t)
	}
	b.must(say(denied.server, denied.client)) // no change tells of it, but the clock
	b.until(func() bool { return b.Cuts().Marked == 1 })
	b.must(b.SyncCut(t.Context()))
	denied.isCut(t, true)
	b.apply(strings.NewReplacer("name: web", "name: db", "app: web", "app: db").Replace(fmt.Sprintf(allow, "x")))
	for _, c := range all {
		c.lives(t)
	}
	b.apply(fmt.Sprintf(allow, "nobody"))
	for i, c := range clear {
		c.isCut(t, i%2 == 0)
	}
	for _, c := range unclear { // the server might have opened it, and may
		c.lives(t)
	}
	b.apply(strings.NewReplacer("name: web", "name: all", "{matchLabels: {app: web}}", "{}").
		Replace(fmt.Sprintf(allow, "nobody")))
	for i, c := range unclear {
		c.isCut(t, i%2 == 0)
	}
}

// until waits for what a Revoker does by its clock.
func (b *bed) until(done func() bool) {
	b.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("not within 20 s: %+v", b.Cuts())
		}
	}
}

func TestCutAcrossRestart(t *testing.T) {
	b := newBed(t)
	b.start(fmt.Sprintf(allow, "client"))
	c, d := b.connect("client", "web", false, 0, ""), b.connect("client", "web", false, 0, "")
	e := b.connect("client", "web", false, 0, "")
	b.apply(fmt.Sprintf(allow, "nobody"))
	b.start(fmt.Sprintf(allow, "nobody"))
	c.isCut(t, true)
	if s := b.Cuts(); s.Cut != 0 || s.Marked == 0 {
		t.Errorf("after a restart: %+v, want none cut anew", s)
	}
	b.start(fmt.Sprintf(allow, "client")) // changed while no agent ran
	d.lives(t)
	b.stop()
	b.start(fmt.Sprintf(allow, "nobody"))
	e.isCut(t, false)
}

func TestBitOfAnotherProgram(t *testing.T) {
	b := newBed(t)
	b.start(fmt.Sprintf(allow, "client"))
	c := b.connect("client", "web", false, 0, "")
	var own net.Conn
	b.must(b.node.Do(func() error {
		l, err := net.Listen("tcp", "192.168.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		own, err = net.Dial("tcp", l.Addr().String())
		return err
	}))
	_, err := b.marker.Remark(bit|2, func(t conntrack.Tracked) uint32 {
		if t.Source.Addr() == netip.MustParseAddr("192.168.0.1") {
			return bit | 2
		}
		return 2
	})
	b.must(err)
	b.apply(fmt.Sprintf(allow, "nobody"))
	if s := b.Cuts(); !strings.Contains(s.Problem, "0x80000000") || b.holds("cut-forward") {
		t.Errorf("%+v, cutting %v; want a problem that names the bit", s, b.holds("cut-forward"))
	}
	c.lives(t)
	_, err = b.marker.Remark(0, func(t conntrack.Tracked) uint32 {
		if t.Mark&2 == 0 {
			b.Errorf("%s > %s lost another program's bit", t.Source, t.Destination)
		}
		return 0
	})
	b.must(err)
	_, err = b.marker.Remark(bit, func(conntrack.Tracked) uint32 { return 0 })
	b.must(err)
	own.Close()
	b.apply(strings.Replace(fmt.Sprintf(allow, "nobody"), "app: nobody", "app: none", 1))
	c.isCut(t, false)
}

func TestNothingIsCutWithoutABit(t *testing.T) {
	b := newBed(t)
	b.bit = 0
	b.start(fmt.Sprintf(allow, "client"))
	c := b.connect("client", "web", false, 0, "")
	b.apply(fmt.Sprintf(allow, "nobody"))
	c.lives(t)
	if s := b.Cuts(); s.Passes != 0 {
		t.Errorf("%+v: want no pass", s)
	}
}
