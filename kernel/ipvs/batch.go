package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Batch is a list of requests that are sent together. They are not atomic: each is tried, in order.
type Batch struct {
	b     buffer
	tries []try
}

// try is one request: how it can be made again as another command where the first is refused.
type try struct {
	start   int
	command uint8
	said    string
}

// Empty says that nothing is to be done.
func (b *Batch) Empty() bool { return len(b.tries) == 0 }

func (b *Batch) request(command uint8, said string, body func()) {
	b.tries = append(b.tries, try{len(b.b), command, said})
	at := header(&b.b, 0, unix.NLM_F_REQUEST, uint32(len(b.tries)), command)
	body()
	finish(&b.b, at)
}

// SetService makes a service, or changes the one that is there.
func (b *Batch) SetService(s Service) {
	b.request(cmdNewService, "set "+s.String()+" "+s.Scheduler, func() {
		s.append(&b.b, func() {
			b.b.str(svcScheduler, s.Scheduler)
			b.b.bytes(svcFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.Flags), flagsMask))
			b.b.u32(svcTimeout, 0)
			netmask := ^uint32(0)
			if s.Six {
				netmask = 128
			}
			b.b.u32(svcNetmask, netmask)
		})
	})
}

// DelService removes a service and its destinations. One that isn't there is no error.
func (b *Batch) DelService(s ServiceID) {
	b.request(cmdDelService, "delete "+s.String(), func() { s.append(&b.b, nil) })
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
	b.request(command, verb+" destination "+d.Addr.String()+" of "+s.String(), func() {
		s.append(&b.b, nil)
		at := b.b.open(attrDest | nested)
		b.b.u16(destFamily, s.family())
		b.b.bytes(destAddr, d.Addr.Addr().AsSlice())
		b.b.bytes(destPort, binary.BigEndian.AppendUint16(nil, d.Addr.Port()))
		if command != cmdDelDest {
			b.b.u32(destForward, 0) // IP_VS_CONN_F_MASQ
			b.b.u32(destWeight, d.Weight)
			b.b.u32(destUpper, 0)
			b.b.u32(destLower, 0)
		}
		b.b.close(at)
	})
}

// portion is how many bytes go in one send.
const portion = 1 << 20

// Run makes the requests. What is there already is changed, and what is gone already is no error. It tries all and gives the
// first error.
func (c *Conn) Run(b *Batch) error {
	again, err := c.send(b)
	if err != nil || again.Empty() {
		return err
	}
	_, err = c.send(again)
	return err
}

// send makes the requests once and gives those that are to be tried again as changes, since what they would make is there.
func (c *Conn) send(b *Batch) (*Batch, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	again, first := &Batch{}, error(nil)
	for from := 0; from < len(b.tries); {
		to := from
		for ; to < len(b.tries) && b.end(to)-b.tries[from].start <= portion; to++ {
			binary.NativeEndian.PutUint16(b.b[b.tries[to].start+4:], c.family)
		}
		flags := b.b[b.tries[to-1].start+6:]
		binary.NativeEndian.PutUint16(flags, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		if _, err := unix.Write(c.fd, b.b[b.tries[from].start:b.end(to-1)]); err != nil {
			return again, fmt.Errorf("ipvs: send %d requests: %w", to-from, err)
		}
		err := c.answers(b, uint32(to), again)
		if first == nil {
			first = err
		}
		from = to
	}
	return again, first
}

// end gives where request i ends.
func (b *Batch) end(i int) int {
	if i+1 < len(b.tries) {
		return b.tries[i+1].start
	}
	return len(b.b)
}

// answers reads what the kernel said of a send whose last request is number last. The kernel handles it within the send, so
// that every answer waits already.
func (c *Conn) answers(b *Batch, last uint32, again *Batch) (first error) {
	done := false
	for {
		n, err := c.receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return fmt.Errorf("ipvs: receive: %w", err)
		}
		eachMessage(c.reader[:n], func(kind, _ uint16, seq uint32, body []byte) {
			i := int(seq) - 1
			if kind != unix.NLMSG_ERROR || i < 0 || i >= len(b.tries) {
				return
			}
			done = done || seq == last
			e := errno(body)
			switch t := b.tries[i]; {
			case e == nil || t.gone(e):
			case errors.Is(e, unix.EEXIST) && (t.command == cmdNewService || t.command == cmdNewDest):
				again.repeat(b, i)
			case first == nil:
				first = t.refused(e)
			}
		})
	}
	if first == nil && !done {
		return errors.New("ipvs: the kernel did not acknowledge a batch")
	}
	return first
}

// gone says that a refusal means that nothing is left to do.
func (t try) gone(e error) bool {
	absent := errors.Is(e, unix.ESRCH) || errors.Is(e, unix.ENOENT)
	return absent && (t.command == cmdDelService || t.command == cmdDelDest || t.command == cmdSetDest)
}

// refused words the kernel's refusal.
func (t try) refused(e error) error {
	if errors.Is(e, unix.ENOENT) && (t.command == cmdNewService || t.command == cmdSetService) {
		return fmt.Errorf("ipvs: %s: the kernel has no such scheduler: load module ip_vs_NAME or choose another: %w", t.said, e)
	}
	return fmt.Errorf("ipvs: %s: %w", t.said, e)
}

// repeat adds request i of another batch, as a change of what is there.
func (b *Batch) repeat(of *Batch, i int) {
	t := of.tries[i]
	from := t.start
	t.start, t.command = len(b.b), t.command+1 // NEW_SERVICE → SET_SERVICE, NEW_DEST → SET_DEST
	b.tries = append(b.tries, t)
	b.b = append(b.b, of.b[from:of.end(i)]...)
	request := b.b[t.start:]
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(request[8:], uint32(len(b.tries)))
	request[16] = t.command
}
