package load

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Inline is a server without a thread of its own: it answers when a client of the same thread has sent its request, by
// plain system calls. Neither end ever waits for the other, so that nothing but the exchange lies between two readings
// of a clock that counts instructions: no idle time, no switch of threads, no timer that an idle processor waits for.
type Inline struct {
	Addrs  []netip.AddrPort // where it listens
	conf   ServerConfig
	listen []int
	in     []byte
	out    []byte
}

// ServeInline opens the sockets of a server where its thread would run. Close closes them.
func ServeInline(c ServerConfig) (*Inline, error) {
	if err := c.Sizes.check(); err != nil {
		return nil, err
	}
	s := &Inline{conf: c, in: make([]byte, c.Sizes.Request), out: make([]byte, c.Sizes.Response)}
	for i := range s.out {
		s.out[i] = c.ID
	}
	err := Thread{Enter: c.Enter}.Do(func() error {
		for _, a := range c.Listen {
			fd, bound, err := listen(a)
			if err != nil {
				return fmt.Errorf("listen on %s: %w", a, err)
			}
			s.listen, s.Addrs = append(s.listen, fd), append(s.Addrs, bound)
			tv := unix.NsecToTimeval(int64(defaultTimeout)) // inherited by what is accepted
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// CPU returns 0: the client's thread has it all.
func (s *Inline) CPU() time.Duration { return 0 }

// Close closes what it listens on.
func (s *Inline) Close() error {
	var errs []error
	for _, fd := range s.listen {
		errs = append(errs, unix.Close(fd))
	}
	s.listen = nil
	return errors.Join(errs...)
}

// drain closes what waits to be accepted: of an operation that failed, it would be taken for the next one's.
func (s *Inline) drain() {
	for _, l := range s.listen {
		for {
			fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
			if err != nil {
				break
			}
			unix.Close(fd)
		}
	}
}

// answer reads a request and writes its response. Where the connection isn't accepted yet (-1), it accepts one first.
// That waits for one only where the kernel has left the end of a handshake to a thread of its own: to one operation of
// many, whose count differs then.
func (s *Inline) answer(conn int) (_ int, err error) {
	for conn < 0 {
		if conn, err = s.accept(); err != nil {
			return -1, err
		}
	}
	if err := readAll(conn, s.in); err != nil {
		return conn, err
	}
	return conn, writeAll(conn, s.out)
}

// accept accepts a connection, or returns -1 once there may be one.
func (s *Inline) accept() (int, error) {
	var wait []unix.PollFd
	for _, l := range s.listen {
		conn, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if err == nil || err != unix.EAGAIN {
			return conn, err
		}
		wait = append(wait, unix.PollFd{Fd: int32(l), Events: unix.POLLIN})
	}
	n, err := unix.Poll(wait, int(defaultTimeout.Milliseconds()))
	if err == nil && n == 0 {
		err = unix.ETIMEDOUT
	}
	if err == unix.EINTR {
		err = nil
	}
	return -1, err
}
