package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Listen opens a socket of a protocol in the calling thread's network namespace and joins groups of notifications,
// such as unix.RTNLGRP_LINK.
func Listen(protocol, buffer int, groups ...int) (*Socket, error) {
	s, err := Open(protocol, buffer)
	if err != nil {
		return nil, err
	}
	if err := s.Join(groups...); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Join joins groups of notifications.
func (s *Socket) Join(groups ...int) error {
	for _, g := range groups {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join netlink group %d: %w", g, err)
		}
	}
	return nil
}

// Leave leaves a group of notifications. Those that have come stay to be read.
func (s *Socket) Leave(group int) error {
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_DROP_MEMBERSHIP, group); err != nil {
		return fmt.Errorf("leave netlink group %d: %w", group, err)
	}
	return nil
}

// Ignore has the kernel filter out what the requests of a port cause, in place of those of another port.
func (s *Socket) Ignore(port uint32) error {
	own := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // nlmsg_pid
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: own, SkipFalse: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 1 << 30},
	})
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(program))
	for i, p := range program {
		filter[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	f := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, f); err != nil {
		return fmt.Errorf("filter netlink notifications: %w", err)
	}
	return nil
}

// Pending calls f with each notification that has come by now. The error is unix.ENOBUFS where some were lost: the
// next call has those that came later.
func (s *Socket) Pending(f func(Message)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		n, err := s.receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
		for m := range Messages(s.reader[:n]) {
			f(m)
		}
	}
}

// Watch sends whenever concerns reports true of a notification, whenever some were lost, and at once if now, until ctx
// ends; then it closes the channel. The socket may send no requests beside it.
func (s *Socket) Watch(ctx context.Context, now bool, concerns func(Message) bool) (<-chan struct{}, error) {
	file, err := s.file()
	if err != nil {
		return nil, err
	}
	signals := make(chan struct{}, 1)
	if now {
		signals <- struct{}{}
	}
	go func() {
		defer close(signals)
		receive(ctx, file, func(got []byte) {
			if anyOf(got, concerns) {
				Signal(signals)
			}
		}, func() { Signal(signals) })
	}()
	return signals, nil
}

// Receive calls f with each notification, and lost whenever some were lost, until ctx ends. The socket may send no
// requests beside it.
func (s *Socket) Receive(ctx context.Context, f func(Message), lost func()) error {
	file, err := s.file()
	if err != nil {
		return err
	}
	err = receive(ctx, file, func(got []byte) {
		for m := range Messages(got) {
			f(m)
		}
	}, lost)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// file returns the socket as a file that can be closed while it is read.
func (s *Socket) file() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that closing the file ends a read
	}
	if err != nil {
		return nil, fmt.Errorf("duplicate netlink socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// receive calls f with each datagram, and lost whenever some were lost, until ctx ends. It closes the file.
func receive(ctx context.Context, file *os.File, f func([]byte), lost func()) error {
	defer file.Close()
	conn, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait at netlink socket: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { file.Close() })
	defer stop()
	for b := make([]byte, readerSize); ; {
		some, got, err := next(conn, b)
		switch {
		case err != nil:
			return fmt.Errorf("receive from netlink: %w", err)
		case some:
			lost()
		}
		f(got)
	}
}

// next waits for a datagram, and reports whether some were lost instead.
func next(conn syscall.RawConn, b []byte) (lost bool, got []byte, err error) {
	n := 0
	ended := conn.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case ended != nil:
		return false, nil, ended
	case errors.Is(err, unix.ENOBUFS):
		return true, nil, nil
	case errors.Is(err, unix.EINTR):
		return false, nil, nil
	}
	return false, b[:max(n, 0)], err
}

func anyOf(b []byte, concerns func(Message) bool) bool {
	for m := range Messages(b) {
		if concerns(m) {
			return true
		}
	}
	return false
}

// Signal sends, unless a signal waits already.
func Signal(signals chan<- struct{}) {
	select {
	case signals <- struct{}{}:
	default:
	}
}
