package iptables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// witness learns whether others write.
type witness interface {
	mark() error                   // what was before does not count
	begin(pid int)                 // a process of ours is about to write
	end(f Family, done bool) error // it has ended, and has written if done
	close() error
	watch(context.Context) (<-chan struct{}, error)
}

// events learns it from nf_tables' notifications. Those that the kernel sends on behalf of our own commands are left out
// by a filter on the sender's port, which is the command's process id (libmnl binds to none, so the kernel gives that).
type events struct {
	fd     int
	prefix string
}

func newEvents(prefix string) (*events, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("iptables: open netlink socket: %w", err)
	}
	e := &events{fd, prefix}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil { // the kernel tells port 0 nothing
		unix.Close(fd)
		return nil, fmt.Errorf("iptables: bind netlink socket: %w", err)
	}
	for _, o := range [][3]int{{unix.SOL_SOCKET, unix.SO_RCVBUF, 256 << 10}, {unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES}} {
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("iptables: listen to nf_tables' notifications: %w; run as root or with CAP_NET_ADMIN", err)
		}
	}
	return e, nil
}

func (e *events) close() error { return unix.Close(e.fd) }

// mark takes what has come off the queue.
func (e *events) mark() error {
	for b := make([]byte, 64<<10); ; {
		if _, _, err := unix.Recvfrom(e.fd, b, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
			return nil
		} else if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("iptables: receive notifications: %w", err)
		}
	}
}

// begin has the kernel leave out what process pid causes. Without the filter a Read too many is all that comes of it.
func (e *events) begin(pid int) {
	own := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, uint32(pid)))
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // nlmsg_pid
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: own, SkipFalse: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 1 << 30},
	})
	if err != nil {
		return
	}
	filter := make([]unix.SockFilter, len(program))
	for i, p := range program {
		filter[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	unix.SetsockoptSockFprog(e.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
}

func (e *events) end(Family, bool) error { return nil }

func (e *events) watch(ctx context.Context) (<-chan struct{}, error) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("iptables: make eventfd: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { unix.Write(wake, binary.NativeEndian.AppendUint64(nil, 1)) })
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		defer unix.Close(wake)
		defer stop()
		for b := make([]byte, 64<<10); ctx.Err() == nil; {
			p := []unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
			if _, err := unix.Poll(p, -1); err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
			if p[0].Revents == 0 {
				continue
			}
			n, _, err := unix.Recvfrom(e.fd, b, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.ENOBUFS) || err == nil && e.concerns(b[:n]) {
				tell(changes)
			}
		}
	}()
	return changes, nil
}

// tell sends, unless something waits already.
func tell(changes chan<- struct{}) {
	select {
	case changes <- struct{}{}:
	default:
	}
}

// Kinds of nf_tables' messages (linux/netfilter/nf_tables.h), and the attribute that names the chain.
const (
	newTable, delTable = 0, 2
	newChain, delChain = 3, 5
	newRule, delRule   = 6, 8
	chainOfRule        = 2
	chainName          = 3
)

// concerns says whether one of the notifications in b is about a chain of ours or a built-in chain.
func (e *events) concerns(b []byte) bool {
	for len(b) >= 20 {
		n := int(binary.NativeEndian.Uint32(b))
		if n < 20 || n > len(b) {
			return false
		}
		if e.about(int(binary.NativeEndian.Uint16(b[4:])), b[16], b[20:n]) {
			return true
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return false
}

// about says it of one message.
func (e *events) about(kind int, family byte, attributes []byte) bool {
	if kind>>8 != unix.NFNL_SUBSYS_NFTABLES || family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		return false
	}
	chain := ""
	switch kind & 0xff {
	case delTable:
		return true
	case newChain, delChain:
		chain = attribute(attributes, chainName)
	case newRule, delRule:
		chain = attribute(attributes, chainOfRule)
	default:
		return false
	}
	builtIn := slices.Contains([]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}, chain)
	return strings.HasPrefix(chain, e.prefix) || builtIn && kind&0xff >= newRule
}

// attribute gives a netlink attribute of text, or "".
func attribute(b []byte, kind uint16) string {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return ""
		}
		if binary.NativeEndian.Uint16(b[2:])&0x3fff == kind {
			return string(bytes.TrimRight(b[4:n], "\x00"))
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return ""
}

// counts looks at the sizes of xtables' tables.
type counts struct {
	used    func(Family) (string, error)
	mu      sync.Mutex
	fds     map[Family]int // of the families that the kernel speaks
	known   map[place]info
	writing bool // a process of ours is: what changes may be its doing
}

// place is a family's table, info what the kernel says of its size.
type place struct {
	family Family
	table  string
}
type info [84]byte

// legacyTables are those in which rules of ours may be.
var legacyTables = []string{"nat", "filter", "raw"}

func newCounts(used func(Family) (string, error)) (*counts, error) {
	c := &counts{used: used, fds: map[Family]int{}, known: map[place]info{}}
	for f, domain := range map[Family]int{IPv4: unix.AF_INET, IPv6: unix.AF_INET6} {
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			c.close()
			return nil, fmt.Errorf("iptables: open raw socket: %w; run as root or with CAP_NET_RAW", err)
		}
		c.fds[f] = fd
	}
	return c, nil
}

func (c *counts) close() (err error) {
	for _, fd := range c.fds {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}

func (c *counts) mark() error { return errors.Join(c.end(IPv4, true), c.end(IPv6, true)) }

func (c *counts) begin(int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writing = true
}

// end takes the sizes of a family's tables for ours, if done.
func (c *counts) end(f Family, done bool) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writing = false
	if done {
		_, err = c.look(f)
	}
	return err
}

// period is how often the sizes are looked at.
const period = time.Second

func (c *counts) watch(ctx context.Context) (<-chan struct{}, error) {
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		tick := time.NewTicker(period)
		defer tick.Stop()
		for {
			if c.changed() {
				tell(changes)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return changes, nil
}

// changed says whether a table's size is not what it was, or can't be known. While a process of ours writes it doesn't look.
func (c *counts) changed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writing {
		return false
	}
	four, err4 := c.look(IPv4)
	six, err6 := c.look(IPv6)
	return four || six || err4 != nil || err6 != nil
}

// look takes the sizes of a family's tables, and says whether one has changed. It leaves out tables that were never used:
// looking would make them (xt_find_table_lock).
func (c *counts) look(f Family) (changed bool, err error) {
	if _, spoken := c.fds[f]; !spoken {
		return false, nil
	}
	names, err := c.used(f)
	if err != nil {
		return false, err
	}
	for _, t := range legacyTables {
		p := place{f, t}
		was := c.known[p]
		if !strings.Contains(names, "\n"+t+"\n") {
			delete(c.known, p)
		} else if c.known[p], err = c.info(p); err != nil {
			return false, err
		}
		changed = changed || c.known[p] != was
	}
	return changed, nil
}

// info asks for a table's hooks, number of entries and size: struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h.
func (c *counts) info(p place) (i info, err error) {
	level := unix.SOL_IP
	if p.family == IPv6 {
		level = unix.SOL_IPV6
	}
	copy(i[:31], p.table)
	if err := getsockopt(c.fds[p.family], level, getInfo, i[:]); err != nil {
		return i, fmt.Errorf("iptables: ask for the size of table %s: %w", p.table, err)
	}
	return i, nil
}
