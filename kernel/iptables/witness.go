package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// witness learns whether others write.
type witness interface {
	mark() error                   // what was before does not count
	begin(pid int)                 // a process of ours is about to write
	end(f Family, done bool) error // it has ended, and has written if done
	close() error
	watch(context.Context) (<-chan struct{}, error)
}

// events learns it from nf_tables' notifications. Those that the kernel sends on behalf of our own commands are left
// out by a filter on the sender's port, which is the command's process id (libmnl binds to none, so the kernel gives
// that).
type events struct {
	s      *netlink.Socket
	prefix string
	tables []string
}

func newEvents(prefix string, tables []string) (*events, error) {
	s, err := netlink.Listen(unix.NETLINK_NETFILTER, 256<<10, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("iptables: listen to nf_tables' notifications: %w; run as root or with CAP_NET_ADMIN", err)
	}
	return &events{s, prefix, tables}, nil
}

func (e *events) close() error { return e.s.Close() }

// mark drops what has come.
func (e *events) mark() error {
	for {
		if err := e.s.Pending(func(netlink.Message) {}); !errors.Is(err, unix.ENOBUFS) {
			return err
		}
	}
}

// begin has the kernel leave out what process pid causes. Without the filter a Read too many is all that comes of it.
func (e *events) begin(pid int) { e.s.Ignore(uint32(pid)) }

func (e *events) end(Family, bool) error { return nil }

func (e *events) watch(ctx context.Context) (<-chan struct{}, error) {
	return e.s.Watch(ctx, false, e.concerns)
}

// Kinds of nf_tables' messages (linux/netfilter/nf_tables.h), and the attributes that name the table and the chain.
const (
	newTable, delTable = 0, 2
	newChain, delChain = 3, 5
	newRule, delRule   = 6, 8
	tableName          = 1
	chainOfRule        = 2
	chainName          = 3
)

// concerns reports whether a notification is about a chain of ours or a built-in chain.
func (e *events) concerns(m netlink.Message) bool {
	const header = 4 // of struct nfgenmsg: the family
	if m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Body) < header ||
		m.Body[0] != unix.NFPROTO_IPV4 && m.Body[0] != unix.NFPROTO_IPV6 ||
		!slices.Contains(e.tables, netlink.Text(netlink.Find(m.Body[header:], tableName))) {
		return false
	}
	chain, kind := "", m.Type&0xff
	switch kind {
	case delTable:
		return true
	case newChain, delChain:
		chain = netlink.Text(netlink.Find(m.Body[header:], chainName))
	case newRule, delRule:
		chain = netlink.Text(netlink.Find(m.Body[header:], chainOfRule))
	default:
		return false
	}
	return strings.HasPrefix(chain, e.prefix) || slices.Contains(builtIn, chain) && kind >= newRule
}

// builtIn are the chains that the commands have without being told.
var builtIn = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// counts inspects the sizes of xtables' tables.
type counts struct {
	tables  []string
	used    func(Family) (string, error)
	mu      sync.Mutex
	fds     map[Family]int // of the families that the kernel speaks
	known   map[tableID]info
	writing bool // a process of ours is: what changes may be its doing
}

// tableID is a family's table, info what the kernel says of its size.
type tableID struct {
	family Family
	table  string
}
type info [84]byte

func newCounts(tables []string, used func(Family) (string, error)) (*counts, error) {
	c := &counts{tables: tables, used: used, fds: map[Family]int{}, known: map[tableID]info{}}
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
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, fd := range c.fds {
		err = errors.Join(err, unix.Close(fd))
	}
	clear(c.fds)
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
		_, err = c.scan(f)
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
				netlink.Signal(changes)
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

// changed reports whether a table's size is not what it was, or can't be known. While a process of ours writes it
// doesn't look.
func (c *counts) changed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writing {
		return false
	}
	four, err4 := c.scan(IPv4)
	six, err6 := c.scan(IPv6)
	return four || six || err4 != nil || err6 != nil
}

// scan takes the sizes of a family's tables, and reports whether one has changed. It leaves out tables that were never
// used: looking would make them (xt_find_table_lock).
func (c *counts) scan(f Family) (changed bool, err error) {
	if _, spoken := c.fds[f]; !spoken {
		return false, nil
	}
	names, err := c.used(f)
	if err != nil {
		return false, err
	}
	for _, t := range c.tables {
		p := tableID{f, t}
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

// info requests a table's hooks, number of entries and size: struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h.
func (c *counts) info(p tableID) (i info, err error) {
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
