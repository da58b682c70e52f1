package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Open is an open loop: one request begins at each intended start, at a fixed rate, on a connection of its own or on
// one that is kept for a few, whatever became of those before it, and its time counts from the intended start. So an
// outage of a second at 1,000/s shows as 1,000 slow or failed connections, and a slow one delays no other. Like Client,
// it is one thread.
type Open struct {
	Thread
	Targets []netip.AddrPort // visited in turn
	Seed    uint64           // draws the order of the targets
	Sizes   Sizes
	Words   *Words // nil: the package's own protocol
	Close   Close
	Rate    float64       // requests per second
	Each    int           // requests on a connection, before a new one is opened; 0: 1
	Work    time.Duration // that the client computes after each answer, as an application would
	Warm    time.Duration // runs before the clock counts
	Timeout time.Duration // from the intended start to the answer, after which it counts as lost; 0: 5 s
	Most    int           // connections under way at once, beyond which they count as "overload"; 0: 4096
	Workers
}

// Event is one connection worth telling of.
type Event struct {
	At      time.Duration  `json:"at"`   // intended start, since the sample's start
	Elapsed time.Duration  `json:"took"` // from then to the answer or the failure
	Target  netip.AddrPort `json:"target"`
	Kind    string         `json:"kind,omitempty"` // of failure, see Kind; "" for an answer
}

// Trace is what an open loop saw beside its Sample.
type Trace struct {
	Intended int64   `json:"intended"`      // connections that were to start: each is among Ops or Errors
	Late     float64 `json:"late"`          // the largest delay, in ns, of an actual start: the load's own fault
	Failures []Event `json:"failures"`      // by start, the first 1,000
	Slowest  []Event `json:"slowest"`       // answers, slowest first, at most 10
	Cut      bool    `json:"cut,omitempty"` // ended early by its context
}

// Run makes connections for d, then waits for those under way, Timeout at most. A failed connection is counted, not
// returned; an ended context ends the loop early, which Trace says, without an error.
func (o Open) Run(ctx context.Context, d time.Duration) (s Sample, t Trace, err error) {
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	if o.Most == 0 {
		o.Most = 4096
	}
	if o.Rate <= 0 {
		return s, t, fmt.Errorf("open loop: the rate %g/s is not above 0", o.Rate)
	}
	if err := o.Sizes.check(); err != nil {
		return s, t, err
	}
	o.Words, o.Each = o.Sizes.words(o.Words), max(o.Each, 1)
	err = o.Thread.Do(func() error {
		l, err := o.loop(d)
		if err != nil {
			return err
		}
		defer l.close()
		if o.Warm > 0 {
			if err := l.warm(ctx); err != nil {
				return err
			}
		}
		before := ReadCounts(o.CPUs, o.Workers)
		before.own()
		l.base = time.Now()
		if err := l.run(ctx); err != nil {
			return err
		}
		wall := l.now()
		after := ReadCounts(o.CPUs, o.Workers)
		s = l.rec.sample(false)
		s.Start, s.Wall = l.base, wall
		s.CPU, s.Counters = after.sub(before)
		slices.SortStableFunc(l.trace.Failures, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
		t = l.trace
		return nil
	})
	if err != nil {
		return s, t, fmt.Errorf("open loop at %g/s on %d targets from %s: %w", o.Rate, len(o.Targets), first(o.Targets), err)
	}
	return s, t, nil
}

// openLoop is an open loop at work.
type openLoop struct {
	Open
	base   time.Time
	total  int64
	route  *route
	rec    *recorder
	trace  Trace
	epoll  int
	live   int
	flows  []flow // by descriptor
	oldest []due  // under way by intended start, for time-outs; may name flows that have ended
	idle   []int  // kept connections without a request, by descriptor
	buf    []byte
	memory []byte // that Work reads
}

// flow is a connection under way.
type flow struct {
	serial   int64 // of its request; 0: none, and the connection idle or no more
	at       time.Duration
	target   int
	requests int  // requests on this connection, with this one
	sent     bool // this one
	got      int  // bytes of the response
}

// due is a flow by descriptor and serial, since descriptors come again.
type due struct {
	fd     int
	serial int64
}

func (o Open) loop(d time.Duration) (*openLoop, error) {
	r, err := newRoute(o.Targets, o.Seed)
	if err != nil {
		return nil, err
	}
	total := int64(math.Ceil(d.Seconds() * o.Rate))
	l := &openLoop{Open: o, total: total, route: r, rec: newRecorder(int(min(total, 1<<20))),
		buf: make([]byte, max(o.Words.Persisted, o.Words.Byed)+1)}
	if o.Work > 0 {
		l.memory = make([]byte, 1<<20)
	}
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	// Wake-ups to the nanosecond instead of the customary 50 µs later; the thread ends with the loop.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		unix.Close(l.epoll)
		return nil, fmt.Errorf("set the timer slack: %w", err)
	}
	return l, nil
}

func (l *openLoop) now() time.Duration { return time.Since(l.base) }

// intended is the start of connection n.
func (l *openLoop) intended(n int64) time.Duration {
	return time.Duration(float64(n) / l.Rate * float64(time.Second))
}

func (l *openLoop) run(ctx context.Context) error {
	events := make([]unix.EpollEvent, 256)
	for l.trace.Intended < l.total || l.live > 0 {
		now := l.now()
		for l.trace.Intended < l.total && l.intended(l.trace.Intended) <= now {
			at := l.intended(l.trace.Intended)
			l.trace.Late = max(l.trace.Late, float64(now-at))
			l.begin(at)
			now = l.now()
		}
		l.expire(now)
		n, err := l.wait(events, l.pause(now))
		if err != nil {
			return err
		}
		for _, e := range events[:n] {
			l.advance(int(e.Fd))
		}
		if ctx.Err() != nil && l.trace.Intended < l.total {
			l.total, l.trace.Cut = l.trace.Intended, true
		}
	}
	return nil
}

// pause is how long nothing is due: 100 ms at most, so that an ended context is noticed.
func (l *openLoop) pause(now time.Duration) time.Duration {
	p := 100 * time.Millisecond
	if l.trace.Intended < l.total {
		p = min(p, l.intended(l.trace.Intended)-now)
	}
	if len(l.oldest) > 0 {
		p = min(p, l.flows[l.oldest[0].fd].at+l.Timeout-now)
	}
	return max(p, 0)
}

// wait is epoll_pwait2(2), which counts in nanoseconds.
func (l *openLoop) wait(events []unix.EpollEvent, d time.Duration) (int, error) {
	ts := unix.NsecToTimespec(int64(d))
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if errno == unix.EINTR {
		return 0, nil
	}
	if errno != 0 {
		return 0, fmt.Errorf("epoll_pwait2: %w", errno)
	}
	return int(n), nil
}

// begin starts the connection intended at a time.
func (l *openLoop) begin(at time.Duration) {
	l.trace.Intended++
	if n := len(l.idle); n > 0 {
		fd := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.again(fd, at)
		return
	}
	to, target := l.route.step()
	if l.live >= l.Most {
		l.fail(flow{at: at, target: target}, errBusy)
		return
	}
	fd, err := unix.Socket(family(to), unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		l.fail(flow{at: at, target: target}, err)
		return
	}
	for fd >= len(l.flows) {
		l.flows = append(l.flows, make([]flow, 1024)...)
	}
	l.flows[fd] = flow{serial: l.trace.Intended, at: at, target: target, requests: 1}
	l.live++
	if err := l.open(fd, to); err != nil {
		l.end(fd, err)
		return
	}
	l.oldest = append(l.oldest, due{fd, l.trace.Intended})
}

// open begins to connect. The first edge comes at once if that was all.
func (l *openLoop) open(fd int, to unix.Sockaddr) error {
	err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), linger(fd, l.Close))
	if err != nil {
		return err
	}
	if err := unix.Connect(fd, to); err != nil && err != unix.EINPROGRESS {
		return err
	}
	e := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLET, Fd: int32(fd)}
	return unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &e)
}

// advance does what a flow can do now: learn that it is connected, send, receive, end.
func (l *openLoop) advance(fd int) {
	f := &l.flows[fd]
	if f.serial == 0 {
		return // ended earlier in this batch
	}
	if !f.sent {
		if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			l.end(fd, cmp.Or(err, error(unix.Errno(code))))
			return
		}
		req, _ := l.words(f)
		n, err := unix.Write(fd, req)
		switch {
		case err == unix.EAGAIN || err == unix.ENOTCONN || err == unix.EINTR:
			return // not connected yet: an edge is to come
		case err != nil:
			l.end(fd, err)
			return
		case n < len(req):
			l.end(fd, fmt.Errorf("a request of %d bytes does not fit into an empty socket buffer", len(req)))
			return
		}
		f.sent = true
	}
	l.receive(fd, f)
}

// again begins a request, intended at a time, on a kept connection.
func (l *openLoop) again(fd int, at time.Duration) {
	f := &l.flows[fd]
	f.serial, f.at, f.sent, f.got = l.trace.Intended, at, false, 0
	f.requests++
	l.live++
	l.oldest = append(l.oldest, due{fd, f.serial})
	l.advance(fd)
}

// last reports whether a flow's request is the last of its connection.
func (l *openLoop) last(f *flow) bool { return f.requests >= l.Each }

// words are a flow's request and the length of its answer.
func (l *openLoop) words(f *flow) ([]byte, int) {
	if l.last(f) && l.Close == Fin {
		return l.Words.Bye, l.Words.Byed
	}
	return l.Words.Persist, l.Words.Persisted
}

func (l *openLoop) receive(fd int, f *flow) {
	_, length := l.words(f)
	waits := l.last(f) && l.Close == Fin // for the server to close
	for {
		n, err := unix.Read(fd, l.buf[:length+1-f.got])
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return
		case err != nil:
			l.end(fd, err)
			return
		case n == 0 && f.got == length:
			l.end(fd, nil)
			return
		case n == 0:
			l.end(fd, io.ErrUnexpectedEOF)
			return
		default:
			if f.got == 0 {
				l.rec.answered(l.buf[0])
			}
			if f.got += n; f.got > length {
				l.end(fd, errMore)
				return
			}
			if f.got == length && !waits {
				l.end(fd, nil)
				return
			}
		}
	}
}

// expire ends what has been under way for too long.
func (l *openLoop) expire(now time.Duration) {
	for len(l.oldest) > 0 {
		d := l.oldest[0]
		f := l.flows[d.fd]
		if f.serial == d.serial {
			if now-f.at < l.Timeout {
				return
			}
			l.end(d.fd, errTimeout)
		}
		l.oldest = l.oldest[1:]
	}
}

// end closes a flow and counts it.
func (l *openLoop) end(fd int, err error) {
	f := l.flows[fd]
	l.live--
	if err == nil && !l.last(&f) {
		l.flows[fd].serial = 0
		l.idle = append(l.idle, fd)
		l.elapsed(f)
		return
	}
	l.flows[fd] = flow{}
	if err != nil {
		_ = linger(fd, Reset) // so that a failure keeps no port
		unix.Close(fd)
		l.fail(f, err)
		return
	}
	elapsed := l.now() - f.at
	unix.Close(fd)
	l.succeeded(f, elapsed)
}

// elapsed records an answer on a connection that stays.
func (l *openLoop) elapsed(f flow) { l.succeeded(f, l.now()-f.at) }

func (l *openLoop) succeeded(f flow, elapsed time.Duration) {
	l.rec.ns = append(l.rec.ns, int64(elapsed))
	l.slow(Event{At: f.at, Elapsed: elapsed, Target: l.route.name[f.target]})
	l.compute()
}

// compute reads memory for as long as Work says.
func (l *openLoop) compute() {
	if l.Work == 0 {
		return
	}
	const line, lines = 64, 64 // bytes of a cache line, and how many are read between looks at the clock
	for at, begin := 0, l.now(); l.now()-begin < l.Work; {
		for range lines {
			l.memory[at]++
			at = (at + line) % len(l.memory)
		}
	}
}

// warm runs for a while and forgets it.
func (l *openLoop) warm(ctx context.Context) error {
	total := l.total
	l.total, l.base = int64(math.Ceil(l.Warm.Seconds()*l.Rate)), time.Now()
	err := l.run(ctx)
	l.rec.clear()
	l.total, l.trace, l.oldest = total, Trace{}, nil
	return err
}

// close ends what is still open.
func (l *openLoop) close() {
	for _, fd := range l.idle {
		_ = linger(fd, Reset) // so that it keeps no port
		unix.Close(fd)
	}
	unix.Close(l.epoll)
}

func (l *openLoop) fail(f flow, err error) {
	k := Kind(err)
	l.rec.errors[k]++
	if len(l.trace.Failures) < 1000 {
		l.trace.Failures = append(l.trace.Failures, Event{At: f.at, Elapsed: l.now() - f.at, Target: l.route.name[f.target],
			Kind: k})
	}
}

// slow keeps the ten slowest answers.
func (l *openLoop) slow(e Event) {
	t := l.trace.Slowest
	if len(t) == 10 && e.Elapsed <= t[9].Elapsed {
		return
	}
	i, _ := slices.BinarySearchFunc(t, e, func(a, b Event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	if t = slices.Insert(t, i, e); len(t) > 10 {
		t = t[:10]
	}
	l.trace.Slowest = t
}
