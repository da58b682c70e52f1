package names

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/policy/packet"
	"fairlead.dev/fairlead/dataplane/dns"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nflog"
	"fairlead.dev/fairlead/kernel/nfqueue"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// Options are what a Learner needs of the node.
type Options struct {
	// makes changes known, and returns when they are in force, or ctx ends
	Apply func(ctx context.Context, changes []source.Change)
	// calls a function with the ends of each connection that is open: the client, and the address that it has reached;
	// nil: those that the kernel tracks
	Connections func(func(client, to netip.Addr)) error
	Floor       time.Duration // how long an address lives at least; 0: a minute
	Hold        time.Duration // how long an answer waits at most for its addresses to be in force; 0: 50 ms
	Copied      bool          // answers are copied also where the kernel can hold them
	AnyDevice   bool          // answers count whatever device they came in by
	Log         *slog.Logger
}

// Counts are what a Learner has done so far, and what it holds.
type Counts struct {
	Names, Addresses int               // that are known now
	Answers          map[string]uint64 // by outcome: see the metric fairlead_policy_dns_answers_total
	Expired, Evicted uint64            // addresses
}

// The outcomes of answers.
const (
	taught      = "taught"
	unsolicited = "unsolicited" // no query waits for them
	limited     = "limited"     // the pod has taught too much of late
	late        = "late"        // let go before their addresses were in force
	resent      = "resent"      // sent again: the kernel dropped them while they waited
	copied      = "copied"      // taught though they were let go at once
	forged      = "forged"      // by another device than their resolver's
	unread      = "unread"      // messages, queries too, that passed unread
	lost        = "lost"        // times that a socket was full
)

// Learner learns the addresses of domain names. Its methods may be called from any goroutine.
type Learner struct {
	options Options
	plane   *dns.Plane
	loop    *reconcile.Loop[dns.Part, dns.Key, string]
	ns      *netns.Namespace
	queue   *nfqueue.Queue // nil: all messages are copied
	log     *nflog.Log     // what is copied
	tracked tracked
	wake    chan struct{} // holds one while there is something to apply

	mu sync.Mutex
	learned
	waiting  []*held // for what is to be applied
	copies   copies
	applying bool
	begun    bool // policies are known
}

// learned is what a Learner knows.
type learned struct {
	watched
	queries
	cache
	changed map[string]bool // names that are to be applied
	unsaved bool            // the kernel's records are others
	rates   map[netip.Addr]*rate
	answers map[string]uint64
	expired uint64
}

func newLearned() learned {
	return learned{watched: watched{map[netip.Addr][]string{}, map[netip.AddrPort]bool{}}, queries: queries{},
		cache: newCache(), changed: map[string]bool{}, rates: map[netip.Addr]*rate{}, answers: map[string]uint64{}}
}

// Open opens a Learner for the calling thread's network namespace, with what the agent before has recorded.
func Open(o Options) (*Learner, error) {
	o.Floor = cmp.Or(o.Floor, time.Minute)
	plane, err := dns.New()
	if err != nil {
		return nil, fmt.Errorf("learn domain names: %w", err)
	}
	ns, err := netns.Current()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("learn domain names: %w", err), plane.Close())
	}
	l := &Learner{options: o, plane: plane, ns: ns, wake: make(chan struct{}, 1), learned: newLearned()}
	if o.Copied {
		plane.Copy()
	}
	if o.AnyDevice {
		plane.AnyDevice()
	}
	if plane.Held() {
		l.queue, err = nfqueue.Open(dns.Queue, dns.QueueLength)
	}
	if err == nil {
		l.log, err = nflog.Listen(dns.LogGroup, dns.Copied)
	}
	if err == nil {
		l.tracked.Conn, err = conntrack.Open()
	}
	if err == nil {
		err = l.restore()
	}
	if l.options.Connections == nil {
		l.options.Connections = l.tracked.connections
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("learn domain names: %w", err), l.Close())
	}
	l.loop = reconcile.New(plane, reconcile.Options[dns.Part]{Log: o.Log,
		Owner: func(dns.Part) model.Owner { return model.Owner{Name: "DNS messages"} }})
	return l, nil
}

// restore reads the records in the kernel.
func (l *Learner) restore() error {
	records, err := l.plane.Records()
	now := time.Now()
	for _, r := range records {
		if l.names[r.Name] == nil {
			l.names[r.Name] = &entry{expires: map[netip.Addr]time.Time{}}
			l.domains[""]++
		}
		e := l.names[r.Name]
		e.expires[r.Addr] = now.Add(r.TTL)
		e.latest = maxTime(e.latest, now.Add(r.TTL))
		l.unsaved = true // a table of another layout goes with its records
	}
	return err
}

// Recorded returns what an agent has recorded in the calling thread's network namespace, as changes.
func Recorded() ([]source.Change, error) {
	plane, err := dns.New()
	if err != nil {
		return nil, fmt.Errorf("read the records of domain names: %w", err)
	}
	l := &Learner{plane: plane, learned: learned{cache: newCache()}}
	err = errors.Join(l.restore(), plane.Close())
	return l.Known(), err
}

// Known returns all names that are known as changes: for those who know none yet.
func (l *Learner) Known() (changes []source.Change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.names {
		changes = append(changes, source.Resolved(name, l.addresses(name)))
	}
	return changes
}

// Close ends it. What is in the kernel stays.
func (l *Learner) Close() error {
	var errs []error
	if l.queue != nil {
		errs = append(errs, l.queue.Close())
	}
	if l.log != nil {
		errs = append(errs, l.log.Close())
	}
	if l.tracked.Conn != nil {
		errs = append(errs, l.tracked.Close())
	}
	return errors.Join(append(errs, l.ns.Close(), l.plane.Close())...)
}

// Held reports whether answers wait until their addresses are in force; else they are copied.
func (l *Learner) Held() bool { return l.queue != nil }

// Follow makes a change of policies known: which pods' answers count, and for which names.
func (l *Learner) Follow(c model.Change[model.PolicyPart]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	put, del := l.follow(c)
	for _, x := range del {
		delete(l.queries, x.Addr)
		delete(l.rates, x.Addr)
	}
	if !l.begun || len(put)+len(del) > 0 {
		l.begun = true
		l.loop.Change(put, del)
	}
}

// SetResolvers makes known which resolvers' answers count.
func (l *Learner) SetResolvers(resolvers []netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if put, del := l.setResolvers(resolvers); len(put)+len(del) > 0 {
		l.loop.Change(put, del)
	}
}

// Needed reports whether a pod of this node has a rule with a domain name, and whether there is a resolver.
func (l *Learner) Needed() (pods, resolvers bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pods) > 0, len(l.resolvers) > 0
}

// Counts returns what was done so far.
func (l *Learner) Counts() Counts {
	passed, err := l.plane.Counts()
	l.mu.Lock()
	defer l.mu.Unlock()
	c := Counts{Answers: map[string]uint64{}, Expired: l.expired, Evicted: l.evicted}
	for _, outcome := range []string{taught, unsolicited, limited, late, resent, copied, lost} {
		c.Answers[outcome] = l.answers[outcome]
	}
	if err == nil {
		c.Answers[unread], c.Answers[forged] = passed.Unread, passed.Forged
	}
	c.Names, c.Addresses = l.count()
	return c
}

// Sync waits until the kernel queues the messages of the pods and resolvers that were made known before.
func (l *Learner) Sync(ctx context.Context) error { return l.loop.Sync(ctx) }

// Status returns the state of the loop that writes the table.
func (l *Learner) Status() reconcile.Status { return l.loop.Status() }

// Run learns until ctx ends. What it has learned it then records in the kernel.
func (l *Learner) Run(ctx context.Context) error {
	var ended sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended.Go(func() { l.loop.Run(ctx) })
	ended.Go(func() { l.work(ctx) })
	var held error
	if l.queue != nil {
		ended.Go(func() {
			held = l.readQueue(ctx)
			stop()
		})
	}
	err := l.readCopies(ctx)
	stop()
	ended.Wait()
	return errors.Join(held, err)
}

// readQueue learns from the messages that are held until ctx ends.
func (l *Learner) readQueue(ctx context.Context) error {
	err := l.queue.Run(ctx, func(p nfqueue.Packet) {
		if l.receive(p.Payload, time.Now()) && l.wait(p) {
			return
		}
		l.accept(p.ID)
	}, l.again, l.lost)
	l.release(l.unblock())
	return err
}

// readCopies learns from the messages that are copied until ctx ends.
func (l *Learner) readCopies(ctx context.Context) error {
	return l.log.Run(ctx, func(e nflog.Entry) {
		if l.receive(e.Payload, time.Now()) {
			l.tally(copied)
			signal(l.wake)
		}
	}, l.lost)
}

func (l *Learner) lost() { l.tally(lost) }

func (l *Learner) tally(outcome string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers[outcome]++
}

// accept lets a message go on.
func (l *Learner) accept(id uint32) {
	if err := l.queue.Accept(id); err != nil && !errors.Is(err, unix.EBADF) {
		l.options.Log.Warn("a DNS message could not go on", "error", err)
	}
}

// receive learns from a packet, and reports whether that taught a name.
func (l *Learner) receive(b []byte, now time.Time) (teaches bool) {
	p, ok := packet.Parse(b)
	if !ok {
		return false
	}
	found := messages(p)
	from, to := p.Ports()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range found {
		switch {
		case !m.response && l.resolvers[netip.AddrPortFrom(p.Dst, to)] && l.domainOf(p.Src, m.name) != "":
			l.queries.add(p.Src, query{from, m.id, m.question, now})
		case m.response && l.resolvers[netip.AddrPortFrom(p.Src, from)]:
			teaches = l.answer(p.Dst, query{to, m.id, m.question, now}, m) || teaches
		}
	}
	return teaches
}

// answer learns from an answer to a pod, and reports whether that taught a name.
func (l *Learner) answer(pod netip.Addr, q query, m message) bool {
	domain := l.domainOf(pod, m.name)
	switch {
	case domain == "":
		return false
	case !l.queries.awaited(pod, q):
		l.answers[unsolicited]++
		return false
	case len(m.addresses) == 0:
		return false
	case !l.rateOf(pod).allows(q.at):
		l.answers[limited]++
		return false
	}
	l.answers[taught]++
	l.unsaved = true
	for _, name := range l.learn(domain, m.name, m.addresses, q.at.Add(max(m.ttl, l.options.Floor))) {
		l.changed[name] = true
	}
	return true
}

// held is an answer that waits.
type held struct {
	id   uint32
	gone atomic.Bool
	due  *time.Timer
}

// wait has an answer wait until all that was learned so far is in force. It reports false where it already is.
func (l *Learner) wait(p nfqueue.Packet) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.changed) == 0 && !l.applying {
		return false
	}
	id := p.ID
	l.copies.add(p)
	h := &held{id: id}
	h.due = time.AfterFunc(cmp.Or(l.options.Hold, 50*time.Millisecond), func() {
		if h.gone.CompareAndSwap(false, true) {
			l.tally(late)
			l.accept(id)
		}
	})
	l.waiting = append(l.waiting, h)
	signal(l.wake)
	return true
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// release lets answers go on.
func (l *Learner) release(waiting []*held) {
	for _, h := range waiting {
		if h.due.Stop(); h.gone.CompareAndSwap(false, true) {
			l.accept(h.id)
		}
	}
}

// unblock returns the answers that wait, which do so no more.
func (l *Learner) unblock() []*held {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting := l.waiting
	l.waiting = nil
	return waiting
}

// work applies what was learned, has addresses expire, and records what is known, until ctx ends.
func (l *Learner) work(ctx context.Context) {
	tick := time.NewTicker(min(time.Second, l.options.Floor/4))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			l.record()
			return
		case <-l.wake:
			l.apply(ctx)
		case <-tick.C:
			l.expire(time.Now())
			l.apply(ctx)
			l.record()
		}
	}
}

// apply applies what has changed, and lets the answers go that waited for it.
func (l *Learner) apply(ctx context.Context) {
	l.mu.Lock()
	if !l.begun {
		l.mu.Unlock()
		return
	}
	var changes []source.Change
	for name := range l.changed {
		changes = append(changes, source.Resolved(name, l.addresses(name)))
	}
	clear(l.changed)
	waiting := l.waiting
	l.waiting, l.applying = nil, true
	l.mu.Unlock()
	if len(changes) > 0 {
		within, stop := context.WithTimeout(ctx, time.Second)
		l.options.Apply(within, changes)
		stop()
	}
	l.mu.Lock()
	l.applying = false
	if len(l.waiting) > 0 {
		signal(l.wake)
	}
	l.mu.Unlock()
	l.release(waiting)
}

// expire removes addresses that are over their time and to which no connection is open.
func (l *Learner) expire(now time.Time) {
	l.mu.Lock()
	due, pods := l.begun && l.due(now), map[netip.Addr]bool{}
	for a := range l.pods {
		pods[a] = true
	}
	l.mu.Unlock()
	if !due {
		return
	}
	used := map[netip.Addr]bool{}
	err := l.options.Connections(func(client, to netip.Addr) {
		if pods[client] {
			used[to] = true
		}
	})
	if err != nil {
		l.options.Log.Warn("addresses of domain names live longer: open connections can't be read", "error", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	changed, gone := l.cache.expire(now, func(a netip.Addr) bool { return err != nil || used[a] }, l.options.Floor)
	l.unsaved, l.expired = true, l.expired+gone
	for _, name := range changed {
		l.changed[name] = true
	}
}

// record writes what is known into the kernel's table, if that is there.
func (l *Learner) record() {
	now := time.Now()
	l.mu.Lock()
	unsaved := l.unsaved && l.begun
	var records []dns.Record
	for name, e := range l.names {
		for a, t := range e.expires {
			records = append(records, dns.Record{Name: name, Addr: a, TTL: t.Sub(now)})
		}
	}
	l.mu.Unlock()
	if !unsaved {
		return
	}
	err := l.plane.SetRecords(records)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		l.options.Log.Warn("addresses of domain names are not recorded for the next agent", "error", err)
	}
	if err == nil {
		l.mu.Lock()
		l.unsaved = false
		l.mu.Unlock()
	}
}

// Bounds of what a pod may teach: answers a second, and at once.
const (
	rateLimit = 50
	rateBurst = 500
)

// rate is how many answers of a pod may still teach, at a time.
type rate struct {
	left float64
	at   time.Time
}

func (l *Learner) rateOf(pod netip.Addr) *rate {
	r := l.rates[pod]
	if r == nil {
		r = &rate{left: rateBurst}
		l.rates[pod] = r
	}
	return r
}

// allows reports whether another may, and counts it.
func (r *rate) allows(now time.Time) bool {
	if !r.at.IsZero() {
		r.left = min(rateBurst, r.left+now.Sub(r.at).Seconds()*rateLimit)
	}
	r.at = now
	if r.left < 1 {
		return false
	}
	r.left--
	return true
}
