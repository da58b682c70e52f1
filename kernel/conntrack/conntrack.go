// Package conntrack reads, marks and cuts connections in the kernel's connection tracking. What cuts them stands on
// vnetlink, what marks them on kernel/netlink: vnetlink 1.3.1 sends marks without a mask.
package conntrack

import (
	"fmt"
	"net"
	"net/netip"

	vnetlink "github.com/vishvananda/netlink"
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

// Conn reaches one network namespace's connection tracking.
type Conn struct {
	flows  *vnetlink.Handle
	stats  *netlink.Socket
	routes *netlink.Socket
}

// Open connects to the calling thread's network namespace. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	flows, err := vnetlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("conntrack: open netlink socket: %w", err)
	}
	stats, err := netlink.Open(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		flows.Close()
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	routes, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		flows.Close()
		stats.Close()
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	return &Conn{flows, stats, routes}, nil
}

// Close closes the sockets.
func (c *Conn) Close() {
	c.flows.Close()
	c.stats.Close()
	c.routes.Close()
}

// Invalid returns how many packets belonged to no connection, nor could they begin one: those that rules match as
// INVALID.
func (c *Conn) Invalid() (packets uint64, err error) {
	const getStats, invalid = 4, 4 // IPCTNL_MSG_CT_GET_STATS_CPU, CTA_STATS_INVALID
	const header = 4               // of struct nfgenmsg
	request := func(b *netlink.Buffer) { *b = append(*b, make([]byte, header)...) }
	err = netlink.Stable(func() error {
		packets = 0
		return c.stats.Request(unix.NFNL_SUBSYS_CTNETLINK<<8|getStats, unix.NLM_F_DUMP, request, func(m netlink.Message) {
			packets += netlink.BE(netlink.Find(m.Body[min(header, len(m.Body)):], invalid))
		})
	})
	if err != nil {
		return 0, fmt.Errorf("conntrack: read statistics: %w", err)
	}
	return packets, nil
}

// Cut removes the flows of a family (unix.AF_INET or AF_INET6) that match says, and returns their number. A packet of
// such a flow that comes later is the first of a new one.
func (c *Conn) Cut(family uint8, match func(Flow) bool) (int, error) {
	n, err := c.flows.ConntrackDeleteFilters(vnetlink.ConntrackTable, vnetlink.InetFamily(family), filter(match))
	if err != nil {
		return int(n), fmt.Errorf("conntrack: cut flows of family %d: %w", family, err)
	}
	return int(n), nil
}

// filter is a vnetlink.CustomConntrackFilter.
type filter func(Flow) bool

// MatchConntrackFlow implements vnetlink.CustomConntrackFilter.
func (f filter) MatchConntrackFlow(flow *vnetlink.ConntrackFlow) bool {
	out := Flow{
		Protocol:    flow.Forward.Protocol,
		Source:      addrPort(flow.Forward.SrcIP, flow.Forward.SrcPort),
		Destination: addrPort(flow.Forward.DstIP, flow.Forward.DstPort),
		ReplySource: addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort),
		Reply:       addrPort(flow.Reverse.DstIP, flow.Reverse.DstPort),
	}
	if tcp, ok := flow.ProtoInfo.(*vnetlink.ProtoInfoTCP); ok {
		out.state(tcp.State)
	}
	return f(out)
}

// state records a TCP connection's state.
func (f *Flow) state(s uint8) {
	f.Opening = s == nl.TCP_CONNTRACK_SYN_SENT
	f.Closing = s >= nl.TCP_CONNTRACK_FIN_WAIT && s <= nl.TCP_CONNTRACK_CLOSE
	f.Ended = s == nl.TCP_CONNTRACK_TIME_WAIT || s == nl.TCP_CONNTRACK_CLOSE
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// Addresses returns the addresses of the namespace's interfaces.
func (c *Conn) Addresses() (map[netip.Addr]bool, error) { return link.Own(c.routes) }
