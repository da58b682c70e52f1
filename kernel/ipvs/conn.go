package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// bufferSize is what the socket may hold: answers to a batch of which every request fails.
const bufferSize = 8 << 20

// Conn is a socket to one network namespace's IPVS. It is safe for concurrent use.
type Conn struct {
	mu     sync.Mutex
	fd     int
	family uint16 // the number that generic netlink has given IPVS
	reader []byte
}

// Open connects to the calling thread's network namespace, and has the kernel load IPVS. It needs CAP_NET_ADMIN there.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("ipvs: open netlink socket: %w", err)
	}
	c := &Conn{fd: fd, reader: make([]byte, 64<<10)}
	if err := nlattr.SetBuffers(fd, bufferSize); err != nil {
		c.Close()
		return nil, fmt.Errorf("ipvs: set the size of socket buffers: %w", err)
	}
	for _, o := range []struct{ level, name, value int }{
		{unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			c.Close()
			return nil, fmt.Errorf("ipvs: set socket option %d: %w", o.name, err)
		}
	}
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
		err = c.resolve()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// resolve asks generic netlink for IPVS's number.
func (c *Conn) resolve() error {
	var b buffer
	at := header(&b, unix.GENL_ID_CTRL, unix.NLM_F_REQUEST|unix.NLM_F_ACK, 1, unix.CTRL_CMD_GETFAMILY)
	b.str(unix.CTRL_ATTR_FAMILY_NAME, "IPVS")
	finish(&b, at)
	err := c.ask(b, func(body []byte) { c.family = uint16(number(nlattr.Find(body, unix.CTRL_ATTR_FAMILY_ID))) })
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("ipvs: this kernel has no IPVS: it needs CONFIG_IP_VS, as module ip_vs: modprobe ip_vs, or choose another mode: %w", err)
	case err != nil:
		return fmt.Errorf("ipvs: look up IPVS in generic netlink: %w", err)
	}
	return nil
}

// Close gives the socket back. What was written stays.
func (c *Conn) Close() error { return unix.Close(c.fd) }

// header writes a netlink header and a generic netlink header, and gives its place for finish.
func header(b *buffer, kind, flags uint16, seq uint32, command uint8) int {
	at := len(*b)
	*b = binary.NativeEndian.AppendUint32(*b, 0)
	*b = binary.NativeEndian.AppendUint16(*b, kind)
	*b = binary.NativeEndian.AppendUint16(*b, flags)
	*b = binary.NativeEndian.AppendUint32(*b, seq)
	*b = binary.NativeEndian.AppendUint32(*b, 0)
	*b = append(*b, command, 1, 0, 0)
	return at
}

// finish writes a message's length.
func finish(b *buffer, at int) { binary.NativeEndian.PutUint32((*b)[at:], uint32(len(*b)-at)) }

// ask sends one request and calls f with the attributes of each answer, up to the acknowledgement or a dump's end.
func (c *Conn) ask(request []byte, f func(attrs []byte)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := unix.Write(c.fd, request); err != nil {
		return err
	}
	var failed error
	for done := false; !done; {
		n, err := c.receive(0)
		if err != nil {
			return err
		}
		eachMessage(c.reader[:n], func(kind, flags uint16, _ uint32, body []byte) {
			if flags&unix.NLM_F_DUMP_INTR != 0 {
				failed = errInterrupted
			}
			switch {
			case kind == unix.NLMSG_DONE || kind == unix.NLMSG_ERROR:
				done = true
				if e := errno(body); e != nil && failed == nil {
					failed = e
				}
			case kind >= unix.NLMSG_MIN_TYPE && len(body) > 4:
				f(body[4:])
			}
		})
	}
	return failed
}

// errno reads the number that an NLMSG_ERROR or NLMSG_DONE begins with.
func errno(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if e := int32(binary.NativeEndian.Uint32(body)); e != 0 {
		return unix.Errno(-e)
	}
	return nil
}

func (c *Conn) receive(flags int) (int, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.reader, flags)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
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
func (s ServiceID) append(b *buffer, more func()) {
	at := b.open(attrService | nested)
	b.u16(svcFamily, s.family())
	b.u32(svcMark, s.Mark)
	if more != nil {
		more()
	}
	b.close(at)
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
