// Package netlink is the netlink socket that the other packages below kernel share: attributes, requests and dumps,
// batches of requests, and notifications without those that a socket's own requests cause. It knows the protocol
// (include/uapi/linux/netlink.h) and the meaning of no family.
package netlink

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// readerSize is more than the kernel puts in one datagram: 32 KiB of a dump (netlink_dump).
const readerSize = 64 << 10

// Socket is a socket of one netlink protocol in one network namespace. It is safe for concurrent use.
type Socket struct {
	mu     sync.Mutex
	fd     int
	port   uint32 // of ours: with it the kernel marks what our requests cause
	seq    uint32 // of the last request
	reader []byte // made when first needed
}

// ErrInterrupted reports that what was read changed meanwhile: see Stable.
var ErrInterrupted = errors.New("the data changed during the dump")

// Open opens a socket of a protocol, such as unix.NETLINK_ROUTE, in the calling thread's network namespace, with
// buffers of so many bytes, 0 for the kernel's default.
func Open(protocol, buffer int) (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	s := &Socket{fd: fd}
	if err := s.prepare(buffer); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return s, nil
}

// OpenIn is Open in another network namespace, with the kernel's default buffers.
func OpenIn(ns *netns.Namespace, protocol int) (s *Socket, err error) {
	err = ns.Do(func() (err error) {
		s, err = Open(protocol, 0)
		return err
	})
	return s, err
}

// prepare sets the socket's options and binds it.
func (s *Socket) prepare(buffer int) error {
	if buffer > 0 {
		if err := setBuffers(s.fd, buffer); err != nil {
			return fmt.Errorf("set the size of netlink buffers: %w", err)
		}
	}
	for _, o := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, o, 1); err != nil {
			return fmt.Errorf("set netlink socket option %d: %w", o, err)
		}
	}
	unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // the kernel filters dumps where it can
	if err := unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind netlink socket: %w", err)
	}
	a, err := unix.Getsockname(s.fd)
	if err != nil {
		return fmt.Errorf("bind netlink socket: %w", err)
	}
	s.port = a.(*unix.SockaddrNetlink).Pid
	return nil
}

// setBuffers sets a socket's send and receive buffers to size bytes. Without CAP_NET_ADMIN in the first user namespace
// they are as large as net.core.wmem_max and rmem_max allow.
func setBuffers(fd, size int) error {
	set := func(force, plain int) error {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size)
		if errors.Is(err, unix.EPERM) {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, size)
		}
		return err
	}
	return errors.Join(set(unix.SO_SNDBUFFORCE, unix.SO_SNDBUF), set(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF))
}

// Close closes the socket. What was written stays, and what Watch began goes on until its context ends. Closed again,
// it does nothing: the number may be another's file by then.
func (s *Socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil
	}
	err := unix.Close(s.fd)
	if s.fd = -1; err != nil {
		return fmt.Errorf("close netlink socket: %w", err)
	}
	return nil
}

// Port returns the socket's address: notifications carry it of what its requests cause.
func (s *Socket) Port() uint32 { return s.port }

// Option reads an option of the socket, such as unix.SO_NETNS_COOKIE of level unix.SOL_SOCKET.
func (s *Socket) Option(level, name int) (uint64, error) {
	return unix.GetsockoptUint64(s.fd, level, name)
}

// Request sends one request, whose header body follows, and calls f with each message of the reply: a dump's if flags
// are unix.NLM_F_DUMP. The error is the kernel's rejection, or ErrInterrupted.
func (s *Socket) Request(kind, flags uint16, body func(*Buffer), f func(Message)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	var b Buffer
	at := b.begin(kind, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK, s.seq)
	body(&b)
	b.end(at)
	if _, err := unix.Write(s.fd, b); err != nil {
		return fmt.Errorf("send netlink request: %w", err)
	}
	var failed error
	for done := false; !done; {
		n, err := s.receive(0)
		if err != nil {
			return err
		}
		for m := range Messages(s.reader[:n]) {
			switch {
			case m.Seq != s.seq:
				continue
			case m.Type == unix.NLMSG_DONE || m.Type == unix.NLMSG_ERROR:
				done = true
				failed = cmp.Or(m.Err(), failed)
			case m.Type >= unix.NLMSG_MIN_TYPE:
				f(m)
			}
			if m.Flags&unix.NLM_F_DUMP_INTR != 0 && failed == nil {
				failed = ErrInterrupted
			}
		}
	}
	return failed
}

// Post sends one request, whose header body follows, and waits for no reply: beside Receive, which has the kernel's
// rejections as messages.
func (s *Socket) Post(kind uint16, body func(*Buffer)) (seq uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	var b Buffer
	at := b.begin(kind, unix.NLM_F_REQUEST, s.seq)
	body(&b)
	b.end(at)
	if _, err := unix.Write(s.fd, b); err != nil {
		return 0, fmt.Errorf("send netlink request: %w", err)
	}
	return s.seq, nil
}

// receive reads a datagram into reader and returns its length. The error is unix.EAGAIN where none is there and flags
// are unix.MSG_DONTWAIT.
func (s *Socket) receive(flags int) (int, error) {
	if s.reader == nil {
		s.reader = make([]byte, readerSize)
	}
	for {
		n, _, err := unix.Recvfrom(s.fd, s.reader, flags|unix.MSG_TRUNC)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("receive from netlink: %w", err)
		case n > len(s.reader):
			return 0, fmt.Errorf("receive from netlink: a datagram of %d bytes, more than %d", n, len(s.reader))
		default:
			return n, nil
		}
	}
}

// Stable repeats a read while it returns ErrInterrupted, a bounded number of times, and returns its error.
func Stable(read func() error) (err error) {
	const tries = 20
	for i := range tries {
		if err = read(); !errors.Is(err, ErrInterrupted) {
			return err
		}
		time.Sleep(time.Millisecond << min(i, 6))
	}
	return fmt.Errorf("%w, %d times", err, tries)
}

// Drops returns how many notifications didn't fit the socket's buffer so far.
func (s *Socket) Drops() (uint32, error) {
	var info [9]uint32 // SK_MEMINFO_VARS; the last is SK_MEMINFO_DROPS
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("read how many notifications were lost: %w", errno)
	}
	return info[len(info)-1], nil
}
