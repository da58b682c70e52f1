package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// How long a probe waits, unless the subject is slow: for an answer that must come, and for one that must not.
const (
	patience    = 3 * time.Second
	dropTimeout = 300 * time.Millisecond
)

// probe sends one client's packets of a line for real and returns what is wrong with their fate, or "".
type probe struct {
	w *testbed
	l *packetLine
	c client
	j assessment

	sample int // ask so often, whether all candidates have answered or not; 0: until they have
}

// flow is a connection, or a client's port, that is kept open.
type flow struct {
	probe
	held *echo.Flow
	last netip.AddrPort // who answered last

	client netip.AddrPort // as the server saw it first
}

// run sends until the line is proven or disproven.
func (p probe) run(ctx context.Context) string {
	if err := p.lead(); err != nil {
		return err.Error()
	}
	if m := memberNamed(p.c.Name); !p.c.Addr.IsLoopback() && !slices.Contains(m.Addrs, p.c.Addr) {
		drop, err := p.w.lend(m, p.c.Addr)
		if err != nil {
			return err.Error()
		}
		defer drop()
	}
	switch {
	case p.l.Open != "":
		return p.openFlow(ctx)
	case p.l.Quotes != "":
		return p.quotes(ctx)
	case p.l.Action == verdict.Reject, p.l.Closed:
		return p.refused(ctx)
	case p.l.Action == verdict.Drop:
		return p.dropped(ctx)
	case p.l.Action == verdict.Pass:
		return p.passed(ctx)
	case p.j.drops() > 0:
		return p.some(ctx)
	case p.l.Moves:
		return p.moves(ctx)
	case p.l.Sticks:
		return p.sticks(ctx)
	case p.l.Scheduled:
		return p.scheduled(ctx)
	}
	return p.covers(ctx)
}

// lead has packets from outside come by the line's node.
func (p probe) lead() error {
	to := p.l.To.Addr()
	if memberNamed(p.c.Name).Node != "" || nodeOf(to) != "" {
		return nil
	}
	via := memberNamed("node-" + p.w.entrance(to, p.l.Via)).addr(to.Is6())
	return p.w.cluster.External().Route(netip.PrefixFrom(to, to.BitLen()), via)
}

// request queries once, from a new port, or with a new identifier.
func (p probe) request(ctx context.Context, wait time.Duration) (a echo.Reply, err error) {
	host, err := p.w.host(memberNamed(p.c.Name))
	if err != nil {
		return a, err
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if p.l.isICMP() {
		return echo.Reply{Pod: "the host", Client: netip.AddrPortFrom(p.c.Addr, 0), Server: p.l.To},
			host.Do(func() error { return echo.Ping(ctx, p.l.To.Addr(), netip.AddrPortFrom(p.c.Addr, p.from().From.Port())) })
	}
	err = host.Do(func() error {
		a, err = echo.Request(ctx, p.l.Proto, p.l.To, p.from())
		return err
	})
	return a, err
}

// from returns how to ask: from the client's address where that may not be the kernel's choice, and from a port that
// was not used before, unless the client has one: the kernel may still know a connection of one that was.
func (p probe) from() echo.Options {
	var addr netip.Addr
	if m := memberNamed(p.c.Name); p.c.Addr != m.addr(p.l.To.Addr().Is6()) || p.chooses() {
		addr = p.c.Addr
	}
	port := p.c.Port
	if port == 0 {
		port = p.w.port()
	}
	return echo.Options{From: netip.AddrPortFrom(addr, port), Size: p.l.Size}
}

// chooses reports whether the packet is one of a node's to another node, whose kernel prefers the one of its addresses
// that is closest to the destination.
func (p probe) chooses() bool {
	at := nodeOf(p.l.To.Addr())
	return memberNamed(p.c.Name).onNode() && at != "" && at != memberNamed(p.c.Name).Node
}

// port returns the client ports from 10000 to 59999, one after the other, round and round: past those that the cast
// serves, and without node ports and host ports, where a process may listen on the client's own host. What comes back
// there is led to the Service in mode userspace, whose rules see no connection.
func (w *testbed) port() uint16 {
	const first, nodePort, after, last = 10000, 30000, 32768, 59999
	port := first + (w.ports.Add(1)-1)%(nodePort-first+last+1-after)
	if port >= nodePort {
		port += after - nodePort
	}
	if slices.ContainsFunc(hostPorts, func(p corev1.ContainerPort) bool { return uint32(p.HostPort) == port }) {
		return w.port()
	}
	return uint16(port)
}

// replied returns what is wrong with an answer, or "".
func (p probe) replied(a echo.Reply, err error) string {
	if err != nil {
		return fmt.Sprintf("no answer: %v", err)
	}
	i := slices.IndexFunc(p.j.outcome.Candidates, func(v verdict.Candidate) bool { return v.Backend.Addr == a.Server })
	if i < 0 {
		return fmt.Sprintf("%s answers, at %s", a.Pod, a.Server)
	}
	if why := p.j.dropped(a.Server); why != "" {
		return fmt.Sprintf("%s answers, at %s, though policies drop it: %s", a.Pod, a.Server, why)
	}
	return p.seen(a, p.masqueraded(p.j.outcome.Candidates[i]))
}

// masqueraded reports whether a candidate of the subject's sees a node in place of the client.
func (p probe) masqueraded(v verdict.Candidate) bool {
	return v.Masqueraded || p.w.implementation.MasqueradesAll || v.DSR && p.w.implementation.NoDirect != ""
}

// seen returns what is wrong with the client address that a server saw, or "". A server in the very network of the node
// that hides a source may see it, and one that asks itself: their answers need no help to come back.
func (p probe) seen(a echo.Reply, masqueraded bool) string {
	node, from := p.w.addresses[p.j.node], a.Client.Addr()
	if p.j.hostPorts != "" && p.w.implementation.MasqueradesAll {
		node = p.w.addresses[p.j.hostPorts]
	}
	own := slices.Contains(node, from)
	retained := from == p.c.Addr || slices.Contains(node, p.c.Addr) && own
	switch {
	case masqueraded && !own && !(retained && (nodeOf(a.Server.Addr()) == p.j.node || a.Server.Addr() == from)):
		return fmt.Sprintf("%s saw the source %s, which is not node %s's", a.Server, from, p.j.node)
	case !masqueraded && !retained:
		return fmt.Sprintf("%s saw the source %s instead of %s", a.Server, from, p.c.Addr)
	}
	return ""
}

// tries returns how often to ask so that n endpoints, drawn evenly, have all answered, and one too many would have,
// too. The first number always; then up to the second until all have: that one doesn't do has a probability below
// n·exp(-last/n), here 1e-13. With the first, one endpoint too many stays unseen with a probability below 0.3 %.
func tries(n int) (first, last int) {
	return 6*n + 6, int(math.Ceil(float64(n) * (math.Log(float64(n)) + 30)))
}

// covers queries until every candidate has answered.
func (p probe) covers(ctx context.Context) string {
	n, sum := len(p.j.outcome.Candidates), p.shares()
	first, last := tries(sum)
	if p.l.Evenly {
		first, last = 200*sum, 200*sum
	}
	if p.few() {
		last = first
	}
	if p.sample > 0 {
		first, last = p.sample, p.sample
	}
	count := map[netip.AddrPort]int{}
	for i := 0; i < last && (i < first || len(count) < n); i++ {
		a, err := p.request(ctx, p.w.patience)
		if wrong := p.replied(a, err); wrong != "" {
			return fmt.Sprintf("try %d: %s", i+1, wrong)
		}
		count[a.Server]++
	}
	for _, v := range p.j.outcome.Candidates {
		k := count[v.Backend.Addr]
		if k == 0 && p.sample == 0 && !p.few() {
			return fmt.Sprintf("%s never answers in %d tries", p.j.show(v), last)
		}
		// 200 ± 100 is seven standard deviations of what a fair draw gives; more than that of a multiple.
		if share := v.Backend.Share(); p.l.Evenly && n > 1 && (k < 100*share || k > 300*share) {
			return fmt.Sprintf("%s answers %d times in %d tries: its share is %d of %d", p.j.show(v), k, last, share, sum)
		}
	}
	return ""
}

// some queries until every candidate has answered to which policies let packets pass; to the others none must get. Of a
// pool that leads a client to one candidate, or need not select each, it may be that none answers.
func (p probe) some(ctx context.Context) string {
	first, last := tries(p.shares())
	answered := map[netip.AddrPort]bool{}
	for i := 0; i < last; {
		n := min(first, last-i)
		wrong := make([]string, n)
		var mu sync.Mutex
		var wg sync.WaitGroup
		for k := range n {
			wg.Go(func() {
				a, err := p.request(ctx, p.w.implementation.within(dropTimeout))
				if errors.Is(err, echo.Timeout) {
					return
				}
				wrong[k] = p.replied(a, err)
				mu.Lock()
				answered[a.Server] = true
				mu.Unlock()
			})
		}
		wg.Wait()
		i += n
		if w := strings.Join(slices.DeleteFunc(wrong, func(w string) bool { return w == "" }), "; "); w != "" {
			return w
		}
		if len(answered) == len(p.j.outcome.Candidates)-p.j.drops() || p.l.Sticks || p.few() {
			return ""
		}
	}
	return fmt.Sprintf("only %v answer in %d tries", slices.Collect(maps.Keys(answered)), last)
}

// pool is the one that the packet is served from.
func (p probe) pool() *model.Pool { return p.j.outcome.Frontend.Target(p.j.outcome.Origin).Pool }

// shares returns the sum of the candidates' weights; a scheduler that knows none counts heads.
func (p probe) shares() (sum int) {
	if p.pool().Scheduler == model.RoundRobin {
		return len(p.pool().Backends)
	}
	for _, b := range p.pool().Backends {
		sum += b.Share()
	}
	return sum
}

// few reports that not every candidate need answer one client that asks again and again: by hash it belongs to one, and
// by connections whoever has none may be taken each time.
func (p probe) few() bool {
	switch p.pool().Scheduler {
	case model.Random, model.RoundRobin, model.WeightedRoundRobin:
		return false
	}
	return true
}

// scheduled wants what the pool's scheduler promises to a client that asks one question after the other.
func (p probe) scheduled(ctx context.Context) string {
	l := *p.l
	p.l = &l
	switch pool := p.pool(); {
	case pool.Scheduler == model.Random:
		p.l.Evenly = true
	case pool.Scheduler == model.RoundRobin || pool.Scheduler == model.WeightedRoundRobin:
		return p.roundRobin(ctx)
	case pool.Scheduler.Hashes() && !pool.Ports:
		return p.sticks(ctx)
	}
	return p.covers(ctx)
}

// roundRobin wants every candidate to answer just as often as its weight says, counted over three rounds.
func (p probe) roundRobin(ctx context.Context) string {
	const rounds = 3
	count, sum := map[netip.AddrPort]int{}, p.shares()
	for i := range rounds * sum {
		a, err := p.request(ctx, p.w.patience)
		if wrong := p.replied(a, err); wrong != "" {
			return fmt.Sprintf("try %d: %s", i+1, wrong)
		}
		count[a.Server]++
	}
	for _, v := range p.j.outcome.Candidates {
		due := rounds
		if p.pool().Scheduler == model.WeightedRoundRobin {
			due *= v.Backend.Share()
		}
		if k := count[v.Backend.Addr]; k != due {
			return fmt.Sprintf("%s answers %d times in %d rounds: its turns are %d", p.j.show(v), k, rounds, due)
		}
	}
	return ""
}

// sticks queries several times and lets one endpoint alone answer.
func (p probe) sticks(ctx context.Context) string {
	mine, known := p.w.known[p.l.As]
	known = known && p.l.As != ""
	for i := range 12 {
		a, err := p.request(ctx, p.w.patience)
		if wrong := p.replied(a, err); wrong != "" {
			return fmt.Sprintf("try %d: %s", i+1, wrong)
		}
		if i == 0 && !known {
			mine = a.Server
		}
		if a.Server != mine {
			return fmt.Sprintf("try %d: %s answers, though the client belongs to %s", i+1, a.Server, mine)
		}
	}
	p.w.known[p.l.As] = mine
	return ""
}

// moves queries with pauses longer than the affinity until another endpoint answers. Each of n endpoints is drawn as
// often as another, so that the first is drawn k times more with a probability of n^-k: k is chosen for less than 1e-9.
func (p probe) moves(ctx context.Context) string {
	pause := p.j.outcome.Frontend.Target(p.j.outcome.Origin).Pool.Affinity + 500*time.Millisecond
	n := len(p.j.outcome.Candidates)
	if n < 2 {
		return "there is nowhere to move to"
	}
	last := 1 + int(math.Ceil(9/math.Log10(float64(n))))
	var first netip.AddrPort
	for i := range last {
		a, err := p.request(ctx, p.w.patience)
		if wrong := p.replied(a, err); wrong != "" {
			return fmt.Sprintf("try %d: %s", i+1, wrong)
		}
		if i == 0 {
			first = a.Server
		}
		if a.Server != first {
			return ""
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err().Error()
		}
	}
	return fmt.Sprintf("%s alone answers in %d tries with %s between them", first, last, pause)
}

// refused queries and must be told no each time. Where policies would drop what a frontend rejects, either may come
// first.
func (p probe) refused(ctx context.Context) string {
	wait := p.w.patience
	dropped := p.w.implementation.Engine != nil && p.j.outcome.Action == verdict.Reject &&
		verdict.Policy(p.w.agents[p.j.node].services.Policies, p.j.packet).Verdict == model.VerdictDrop
	if dropped {
		wait = p.w.implementation.within(dropTimeout)
	}
	for i := range 3 {
		if a, err := p.request(ctx, wait); !errors.Is(err, echo.Refused) && !(dropped && errors.Is(err, echo.Timeout)) {
			return fmt.Sprintf("try %d: %s, instead of a refusal", i+1, describe(a, err))
		}
	}
	return ""
}

// dropped queries and must hear nothing. A process of the node itself may be told by its own kernel that the packet was
// not let out. Where no frontend matches, the one outside has the address for a while: the packet must not get there.
func (p probe) dropped(ctx context.Context) string {
	if p.j.outcome.Frontend == nil && !p.l.Lost {
		_, stop, err := p.w.stand(p.c, p.l.To, p.l.Proto)
		if err != nil {
			return err.Error()
		}
		defer stop()
	}
	if p.j.drops() > 0 { // whichever candidate is selected
		return p.some(ctx)
	}
	a, err := p.request(ctx, dropTimeout)
	own := errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) // by netfilter; by a route
	if errors.Is(err, echo.Timeout) || own && p.j.outcome.Origin == model.FromNode {
		return ""
	}
	return fmt.Sprintf("%s, instead of silence", describe(a, err))
}

// passed queries, while whoever has the address answers there: it must, and see the packet as it was sent.
func (p probe) passed(ctx context.Context) string {
	replies, stop, err := p.w.stand(p.c, p.l.To, p.l.Proto)
	if err != nil {
		return err.Error()
	}
	defer stop()
	if !replies {
		if a, err := p.request(ctx, dropTimeout); err == nil {
			return describe(a, err) + ", though no host has the address"
		}
		return ""
	}
	for i := range 2 {
		if wrong := p.through(p.request(ctx, p.w.patience)); wrong != "" {
			return fmt.Sprintf("try %d: %s", i+1, wrong)
		}
	}
	return ""
}

// quotes sends an ICMP error that quotes a packet of the line's flow, and returns what is wrong with its fate.
func (p probe) quotes(ctx context.Context) string {
	f, to := p.w.flows[p.l.Quotes], p.l.To.Addr()
	q, data := echo.Quote{Protocol: f.l.Proto, Src: f.client, Dst: f.last}, []byte(rand.Text())
	from, err := p.w.host(memberNamed(p.c.Name))
	if err != nil {
		return err.Error()
	}
	at, err := p.w.host(memberNamed(nameOf(to)))
	if err != nil {
		return err.Error()
	}
	var errs *echo.Errors
	err = at.Do(func() (err error) {
		errs, err = echo.ListenErrors(to)
		return err
	})
	if err != nil {
		return err.Error()
	}
	defer errs.Close()
	if err := from.Do(func() error { return echo.SendError(p.c.Addr, to, q, data) }); err != nil {
		return err.Error()
	}
	wait := p.w.patience
	if p.l.Action == verdict.Drop {
		wait = dropTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	switch _, err := errs.Await(ctx, data); {
	case err == nil && p.l.Action == verdict.Drop:
		return fmt.Sprintf("an ICMP error that quotes %s > %s arrives at %s", q.Src, q.Dst, to)
	case err != nil && p.l.Action == verdict.Pass:
		return err.Error()
	}
	return ""
}

// through returns what is wrong with the answer to a packet that should have passed, or "".
func (p probe) through(a echo.Reply, err error) string {
	if err != nil || a.Server != p.l.To {
		return fmt.Sprintf("%s, instead of who is at %s", describe(a, err), p.l.To)
	}
	return p.seen(a, false)
}

func describe(a echo.Reply, err error) string {
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s answers, at %s", a.Pod, a.Server)
}

// stand has whoever has an address answer there: a host of the cast, or, for an address of no host, the one outside,
// where such packets go. It reports whether it is answered: not where the one outside asks for an address of
// no host.
func (w *testbed) stand(c client, at netip.AddrPort, proto model.Protocol) (replies bool, stop func(), err error) {
	owner := memberNamed(nameOf(at.Addr()))
	if at.Addr().IsLoopback() {
		owner = memberNamed(c.Name)
	}
	var undo []func() error
	stop = func() {
		for _, f := range slices.Backward(undo) {
			f() // the sandbox goes soon; what an address or server too many would do shows in later lines
		}
	}
	if owner == nil {
		if owner = memberNamed("outside"); c.Name == owner.Name {
			return false, stop, nil
		}
		drop, err := w.lend(owner, at.Addr())
		if err != nil {
			return false, stop, err
		}
		undo = append(undo, drop)
	}
	host, err := w.host(owner)
	if err != nil {
		return false, stop, err
	}
	if proto == icmpOf(at.Addr().Is6()) {
		return true, stop, nil // kernels answer
	}
	end, err := w.serve(host, owner.Name, echo.Port{Number: at.Port(), Protocol: proto})
	if err != nil {
		stop()
	}
	undo = append(undo, end)
	return true, stop, err
}

// server is one that answers for several lines at once.
type server struct {
	users int
	*echo.Server
}

// serve has a host answer on a port, if it doesn't anyway, until the last caller stops it.
func (w *testbed) serve(host *sandbox.Host, name string, port echo.Port) (stop func() error, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := name + " " + port.String()
	s := w.servers[key]
	if s == nil {
		s = &server{}
		err := host.Do(func() (err error) {
			s.Server, err = echo.Serve(name, []echo.Port{port})
			return err
		})
		if errors.Is(err, unix.EADDRINUSE) {
			return func() error { return nil }, nil
		}
		if err != nil {
			return nil, err
		}
		w.servers[key] = s
	}
	s.users++
	return func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if s.users--; s.users > 0 {
			return nil
		}
		delete(w.servers, key)
		return s.Close()
	}, nil
}

// lend adds a further address to a host for a while: on an interface of its own, with which it goes again.
func (w *testbed) lend(m *member, a netip.Addr) (drop func() error, err error) {
	host, err := w.host(m)
	if err != nil {
		return nil, err
	}
	var conn *link.Conn
	dev := 0
	err = host.Do(func() error {
		here, err := netns.Current()
		if err != nil {
			return err
		}
		defer here.Close()
		if conn, err = link.Dial(here); err != nil {
			return err
		}
		if dev, err = conn.AddVeth(link.End{Name: "lent"}, link.End{Name: "lent-peer"}, here); err != nil {
			return err
		}
		peer, err := conn.Index("lent-peer")
		if err == nil {
			err = conn.Up(peer) // without a carrier, an IPv6 address is of no use
		}
		if err == nil {
			err = conn.AddAddress(dev, netip.PrefixFrom(a, a.BitLen()))
		}
		if err != nil {
			return err
		}
		return usable(a)
	})
	drop = func() error {
		defer conn.Close()
		return conn.Delete(dev)
	}
	if err != nil && conn != nil {
		err = errors.Join(err, drop())
	}
	return drop, err
}

// usable waits until packets to the address arrive: the kernel notices a carrier and sets up local routes in the
// background.
func usable(a netip.Addr) error {
	try := func() error {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.WriteTo([]byte{0}, c.LocalAddr()); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(2 * time.Millisecond))
		_, err = c.Read(make([]byte, 1))
		return err
	}
	for end := time.Now().Add(patience); ; {
		err := try()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// open opens a flow.
func (p probe) open(ctx context.Context) (held *echo.Flow, err error) {
	host, err := p.w.host(memberNamed(p.c.Name))
	if err != nil {
		return nil, err
	}
	err = host.Do(func() (err error) {
		held, err = echo.Open(ctx, p.l.Proto, p.l.To, p.from())
		return err
	})
	return held, err
}

// openFlow opens a flow, asks over it once, and keeps it. A flow whose packets are lost is not open, but has its port.
func (p probe) openFlow(ctx context.Context) string {
	if p.l.Lost {
		if p.c.Port == 0 {
			p.c.Port = p.w.port()
		}
		p.w.flows[p.l.Open] = &flow{probe: p}
		return p.dropped(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, p.w.patience)
	defer cancel()
	if p.l.Action == verdict.Pass {
		_, stop, err := p.w.stand(p.c, p.l.To, p.l.Proto)
		if err != nil {
			return err.Error()
		}
		defer stop()
	}
	held, err := p.open(ctx)
	if err != nil {
		return err.Error()
	}
	a, err := held.Request(ctx)
	for _, n := range p.l.Apart {
		if p.w.known[n] == a.Server && p.pool().Scheduler != model.Random {
			return fmt.Sprintf("%s answers again, as in %s", a.Server, n)
		}
	}
	p.w.flows[p.l.Open] = &flow{probe: p, held: held, last: a.Server, client: a.Client}
	p.w.known[p.l.Open] = a.Server
	if p.l.Action == verdict.Pass {
		return p.through(a, err)
	}
	return p.replied(a, err)
}

// again queries over a held flow, as line l has it, and returns what is wrong, or "". Where the flow must change sides,
// it has a while to do so; where it must stay, it must stay at once.
func (f *flow) again(ctx context.Context, l *packetLine) string {
	expected := l.expected(f.w.known)
	stays := slices.ContainsFunc(expected, func(c candidate) bool { return c.is(f.last) })
	if l.Proto != model.TCP && f.j.outcome.Action == verdict.Forward {
		if is := f.stays(); is != stays {
			return fmt.Sprintf("verdict says it stays with %s: %t", f.last, is)
		}
	}
	for end := time.Now().Add(f.w.patience); ; {
		wrong := f.once(ctx, l, expected)
		if wrong == "" || stays || time.Now().After(end) {
			return wrong
		}
	}
}

// stays reports whether verdict says that a flow of UDP or SCTP stays with the endpoint that answered last: that one
// serves, on the node that translates the flow. Where another node does from now on, it selects an endpoint itself.
func (f *flow) stays() bool {
	was := f.j.node
	if now := f.w.assess(f.c, f.l.To, f.l.Proto, f.l.Via); now.node != was {
		f.j = now
	}
	return f.j.node == was && verdict.Stays(f.w.agents[was].services, f.j.packet, f.last)
}

// request queries over the flow. A socket that the kernel has closed is opened anew, as a program would.
func (f *flow) request(ctx context.Context) (a echo.Reply, err error) {
	if f.held != nil {
		if a, err = f.held.Request(ctx); !closed(err) {
			return a, err
		}
		f.held.Close()
	}
	if f.held, err = f.open(ctx); err != nil {
		return a, err
	}
	return f.held.Request(ctx)
}

// closed reports that a UDP socket was closed for its owner since its endpoint has gone: the first call hears so, later
// ones that it is not connected.
func closed(err error) bool {
	return errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EDESTADDRREQ)
}

func (f *flow) once(ctx context.Context, l *packetLine, expected []candidate) string {
	wait := f.w.implementation.within(dropTimeout)
	if l.Proto == model.TCP {
		wait = f.w.patience
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	a, err := f.request(ctx)
	switch {
	case (l.Action == verdict.Reject || l.Cut) && errors.Is(err, echo.Refused),
		l.Action == verdict.Drop && errors.Is(err, echo.Timeout):
		return ""
	case l.Action == verdict.Pass:
		return f.through(a, err)
	case l.Action != verdict.Forward, err != nil:
		return describe(a, err)
	}
	i := slices.IndexFunc(expected, func(c candidate) bool { return c.is(a.Server) })
	if i < 0 {
		return describe(a, err)
	}
	f.last = a.Server
	masquerades := f.w.implementation.MasqueradesAll ||
		slices.ContainsFunc(f.j.outcome.Candidates, func(v verdict.Candidate) bool { return v.DSR && f.masqueraded(v) })
	if masquerades && f.seen(a, true) == "" { // if it was not let pass when it was opened
		return ""
	}
	return f.seen(a, expected[i].Masqueraded)
}
