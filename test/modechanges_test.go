package test_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source/manifest"
)

var everyChangeOf = flag.String("every-change-of", "",
	"modes, by commas: TestModeChanges makes every change from one to another")

// fewChanges are the modes that TestModeChanges goes through unless it is told others, in that order.
var fewChanges = []string{"nftables", "ebpf", "iptables-nft", "ebpf", "nftables", "iptables-legacy", "ebpf"}

// everyChange returns modes in an order in which each follows each other.
func everyChange(modes ...string) (order []string) {
	order = modes[:1:1]
	for i, from := range modes {
		for _, to := range modes[i+1:] {
			order = append(order, to, from)
		}
		if i+1 < len(modes) {
			order = append(order, modes[i+1])
		}
	}
	return order
}

const (
	reusedPorts  = 100
	firstPort    = 20000 // outside the kernel's range for ports that the kernel chooses
	opensEach    = 4     // connections that are opened in each mode, per client and protocol
	maxOpen      = 12    // that are open at once
	replyTimeout = 3 * time.Second
)

const modesObjects = `
apiVersion: v1
kind: Node
metadata: {name: a}
spec: {podCIDRs: [10.244.1.0/24, "fd00:244:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.77.1}, {type: InternalIP, address: "fd00:77::1"}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  ipFamilies: [IPv4, IPv6]
  ports: [{name: tcp, port: 80, nodePort: 30080}, {name: udp, port: 80, nodePort: 30080, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
addressType: IPv4
metadata: {name: web-4, namespace: default, labels: {kubernetes.io/service-name: web}}
ports: [{name: tcp, port: 8080}, {name: udp, port: 8080, protocol: UDP}]
endpoints: [{addresses: [10.244.1.1]}, {addresses: [10.244.1.2]}, {addresses: [10.244.1.3]}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
addressType: IPv6
metadata: {name: web-6, namespace: default, labels: {kubernetes.io/service-name: web}}
ports: [{name: tcp, port: 8080}, {name: udp, port: 8080, protocol: UDP}]
endpoints: [{addresses: ["fd00:244:1::1"]}, {addresses: ["fd00:244:1::2"]}, {addresses: ["fd00:244:1::3"]}]
`

// modeChanges is a node whose running agent is told of one mode after the other, under traffic.
type modeChanges struct {
	t       *testing.T
	dir     string
	node    *sandbox.Host
	reusers []*reuser
	web     http.Client
	log     string // the agent's
	change  atomic.Pointer[string]
}

// reuser is a client that uses the same ports again and again, by one protocol.
type reuser struct {
	in       *modeChanges
	host     *sandbox.Host
	protocol model.Protocol
	to       [2]netip.AddrPort // IPv4, IPv6
	ports    [reusedPorts]sync.Mutex
	rounds   atomic.Int64
	open     []openFlow
	opened   int

	mu       sync.Mutex
	replies  int
	failures []string
}

// openFlow is a connection, or a socket of UDP, that stays open.
type openFlow struct {
	net.Conn
	port int
	mode string // that it began in
}

// No connection fails while the mode of a running agent is changed, of clients that use the same ports again: in a pod,
// on the node, and outside; by TCP and UDP, IPv4 and IPv6. Open connections go on, but for those through the agent.
func TestModeChanges(t *testing.T) {
	order := fewChanges
	if *everyChangeOf != "" {
		order = everyChange(strings.Split(*everyChangeOf, ",")...)
	}
	c := newModeChanges(t, order[0])
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, r := range c.reusers {
		running.Go(func() { r.run(ctx) })
	}
	defer func() {
		stop()
		running.Wait()
		for _, r := range c.reusers {
			r.report()
		}
	}()
	c.rounds()
	for i, mode := range order[1:] {
		begin := time.Now()
		what := order[i] + " → " + mode
		c.change.Store(&what)
		for _, r := range c.reusers {
			r.openSome(order[i])
		}
		c.configure(mode)
		c.serving(mode)
		latency := time.Since(begin)
		c.rounds()
		for _, r := range c.reusers {
			r.probeOpen(mode)
		}
		t.Logf("%s: ready after %s, all in %s", what, latency.Round(time.Millisecond),
			time.Since(begin).Round(time.Millisecond))
	}
	c.countedHonestly()
}

// newModeChanges brings a node up with an agent of a mode.
func newModeChanges(t *testing.T, mode string) *modeChanges {
	c := &modeChanges{t: t, dir: t.TempDir()}
	first := "start"
	c.change.Store(&first)
	text := modesObjects
	for i, name := range []string{"web-1", "web-2", "web-3", "client"} {
		text += fmt.Sprintf(`---
{apiVersion: v1, kind: Pod, metadata: {name: %s, namespace: default}, spec: {nodeName: a, containers: [{name: echo,
  ports: [{containerPort: 8080}, {containerPort: 8080, protocol: UDP}]}]},
  status: {phase: Running, podIP: 10.244.1.%[2]d, podIPs: [{ip: 10.244.1.%[2]d}, {ip: "fd00:244:1::%[2]d"}]}}
`, name, 1+i)
	}
	if err := os.Mkdir(filepath.Join(c.dir, "objects"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.dir, "objects", "all.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	objects, problems, err := manifest.Load(filepath.Join(c.dir, "objects"))
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	name := "modes" + strings.ToLower(rand.Text()[:8])
	box, err := sandbox.Up(t.Context(), sandbox.Options{Name: name, Objects: objects, Serve: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := box.Down(); err != nil {
			t.Error(err)
		}
	})
	pod, err := box.Pod("default", "client")
	if err != nil {
		t.Fatal(err)
	}
	if c.node, err = box.Node("a"); err != nil {
		t.Fatal(err)
	}
	both := func(four, six string) [2]netip.AddrPort {
		return [2]netip.AddrPort{netip.MustParseAddrPort(four), netip.MustParseAddrPort(six)}
	}
	internal, external := both("10.96.0.10:80", "[fd00:96::10]:80"), both("192.168.77.1:30080", "[fd00:77::1]:30080")
	for _, p := range []model.Protocol{model.TCP, model.UDP} {
		c.reusers = append(c.reusers,
			&reuser{in: c, host: pod, protocol: p, to: internal},
			&reuser{in: c, host: c.node, protocol: p, to: internal},
			&reuser{in: c, host: box.External(), protocol: p, to: external})
	}
	c.web.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (n net.Conn, err error) {
			err = c.node.Do(func() error { n, err = new(net.Dialer).DialContext(ctx, network, address); return err })
			return n, err
		}}
	c.configure(mode)
	c.start()
	c.serving(mode)
	return c
}

// configure has the agent's configuration file name a mode.
func (c *modeChanges) configure(mode string) {
	c.t.Helper()
	file := filepath.Join(c.dir, "fairlead.yaml")
	const head = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n"
	text := fmt.Appendf(nil, "%smode: %s\nsource: %s\n", head, mode, filepath.Join(c.dir, "objects"))
	err := os.WriteFile(file+".new", text, 0o644)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// start starts the agent.
func (c *modeChanges) start() {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, "agent.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.log = log.Name()
	cmd := exec.Command(fairlead, "run", "--config", filepath.Join(c.dir, "fairlead.yaml"), "--node", "a")
	cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+filepath.Join(c.dir, "lock"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.node.Do(cmd.Start); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		log.Close()
		if b, err := os.ReadFile(c.log); c.t.Failed() && err == nil {
			c.t.Logf("the agent's log:\n%s", b)
		}
		clean := exec.Command(fairlead, "clean")
		clean.Env = cmd.Env
		if err := c.node.Do(func() error { return clean.Run() }); err != nil {
			c.t.Error(err)
		}
	})
}

// serving waits until the agent serves in a mode.
func (c *modeChanges) serving(mode string) {
	c.t.Helper()
	eventually(c.t, "mode "+mode+" serves", func() bool {
		var s agent.State
		r, err := c.web.Get("http://127.0.0.1:10249/status")
		if err == nil {
			err = json.NewDecoder(r.Body).Decode(&s)
			r.Body.Close()
		}
		return err == nil && s.Mode == mode && s.Ready
	})
}

// rounds waits until every client has used each of its ports once from now on.
func (c *modeChanges) rounds() {
	c.t.Helper()
	var until []int64
	for _, r := range c.reusers {
		until = append(until, r.rounds.Load()+2)
	}
	for i, r := range c.reusers {
		within(c.t, 30*time.Second, "all ports are used again", func() bool { return r.rounds.Load() >= until[i] })
	}
}

// run has the client use one port after the other until ctx ends.
func (r *reuser) run(ctx context.Context) {
	err := r.host.Do(func() error {
		for ; ctx.Err() == nil; r.rounds.Add(1) {
			for port := range reusedPorts {
				if !r.ports[port].TryLock() {
					continue // of an open connection
				}
				err := r.once(port)
				r.ports[port].Unlock()
				if !r.endsWithTheAgent(err) {
					r.count(port, err)
				}
				time.Sleep(time.Millisecond) // there is work for others
			}
		}
		return nil
	})
	if err != nil {
		r.count(0, err)
	}
}

// endsWithTheAgent reports whether err is the end of a connection that ran through an agent of mode userspace, which
// ends.
func (r *reuser) endsWithTheAgent(err error) bool {
	through := r.protocol == model.TCP && strings.HasPrefix(*r.in.change.Load(), "userspace →")
	return through && errors.Is(err, unix.ECONNRESET)
}

// at returns where a port's connections go to.
func (r *reuser) at(port int) netip.AddrPort { return r.to[port/2%2] }

// once opens a connection, asks and closes it, or sends a datagram. Of TCP, every other connection is closed by its
// server first, so that its port may be used again at once; the others are reset.
func (r *reuser) once(port int) error {
	c, err := r.dial(port)
	if err != nil {
		return err
	}
	defer c.Close()
	if r.protocol == model.TCP && port%2 == 0 {
		return fetch(c)
	}
	return probe(c)
}

// dial opens a connection, or a socket of UDP, from a port.
func (r *reuser) dial(port int) (net.Conn, error) {
	from, network := net.Addr(&net.TCPAddr{Port: firstPort + port}), "tcp"
	if r.protocol == model.UDP {
		from, network = &net.UDPAddr{Port: firstPort + port}, "udp"
	}
	d := net.Dialer{Timeout: replyTimeout, LocalAddr: from, Control: func(_, _ string, c syscall.RawConn) (err error) {
		failed := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		})
		return errors.Join(err, failed)
	}}
	return d.Dial(network, r.at(port).String())
}

// probe queries by an open connection, which is reset when it is closed. A datagram is sent again once, as resolvers
// do: the reply to one is lost if its entry of connection tracking is deleted meanwhile.
func probe(c net.Conn) (err error) {
	tcp, is := c.(*net.TCPConn)
	if is {
		tcp.SetLinger(0)
	}
	b, n := make([]byte, 1024), 0
	for range 2 {
		c.SetDeadline(time.Now().Add(replyTimeout))
		if _, err := io.WriteString(c, "?\n"); err != nil {
			return err
		}
		if n, err = c.Read(b); err == nil || is {
			break
		}
	}
	if err == nil && !strings.Contains(string(b[:n]), "default/web-") {
		err = fmt.Errorf("the answer is %q", b[:n])
	}
	return err
}

// fetch requests a page, behind which the server closes the connection.
func fetch(c net.Conn) error {
	c.SetDeadline(time.Now().Add(replyTimeout))
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	b, err := io.ReadAll(c)
	if err == nil && !strings.Contains(string(b), " 200 OK") {
		err = fmt.Errorf("the answer is %q", b)
	}
	return err
}

// openSome opens connections in a mode that stay open, and closes those that were open longest.
func (r *reuser) openSome(mode string) {
	for range opensEach {
		port := r.opened % reusedPorts
		r.opened++
		r.ports[port].Lock()
		f := openFlow{port: port, mode: mode}
		err := r.host.Do(func() (err error) {
			if f.Conn, err = r.dial(port); err == nil {
				err = probe(f.Conn)
			}
			return err
		})
		r.count(port, err)
		if f.Conn == nil {
			r.ports[port].Unlock()
			continue
		}
		r.open = append(r.open, f)
	}
	for len(r.open) > maxOpen {
		r.closeOpen(0)
	}
}

func (r *reuser) closeOpen(i int) {
	r.open[i].Close()
	r.ports[r.open[i].port].Unlock()
	r.open = slices.Delete(r.open, i, i+1)
}

// probeOpen queries again by what is open. What ran through an agent of another mode has ended.
func (r *reuser) probeOpen(mode string) {
	for i := len(r.open) - 1; i >= 0; i-- {
		if f := r.open[i]; r.protocol == model.TCP && f.mode == "userspace" && mode != "userspace" {
			r.closeOpen(i)
			continue
		}
		err := probe(r.open[i].Conn)
		if err != nil {
			err = fmt.Errorf("open since %s: %w", r.open[i].mode, err)
		}
		r.count(r.open[i].port, err)
		if err != nil {
			r.closeOpen(i)
		}
	}
}

// count records what became of a connection.
func (r *reuser) count(port int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.replies++
		return
	}
	r.failures = append(r.failures, fmt.Sprintf("%s: %s from port %d to %s: %v", *r.in.change.Load(),
		time.Now().Format("05.000"), firstPort+port, r.at(port), err))
}

// report closes what is open, and says what became of the client's connections.
func (r *reuser) report() {
	for len(r.open) > 0 {
		r.closeOpen(0)
	}
	t := r.in.t
	t.Logf("%s/%s: %d answers, %d failures", r.host.Name, r.protocol, r.replies, len(r.failures))
	if len(r.failures) > 0 || r.replies == 0 {
		few := strings.Join(r.failures[:min(len(r.failures), 40)], "\n  ")
		t.Errorf("%s/%s failed:\n  %s", r.host.Name, r.protocol, few)
	}
}

var goOn = regexp.MustCompile(`continue by its rules" connections=(\d+)`)

// countedHonestly wants the log to count no more connections that go on than could be open.
func (c *modeChanges) countedHonestly() {
	most := 0
	for _, r := range c.reusers {
		if r.protocol == model.TCP {
			most += maxOpen + 1 // and one that is just asked by
		}
	}
	b, err := os.ReadFile(c.log)
	if err != nil {
		c.t.Fatal(err)
	}
	counted := goOn.FindAllSubmatch(b, -1)
	for _, m := range counted {
		if n, err := strconv.Atoi(string(m[1])); err != nil || n > most {
			c.t.Errorf("the log says that %s connections go on; %d could", m[1], most)
		}
	}
	if len(counted) == 0 {
		c.t.Error("the log says of no connection that it goes on")
	}
}
