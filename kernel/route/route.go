// Package route writes, reads and follows routes, by the thousand. It writes into netlink.Batch and reads by a
// netlink.Socket of unix.NETLINK_ROUTE, so that routes and rules can go in one batch.
package route

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
)

// Route is a route, which Owner marks as theirs (rtm_protocol).
type Route struct {
	Owner  uint8  // 0: unix.RTPROT_BOOT, as ip-route(8) has it
	Table  uint32 // 0: the main table
	Type   Type
	To     netip.Prefix
	Via    netip.Addr // next hop on Dev's link, whatever addresses Dev has; zero: To is on the link itself
	Dev    int        // interface index
	Source netip.Addr // the source that the kernel prefers; zero: its choice
	MTU    uint32     // bytes of the longest packet that takes it; 0: as many as Dev takes
	// Interior: one of thousands of IPv4 routes by next hops behind the same device, see interiorScope. It isn't read.
	Interior bool
}

// Type is what a route does with its packets (RTN_*).
type Type uint8

// The types in use.
const (
	Unicast     Type = 0                    // sends them on
	Local       Type = unix.RTN_LOCAL       // delivers them to this host's own sockets
	Blackhole   Type = unix.RTN_BLACKHOLE   // drops them
	Unreachable Type = unix.RTN_UNREACHABLE // rejects them, as unreachable (ICMP)
)

// portion is how many bytes of requests are sent at once: rejections of all of them fit in a socket's usual buffer.
const portion = 8 << 10

// NewBatch returns a batch for routes and rules.
func NewBatch() *netlink.Batch { return &netlink.Batch{Portion: portion} }

// Put makes each route the one to its prefix in its table, in place of any other.
func Put(b *netlink.Batch, routes ...Route) {
	for _, r := range routes {
		said := func() string { return "set " + r.String() }
		b.Add(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, said, func(m *netlink.Buffer) { r.write(m, false) })
	}
}

// Delete removes routes, each known by what is set of it. One that isn't there is no error.
func Delete(b *netlink.Batch, routes ...Route) {
	for _, r := range routes {
		said := func() string { return "delete " + r.String() }
		b.Add(unix.RTM_DELROUTE, 0, said, func(m *netlink.Buffer) { r.write(m, true) }, unix.ESRCH, unix.ENOENT, unix.ENODEV)
	}
}

// String returns text such as "route to 10.0.0.0/8 via 10.1.0.1 in table 0x5e", for errors.
func (r Route) String() string {
	text := fmt.Sprintf("route to %s", r.To)
	if r.Via.IsValid() {
		text += fmt.Sprintf(" via %s", r.Via)
	}
	if r.Table != 0 {
		text += fmt.Sprintf(" in table %#x", r.Table)
	}
	return text
}

// IsMain reports whether the route is a unicast one of the main table.
func (r Route) IsMain() bool {
	return r.Type == Unicast && cmp.Or(r.Table, unix.RT_TABLE_MAIN) == unix.RT_TABLE_MAIN
}

const headerLength = unix.SizeofRtMsg

// interiorScope returns the scope (rtm_scope) of an Interior route by a next hop: one of those between universe and
// site that the kernel leaves for interior routes (linux/rtnetlink.h). Its forwarding treats them all as it does
// universe. It keeps equal next hops once, and finds them by a hash of protocol, scope, source, metric and device, but
// not of the address (fib_find_info): in one scope, thousands of routes by one device are one list, which each new one
// walks. IPv6 has no such list, and ignores the scope.
func interiorScope(via netip.Addr) uint8 {
	h := fnv.New32a()
	h.Write(via.AsSlice())
	return uint8(unix.RT_SCOPE_UNIVERSE + 1 + h.Sum32()%(unix.RT_SCOPE_SITE-unix.RT_SCOPE_UNIVERSE-1))
}

// write writes a route. One that is to go is looked for by what is set alone.
func (r Route) write(m *netlink.Buffer, gone bool) {
	owner, kind, scope, flags := r.Owner, cmp.Or(r.Type, unix.RTN_UNICAST), uint8(unix.RT_SCOPE_UNIVERSE), uint32(0)
	switch {
	case gone:
		kind, scope = unix.RTN_UNSPEC, unix.RT_SCOPE_NOWHERE
	case r.Type == Local:
		scope = unix.RT_SCOPE_HOST
	case r.Type == Unicast && !r.Via.IsValid():
		scope = unix.RT_SCOPE_LINK
	case r.Type == Unicast:
		if flags = unix.RTNH_F_ONLINK; r.Interior {
			scope = interiorScope(r.Via)
		}
	}
	if !gone {
		owner = cmp.Or(owner, unix.RTPROT_BOOT)
	}
	*m = append(*m, uint8(inet.Family(r.To.Addr())), uint8(r.To.Bits()), 0, 0, unix.RT_TABLE_UNSPEC, owner,
		scope, uint8(kind))
	*m = binary.NativeEndian.AppendUint32(*m, flags)
	m.Uint32(unix.RTA_TABLE, cmp.Or(r.Table, unix.RT_TABLE_MAIN))
	m.Bytes(unix.RTA_DST, r.To.Addr().AsSlice())
	if r.Via.IsValid() {
		m.Bytes(unix.RTA_GATEWAY, r.Via.AsSlice())
	}
	if r.Source.IsValid() {
		m.Bytes(unix.RTA_PREFSRC, r.Source.AsSlice())
	}
	if r.Dev != 0 {
		m.Uint32(unix.RTA_OIF, uint32(r.Dev))
	}
	if r.MTU != 0 {
		at := m.Open(unix.RTA_METRICS)
		m.Uint32(unix.RTAX_MTU, r.MTU)
		m.Close(at)
	}
}

// Of reads a message, and reports whether it is about a route.
func Of(m netlink.Message) (r Route, ok bool) {
	if m.Type != unix.RTM_NEWROUTE && m.Type != unix.RTM_DELROUTE || len(m.Body) < headerLength {
		return r, false
	}
	r = Route{Owner: m.Body[5], Table: uint32(m.Body[4])}
	if m.Body[7] != unix.RTN_UNICAST {
		r.Type = Type(m.Body[7])
	}
	to := netip.IPv4Unspecified()
	if m.Body[0] == unix.AF_INET6 {
		to = netip.IPv6Unspecified()
	}
	for t, v := range m.Attributes(headerLength) {
		switch t {
		case unix.RTA_TABLE:
			r.Table = netlink.Uint(v)
		case unix.RTA_DST:
			to = addr(v)
		case unix.RTA_GATEWAY:
			r.Via = addr(v)
		case unix.RTA_PREFSRC:
			r.Source = addr(v)
		case unix.RTA_OIF:
			r.Dev = int(netlink.Uint(v))
		case unix.RTA_METRICS:
			r.MTU = netlink.Uint(netlink.Find(v, unix.RTAX_MTU))
		}
	}
	r.To = netip.PrefixFrom(to, int(m.Body[1]))
	return r, true
}

func addr(b []byte) netip.Addr { a, _ := netip.AddrFromSlice(b); return a }

// list returns the selected routes of both families; header has the kernel leave out others, if it can.
func list(s *netlink.Socket, header [headerLength]byte, selected func(Route) bool) (l []Route, err error) {
	err = netlink.Stable(func() error {
		l = nil
		for _, header[0] = range []uint8{unix.AF_INET, unix.AF_INET6} {
			request := func(b *netlink.Buffer) { *b = append(*b, header[:]...) }
			err := s.Request(unix.RTM_GETROUTE, unix.NLM_F_DUMP, request, func(m netlink.Message) {
				// Without IPv6, the kernel lists IPv4's again.
				if r, ok := Of(m); ok && m.Body[0] == header[0] && selected(r) {
					l = append(l, r)
				}
			})
			if err != nil && !errors.Is(err, unix.ENOENT) { // where nothing was ever routed there is no table
				return fmt.Errorf("list routes: %w", err)
			}
		}
		return nil
	})
	return l, err
}

// List returns the routes that owner has.
func List(s *netlink.Socket, owner uint8) ([]Route, error) {
	return list(s, [headerLength]byte{5: owner}, func(r Route) bool { return r.Owner == owner })
}

// Reach is by which interface packets to a prefix leave.
type Reach struct {
	To        netip.Prefix
	Interface string
}

// Reached returns the unicast routes of the main table that have one interface, the longest prefixes first.
func Reached(s *netlink.Socket) (l []Reach, err error) {
	names, err := link.Names(s)
	if err != nil {
		return nil, err
	}
	routes, err := list(s, [headerLength]byte{4: unix.RT_TABLE_MAIN, 7: unix.RTN_UNICAST}, Route.IsMain)
	for _, r := range routes {
		if r.Dev != 0 {
			l = append(l, Reach{r.To, names[r.Dev]})
		}
	}
	slices.SortStableFunc(l, func(a, b Reach) int { return b.To.Bits() - a.To.Bits() })
	return l, err
}

// To returns the route of this host's own packets to an address, and reports whether there is one that delivers them.
func To(s *netlink.Socket, a netip.Addr) (r Route, ok bool, err error) {
	err = s.Request(unix.RTM_GETROUTE, 0, func(b *netlink.Buffer) {
		*b = append(*b, uint8(inet.Family(a)), uint8(a.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
		b.Bytes(unix.RTA_DST, a.AsSlice())
	}, func(m netlink.Message) { r, ok = Of(m) })
	for _, none := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL} {
		if errors.Is(err, none) { // no route, or unreachable, prohibit, blackhole
			return Route{}, false, nil
		}
	}
	if err != nil {
		return Route{}, false, fmt.Errorf("look up the route to %s: %w", a, err)
	}
	return r, ok, nil
}

// PutIn makes a few routes in ns, as Put does.
func PutIn(ns *netns.Namespace, routes ...Route) error { return in(ns, Put, routes) }

// DeleteIn removes a few routes of ns, as Delete does.
func DeleteIn(ns *netns.Namespace, routes ...Route) error { return in(ns, Delete, routes) }

func in(ns *netns.Namespace, add func(*netlink.Batch, ...Route), routes []Route) error {
	b := NewBatch()
	add(b, routes...)
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Apply(b)
}
