package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// Batch is a list of requests that are sent together. They are not atomic: each is tried, in order.
type Batch struct{ b netlink.Batch }

// Empty reports whether nothing is to be done.
func (b *Batch) Empty() bool { return b.b.Len() == 0 }

func (b *Batch) request(command uint8, said func() string, body func(m *netlink.Buffer)) {
	var fine []unix.Errno
	if command == cmdDelService || command == cmdDelDest || command == cmdSetDest {
		fine = gone
	}
	b.b.Add(0, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, command, 1, 0, 0)
		body(m)
	}, fine...)
}

// gone are the rejections of a change of what isn't there.
var gone = []unix.Errno{unix.ESRCH, unix.ENOENT}

// SetService makes a service, or changes the one that is there.
func (b *Batch) SetService(s Service) {
	b.request(cmdNewService, func() string { return "set " + s.String() + " " + s.Scheduler }, func(m *netlink.Buffer) {
		s.append(m, func() {
			m.Text(svcScheduler, s.Scheduler)
			flags := binary.NativeEndian.AppendUint32(nil, s.Flags)
			m.Bytes(svcFlags, binary.NativeEndian.AppendUint32(flags, flagsMask))
			m.Uint32(svcTimeout, 0)
			netmask := ^uint32(0)
			if s.Six {
				netmask = 128
			}
			m.Uint32(svcNetmask, netmask)
		})
	})
}

// DelService removes a service and its destinations. One that isn't there is no error.
func (b *Batch) DelService(s ServiceID) {
	said := func() string { return "delete " + s.String() }
	b.request(cmdDelService, said, func(m *netlink.Buffer) { s.append(m, nil) })
}

// SetDestination makes a destination, or changes the weight of the one that is there.
func (b *Batch) SetDestination(s ServiceID, d Destination) {
	b.destination(cmdNewDest, "set", s, d)
}

// Weigh changes the weight of a destination. One that isn't there is no error.
func (b *Batch) Weigh(s ServiceID, d Destination) { b.destination(cmdSetDest, "weigh", s, d) }

// DelDestination removes a destination: its connections end. One that isn't there is no error.
func (b *Batch) DelDestination(s ServiceID, at netip.AddrPort) {
	b.destination(cmdDelDest, "delete", s, Destination{Addr: at})
}

func (b *Batch) destination(command uint8, verb string, s ServiceID, d Destination) {
	said := func() string { return verb + " destination " + d.Addr.String() + " of " + s.String() }
	b.request(command, said, func(m *netlink.Buffer) {
		s.append(m, nil)
		m.Nest(attrDest, func() {
			m.Uint16(destFamily, s.family())
			m.Bytes(destAddr, d.Addr.Addr().AsSlice())
			m.BE16(destPort, d.Addr.Port())
			if command != cmdDelDest {
				m.Uint32(destForward, 0) // IP_VS_CONN_F_MASQ
				m.Uint32(destWeight, d.Weight)
				m.Uint32(destUpper, 0)
				m.Uint32(destLower, 0)
			}
		})
	})
}

// portion is how many bytes go in one send.
const portion = 1 << 20

// Run makes the requests. What is there already is changed, and what is gone already is no error. It tries all and
// returns the first error.
func (c *Conn) Run(b *Batch) error {
	again, err := c.send(b)
	if err != nil || again.Empty() {
		return err
	}
	_, err = c.send(again)
	return err
}

// send makes the requests once and returns those that are to be tried again as changes, since what they would make is
// there.
func (c *Conn) send(b *Batch) (again *Batch, first error) {
	again = &Batch{}
	b.b.Type, b.b.Portion = c.family, portion
	err := c.s.Run(&b.b, func(i int, err error) {
		switch command := b.b.Body(i)[0]; {
		case errors.Is(err, unix.EEXIST) && (command == cmdNewService || command == cmdNewDest):
			again.repeat(b, i)
		case first == nil:
			first = refused(command, b.b.Said(i), err)
		}
	})
	if err != nil {
		return again, fmt.Errorf("ipvs: %w", err)
	}
	return again, first
}

// repeat adds request i of another batch, as a change of what is there.
func (b *Batch) repeat(of *Batch, i int) {
	b.b.Copy(&of.b, i)
	b.b.Body(b.b.Len() - 1)[0]++ // NEW_SERVICE → SET_SERVICE, NEW_DEST → SET_DEST
}

// refused returns the error of a request that the kernel refused.
func refused(command uint8, said string, e error) error {
	if errors.Is(e, unix.ENOENT) && (command == cmdNewService || command == cmdSetService) {
		return fmt.Errorf("ipvs: %s: the kernel has no such scheduler: load module ip_vs_NAME or choose another: %w", said, e)
	}
	return fmt.Errorf("ipvs: %s: %w", said, e)
}
