package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// dump lists, again where the list changed meanwhile; begin is called before each time.
func (c *Conn) dump(command uint8, body func(*netlink.Buffer), begin func(), f func(attrs []byte)) error {
	return netlink.Stable(func() error {
		begin()
		return c.request(c.family, unix.NLM_F_DUMP, command, body, f)
	})
}

// Services returns the namespace's services that are known by a mark.
func (c *Conn) Services() (list []Service, err error) {
	err = c.dump(cmdGetService, nil, func() { list = nil }, func(attrs []byte) {
		s := netlink.Find(attrs, attrService)
		if netlink.Find(s, svcMark) == nil {
			return
		}
		flags := netlink.Find(s, svcFlags) // struct ip_vs_flags: flags and mask
		list = append(list, Service{
			ServiceID: ServiceID{Six: netlink.Uint(netlink.Find(s, svcFamily)) == unix.AF_INET6,
				Mark: netlink.Uint(netlink.Find(s, svcMark))},
			Scheduler: netlink.Text(netlink.Find(s, svcScheduler)), Flags: netlink.Uint(flags[:min(4, len(flags))]) &^ hashed,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// Destinations returns a service's destinations, none for a service that isn't there.
func (c *Conn) Destinations(s ServiceID) (list []Destination, err error) {
	err = c.dump(cmdGetDest, func(b *netlink.Buffer) { s.append(b, nil) }, func() { list = nil }, func(attrs []byte) {
		d := netlink.Find(attrs, attrDest)
		list = append(list, Destination{
			Addr:   addrPort(netlink.Find(d, destAddr), netlink.Find(d, destPort), s.Six),
			Weight: netlink.Uint(netlink.Find(d, destWeight)),
			Active: netlink.Uint(netlink.Find(d, destActive)), Idle: netlink.Uint(netlink.Find(d, destIdle)),
		})
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list destinations of %s: %w", s, err)
	}
	return list, nil
}

// addrPort reads an address, of which IPv4 takes the first 4 of 16 bytes, and a port.
func addrPort(addr, port []byte, six bool) netip.AddrPort {
	n := 4
	if six {
		n = 16
	}
	if len(addr) < n || len(port) < 2 {
		return netip.AddrPort{}
	}
	a, _ := netip.AddrFromSlice(addr[:n])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
}

// Timeouts are how long connections may be silent before they are forgotten, in whole seconds.
type Timeouts struct {
	TCP time.Duration // established
	FIN time.Duration // TCP, after a FIN
	UDP time.Duration
}

// Timeouts returns the namespace's.
func (c *Conn) Timeouts() (t Timeouts, err error) {
	err = c.request(c.family, 0, cmdGetConfig, nil, func(attrs []byte) {
		seconds := func(attr uint16) time.Duration {
			return time.Duration(netlink.Uint(netlink.Find(attrs, attr))) * time.Second
		}
		t = Timeouts{TCP: seconds(attrTimeoutTCP), FIN: seconds(attrTimeoutFIN), UDP: seconds(attrTimeoutUDP)}
	})
	if err != nil {
		return t, fmt.Errorf("ipvs: read timeouts: %w", err)
	}
	return t, nil
}

// SetTimeouts sets those that are not zero.
func (c *Conn) SetTimeouts(t Timeouts) error {
	err := c.request(c.family, 0, cmdSetConfig, func(b *netlink.Buffer) {
		b.Uint32(attrTimeoutTCP, uint32(t.TCP/time.Second))
		b.Uint32(attrTimeoutFIN, uint32(t.FIN/time.Second))
		b.Uint32(attrTimeoutUDP, uint32(t.UDP/time.Second))
	}, nil)
	if err != nil {
		return fmt.Errorf("ipvs: set the timeouts to %+v: %w", t, err)
	}
	return nil
}
