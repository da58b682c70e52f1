package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// errInterrupted says that services changed while they were read.
var errInterrupted = errors.New("ipvs: services changed while they were read")

// dump asks for a list, again where it changed meanwhile, a bounded number of times.
func (c *Conn) dump(command uint8, request func(*buffer), begin func(), f func(attrs []byte)) error {
	var b buffer
	at := header(&b, c.family, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, 1, command)
	if request != nil {
		request(&b)
	}
	finish(&b, at)
	err := errInterrupted
	for i := 0; i < 20 && errors.Is(err, errInterrupted); i++ {
		begin()
		err = c.ask(b, f)
	}
	return err
}

// Services gives the namespace's services that are known by a mark.
func (c *Conn) Services() (list []Service, err error) {
	err = c.dump(cmdGetService, nil, func() { list = nil }, func(attrs []byte) {
		s := nlattr.Find(attrs, attrService)
		if nlattr.Find(s, svcMark) == nil {
			return
		}
		list = append(list, Service{
			ServiceID: ServiceID{Six: number(nlattr.Find(s, svcFamily)) == unix.AF_INET6, Mark: number(nlattr.Find(s, svcMark))},
			Scheduler: nlattr.Text(nlattr.Find(s, svcScheduler)), Flags: number(nlattr.Find(s, svcFlags)) &^ hashed,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// Destinations gives a service's destinations, none for a service that isn't there.
func (c *Conn) Destinations(s ServiceID) (list []Destination, err error) {
	err = c.dump(cmdGetDest, func(b *buffer) { s.append(b, nil) }, func() { list = nil }, func(attrs []byte) {
		d := nlattr.Find(attrs, attrDest)
		list = append(list, Destination{
			Addr: addrPort(nlattr.Find(d, destAddr), nlattr.Find(d, destPort), s.Six), Weight: number(nlattr.Find(d, destWeight)),
			Active: number(nlattr.Find(d, destActive)), Idle: number(nlattr.Find(d, destIdle)),
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

// Timeouts gives the namespace's.
func (c *Conn) Timeouts() (t Timeouts, err error) {
	var b buffer
	at := header(&b, c.family, unix.NLM_F_REQUEST|unix.NLM_F_ACK, 1, cmdGetConfig)
	finish(&b, at)
	err = c.ask(b, func(attrs []byte) {
		seconds := func(attr uint16) time.Duration { return time.Duration(number(nlattr.Find(attrs, attr))) * time.Second }
		t = Timeouts{TCP: seconds(attrTimeoutTCP), FIN: seconds(attrTimeoutFIN), UDP: seconds(attrTimeoutUDP)}
	})
	if err != nil {
		return t, fmt.Errorf("ipvs: read timeouts: %w", err)
	}
	return t, nil
}

// SetTimeouts sets those that are not zero.
func (c *Conn) SetTimeouts(t Timeouts) error {
	var b buffer
	at := header(&b, c.family, unix.NLM_F_REQUEST|unix.NLM_F_ACK, 1, cmdSetConfig)
	b.u32(attrTimeoutTCP, uint32(t.TCP/time.Second))
	b.u32(attrTimeoutFIN, uint32(t.FIN/time.Second))
	b.u32(attrTimeoutUDP, uint32(t.UDP/time.Second))
	finish(&b, at)
	if err := c.ask(b, func([]byte) {}); err != nil {
		return fmt.Errorf("ipvs: set the timeouts to %+v: %w", t, err)
	}
	return nil
}
