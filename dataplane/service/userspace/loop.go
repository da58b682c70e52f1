package userspace

import (
	"encoding/binary"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// loop proxies connections and flows on a thread of its own in the node's network namespace, waiting by epoll. What it
// proxies belongs to it alone; others have it do what concerns that.
type loop struct {
	events
	pending
	steady *atomic.Int64 // Plane.steady

	mu     sync.Mutex
	mail   []func()
	closed bool

	idle   []*pipe
	conns  map[*conn]struct{}
	flows  [2]line // by how long they may be silent: those without an answer yet, and with
	batch  *packets
	hungry map[*listener]struct{} // that wait for file descriptors
	now    time.Time              // when the turn began
	done   chan struct{}
}

// events are what the kernel reports by epoll, and to which slot.
type events struct {
	epoll, bell int
	coarse      bool // the kernel can't wait for less than a millisecond
	slots       []slot
	free        []uint32
}

// pending is what continues without an event.
type pending struct {
	again []waiting // with more to do than a turn may
	late  []waiting // with something to do by the time due
	due   time.Time
}

// slot is what an event is about. Its generation tells late events of what was there before.
type slot struct {
	who        watcher
	generation uint32
}

// watcher is what events are for.
type watcher interface{ ready(events uint32) }

// waiting is what has had its turn and is not done.
type waiting interface{ resume() }

// newLoop starts a loop.
func newLoop(node *netns.Namespace, steady *atomic.Int64) (*loop, error) {
	l := &loop{steady: steady, conns: map[*conn]struct{}{}, hungry: map[*listener]struct{}{}, done: make(chan struct{})}
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	if l.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		_, err = l.watch(l.bell, unix.EPOLLIN|unix.EPOLLET, bell{})
	}
	if err != nil {
		unix.Close(l.epoll)
		return nil, err
	}
	entered := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := node.Enter()
		unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) // nanoseconds: lingering means what it says
		if entered <- err; err == nil {
			l.run()
		}
		close(l.done)
	}()
	if err := <-entered; err != nil {
		unix.Close(l.epoll)
		unix.Close(l.bell)
		return nil, err
	}
	return l, nil
}

// bell only wakes.
type bell struct{}

func (bell) ready(uint32) {}

// do has the loop's thread call f and waits until it has. Once the loop ends it calls nothing.
func (l *loop) do(f func()) {
	done := make(chan struct{})
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.mail = append(l.mail, func() { f(); close(done) })
	l.mu.Unlock()
	l.ring()
	select {
	case <-done:
	case <-l.done:
	}
}

func (l *loop) ring() { unix.Write(l.bell, binary.NativeEndian.AppendUint64(nil, 1)) }

// close ends everything that the loop proxies.
func (l *loop) close() {
	l.do(func() {
		for c := range l.conns {
			c.abort()
		}
		for i := range l.flows {
			for l.flows[i].first != nil {
				l.flows[i].first.close()
			}
		}
		for _, p := range l.idle {
			l.discard(p)
		}
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
	})
	<-l.done
	unix.Close(l.epoll)
	unix.Close(l.bell)
}

// watch has events of a file descriptor told to who, until forget, which comes before the descriptor is closed.
func (l *loop) watch(fd int, events uint32, who watcher) (watchID uint32, err error) {
	if len(l.free) > 0 {
		watchID = l.free[len(l.free)-1]
	} else {
		watchID = uint32(len(l.slots))
		l.slots = append(l.slots, slot{})
		l.free = append(l.free, watchID)
	}
	s := &l.slots[watchID]
	e := unix.EpollEvent{Events: events, Fd: int32(watchID), Pad: int32(s.generation)}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		return 0, err
	}
	l.free = l.free[:len(l.free)-1]
	s.who = who
	return watchID, nil
}

// forget ends what watch began.
func (l *loop) forget(fd int, watchID uint32) {
	unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
	s := &l.slots[watchID]
	s.who = nil
	s.generation++
	l.free = append(l.free, watchID)
}

// run waits for events and dispatches them.
func (l *loop) run() {
	events := make([]unix.EpollEvent, 256)
	for {
		n, err := l.wait(events, l.patience())
		if err != nil && !errors.Is(err, unix.EINTR) {
			panic("userspace: epoll_wait: " + err.Error()) // only of a descriptor that is none
		}
		l.now = time.Now()
		for _, e := range events[:max(n, 0)] {
			if s := l.slots[e.Fd]; s.who != nil && s.generation == uint32(e.Pad) {
				s.who.ready(e.Events)
			}
		}
		again := l.again
		l.again = nil
		if len(l.late) > 0 && !l.now.Before(l.due) {
			again = append(again, l.late...)
			clear(l.late) // of connections that may end
			l.late = l.late[:0]
		}
		for _, w := range again {
			w.resume()
		}
		l.expire()
		l.feed()
		if l.errands() {
			return
		}
	}
}

// errands does what others asked for, and reports whether that was to end.
func (l *loop) errands() bool {
	l.mu.Lock()
	mail := l.mail
	l.mail = nil
	l.mu.Unlock()
	if len(mail) > 0 {
		unix.Read(l.bell, make([]byte, 8))
	}
	for _, f := range mail {
		f()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// appetite is how long those who found no file descriptors wait until they try again.
const appetite = 100 * time.Millisecond

// lingering is how long a stream is left to gather bytes.
const lingering = 200 * time.Microsecond

// linger has a stream moved a little later, if that can be told so finely: it reports whether it can.
func (l *loop) linger(s *stream) bool {
	if l.coarse {
		return false
	}
	if len(l.late) == 0 {
		l.due = time.Now().Add(lingering)
	}
	if !s.queued {
		s.queued = true
		l.late = append(l.late, s)
	}
	return true
}

// wait waits for events, without end where the time is below 0.
func (l *loop) wait(events []unix.EpollEvent, most time.Duration) (int, error) {
	if !l.coarse {
		var t *unix.Timespec
		if most >= 0 {
			s := unix.NsecToTimespec(int64(most))
			t = &s
		}
		n, _, err := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.epoll), uintptr(unsafe.Pointer(&events[0])),
			uintptr(len(events)), uintptr(unsafe.Pointer(t)), 0, 0)
		switch err {
		case 0:
			return int(n), nil
		case unix.ENOSYS, unix.EPERM:
			l.coarse = true // before Linux 5.11, or forbidden
		default:
			return 0, err
		}
	}
	milliseconds := -1
	if most >= 0 {
		milliseconds = int(min(most, time.Hour) / time.Millisecond)
	}
	return unix.EpollWait(l.epoll, events, milliseconds)
}

// patience is how long to wait for events: without end, which is less than 0, where nothing else is due.
func (l *loop) patience() time.Duration {
	wait := time.Duration(-1)
	sooner := func(d time.Duration) {
		if wait < 0 || d < wait {
			wait = max(d, 0)
		}
	}
	if len(l.again) > 0 {
		return 0
	}
	if len(l.late) > 0 {
		sooner(time.Until(l.due))
	}
	if len(l.hungry) > 0 {
		sooner(appetite)
	}
	for i := range l.flows {
		if f := l.flows[i].first; f != nil {
			sooner(time.Until(f.last.Add(silences[i])) + time.Millisecond)
		}
	}
	return wait
}

// expire ends flows that were silent for too long.
func (l *loop) expire() {
	for i := range l.flows {
		for f := l.flows[i].first; f != nil && l.now.Sub(f.last) >= silences[i]; f = l.flows[i].first {
			f.close()
		}
	}
}

// feed lets those who wait for file descriptors try again.
func (l *loop) feed() {
	for li := range l.hungry {
		if !li.starved.IsZero() && l.now.Sub(li.starved) >= appetite {
			delete(l.hungry, li)
			li.ready(unix.EPOLLIN)
		}
	}
}

// pipe is where bytes wait between two sockets, without being copied.
type pipe struct{ out, in int } // to read from, to write to

// capacity is a pipe's size in bytes, and the most that waits between two sockets.
const capacity = 1 << 20

// borrow returns an empty pipe.
func (l *loop) borrow() (*pipe, error) {
	if n := len(l.idle); n > 0 {
		p := l.idle[n-1]
		l.idle = l.idle[:n-1]
		return p, nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	l.steady.Add(2)
	unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, capacity) // else it stays at the usual 64 KiB: slower, no less right
	return &pipe{fds[0], fds[1]}, nil
}

// returnPipe takes an empty pipe back.
func (l *loop) returnPipe(p *pipe) {
	const most = 32
	if len(l.idle) < most {
		l.idle = append(l.idle, p)
	} else {
		l.discard(p)
	}
}

// discard closes a pipe, and what waits in it is lost.
func (l *loop) discard(p *pipe) {
	unix.Close(p.out)
	unix.Close(p.in)
	l.steady.Add(-2)
}
