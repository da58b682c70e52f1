package load

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
)

// Server answers every engine of this package: one thread, one epoll instance, one request at a time per connection.
type Server struct {
	Addrs []netip.AddrPort // where it listens; port 0 became a free one

	conf     ServerConfig
	epoll    int
	wake     int // eventfd that ends the loop
	listen   map[int32]bool
	conns    []conn // by descriptor
	memory   []byte // that Work reads; nil: it does none
	tid      atomic.Int64
	cpu      atomic.Int64 // ns at the end
	accepted atomic.Int64
	served   atomic.Int64
	done     chan error
	closing  sync.Once
	closed   error
}

// ServerConfig is where and how a server answers.
type ServerConfig struct {
	Thread
	Listen []netip.AddrPort // one of 0.0.0.0 or [::] takes whatever is routed here
	Sizes  Sizes
	ID     byte // every byte of its responses
	Work   Work // before each response, as an application would
}

type conn struct {
	got  int // bytes of the present request
	bye  bool
	resp []byte // rest of a response that did not fit
}

// Serve starts a server; when it returns, connections are taken. Close ends it.
func Serve(c ServerConfig) (*Server, error) {
	if err := c.Sizes.check(); err != nil {
		return nil, err
	}
	s := &Server{conf: c, listen: map[int32]bool{}, done: make(chan error, 1), epoll: -1, wake: -1}
	if c.Work.Steps > 0 {
		s.memory = make([]byte, workMemory)
	}
	ready := make(chan error, 1)
	go func() {
		s.done <- c.Thread.Do(func() error {
			s.tid.Store(int64(unix.Gettid()))
			err := s.open()
			ready <- err
			if err == nil {
				err = s.loop()
			}
			s.cpu.Store(int64(threadCPU(unix.Gettid())))
			s.tid.Store(0)
			return err
		})
	}()
	select {
	case err := <-ready:
		if err != nil {
			<-s.done
			s.shut()
			return nil, fmt.Errorf("serve on %v: %w", c.Listen, err)
		}
		return s, nil
	case err := <-s.done: // the thread never got as far as open
		return nil, fmt.Errorf("serve on %v: %w", c.Listen, err)
	}
}

// Accepted is the number of connections taken so far.
func (s *Server) Accepted() int64 { return s.accepted.Load() }

// Served is the number of requests answered so far.
func (s *Server) Served() int64 { return s.served.Load() }

// CPU is the processor time that the server's thread has used.
func (s *Server) CPU() time.Duration {
	if tid := s.tid.Load(); tid != 0 {
		return threadCPU(int(tid))
	}
	return time.Duration(s.cpu.Load())
}

// Close ends the server, resets what is connected, and waits for its thread.
func (s *Server) Close() error {
	s.closing.Do(func() {
		one := [8]byte{0: 1} // the counter is in the machine's order; any number but 0 will do
		if _, err := unix.Write(s.wake, one[:]); err != nil {
			s.closed = fmt.Errorf("wake the server on %v: %w", s.Addrs, err)
			return
		}
		s.closed = <-s.done
		s.shut()
	})
	return s.closed
}

func (s *Server) shut() {
	for fd := range s.listen {
		unix.Close(int(fd))
	}
	for _, fd := range []int{s.epoll, s.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (s *Server) open() (err error) {
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	if err := s.watch(s.wake); err != nil {
		return err
	}
	for _, a := range s.conf.Listen {
		fd, bound, err := listen(a)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", a, err)
		}
		s.listen[int32(fd)] = true
		s.Addrs = append(s.Addrs, bound)
		if err := s.watch(fd); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) watch(fd int) error {
	return unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// backlog is more than a client can open before the server gets the processor; net.core.somaxconn may cut it.
const backlog = 1 << 16

func listen(a netip.AddrPort) (fd int, bound netip.AddrPort, err error) {
	to := sockaddr(a)
	fd, err = unix.Socket(family(to), unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, bound, err
	}
	steps := []func() error{
		func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) },
		func() error { // inherited by what is accepted
			return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		},
		func() error {
			if family(to) == unix.AF_INET {
				return nil
			}
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
		},
		func() error { return unix.Bind(fd, to) },
		func() error { return unix.Listen(fd, backlog) },
	}
	for _, step := range steps {
		if err = step(); err != nil {
			unix.Close(fd)
			return -1, bound, err
		}
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return -1, bound, err
	}
	return fd, inet.AddrPort(sa), nil
}

func (s *Server) loop() error {
	events := make([]unix.EpollEvent, 256)
	in := make([]byte, min(max(s.conf.Sizes.Request, 1<<12), 1<<18))
	out := make([]byte, s.conf.Sizes.Response)
	for i := range out {
		out[i] = s.conf.ID
	}
	defer func() {
		for fd := range s.conns {
			s.drop(fd, true)
		}
	}()
	for {
		n, err := unix.EpollWait(s.epoll, events, -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for connections on %v: %w", s.Addrs, err)
		}
		for _, e := range events[:n] {
			switch {
			case int(e.Fd) == s.wake:
				return nil
			case s.listen[e.Fd]:
				s.accept(int(e.Fd))
			default:
				s.serve(int(e.Fd), in, out)
			}
		}
	}
}

// accept takes all that wait. Out of descriptors it leaves them waiting.
func (s *Server) accept(l int) {
	for {
		fd, _, err := unix.Accept4(l, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNABORTED {
			continue
		}
		if err != nil {
			return
		}
		s.accepted.Add(1)
		for fd >= len(s.conns) {
			s.conns = append(s.conns, make([]conn, 1024)...)
		}
		s.conns[fd] = conn{}
		if s.watch(fd) != nil {
			unix.Close(fd)
			continue
		}
		s.conns[fd].resp = alive
	}
}

// alive marks a descriptor as a connection; nothing is left to be sent.
var alive = make([]byte, 0)

// serve reads what is there and answers every request that is complete.
func (s *Server) serve(fd int, in, out []byte) {
	c := &s.conns[fd]
	if len(c.resp) > 0 && !s.send(fd, c.resp) {
		return
	}
	n, err := unix.Read(fd, in)
	if err == unix.EINTR || err == unix.EAGAIN {
		return // still readable, or not: epoll is level-triggered
	}
	if err != nil || n == 0 {
		s.drop(fd, err != nil)
		return
	}
	for b := in[:n]; len(b) > 0; {
		if c.got == 0 {
			c.bye = b[0] == farewell
		}
		part := min(len(b), s.conf.Sizes.Request-c.got)
		b, c.got = b[part:], c.got+part
		if c.got < s.conf.Sizes.Request {
			return
		}
		c.got = 0
		s.served.Add(1)
		s.conf.Work.do(s.memory)
		if !s.send(fd, out) {
			return
		}
		if c.bye {
			s.drop(fd, false)
			return
		}
	}
}

// send writes all of b, or keeps the rest for when there is room. It reports whether all was sent and the connection
// lives.
func (s *Server) send(fd int, b []byte) bool {
	c := &s.conns[fd]
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			c.resp = b
			s.want(fd, unix.EPOLLOUT)
			return false
		case err != nil:
			s.drop(fd, true)
			return false
		default:
			b = b[n:]
		}
	}
	if len(c.resp) > 0 {
		c.resp = alive
		s.want(fd, unix.EPOLLIN)
		if c.bye {
			s.drop(fd, false)
			return false
		}
	}
	return true
}

func (s *Server) want(fd int, events uint32) {
	// fd is watched: it can't fail
	_ = unix.EpollCtl(s.epoll, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

// drop closes a connection, by a reset if hard. A descriptor that is none of ours stays as it is.
func (s *Server) drop(fd int, hard bool) {
	if s.conns[fd].resp == nil {
		return
	}
	s.conns[fd] = conn{}
	if hard {
		_ = linger(fd, Reset) // a reset connection has nothing to linger
	}
	unix.Close(fd)
}
