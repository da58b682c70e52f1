package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Op is what a closed-loop client does over and over, and which part of it the clock sees.
type Op uint8

// The operations, in netperf's words where it has them.
const (
	// connect() alone; socket(), a request and its response, which let the server come to rest, and close() are not timed
	Connect Op = iota
	CRR        // connect(), a request, its response, close(); socket() is not timed
	RR         // a request and its response on a kept connection
	Stream     // the same with a request of any length, sent out of a small buffer
)

// String returns "connect", "crr", "rr" or "stream".
func (o Op) String() string { return [...]string{"connect", "crr", "rr", "stream"}[o] }

// Client is a closed loop: the next operation starts when the last one has ended. What it says about tails is blind to
// coordinated omission; that is what Open is for.
type Client struct {
	Thread
	Targets []netip.AddrPort // visited in turn; RR keeps one connection to each
	Sources []netip.Addr     // that connections come from, in turn; none: the kernel's choice
	Seed    uint64           // draws the order of the targets
	Sizes   Sizes
	Words   *Words // nil: the package's own protocol
	Close   Close
	Timeout time.Duration // of each system call; 0: 5 s
	Warm    time.Duration // runs before the clock counts
	Most    int           // operations after which it ends, if the time hasn't before; 0: none
	Record  bool          // the sample has each operation's time and answer, in order
	Cold    *Memory       // walked just before the clock of each operation starts; nil: none is
	Exact   *Exact        // nil: times are measured
	Workers
}

// Exact has a client count instructions instead of measuring time, in a machine of which the processor's time stamp
// counter does: a number of operations after some that don't count, whatever the time.
type Exact struct {
	Server *Inline // that it connects to
	Warm   int
	Ops    int
	// Trace has the instructions traced that f executes, nil: they aren't. The address executed at the start and the end
	// of each operation is at mark.
	Trace  func(mark uintptr, f func() error) error
	Traced int // operations to be traced at most, after the others: until one executes hardly more than their median
}

// defaultTimeout bounds each system call.
const defaultTimeout = 5 * time.Second

// Run does op for d. An operation that fails is counted, not returned; an error means that nothing could be measured.
// Ops that fail are not in the histogram.
func (c Client) Run(ctx context.Context, op Op, d time.Duration) (s Sample, err error) {
	if err := c.Sizes.check(); err != nil {
		return s, err
	}
	c.Words = c.Sizes.words(c.Words)
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Exact != nil {
		if op == Stream || c.Close != Reset {
			return s, errors.New("exact counts are of connections that end with a reset, and of no stream")
		}
		d, c.Most = exactly, c.Exact.Ops
	}
	err = c.Thread.Do(func() error {
		l, err := c.loop(op, d)
		if err != nil {
			return err
		}
		defer l.close()
		l.warmUp(ctx)
		l.rec.clear()
		l.from = 0
		before := c.counts()
		before.own()
		start := time.Now()
		wall := l.run(ctx, d, c.Most)
		after := c.counts()
		s = l.rec.sample(c.Record)
		s.Start, s.Wall = start, wall
		s.CPU, s.Counters = after.sub(before)
		return errors.Join(ctx.Err(), l.trace(ctx, few(s)))
	})
	if err != nil {
		return s, fmt.Errorf("%s load on %d targets from %s: %w", op, len(c.Targets), first(c.Targets), err)
	}
	return s, nil
}

func first(a []netip.AddrPort) string {
	if len(a) == 0 {
		return "none"
	}
	return a[0].String()
}

// exactly is a time that no block of counted operations takes.
const exactly = 24 * time.Hour

// warmUp does the operations before the clock counts: a number of them, or for a time.
func (l *loop) warmUp(ctx context.Context) {
	switch {
	case l.Exact == nil:
		l.run(ctx, l.Warm, 0)
	case l.Exact.Warm > 0:
		l.run(ctx, exactly, l.Exact.Warm)
	}
}

// few returns how many instructions are no more than an operation's median, but for what a hash chain has.
func few(s Sample) int64 { return int64(s.Quantiles[QuantileName(0.5)] * 1.001) }

// trace has operations traced, if they are to be, up to one of no more instructions than few.
func (l *loop) trace(ctx context.Context, few int64) error {
	if l.Exact == nil || l.Exact.Trace == nil {
		return nil
	}
	l.few = few
	return l.Exact.Trace(ticksAt(), func() error {
		l.rec.clear()
		l.run(ctx, exactly, l.Exact.Traced)
		if len(l.rec.errors) > 0 {
			return fmt.Errorf("traced operations failed: %v", l.rec.errors)
		}
		return nil
	})
}

func (c Client) counts() Counts { return ReadCounts(c.CPUs, c.Workers) }

// loop is a closed loop at work. Times are since base.
type loop struct {
	Client
	base       time.Time
	route      *route
	rec        *recorder
	persistent []int // RR: descriptors by target, -1 where there is none
	from       int   // the next of Sources
	req        []byte
	size       int // of a request: req, over and over
	resp       []byte
	do         func(*loop) (start, end time.Duration, err error)
	inline     inline
	few        int64 // an operation of so many instructions ends a run; 0: none does
}

// inline is what a client with an Inline server knows of it.
type inline struct {
	conn  int   // of the server, for the present connection; -1: none
	conns []int // likewise of those that persist, by target
	clock int64 // instructions that reading the clock twice takes
}

func (c Client) loop(op Op, d time.Duration) (*loop, error) {
	r, err := newRoute(c.Targets, c.Seed)
	if err != nil {
		return nil, err
	}
	l := &loop{Client: c, base: time.Now(), route: r, req: c.Words.Persist, resp: make([]byte, c.Words.Persisted),
		inline: inline{conn: -1}}
	capacity := int(min(d/(4*time.Microsecond), 1<<20))
	if c.Most > 0 {
		capacity = min(capacity, c.Most)
	}
	l.rec = newRecorder(capacity + 1024)
	l.do = [...]func(*loop) (time.Duration, time.Duration, error){(*loop).connect, (*loop).crr, (*loop).rr, (*loop).rr}[op]
	if c.Close == Fin && op < RR {
		l.req, l.resp = c.Words.Bye, make([]byte, c.Words.Byed)
	}
	l.size = len(l.req)
	if op == Stream {
		l.size, l.req = c.Sizes.Request, l.req[:min(len(l.req), 1<<17)]
	}
	if op >= RR {
		l.persistent = make([]int, len(r.to))
		for i := range l.persistent {
			l.persistent[i] = -1
		}
		l.inline.conns = slices.Clone(l.persistent)
	}
	if c.Exact != nil {
		l.calibrate()
	}
	return l, nil
}

func (l *loop) now() time.Duration {
	if l.Exact != nil {
		return time.Duration(ticks())
	}
	return time.Since(l.base)
}

// calibrate counts what reading the clock takes itself.
func (l *loop) calibrate() {
	l.inline.clock = math.MaxInt64
	for range 100 {
		start := l.start()
		l.inline.clock = min(l.inline.clock, int64(l.now()-start))
	}
}

// start is when an operation's clock starts: once the caches are cold, if they are to be.
func (l *loop) start() time.Duration {
	if l.Cold != nil {
		l.Cold.Walk()
	}
	return l.now()
}

// run loops for d, or for so many operations if most is not 0, or up to one that is few, and says how long that took.
// It looks at ctx every 64 operations.
func (l *loop) run(ctx context.Context, d time.Duration, most int) time.Duration {
	begin := l.now()
	for n, now := 0, begin; now-begin < d && (most == 0 || n < most) && (n%64 != 0 || ctx.Err() == nil); n++ {
		start, end, err := l.do(l)
		if err != nil {
			l.rec.errors[Kind(err)]++
			l.failed()
		} else {
			l.rec.ns = append(l.rec.ns, int64(end-start)-l.inline.clock)
			if l.few > 0 && int64(end-start)-l.inline.clock <= l.few {
				break
			}
		}
		now = end
	}
	return l.now() - begin
}

// failed removes what an operation that failed left at a server of this thread.
func (l *loop) failed() {
	if l.Exact != nil {
		l.Exact.Server.drain()
	}
}

func (l *loop) connect() (start, end time.Duration, err error) {
	to, _ := l.route.step()
	fd, err := l.socket(to)
	if err != nil {
		return 0, l.now(), err
	}
	defer hangUp(&l.inline.conn)
	defer unix.Close(fd)
	start = l.start()
	err = connect(fd, to)
	end = l.now()
	if err == nil {
		err = l.request(fd, &l.inline.conn)
	}
	return start, end, err
}

func (l *loop) crr() (start, end time.Duration, err error) {
	to, _ := l.route.step()
	fd, err := l.socket(to)
	if err != nil {
		return 0, l.now(), err
	}
	defer hangUp(&l.inline.conn)
	start = l.start()
	if err = connect(fd, to); err == nil {
		err = l.request(fd, &l.inline.conn)
	}
	unix.Close(fd)
	return start, l.now(), err
}

// hangUp closes the server's end of a connection, where this thread has it.
func hangUp(conn *int) {
	if *conn >= 0 {
		unix.Close(*conn)
		*conn = -1
	}
}

func (l *loop) rr() (start, end time.Duration, err error) {
	to, i := l.route.step()
	if l.persistent[i] < 0 {
		if l.persistent[i], err = l.dial(to, &l.inline.conns[i]); err != nil {
			return 0, l.now(), err
		}
	}
	start = l.start()
	err = l.request(l.persistent[i], &l.inline.conns[i])
	end = l.now()
	if err != nil {
		unix.Close(l.persistent[i])
		l.persistent[i] = -1
		hangUp(&l.inline.conns[i])
	}
	return start, end, err
}

// dial connects and exchanges one request, so that what follows finds the connection accepted and the path warm.
func (l *loop) dial(to unix.Sockaddr, server *int) (int, error) {
	fd, err := l.socket(to)
	if err != nil {
		return -1, err
	}
	if err = connect(fd, to); err == nil {
		err = l.request(fd, server)
	}
	if err != nil {
		unix.Close(fd)
		hangUp(server)
		return -1, err
	}
	return fd, nil
}

// request sends one and reads its response, and the server's FIN after a farewell. An Inline server answers in between,
// by its end of the connection.
func (l *loop) request(fd int, server *int) (err error) {
	for left := l.size; left > 0; left -= len(l.req) {
		if err := writeAll(fd, l.req[:min(left, len(l.req))]); err != nil {
			return err
		}
	}
	if l.Exact != nil {
		if *server, err = l.Exact.Server.answer(*server); err != nil {
			return err
		}
	}
	if err := readAll(fd, l.resp); err != nil {
		return err
	}
	l.rec.answered(l.resp[0])
	if l.Close == Fin && l.persistent == nil {
		return readEnd(fd)
	}
	return nil
}

func (l *loop) socket(to unix.Sockaddr) (int, error) {
	fd, err := unix.Socket(family(to), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	tv := unix.NsecToTimeval(int64(l.Timeout))
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv), // bounds connect() too
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		linger(fd, l.Close),
		l.bind(fd),
	)
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// bind binds a socket to the next source. Its port is drawn at connect(), when the other side is known too.
func (l *loop) bind(fd int) error {
	if len(l.Sources) == 0 {
		return nil
	}
	a := l.Sources[l.from%len(l.Sources)]
	l.from++
	return errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1),
		unix.Bind(fd, sockaddr(netip.AddrPortFrom(a, 0))))
}

func (l *loop) close() {
	for _, fd := range slices.Concat(l.persistent, l.inline.conns) {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func linger(fd int, c Close) error {
	if c != Reset {
		return nil
	}
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}
