// Package nftables speaks nf_tables' netlink protocol: transactions, reading back, and events of what others write. It
// knows tables of the inet family, and no meaning of what it writes. It starts no nft command, so no version of that
// command can misread what it wrote.
//
// Written against include/uapi/linux/netfilter/nf_tables.h and net/netfilter/{nfnetlink,nf_tables_api}.c.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// bufferSize is what the socket may hold: a whole transaction goes in one piece.
const bufferSize = 64 << 20

// Conn reaches one network namespace's nf_tables. It is safe for concurrent use.
type Conn struct {
	s      *netlink.Socket
	events *netlink.Socket // a second socket in the same namespace, for Watch

	commits atomic.Uint32 // transactions of ours since Open
	since   atomic.Uint32 // generation of the ruleset at the last Mark, less our commits until then
}

// ErrAbsent reports that the kernel can't do it at all.
var ErrAbsent = errors.New("this kernel has no nf_tables (CONFIG_NF_TABLES)")

// Open connects to the calling thread's network namespace. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, bufferSize)
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	events, err := netlink.Open(unix.NETLINK_NETFILTER, bufferSize)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("nftables: %w", err)
	}
	c := &Conn{s: s, events: events}
	if err := c.probe(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// probe requests the ruleset's generation, which every kernel with nf_tables knows.
func (c *Conn) probe() error {
	_, err := c.Generation()
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("nftables: not permitted: run as root or with CAP_NET_ADMIN: %w", err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("nftables: %w: %w", ErrAbsent, err)
	}
	return err
}

// Close closes the sockets. What was written stays. End what Watch began first.
func (c *Conn) Close() error { return errors.Join(c.s.Close(), c.events.Close()) }

// Commit makes the changes of t, all or none. An error names the first change that the kernel refused.
func (c *Conn) Commit(t *Tx) error {
	if t.Empty() {
		return nil
	}
	t.batch.End = marker(unix.NFNL_MSG_BATCH_END)
	err := c.send(t)
	if err == nil {
		c.commits.Add(1)
	}
	return err
}

// Check returns the error that Commit would return, as far as the kernel knows before it makes the changes. It makes
// none: a transaction without an end is undone (nfnetlink_rcv_batch, net/netfilter/nfnetlink.c).
func (c *Conn) Check(t *Tx) error {
	if t.Empty() {
		return nil
	}
	t.batch.End = nil
	return c.send(t)
}

func marker(kind uint16) []byte {
	return netlink.Marker(kind, unix.AF_UNSPEC, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
}

// send sends a transaction. The error names the first change that the kernel refused.
func (c *Conn) send(t *Tx) error {
	t.batch.Begin = marker(unix.NFNL_MSG_BATCH_BEGIN)
	var first error
	err := c.s.Run(&t.batch, func(i int, err error) {
		what := "commit"
		if i >= 0 {
			what = t.batch.Said(i)
		}
		if first == nil {
			first = fmt.Errorf("nftables: %s: %w", what, err)
		}
	})
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return first
}

// Supports reports whether the kernel knows flags of tables. It writes nothing: what it tries ends by deleting a table
// that isn't there, so that the kernel undoes the whole.
func (c *Conn) Supports(flags TableFlags) (bool, error) {
	var tx Tx
	tx.AddTableAs("fairlead-probe", flags, "")
	tx.DelTable("fairlead-absent")
	switch err := c.Commit(&tx); {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return false, nil
	case errors.Is(err, unix.ENOENT):
		return true, nil
	default:
		return false, err
	}
}

// SupportsRule reports whether the kernel knows all instructions of a rule at a hook. It writes nothing: what it tries
// ends by making a set twice.
func (c *Conn) SupportsRule(hook Hook, rule []Expr) (bool, error) {
	const name = "fairlead-probe"
	var tx Tx
	tx.AddTable(name)
	tx.AddChain(name, Chain{Name: "probe", Hook: &hook})
	tx.AddRule(name, "probe", Rule{Exprs: rule})
	for range 2 {
		tx.AddSet(name, Set{Name: "probe", Key: []Type{Mark}})
	}
	switch err := c.Commit(&tx); {
	case errors.Is(err, unix.EEXIST):
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return false, nil
	default:
		return false, err
	}
}

// Generation returns the ruleset's generation, a number that every transaction of anyone in the namespace raises by
// one.
func (c *Conn) Generation() (g uint32, err error) {
	err = c.dump(msgGetGen, 0, family, nil, func(b []byte) { g = number(netlink.Find(b, 1)) })
	return g, err
}

// Mark remembers the ruleset as it is now, for Alone.
func (c *Conn) Mark() error {
	g, err := c.Generation()
	c.since.Store(g - c.commits.Load())
	return err
}

// Alone reports whether no other than c has changed any table since Mark.
func (c *Conn) Alone() (bool, error) {
	g, err := c.Generation()
	return g-c.commits.Load() == c.since.Load(), err
}

// Watch sends whenever anyone but c changes a table, until ctx ends; then it closes the channel. It sends at once if
// any table has changed since Mark.
func (c *Conn) Watch(ctx context.Context, table string) (<-chan struct{}, error) {
	err := c.events.Ignore(c.s.Port())
	if err == nil {
		err = c.events.Join(unix.NFNLGRP_NFTABLES)
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: listen for changes: %w", err)
	}
	alone, err := c.Alone()
	signals, err := c.events.Watch(ctx, err != nil || !alone, func(m netlink.Message) bool { return concerns(m, table) })
	if err != nil {
		return nil, fmt.Errorf("nftables: listen for changes: %w", err)
	}
	return signals, nil
}

// concerns reports whether an event is about a table. Attribute 1 of every kind of event but a new generation names it.
func concerns(m netlink.Message, table string) bool {
	const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | 15
	return m.Type != newGeneration && len(m.Body) > header && m.Body[0] == family &&
		netlink.Text(netlink.Find(m.Body[header:], 1)) == table
}
