package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Watch sends whenever anyone but c changes a table, until ctx ends; then it closes the channel. It sends at once if any
// table has changed since Mark.
func (c *Conn) Watch(ctx context.Context, table string) (<-chan struct{}, error) {
	fd, err := unix.FcntlInt(uintptr(c.events), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nftables: duplicate socket: %w", err)
	}
	if err := c.listen(fd); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("nftables: listen for changes: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("nftables: make eventfd: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { unix.Write(wake, binary.NativeEndian.AppendUint64(nil, 1)) })
	changes := make(chan struct{}, 1)
	if alone, err := c.Alone(); err != nil || !alone {
		changes <- struct{}{}
	}
	go func() {
		defer close(changes)
		defer unix.Close(fd)
		defer unix.Close(wake)
		defer stop()
		watch(ctx, fd, wake, table, changes)
	}()
	return changes, nil
}

// listen joins the group of nf_tables' events and has the kernel filter out those that c itself causes.
func (c *Conn) listen(fd int) error {
	own := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, c.port))
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
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
}

// watch reads events until wake is written to.
func watch(ctx context.Context, fd, wake int, table string, changes chan<- struct{}) {
	b := make([]byte, 64<<10)
	for ctx.Err() == nil {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(p, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if p[0].Revents == 0 {
			continue
		}
		n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.ENOBUFS) || err == nil && concerns(b[:n], table) {
			select {
			case changes <- struct{}{}:
			default: // one is waiting already
			}
		}
	}
}

// concerns says whether an event is about a table. Attribute 1 of every kind of event but a new generation names it.
func concerns(b []byte, table string) (yes bool) {
	eachMessage(b, func(kind, _ uint16, _ uint32, body []byte) {
		const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | 15
		if kind != newGeneration && len(body) > 4 && body[0] == family && nlattr.Text(nlattr.Find(body[4:], 1)) == table {
			yes = true
		}
	})
	return yes
}
