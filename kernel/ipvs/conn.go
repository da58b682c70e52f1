package ipvs

import (
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// bufferSize is what the socket may hold: replies to a portion of a batch of which every request fails.
const bufferSize = 8 << 20

// Conn reaches one network namespace's IPVS. It is safe for concurrent use.
type Conn struct {
	s      *netlink.Socket
	family uint16 // the number that generic netlink has given IPVS
}

// Open connects to the calling thread's network namespace, and has the kernel load IPVS. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	s, err := netlink.Open(unix.NETLINK_GENERIC, bufferSize)
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	c := &Conn{s: s}
	if err := c.resolve(); err != nil {
		s.Close()
		return nil, err
	}
	return c, nil
}

// resolve inspects IPVS's number up in generic netlink.
func (c *Conn) resolve() error {
	name := func(b *netlink.Buffer) { b.Text(unix.CTRL_ATTR_FAMILY_NAME, "IPVS") }
	err := c.request(unix.GENL_ID_CTRL, 0, unix.CTRL_CMD_GETFAMILY, name, func(attrs []byte) {
		c.family = uint16(netlink.Uint(netlink.Find(attrs, unix.CTRL_ATTR_FAMILY_ID)))
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("ipvs: this kernel has no IPVS: it needs CONFIG_IP_VS, as module ip_vs: modprobe ip_vs, or choose "+
			"another mode: %w", err)
	case err != nil:
		return fmt.Errorf("ipvs: look up IPVS in generic netlink: %w", err)
	}
	return nil
}

// Close closes the socket. What was written stays.
func (c *Conn) Close() error { return c.s.Close() }

// header is the length of struct genlmsghdr: the command, a version and two bytes more.
const header = 4

// request sends a command and calls f with the attributes of each message of the reply.
func (c *Conn) request(kind, flags uint16, command uint8, body func(*netlink.Buffer), f func(attrs []byte)) error {
	head := func(b *netlink.Buffer) {
		*b = append(*b, command, 1, 0, 0)
		if body != nil {
			body(b)
		}
	}
	return c.s.Request(kind, flags, head, func(m netlink.Message) {
		if f != nil && len(m.Body) > header {
			f(m.Body[header:])
		}
	})
}

// Attributes and commands of include/uapi/linux/ip_vs.h.
const (
	cmdNewService, cmdSetService, cmdDelService, cmdGetService = 1, 2, 3, 4
	cmdNewDest, cmdSetDest, cmdDelDest, cmdGetDest             = 5, 6, 7, 8
	cmdSetConfig, cmdGetConfig                                 = 12, 13

	attrService, attrDest                          = 1, 2
	attrTimeoutTCP, attrTimeoutFIN, attrTimeoutUDP = 4, 5, 6

	svcFamily, svcMark, svcScheduler, svcFlags, svcTimeout, svcNetmask = 1, 5, 6, 7, 8, 9

	destAddr, destPort, destForward, destWeight = 1, 2, 3, 4
	destUpper, destLower, destActive, destIdle  = 5, 6, 7, 8
	destFamily                                  = 11
)

// Flags of a service's scheduler (IP_VS_SVC_F_SCHED*).
const (
	Fallback = 0x08 // sh and mh: past a destination of weight 0 to the next
	WithPort = 0x10 // sh and mh: the client's port counts too

	hashed    = 0x02 // the kernel's own: IP_VS_SVC_F_HASHED
	flagsMask = ^uint32(0)
)

// ServiceID names a virtual service: packets of a family that carry a mark.
type ServiceID struct {
	Six  bool // IPv6
	Mark uint32
}

func (s ServiceID) String() string {
	return fmt.Sprintf("service fwmark %#x family %d", s.Mark, s.family())
}

func (s ServiceID) family() uint16 {
	if s.Six {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// append writes what names the service.
func (s ServiceID) append(b *netlink.Buffer, more func()) {
	b.Nest(attrService, func() {
		b.Uint16(svcFamily, s.family())
		b.Uint32(svcMark, s.Mark)
		if more != nil {
			more()
		}
	})
}

// Service is a virtual service and how it chooses.
type Service struct {
	ServiceID
	Scheduler string // such as rr
	Flags     uint32 // Fallback, WithPort
}

// Destination is where a service's connections go, by translation.
type Destination struct {
	Addr         netip.AddrPort
	Weight       uint32 // 0: no new connections
	Active, Idle uint32 // connections, as the kernel counts them; not written
}
