// Package load makes TCP load at the scale of microseconds and counts what it cost: closed-loop engines (connect(), a
// whole connection with one request, a request on a kept connection), an open-loop engine that measures from the
// intended start, and the server that answers them.
//
// Every engine is one operating system thread, pinned to a processor, in a network namespace of the caller's choice,
// making plain blocking system calls or its own epoll loop: neither Go's network poller nor a goroutine switch stands
// between the clock and the kernel. It is no general load generator: fixed sizes, one protocol, no HTTP, no TLS. It
// builds no topology and draws no conclusion.
//
// The protocol: a request is Sizes.Request bytes, the first of which reports whether the server is to keep the
// connection or close it after its answer; the answer is Sizes.Response bytes, each of them the server's ID.
package load

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// Thread is where an engine's thread runs. The zero Thread is any processor, in the caller's network namespace.
type Thread struct {
	// Enter runs its argument on the calling thread in a network namespace (and cgroup, if that matters).
	Enter func(func() error) error
	// CPUs to be pinned to, usually one; none leaves the thread free.
	CPUs []int
	// Realtime threads (SCHED_FIFO, sched(7)) are interrupted by no other, neither by each other: which runs when is
	// decided by which waits for which alone. Else whether waking the server interrupts the client makes connect() cost
	// half as much again, or not, for seconds at a time.
	Realtime bool
}

// Do calls f on a thread of its own, which ends with it, so that neither affinity nor namespace can leak.
func (p Thread) Do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread dies with the goroutine
		done <- p.here(f)
	}()
	return <-done
}

func (p Thread) here(f func() error) error {
	if len(p.CPUs) > 0 {
		var set unix.CPUSet
		for _, c := range p.CPUs {
			set.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pin a thread to processors %v: %w", p.CPUs, err)
		}
	}
	if p.Realtime {
		if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1},
			0); err != nil {
			return fmt.Errorf("give a thread real-time priority (CAP_SYS_NICE): %w", err)
		}
	}
	if p.Enter == nil {
		return f()
	}
	return p.Enter(f)
}

// Prefer puts a thread of another process, or of the kernel, before Realtime ones.
func Prefer(pid int) error {
	return unix.SchedSetAttr(pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 2}, 0)
}

// MayRealtime reports whether this process may run Realtime threads.
func MayRealtime() bool { return Thread{Realtime: true}.Do(func() error { return nil }) == nil }

// Close is how connections end. Neither leaves a TIME_WAIT at the client, so no local port is ever used up.
type Close uint8

// The ways to end a connection.
const (
	Reset Close = iota // SO_LINGER 0: the client resets it, nothing waits anywhere
	Fin                // FIN and FIN: the server closes first, and TIME_WAIT stays with its port
)

// String returns "reset" or "fin".
func (c Close) String() string { return [...]string{"reset", "fin"}[c] }

// Sizes are bytes per message, at least 1 each. Client and server must agree.
type Sizes struct{ Request, Response int }

func (s Sizes) check() error {
	if s.Request < 1 || s.Response < 1 {
		return fmt.Errorf("sizes %+v: a request and a response have at least one byte", s)
	}
	return nil
}

// persist and farewell are the first byte of a request.
const (
	persist  = 'k'
	farewell = 'c'
)

// Words are what a client says to a server, and how long the answers are: after Keep the connection stays, after Bye
// the server closes it.
type Words struct {
	Persist, Bye    []byte
	Persisted, Byed int // bytes of their answers
}

// words are those of the package's own protocol, unless there are others.
func (s Sizes) words(others *Words) *Words {
	if others != nil {
		return others
	}
	w := &Words{Persist: make([]byte, s.Request), Bye: make([]byte, s.Request), Persisted: s.Response, Byed: s.Response}
	w.Persist[0], w.Bye[0] = persist, farewell
	return w
}

// Worker is a process or thread that works for a load.
type Worker interface {
	CPU() time.Duration // processor time used so far
}

// Workers are those whose processor time is counted with a load's.
type Workers struct{ Servers, Agents []Worker }

// Sample is what an engine saw in one run.
type Sample struct {
	Start     time.Time
	Wall      time.Duration
	Ops       int64            // operations that succeeded
	Errors    map[string]int64 // the others, by kind
	Quantiles map[string]float64
	Hist      *hdrhistogram.Histogram // ns of the successful operations, three digits
	Answers   map[byte]int64          // by the first byte of the answer: the server's ID
	Times     []int64                 // ns of each successful operation, in order, if they were to be kept
	Said      []byte                  // the first byte of each answer, likewise
	CPU       CPU
	Counters  map[string]float64 // exact counts over the whole run, see Counts
}

// Failed is the number of operations that did not succeed.
func (s Sample) Failed() (n int64) {
	for _, e := range s.Errors {
		n += e
	}
	return n
}

// quantiles are those that a Sample gives by name, beside "mean", "min" and "max".
var quantiles = []float64{0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999}

// QuantileName returns "p50" for 0.5 and "p99.9" for 0.999.
func QuantileName(q float64) string {
	return "p" + strconv.FormatFloat(float64(int(q*1e6+0.5))/1e4, 'f', -1, 64)
}

// Quantiles returns exact quantiles (the smallest number that has at least the share q at or below it), mean, min and
// max by name, and the HdrHistogram of the same numbers, all in ns. It sorts its argument. No numbers give no
// quantiles.
func Quantiles(ns []int64) (map[string]float64, *hdrhistogram.Histogram) {
	h := NewHist()
	if len(ns) == 0 {
		return nil, h
	}
	slices.Sort(ns)
	sum, q := 0.0, map[string]float64{"min": float64(ns[0]), "max": float64(ns[len(ns)-1])}
	for _, n := range ns {
		sum += float64(n)
		h.RecordValue(min(max(n, 1), h.HighestTrackableValue())) // in range: it can't fail
	}
	q["mean"] = sum / float64(len(ns))
	for _, p := range quantiles {
		i := int(p * float64(len(ns)))
		if float64(i) == p*float64(len(ns)) && i > 0 {
			i--
		}
		q[QuantileName(p)] = float64(ns[i])
	}
	return q, h
}

// NewHist is an empty histogram of the kind that samples carry: 1 ns to 5 minutes, three digits.
func NewHist() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(5*time.Minute), 3) }

// recorder collects one run. Times are appended to room that is already mapped, so that the loop neither counts nor
// faults.
type recorder struct {
	ns      []int64
	errors  map[string]int64
	answers [256]int64
	said    []byte // in order
}

func newRecorder(capacity int) *recorder {
	r := &recorder{ns: make([]int64, capacity), errors: map[string]int64{}}
	for i := range r.ns {
		r.ns[i] = 1 // map the page
	}
	r.ns = r.ns[:0]
	r.said = make([]byte, 0, capacity)
	return r
}

// answered records an answer by its first byte.
func (r *recorder) answered(id byte) {
	r.answers[id]++
	r.said = append(r.said, id)
}

func (r *recorder) clear() {
	r.ns = r.ns[:0]
	clear(r.errors)
	r.answers = [256]int64{}
	r.said = r.said[:0]
}

func (r *recorder) sample(persist bool) Sample {
	s := Sample{Ops: int64(len(r.ns)), Errors: maps.Clone(r.errors), Answers: map[byte]int64{}}
	if persist {
		s.Times, s.Said = slices.Clone(r.ns), slices.Clone(r.said)
	}
	s.Quantiles, s.Hist = Quantiles(r.ns)
	for id, n := range r.answers {
		if n > 0 {
			s.Answers[byte(id)] = n
		}
	}
	return s
}

// route is a sequence of targets, visited round and round: each once per round, in an order drawn from a seed.
type route struct {
	to   []unix.Sockaddr
	name []netip.AddrPort
	next int
}

func newRoute(targets []netip.AddrPort, seed uint64) (*route, error) {
	if len(targets) == 0 {
		return nil, fmt.Errorf("no target to connect to")
	}
	r := &route{name: slices.Clone(targets)}
	rand.New(rand.NewPCG(seed, 1)).Shuffle(len(r.name), func(i, j int) { r.name[i], r.name[j] = r.name[j], r.name[i] })
	for _, t := range r.name {
		r.to = append(r.to, sockaddr(t))
	}
	return r, nil
}

func (r *route) step() (unix.Sockaddr, int) {
	i := r.next
	if r.next++; r.next == len(r.to) {
		r.next = 0
	}
	return r.to[i], i
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if ip := a.Addr().Unmap(); ip.Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: ip.As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func family(a unix.Sockaddr) int {
	if _, ok := a.(*unix.SockaddrInet4); ok {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
