// Package conntrack reads and cuts connections in the kernel's connection tracking, by netlink.
package conntrack

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nlattr"
)

// Flow is a tracked connection: where its first packet was sent, and who answers.
type Flow struct {
	Protocol    uint8          // IP protocol number
	Source      netip.AddrPort // the client
	Destination netip.AddrPort // as the client wrote it
	Answers     netip.AddrPort // the source of replies: the backend, if the destination was translated
	Opening     bool           // a TCP connection of which a SYN was seen, and no answer yet
	Closing     bool           // a TCP connection that one end has closed or reset, or that has ended
	Ended       bool           // a TCP connection that both ends have closed (TIME_WAIT), or one has reset
}

// Conn reaches one network namespace's connection tracking.
type Conn struct {
	flows  *netlink.Handle
	routes *netlink.Handle
	ns     *netns.Namespace
}

// Open connects to the calling thread's network namespace. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	flows, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("conntrack: open netlink socket: %w", err)
	}
	routes, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		flows.Close()
		return nil, fmt.Errorf("conntrack: open netlink socket: %w", err)
	}
	ns, err := netns.Current()
	if err != nil {
		flows.Close()
		routes.Close()
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	return &Conn{flows, routes, ns}, nil
}

// Close gives the sockets back.
func (c *Conn) Close() {
	c.flows.Close()
	c.routes.Close()
	c.ns.Close()
}

// Invalid returns how many packets belonged to no connection, nor could they begin one: those that rules match as
// INVALID.
func (c *Conn) Invalid() (packets uint64, err error) {
	const getStats, invalid = 4, 4 // IPCTNL_MSG_CT_GET_STATS_CPU, CTA_STATS_INVALID
	var processors [][]byte
	err = c.ns.Do(func() (err error) {
		r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|getStats, unix.NLM_F_DUMP)
		r.AddData(&nl.Nfgenmsg{})
		processors, err = r.Execute(unix.NETLINK_NETFILTER, 0)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("conntrack: read statistics: %w", err)
	}
	for _, b := range processors {
		if v := nlattr.Find(b[min(nl.SizeofNfgenmsg, len(b)):], invalid); len(v) == 4 {
			packets += uint64(binary.BigEndian.Uint32(v))
		}
	}
	return packets, nil
}

// Cut removes the flows of a family (unix.AF_INET or AF_INET6) that match says, and gives their number. A packet of such
// a flow that comes later is the first of a new one.
func (c *Conn) Cut(family uint8, match func(Flow) bool) (int, error) {
	n, err := c.flows.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(family), filter(match))
	if err != nil {
		return int(n), fmt.Errorf("conntrack: cut flows of family %d: %w", family, err)
	}
	return int(n), nil
}

// filter is a netlink.CustomConntrackFilter.
type filter func(Flow) bool

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f filter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	tcp, _ := flow.ProtoInfo.(*netlink.ProtoInfoTCP)
	return f(Flow{
		Opening:     tcp != nil && tcp.State == nl.TCP_CONNTRACK_SYN_SENT,
		Closing:     tcp != nil && tcp.State >= nl.TCP_CONNTRACK_FIN_WAIT && tcp.State <= nl.TCP_CONNTRACK_CLOSE,
		Ended:       tcp != nil && (tcp.State == nl.TCP_CONNTRACK_TIME_WAIT || tcp.State == nl.TCP_CONNTRACK_CLOSE),
		Protocol:    flow.Forward.Protocol,
		Source:      addrPort(flow.Forward.SrcIP, flow.Forward.SrcPort),
		Destination: addrPort(flow.Forward.DstIP, flow.Forward.DstPort),
		Answers:     addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort),
	})
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// Addresses gives the addresses of the namespace's interfaces.
func (c *Conn) Addresses() (map[netip.Addr]bool, error) {
	list, err := c.routes.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("conntrack: list addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range list {
		own[addrPort(a.IP, 0).Addr()] = true
	}
	return own, nil
}
