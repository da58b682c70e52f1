package echo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// socket is a socket whose waiting is Go's: it blocks no thread and ends at a deadline or Close.
type socket struct {
	*os.File
	raw     syscall.RawConn
	family  int  // AF_INET or AF_INET6
	listens bool // to streams
}

// Close closes the socket, so that its port is free at once: a child process that is being started has copies of all
// sockets until it executes its program.
func (s *socket) Close() error {
	if s.listens {
		s.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RDWR) })
	}
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return s.File.Close()
}

// open makes a socket in the calling thread's network namespace.
func open(family, kind int, p model.Protocol) (*socket, error) {
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(p))
	if err != nil {
		return nil, fmt.Errorf("open %s socket: %w", p, err)
	}
	s, err := wrap(fd, family)
	if err != nil {
		return nil, err
	}
	if family == unix.AF_INET6 && kind != unix.SOCK_RAW {
		err = s.option(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// wrap takes over a non-blocking fd.
func wrap(fd, family int) (*socket, error) {
	f := os.NewFile(uintptr(fd), "socket")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &socket{File: f, raw: raw, family: family}, nil
}

// control runs f on the file descriptor.
func (s *socket) control(f func(fd int) error) (err error) {
	if e := s.raw.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

func (s *socket) option(level, name, value int) error {
	err := s.control(func(fd int) error { return unix.SetsockoptInt(fd, level, name, value) })
	if err != nil {
		return fmt.Errorf("set socket option %d/%d to %d: %w", level, name, value, err)
	}
	return nil
}

// byFamily sets the option of the socket's own family.
func (s *socket) byFamily(v4, v6, value int) error {
	if s.family == unix.AF_INET {
		return s.option(unix.IPPROTO_IP, v4, value)
	}
	return s.option(unix.IPPROTO_IPV6, v6, value)
}

func (s *socket) bind(a netip.AddrPort) error {
	if err := s.control(func(fd int) error { return unix.Bind(fd, inet.Sockaddr(a)) }); err != nil {
		return fmt.Errorf("bind to %s: %w", a, err)
	}
	return nil
}

// name queries the kernel for one of the socket's addresses, with unix.Getsockname or unix.Getpeername.
func (s *socket) name(request func(fd int) (unix.Sockaddr, error)) (a netip.AddrPort, err error) {
	err = s.control(func(fd int) error {
		sa, err := request(fd)
		a = inet.AddrPort(sa)
		return err
	})
	return a, err
}

// connect waits until the socket is connected or refused.
func (s *socket) connect(to netip.AddrPort) error {
	var err error
	begun := false
	wait := s.raw.Write(func(fd uintptr) bool {
		if !begun {
			begun = true
			err = unix.Connect(int(fd), inet.Sockaddr(to))
			return err != unix.EINPROGRESS
		}
		var code int
		if code, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			err = unix.Errno(code)
		}
		if err != nil {
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err != unix.ENOTCONN // woken too early
	})
	if wait != nil {
		return wait
	}
	return err
}

// accept waits for the next connection.
func (s *socket) accept() (c *socket, err error) {
	wait := s.raw.Read(func(fd uintptr) bool {
		var n int
		n, _, err = unix.Accept4(int(fd), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err == unix.EAGAIN {
			return false
		}
		if err == nil {
			c, err = wrap(n, s.family)
		}
		return true
	})
	if wait != nil {
		return nil, wait
	}
	return c, err
}

// packet is one datagram: its bytes, its control messages and who sent it.
type packet struct {
	data, control []byte
	from          netip.AddrPort
}

// receive waits for a packet. Its bytes lie in buf.
func (s *socket) receive(buf []byte) (p packet, err error) {
	p.control = make([]byte, 128)
	wait := s.raw.Read(func(fd uintptr) bool {
		n, cn, _, from, e := unix.Recvmsg(int(fd), buf, p.control, 0)
		err = e
		if e == nil {
			p = packet{buf[:n], p.control[:cn], inet.AddrPort(from)}
		}
		return e != unix.EAGAIN
	})
	if wait != nil {
		return p, wait
	}
	return p, err
}

// send sends a packet to p.from, or to the connected peer where that is zero.
func (s *socket) send(p packet) (err error) {
	var to unix.Sockaddr
	if p.from.IsValid() {
		to = inet.Sockaddr(p.from)
	}
	wait := s.raw.Write(func(fd uintptr) bool {
		err = unix.Sendmsg(int(fd), p.data, p.control, to, 0)
		return err != unix.EAGAIN
	})
	if wait != nil {
		return wait
	}
	return err
}

// during lets waits on the socket end when ctx does, until the function that it returns is called.
func (s *socket) during(ctx context.Context) (end func()) {
	s.SetDeadline(time.Time{})
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		s.SetDeadline(time.Unix(1, 0))
		close(ended)
	})
	return func() {
		if !stop() {
			<-ended
		}
	}
}

// destination reads from a packet's control messages at which address it came in, and returns the control message that
// makes an answer leave from there, by whatever interface (ip(7), IP_PKTINFO; RFC 3542, section 6).
func destination(control []byte) (netip.Addr, []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, nil
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= 12:
			local := [4]byte(m.Data[4:8])
			return netip.AddrFrom4(local), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: local})
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 20:
			local := [16]byte(m.Data[:16])
			return netip.AddrFrom16(local), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: local})
		}
	}
	return netip.Addr{}, nil
}

// RawSCTP is an environment variable: where it is set, SCTP is spoken by raw sockets, one INIT at a time, also by
// kernels that have SCTP sockets. It takes a kernel that hasn't loaded them yet, or else that answers too.
const RawSCTP = "FAIRLEAD_RAW_SCTP"

// haveSCTP reports whether SCTP sockets are used here.
func haveSCTP() bool { return os.Getenv(RawSCTP) == "" && kernelSCTP() }

// kernelSCTP reports whether this kernel has SCTP sockets.
var kernelSCTP = sync.OnceValue(func() bool {
	s, err := open(unix.AF_INET, unix.SOCK_STREAM, model.SCTP)
	if err != nil {
		return false
	}
	s.Close()
	return true
})

// rejections are the errors by which a kernel passes on that the other end rejects.
var rejections = []error{
	unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE, // TCP reset, SCTP ABORT, ICMP port unreachable
	unix.EPERM,                     // a rule or program of the sender's own host
	unix.EACCES, unix.EHOSTUNREACH, // ICMP administratively prohibited, host unreachable
	unix.ENOPROTOOPT, unix.EPROTO, // ICMP protocol unreachable, ICMPv6 unknown next header
}

// classify returns what err means for a question of that description.
func classify(ctx context.Context, what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded) && errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return fmt.Errorf("%s: %w", what, Timeout)
	}
	for _, r := range rejections {
		if errors.Is(err, r) {
			return fmt.Errorf("%s: %w: %w", what, Refused, err)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}
