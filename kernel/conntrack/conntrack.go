// Package conntrack reads, marks and cuts connections in the kernel's connection tracking. It stands on kernel/netlink:
// vnetlink 1.3.1 sends marks without a mask, and reads each family by itself.
package conntrack

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
)

// Flow is a tracked connection: where its first packet was sent, and who answers.
type Flow struct {
	Protocol    uint8          // IP protocol number
	Source      netip.AddrPort // the client
	Destination netip.AddrPort // as the client wrote it
	ReplySource netip.AddrPort // the source of replies: the backend, if the destination was translated
	Reply       netip.AddrPort // the destination of replies: the node, if the source was masqueraded
	Opening     bool           // a TCP connection of which a SYN was seen, and no answer yet
	Closing     bool           // a TCP connection that one end has closed or reset, or that has ended
	Ended       bool           // a TCP connection that both ends have closed (TIME_WAIT), or one has reset
}

// Conn reaches one network namespace's connection tracking: it reads the tracked connections, changes their marks and
// removes them. It is safe for concurrent use.
type Conn struct {
	dump, write *netlink.Socket
	routes      *netlink.Socket
}

// Open connects to the calling thread's network namespace. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	c := &Conn{}
	for _, s := range []struct {
		to       **netlink.Socket
		protocol int
	}{{&c.dump, unix.NETLINK_NETFILTER}, {&c.write, unix.NETLINK_NETFILTER}, {&c.routes, unix.NETLINK_ROUTE}} {
		var err error
		if *s.to, err = netlink.Open(s.protocol, 0); err != nil {
			return nil, errors.Join(fmt.Errorf("conntrack: %w", err), c.Close())
		}
	}
	return c, nil
}

// Close closes the sockets. Marks stay.
func (c *Conn) Close() (err error) {
	for _, s := range []*netlink.Socket{c.dump, c.write, c.routes} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return err
}

// Invalid returns how many packets belonged to no connection, nor could they begin one: those that rules match as
// INVALID.
func (c *Conn) Invalid() (packets uint64, err error) {
	const getStats, invalid = 4, 4 // IPCTNL_MSG_CT_GET_STATS_CPU, CTA_STATS_INVALID
	const header = 4               // of struct nfgenmsg
	request := func(b *netlink.Buffer) { *b = append(*b, make([]byte, header)...) }
	err = netlink.Stable(func() error {
		packets = 0
		return c.dump.Request(unix.NFNL_SUBSYS_CTNETLINK<<8|getStats, unix.NLM_F_DUMP, request, func(m netlink.Message) {
			packets += netlink.BE(netlink.Find(m.Body[min(header, len(m.Body)):], invalid))
		})
	})
	if err != nil {
		return 0, fmt.Errorf("conntrack: read statistics: %w", err)
	}
	return packets, nil
}

// Cut removes the flows of both families that match says, by their tuples, and returns their number: the table is read
// once. A packet of such a flow that comes later is the first of a new one. A flow that ends meanwhile is no error.
func (c *Conn) Cut(match func(Flow) bool) (int, error) {
	n, err := c.each(nil, func(b *netlink.Batch, t Tracked, e entry) {
		if !match(t.Flow) {
			return
		}
		said := func() string { return fmt.Sprintf("cut %d %s > %s", t.Protocol, t.Source, t.Destination) }
		b.Add(unix.NFNL_SUBSYS_CTNETLINK<<8|msgDelete, 0, said, func(b *netlink.Buffer) { e.name(b, t.Zone) })
	})
	if err != nil {
		return n, fmt.Errorf("conntrack: cut flows: %w", err)
	}
	return n, nil
}

// state records a TCP connection's state.
func (f *Flow) state(s uint8) {
	f.Opening = s == nl.TCP_CONNTRACK_SYN_SENT
	f.Closing = s >= nl.TCP_CONNTRACK_FIN_WAIT && s <= nl.TCP_CONNTRACK_CLOSE
	f.Ended = s == nl.TCP_CONNTRACK_TIME_WAIT || s == nl.TCP_CONNTRACK_CLOSE
}

// Addresses returns the addresses of the namespace's interfaces.
func (c *Conn) Addresses() (map[netip.Addr]bool, error) { return link.Own(c.routes) }
