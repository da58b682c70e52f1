package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// How Churn goes.
const (
	pace     = 4 * time.Millisecond  // between replacements of an endpoint of the Service busy, at least
	interval = 50 * time.Millisecond // between a stream's questions, whether earlier ones are answered or not
	underway = 100                   // questions of a stream that may be open at once
)

// churnServices are one that stays as it is while all else changes, and one whose endpoints are replaced.
const churnServices = `
apiVersion: v1
kind: Service
metadata: {name: steady}
spec:
  type: NodePort
  clusterIPs: [10.96.1.1, "fd00:96::1:1"]
  ports:
  - {name: http, port: 80, nodePort: 30101}
  - {name: dns, protocol: UDP, port: 53, nodePort: 30153}
---
apiVersion: v1
kind: Service
metadata: {name: busy}
spec:
  type: NodePort
  clusterIPs: [10.96.1.2, "fd00:96::1:2"]
  ports:
  - {name: http, port: 80, nodePort: 30102}
  - {name: dns, protocol: UDP, port: 53, nodePort: 30154}
`

// stream is a client that asks all the time.
type stream struct {
	packet string // as in a case; with a hold, over one flow for ever
	from   answerers

	line     packetLine
	held     *echo.Flow
	first    string // who answered first
	replies  int
	retries  int // of questions whose endpoint was taken away before its answer came back
	slowest  time.Duration
	failures []string
}

// answerers returns who may answer a stream.
type answerers int

const (
	steady answerers = iota // an endpoint of steady
	busy                    // who was an endpoint of busy at some time while the question was open
	same                    // who answered first
)

func churnStreams() []*stream {
	return []*stream{
		{packet: "client-a -> 10.96.1.1:80/tcp", from: steady},
		{packet: "client-b -> [fd00:96::1:1]:53/udp", from: steady},
		{packet: "outside -> node-a:30101/tcp", from: steady},
		{packet: "node-a -> 10.96.1.1:80/tcp", from: steady},
		{packet: "client-a -> 10.96.1.2:80/tcp", from: busy},
		{packet: "client-b -> [fd00:96::1:2]:80/tcp", from: busy},
		{packet: "outside -> node-b.6:30102/tcp", from: busy},
		{packet: "client-a -> 10.96.1.2:53/udp", from: busy},
		{packet: "hold 1: client-a -> 10.96.1.1:80/tcp", from: same},
		{packet: "hold 2: outside -> node-a:30153/udp", from: same},
		{packet: "hold 3: client-b -> 10.96.1.2:80/tcp", from: same}, // established: also when its endpoint has gone
		{packet: "hold 4: client-b -> 10.96.1.2:53/udp", from: busy},
	}
}

// Churn changes Services and replaces so many endpoints under traffic, and restarts the subject in the middle, unless
// its connections end then. Every question to a Service that has living endpoints must be answered, by one that was an
// endpoint while it was asked. Only a UDP question may need to be asked again, where its flow was cut with the answer
// under way, since its endpoint went.
func Churn(t *testing.T, s Implementation, replacements int) {
	log, wrong := churned(t.Context(), s, replacements)
	t.Log(log)
	for _, w := range wrong {
		t.Error(w)
	}
}

// churned does it with so many replacements. It returns the counts and what went wrong.
func churned(ctx context.Context, s Implementation, replacements int) (log string, wrong []string) {
	w, err := newTestbed(ctx, s, Config{})
	if err != nil {
		return "", []string{err.Error()}
	}
	defer func() {
		if err := w.close(); err != nil {
			wrong = append(wrong, err.Error())
		}
	}()
	c := &churn{w: w, wanted: replacements, Rand: rand.New(rand.NewPCG(1, 1)), dns: map[string]bool{},
		extra: map[string]bool{}}
	if err := c.begin(ctx); err != nil {
		return "", []string{err.Error()}
	}
	streams, begin := churnStreams(), time.Now()
	stop := c.start(ctx, streams)
	if err := c.change(ctx); err != nil {
		wrong = append(wrong, err.Error())
	}
	latency := time.Since(begin)
	stop()
	log = fmt.Sprintf("%d endpoint replacements, %d changes of other Services and %d restarts in %s",
		c.replaced, c.others, c.restarts, latency.Round(time.Millisecond))
	for _, l := range streams {
		log += fmt.Sprintf("\n%6d answers, slowest %6s, %d retries, %d failures: %s",
			l.replies, l.slowest.Round(time.Millisecond), l.retries, len(l.failures), l.packet)
		if l.replies == 0 || len(l.failures) > 0 {
			few := strings.Join(l.failures[:min(5, len(l.failures))], "\n  ")
			wrong = append(wrong, fmt.Sprintf("%s: %d answers, %d failures:\n  %s", l.packet, l.replies, len(l.failures), few))
		}
	}
	return log, wrong
}

// start has the streams ask until stop, which waits for their last answers.
func (c *churn) start(ctx context.Context, streams []*stream) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, l := range streams {
		if err := l.line.parseFrom(l.packet); err != nil {
			panic(err) // the text is ours
		}
		wg.Go(func() { c.run(ctx, l) })
	}
	return func() { cancel(); wg.Wait() }
}

// churn is change under traffic.
type churn struct {
	*rand.Rand
	w                          *testbed
	endpoints                  []string        // of busy's port http, NAME:PORT; the first stays
	dns                        map[string]bool // of its port dns, the pods
	extra                      map[string]bool // the other Services that are there
	wanted                     int             // replacements
	replaced, others, restarts int

	mu           sync.Mutex        // for the streams too
	endpointSets []map[string]bool // who was an endpoint of busy, change by change
	synced       int               // the last change that is known to be in force
}

// begin puts the first endpoints in force.
func (c *churn) begin(ctx context.Context) error {
	c.endpoints = []string{"web-1:8080"}
	for len(c.endpoints) < 6 {
		c.endpoints = append(c.endpoints, c.unused())
	}
	objects, err := manifest{Text: churnServices}.decode()
	if err != nil {
		return err
	}
	l := c.slice("steady http=8080 dns=8053/udp: web-1 web-2 web-3")
	l = append(l, source.Put(objects...)...)
	return c.apply(ctx, l)
}

// unused draws an endpoint that busy doesn't have.
func (c *churn) unused() string {
	for {
		e := fmt.Sprintf("web-%d:%d", 1+c.IntN(3), 9000+c.IntN(34))
		if !slices.Contains(c.endpoints, e) {
			return e
		}
	}
}

// change makes all changes, one after the other.
func (c *churn) change(ctx context.Context) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for c.replaced < c.wanted {
		<-tick.C
		c.endpoints[1+c.IntN(len(c.endpoints)-1)] = c.unused()
		c.replaced++
		var restart []string
		if c.replaced%max(1, c.wanted/8) == 0 && !c.w.implementation.Ends {
			restart = []string{nodes[c.restarts%2]}
			c.restarts++
		}
		if err := c.apply(ctx, c.other(), restart...); err != nil {
			return err
		}
	}
	return nil
}

// apply makes busy's endpoints known together with other changes, and waits until all is in force.
func (c *churn) apply(ctx context.Context, l []source.Change, restart ...string) error {
	is := map[string]bool{}
	for i, e := range c.endpoints {
		pod, port, _ := strings.Cut(e, ":")
		l = append(l, c.slice(fmt.Sprintf("busy#%d http=%s: %s", i, port, pod))...)
		is[e] = true
	}
	c.toggle()
	for pod := range c.dns {
		is[pod+":8053"] = true
	}
	l = append(l, c.slice("busy#dns dns=8053/udp: "+strings.Join(slices.Sorted(maps.Keys(c.dns)), " "))...)
	c.mu.Lock()
	c.endpointSets = append(c.endpointSets, is)
	now := len(c.endpointSets) - 1
	c.mu.Unlock()
	if err := c.w.change(l, restart...); err != nil {
		return err
	}
	if err := c.w.sync(ctx); err != nil {
		return err
	}
	c.mu.Lock()
	c.synced = now
	c.mu.Unlock()
	return nil
}

// toggle adds one endpoint to busy's port dns, or removes one that is not the last.
func (c *churn) toggle() {
	pod := fmt.Sprintf("web-%d", 1+c.IntN(3))
	if c.dns[pod] && len(c.dns) > 1 {
		delete(c.dns, pod)
	} else {
		c.dns[pod] = true
	}
}

// slice returns the changes of a line of ours, as in a case's section slices.
func (c *churn) slice(text string) []source.Change {
	line, err := parseSlice(text)
	if err != nil {
		panic(err)
	}
	return c.w.slices(line)
}

// other makes a Service that wasn't there, or removes one that was.
func (c *churn) other() (l []source.Change) {
	n := c.IntN(50)
	name := fmt.Sprintf("other-%d", n)
	c.others++
	if c.extra[name] {
		for _, k := range c.w.made[name] {
			l = append(l, source.Change{Key: k})
		}
		delete(c.extra, name)
		delete(c.w.made, name)
		return append(l, source.Change{Key: source.Key{Kind: source.Service, Namespace: "default", Name: name}})
	}
	o, err := decodeObject(fmt.Sprintf(`{apiVersion: v1, kind: Service, metadata: {name: %s}, spec: {type: NodePort,
		clusterIPs: [10.96.2.%d], sessionAffinity: %s, ports: [{port: 80, nodePort: %d}]}}`,
		name, n, [...]string{"None", "ClientIP"}[n%2], 31000+n))
	if err != nil {
		panic(err)
	}
	c.extra[name] = true
	return append(c.slice(name+" 8080: web-1 web-2"), source.Change{Key: source.KeyOf(o), Object: o})
}

// run queries, as the stream has it, until ctx ends.
func (c *churn) run(ctx context.Context, s *stream) {
	p := probe{w: c.w, l: &s.line, c: s.line.Clients[0]}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var wg sync.WaitGroup
	defer func() {
		if wg.Wait(); s.held != nil {
			s.held.Close()
		}
	}()
	slots := make(chan struct{}, underway)
	for ctx.Err() == nil {
		<-tick.C
		if s.line.Open != "" {
			c.request(s, func(ctx context.Context) (echo.Reply, error) { return s.again(ctx, p) })
			continue
		}
		select {
		case slots <- struct{}{}:
			wg.Go(func() {
				c.request(s, func(ctx context.Context) (echo.Reply, error) { return p.request(ctx, p.w.patience) })
				<-slots
			})
		default:
			c.fail(s, fmt.Sprintf("%d questions wait for an answer", underway))
		}
	}
}

// again queries over the stream's flow.
func (s *stream) again(ctx context.Context, p probe) (a echo.Reply, err error) {
	if s.held == nil {
		if s.held, err = p.open(ctx); err != nil {
			return a, err
		}
	}
	if a, err = s.held.Request(ctx); closed(err) {
		s.held.Close()
		s.held = nil
	}
	return a, err
}

// request queries once and judges who answers. A datagram to an endpoint that goes while it is under way may lose its
// answer with the flow that is cut, or find its socket closed: that is UDP, whose clients ask again, and so does ask.
func (c *churn) request(s *stream, request func(context.Context) (echo.Reply, error)) {
	const most = 10 // endpoints may go faster than a busy machine asks
	for try := 1; ; try++ {
		since, begin := c.now(), time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), c.w.patience)
		a, err := request(ctx)
		cancel()
		if err == nil {
			c.assess(s, a, since, time.Since(begin))
			return
		}
		if s.from != busy || s.line.Proto != model.UDP || !errors.Is(err, echo.Timeout) && !closed(err) ||
			!closed(err) && c.now() == since || try == most {
			c.fail(s, err.Error())
			return
		}
		c.mu.Lock()
		s.retries++
		c.mu.Unlock()
	}
}

// now returns how many changes are in the kernel.
func (c *churn) now() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.synced
}

// assess judges who answered a question that was asked when since changes were in the kernel.
func (c *churn) assess(s *stream, a echo.Reply, since int, latency time.Duration) {
	who := fmt.Sprintf("%s:%d", nameOf(a.Server.Addr()), a.Server.Port())
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.replies++; s.replies == 1 {
		s.first = who
	}
	s.slowest = max(s.slowest, latency)
	right := true
	switch s.from {
	case busy:
		right = slices.ContainsFunc(c.endpointSets[since:], func(is map[string]bool) bool { return is[who] })
	case same:
		right = who == s.first
	}
	if !right {
		s.failures = append(s.failures, fmt.Sprintf("after %d changes: %s answers, who is no endpoint now; first it was %s",
			len(c.endpointSets), who, s.first))
	}
}

func (c *churn) fail(s *stream, wrong string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.failures = append(s.failures, fmt.Sprintf("after %d changes: %s", len(c.endpointSets), wrong))
}
