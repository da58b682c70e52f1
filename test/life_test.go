package test_test

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source/manifest"
)

// How much happens to a node under load.
var (
	replacements = flag.Int("replacements", 600, "endpoint replacements under load, in each mode")
	deaths       = flag.Int("deaths", 3, "kills of the agent under load in each mode, and upgrades where it has layouts")
	before       = flag.String("before", "", "another build, for TestUpgradeAndDowngrade to change from and back")
)

// The load: questions of each client, by a clock that waits for no answer.
const (
	probeInterval = 10 * time.Millisecond
	saveEvery     = 5 * time.Millisecond
	probers       = 24   // questions of a client that may be open at once
	waiting       = 1000 // that may wait for one of them to end
	slots         = 6    // EndpointSlices of one endpoint each, of which one at a time is replaced
)

const lifeObjects = `
apiVersion: v1
kind: Node
metadata: {name: a}
status: {addresses: [{type: InternalIP, address: 192.168.77.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ports: [{name: http, port: 80, nodePort: 30080}]
`

// lives is a node whose agent is changed, killed and replaced while clients ask.
type lives struct {
	t       *testing.T
	mode    string
	program string // what the agent is; empty: the build under test
	dir     string
	config  string   // the file that configures the agent; empty: flags do, mode among them
	confine []string // what the agent is run by: a command that ends with its
	cluster *sandbox.Cluster
	node    *sandbox.Host
	clients []*prober
	web     http.Client
	cmd     *exec.Cmd
	ended   chan struct{}
	log     *os.File
	writes  uint64 // by agents that were killed
	now     [slots]netip.AddrPort
	saved   int
}

// prober is a client: it opens a connection, asks and closes it.
type prober struct {
	host *sandbox.Host
	to   netip.AddrPort

	mu       sync.Mutex
	replies  int
	slowest  time.Duration // from when the question was due
	failures []string
}

// No connection fails, of clients on the node and outside, while endpoints are replaced, while the agent is killed and
// comes back to what has changed, and while another with other maps takes over. All endpoints live on: what fails was
// failed by the node.
func TestNoConnectionFails(t *testing.T) {
	for mode, layouts := range map[string][]string{"nftables": nil,
		"ebpf": {"--ebpf-map-entries=4096", "--ebpf-map-entries=8192"}} {
		t.Run(mode, func(t *testing.T) {
			l := newLife(t, mode)
			l.hire()
			stop := l.probe()
			l.during("replacements", *replacements, func(int) { l.replace() })
			l.during("kills", *deaths, func(int) { l.kill(); l.hire() })
			if layouts != nil {
				l.during("upgrades", *deaths, func(i int) { l.kill(); l.hire(layouts[i%len(layouts)]) })
			}
			stop()
			l.settled()
		})
	}
}

// No connection fails while this build takes the place of an earlier one in the same mode, and that of this one.
func TestUpgradeAndDowngrade(t *testing.T) {
	if *before == "" {
		*before = fairlead // a build by the same sources: what stays in the kernel is then found unchanged
	}
	for _, mode := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			l := newLife(t, mode)
			l.program = *before
			l.hire()
			stop := l.probe()
			l.during("upgrades and downgrades", 2**deaths, func(i int) {
				l.kill()
				l.program = []string{fairlead, *before}[i%2]
				l.hire()
			})
			stop()
			l.settled()
		})
	}
}

// newLife brings a node up, with pods that serve.
func newLife(t *testing.T, mode string) *lives {
	l := &lives{t: t, mode: mode, dir: t.TempDir()}
	text := lifeObjects
	for i, name := range []string{"web-1", "web-2", "web-3", "client"} {
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: default}\nspec: {nodeName: a, "+
			"containers: [{name: echo, ports: [", name)
		for p := range 20 {
			text += fmt.Sprintf("{containerPort: %d},", 9000+p)
		}
		text += fmt.Sprintf("]}]}\nstatus: {phase: Running, podIP: 10.244.1.%d, podIPs: [{ip: 10.244.1.%d}]}\n", 1+i, 1+i)
	}
	l.save("objects", text)
	for i := range slots {
		l.now[i] = l.endpoint(i)
		l.saveSlice(i)
	}
	objects, problems, err := manifest.Load(l.dir)
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	c, err := sandbox.Up(t.Context(), sandbox.Options{Objects: objects, Serve: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	l.cluster = c
	pod, err := c.Pod("default", "client")
	if err != nil {
		t.Fatal(err)
	}
	if l.node, err = c.Node("a"); err != nil {
		t.Fatal(err)
	}
	l.clients = []*prober{{host: pod, to: netip.MustParseAddrPort("10.96.0.10:80")},
		{host: l.node, to: netip.MustParseAddrPort("10.96.0.10:80")},
		{host: c.External(), to: netip.MustParseAddrPort("192.168.77.1:30080")}}
	l.web.Transport = &http.Transport{DialContext: func(ctx context.Context, network, address string) (c net.Conn,
		err error) {
		err = l.node.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, address); return err })
		return c, err
	}}
	t.Cleanup(l.kill)
	return l
}

// save replaces a file of the source at once.
func (l *lives) save(name, text string) {
	next := filepath.Join(l.dir, ".next")
	err := os.WriteFile(next, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(next, filepath.Join(l.dir, name+".yaml"))
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// endpoint returns the n-th of 60 endpoints, round and round.
func (l *lives) endpoint(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(1 + n%3)}), uint16(9000+n/3%20))
}

func (l *lives) saveSlice(i int) {
	l.save(fmt.Sprint("slice-", i), fmt.Sprintf(`{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4,
		metadata: {name: web-%d, namespace: default, labels: {kubernetes.io/service-name: web}},
		ports: [{name: http, port: %d}], endpoints: [{addresses: [%s], conditions: {ready: true}}]}`,
		i, l.now[i].Port(), l.now[i].Addr()))
}

// replace replaces the endpoint that is there longest.
func (l *lives) replace() {
	i := l.saved % slots
	l.now[i] = l.endpoint(slots + l.saved)
	l.saveSlice(i)
	l.saved++
}

// hire starts an agent and waits until the kernel is as wanted.
func (l *lives) hire(flags ...string) {
	l.t.Helper()
	l.start(flags...)
	ended := l.ended
	eventually(l.t, "the agent is ready", func() bool {
		select {
		case <-ended:
			b, _ := os.ReadFile(l.log.Name())
			l.t.Fatalf("the agent ended: %s", b)
		default:
		}
		r, err := l.web.Get("http://127.0.0.1:10249/readyz")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
}

// start starts an agent.
func (l *lives) start(flags ...string) {
	l.t.Helper()
	var err error
	if l.log, err = os.CreateTemp(l.t.TempDir(), "agent"); err != nil {
		l.t.Fatal(err)
	}
	mode := []string{"--mode", l.mode}
	if l.config != "" {
		mode = []string{"--config", l.config}
	}
	run := []string{cmp.Or(l.program, fairlead), "run", "--source", l.dir, "--node", "a"}
	args := slices.Concat(l.confine, run, mode, flags)
	l.cmd = exec.Command(args[0], args[1:]...)
	l.cmd.Stdout, l.cmd.Stderr = l.log, l.log
	if err := l.node.Do(l.cmd.Start); err != nil {
		l.t.Fatal(err)
	}
	cmd, ended := l.cmd, make(chan struct{})
	l.ended = ended
	go func() { cmd.Wait(); close(ended) }()
}

// kill ends the agent without a word, and has something change before the next.
func (l *lives) kill() {
	if l.cmd == nil {
		return
	}
	l.writes += l.state().Writes
	l.cmd.Process.Kill()
	<-l.ended
	l.web.CloseIdleConnections()
	l.log.Close()
	l.cmd = nil
	l.replace()
}

// state queries how the agent's loop does.
func (l *lives) state() (s struct{ Writes, Unsynced uint64 }) {
	var all agent.State
	r, err := l.web.Get("http://127.0.0.1:10249/status")
	if err == nil {
		err = json.NewDecoder(r.Body).Decode(&all)
		r.Body.Close()
	}
	if err != nil {
		l.t.Errorf("the agent's state: %v", err)
	}
	loop := all.Loops[l.mode]
	s.Writes, s.Unsynced = loop.Writes, uint64(loop.Unsynced)
	return s
}

// during does something so many times under load.
func (l *lives) during(what string, times int, something func(int)) {
	l.t.Helper()
	begin, writes := l.count(), l.writes+l.state().Writes
	tick := time.NewTicker(saveEvery)
	defer tick.Stop()
	at := time.Now()
	for i := range times {
		<-tick.C
		something(i)
	}
	l.t.Logf("%s: %d %s in %s, %d connections, %d transactions by the agents", l.mode, times, what,
		time.Since(at).Round(time.Millisecond),
		l.count()-begin, l.writes+l.state().Writes-writes)
}

// count returns how many connections were served so far.
func (l *lives) count() (n int) {
	for _, c := range l.clients {
		c.mu.Lock()
		n += c.replies
		c.mu.Unlock()
	}
	return n
}

// probe has the clients ask until stop, which judges.
func (l *lives) probe() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, c := range l.clients {
		due := make(chan time.Time, waiting)
		for range probers {
			wg.Go(func() {
				err := c.host.Do(func() error {
					for at := range due {
						c.once(at)
					}
					return nil
				})
				if err != nil {
					c.fail(err)
				}
			})
		}
		wg.Go(func() { c.clock(ctx, due) })
	}
	return func() {
		cancel()
		wg.Wait()
		for _, c := range l.clients {
			l.t.Logf("%s: %s asked %s: %d answers, slowest %s, %d failures", l.mode, c.host.Name, c.to, c.replies,
				c.slowest.Round(time.Millisecond), len(c.failures))
			if len(c.failures) > 0 || c.replies == 0 {
				l.t.Errorf("%s: connections from %s to %s failed:\n  %s", l.mode, c.host.Name, c.to,
					strings.Join(c.failures[:min(5, len(c.failures))], "\n  "))
			}
		}
	}
}

// clock returns when questions are due.
func (c *prober) clock(ctx context.Context, due chan<- time.Time) {
	defer close(due)
	for at := time.Now(); ; at = at.Add(probeInterval) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(at)):
		}
		select {
		case due <- at:
		default:
			c.fail(fmt.Errorf("%d questions wait", cap(due)))
		}
	}
}

func (c *prober) once(at time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err := echo.Request(ctx, model.TCP, c.to, echo.Options{})
	if err != nil {
		c.fail(err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replies++
	c.slowest = max(c.slowest, time.Since(at))
}

func (c *prober) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = append(c.failures, err.Error())
}

// settled wants every client to be served by the endpoints that there are now, and by each.
func (l *lives) settled() {
	eventually(l.t, "the kernel has all that was changed", func() bool {
		for _, c := range l.clients {
			seen := map[netip.AddrPort]bool{}
			err := c.host.Do(func() error {
				for range 100 {
					a, err := echo.Request(l.t.Context(), model.TCP, c.to, echo.Options{})
					if err != nil {
						return err
					}
					seen[a.Server] = true
				}
				return nil
			})
			for at := range seen {
				if !slices.Contains(l.now[:], at) {
					return false
				}
			}
			if err != nil || len(seen) != slots {
				return false
			}
		}
		return true
	})
}
