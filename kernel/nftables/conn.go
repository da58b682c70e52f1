// Package nftables speaks nf_tables' netlink protocol: transactions, reading back, and events of what others write. It
// knows tables of the inet family, and no meaning of what it writes. It starts no nft command, so no version of that
// command can misread what it wrote.
//
// Written against include/uapi/linux/netfilter/nf_tables.h and net/netfilter/{nfnetlink,nf_tables_api}.c.
package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// bufferSize is what the socket may hold: a whole transaction goes in one piece.
const bufferSize = 64 << 20

// Conn is a socket to one network namespace's nf_tables. It is safe for concurrent use.
type Conn struct {
	mu     sync.Mutex
	fd     int
	port   uint32 // our netlink port: tells our own events from others'
	events int    // a second socket in the same namespace, for Watch
	reader []byte

	commits atomic.Uint32 // transactions of ours since Open
	since   atomic.Uint32 // generation of the ruleset at the last Mark, less our commits until then
}

// ErrAbsent says that the kernel can't do it at all.
var ErrAbsent = errors.New("this kernel has no nf_tables (CONFIG_NF_TABLES)")

// Open connects to the calling thread's network namespace. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	fd, port, err := socket()
	if err != nil {
		return nil, err
	}
	events, _, err := socket()
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	c := &Conn{fd: fd, port: port, events: events, reader: make([]byte, 256<<10)}
	if err := c.probe(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// probe asks for the ruleset's generation, which every kernel with nf_tables knows.
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

// socket opens a netfilter netlink socket with large buffers.
func socket() (fd int, port uint32, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, 0, fmt.Errorf("nftables: open netlink socket: %w", err)
	}
	if err := nlattr.SetBuffers(fd, bufferSize); err != nil {
		unix.Close(fd)
		return 0, 0, fmt.Errorf("nftables: set the size of socket buffers: %w", err)
	}
	for _, o := range []struct{ level, name, value int }{
		{unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1},
		{unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1},
	} {
		if err = unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			unix.Close(fd)
			return 0, 0, fmt.Errorf("nftables: set socket option %d: %w", o.name, err)
		}
	}
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
		var sa unix.Sockaddr
		if sa, err = unix.Getsockname(fd); err == nil {
			return fd, sa.(*unix.SockaddrNetlink).Pid, nil
		}
	}
	unix.Close(fd)
	return 0, 0, fmt.Errorf("nftables: bind netlink socket: %w", err)
}

// Close gives the sockets back. What was written stays. End what Watch began first.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(unix.Close(c.fd), unix.Close(c.events))
}

// Commit makes the changes of t, all or none. An error names the first change that the kernel refused.
func (c *Conn) Commit(t *Tx) error {
	if t.Empty() {
		return nil
	}
	last := uint32(len(t.said))
	b := make(buffer, 0, len(t.b)+40)
	header(&b, unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	b = append(b, t.acknowledged()...)
	header(&b, unix.NFNL_MSG_BATCH_END, 0, last+1, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)

	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := unix.Write(c.fd, b); err != nil {
		return fmt.Errorf("nftables: send %d bytes: %w", len(b), err)
	}
	err := c.answers(t, last)
	if err == nil {
		c.commits.Add(1)
	}
	return err
}

// Generation gives the ruleset's generation, a number that every transaction of anyone in the namespace raises by one.
func (c *Conn) Generation() (g uint32, err error) {
	err = c.dump(msgGetGen, 0, func(*buffer) {}, func(b []byte) { g = number(nlattr.Find(b, 1)) })
	return g, err
}

// Mark remembers the ruleset as it is now, for Alone.
func (c *Conn) Mark() error {
	g, err := c.Generation()
	c.since.Store(g - c.commits.Load())
	return err
}

// Alone says whether nobody but c has changed any table since Mark.
func (c *Conn) Alone() (bool, error) {
	g, err := c.Generation()
	return g-c.commits.Load() == c.since.Load(), err
}

// acknowledged gives t's messages with an acknowledgement asked of the last one.
func (t *Tx) acknowledged() []byte {
	at, next := 0, 0
	for next < len(t.b) {
		at, next = next, next+int(binary.NativeEndian.Uint32(t.b[next:]))
	}
	flags := t.b[at+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	return t.b
}

// answers reads what the kernel said of a transaction. The kernel handles it within the send, so that every answer waits
// already.
func (c *Conn) answers(t *Tx, last uint32) error {
	var first error
	done := false
	for {
		n, _, err := unix.Recvfrom(c.fd, c.reader, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return fmt.Errorf("nftables: receive: %w", err)
		}
		eachMessage(c.reader[:n], func(kind, _ uint16, seq uint32, body []byte) {
			if kind != unix.NLMSG_ERROR || len(body) < 4 {
				return
			}
			if e := unix.Errno(-int32(binary.NativeEndian.Uint32(body))); e != 0 && first == nil {
				first = t.refused(seq, e, body)
			}
			done = done || seq == last
		})
	}
	if first == nil && !done {
		return errors.New("nftables: the kernel did not acknowledge a transaction")
	}
	return first
}

// refused words the kernel's refusal of message seq.
func (t *Tx) refused(seq uint32, e unix.Errno, body []byte) error {
	what := "commit"
	if i := int(seq) - 1; i >= 0 && i < len(t.said) {
		what = t.said[i]
	}
	if len(body) > 20 {
		if m := nlattr.Find(body[20:], 1); m != nil { // NLMSGERR_ATTR_MSG
			return fmt.Errorf("nftables: %s: %w (%s)", what, e, nlattr.Text(m))
		}
	}
	return fmt.Errorf("nftables: %s: %w", what, e)
}

// eachMessage calls f with every netlink message in b.
func eachMessage(b []byte, f func(kind, flags uint16, seq uint32, body []byte)) {
	for len(b) >= 16 {
		n := int(binary.NativeEndian.Uint32(b))
		if n < 16 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[16:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}
