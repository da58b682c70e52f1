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
func (s *Inline) answer(conn int) (int, error) {
	for i := 0; conn < 0; i++ {
		if i == len(s.listen) {
			return -1, errors.New("no connection arrived while the client was connecting")
		}
		fd, _, err := unix.Accept4(s.listen[i], unix.SOCK_CLOEXEC)
		if err == nil {
			conn = fd
		} else if err != unix.EAGAIN {
			return -1, err
		}
	}
	if err := readAll(conn, s.in); err != nil {
		return conn, err
	}
	return conn, writeAll(conn, s.out)
}
