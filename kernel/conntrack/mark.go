package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Tracked is a connection as its entry shows it.
type Tracked struct {
	Flow
	Mark      uint32
	Zone      uint16
	Midstream bool // a TCP connection of which no SYN was seen: its original direction may be that of the replies
}

// Each calls f with each tracked connection of both families.
func (c *Conn) Each(f func(Tracked)) error {
	_, err := c.Remark(0, func(t Tracked) uint32 { f(t); return 0 })
	return err
}

// Attributes, messages and flags of include/uapi/linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_tcp.h.
const (
	msgNew, msgGet, msgDelete              = 0, 1, 2
	ctaOriginal, ctaReply, ctaProtoinfo    = 1, 2, 4
	ctaMark, ctaZone, ctaMarkMask          = 8, 18, 21
	ctaTupleIP, ctaTupleProto              = 1, 2
	ctaProtoNumber, ctaSrcPort, ctaDstPort = 1, 2, 3
	ctaInfoTCP, ctaTCPState, ctaTCPFlags   = 1, 1, 4
	// set on both ends of what is picked up in mid-stream (IP_CT_TCP_FLAG_BE_LIBERAL)
	liberal                                   = 0x08
	batchLength                               = 512 // changes that are sent at once
	genHeader                                 = 4   // of struct nfgenmsg
	ctaSrc4, ctaDst4, ctaSrc6, ctaDst6 uint16 = 1, 2, 3, 4
)

// Remark calls f with each tracked connection of both families and sets the bits of mask in its mark to those that f
// returns, where they differ; other bits stay. It returns how many marks it changed. One that ends meanwhile is no
// error.
func (c *Conn) Remark(mask uint32, f func(Tracked) uint32) (changed int, err error) {
	return c.remark(mask, 0, f)
}

// RemarkUnmarked does what Remark does with those connections alone that have none of mask's bits: the kernel leaves
// the others out, which takes it less than a tenth of the time.
func (c *Conn) RemarkUnmarked(mask uint32, f func(Tracked) uint32) (changed int, err error) {
	return c.remark(mask, mask, f)
}

// remark is Remark of the connections that have none of the bits of without.
func (c *Conn) remark(mask, without uint32, f func(Tracked) uint32) (changed int, err error) {
	only := func(b *netlink.Buffer) {
		if without != 0 {
			b.BE32(ctaMark, 0)
			b.BE32(ctaMarkMask, without)
		}
	}
	changed, err = c.each(only, func(b *netlink.Batch, t Tracked, e entry) {
		value := f(t) & mask
		if value == t.Mark&mask {
			return
		}
		said := func() string {
			return fmt.Sprintf("set mark %#x/%#x of %d %s > %s", value, mask, t.Protocol, t.Source, t.Destination)
		}
		b.Add(unix.NFNL_SUBSYS_CTNETLINK<<8|msgNew, 0, said, func(b *netlink.Buffer) {
			e.name(b, t.Zone)
			b.BE32(ctaMark, value)
			b.BE32(ctaMarkMask, mask)
		})
	})
	if err != nil {
		return changed, fmt.Errorf("conntrack: mark connections: %w", err)
	}
	return changed, nil
}

// each calls change with each tracked connection of both families, or those that only's attributes select, and sends
// the requests that it adds to a batch while the table is still read; at most a few batches of them are held at once.
// It returns how many were done; that a connection has ended meanwhile counts as none, and is no error.
func (c *Conn) each(only func(*netlink.Buffer), change func(*netlink.Batch, Tracked, entry)) (done int, err error) {
	batches := make(chan *netlink.Batch)
	var failed error // like done the writer's, until it has ended
	var writer sync.WaitGroup
	writer.Go(func() {
		for b := range batches {
			done += b.Len()
			failed = errors.Join(failed, c.write.Run(b, func(i int, err error) {
				if done--; !errors.Is(err, unix.ENOENT) && failed == nil {
					failed = fmt.Errorf("%s: %w", b.Said(i), err)
				}
			}))
		}
	})
	b := &netlink.Batch{}
	request := func(b *netlink.Buffer) {
		*b = append(*b, unix.AF_UNSPEC, 0, 0, 0)
		if only != nil {
			only(b)
		}
	}
	err = c.dump.Request(unix.NFNL_SUBSYS_CTNETLINK<<8|msgGet, unix.NLM_F_DUMP, request, func(n netlink.Message) {
		if n.Type>>8 != unix.NFNL_SUBSYS_CTNETLINK || len(n.Body) < genHeader {
			return
		}
		t, e, ok := tracked(n.Body[genHeader:])
		if !ok {
			return
		}
		e.family = n.Body[0]
		if change(b, t, e); b.Len() >= batchLength {
			batches <- b
			b = &netlink.Batch{}
		}
	})
	batches <- b
	close(batches)
	writer.Wait()
	return done, errors.Join(err, failed)
}

// entry is what names a connection's entry in the kernel. Its number (CTA_ID) is left out: with it, removal left
// entries behind in mode ebpf, where packets without an answer followed.
type entry struct {
	family uint8
	tuple  []byte // its original direction
}

// name appends what says which entry a request is about.
func (e entry) name(b *netlink.Buffer, zone uint16) {
	*b = append(*b, e.family, 0, 0, 0)
	b.Bytes(ctaOriginal|netlink.Nested, e.tuple)
	if zone != 0 {
		b.BE16(ctaZone, zone)
	}
}

// tracked reads an entry's attributes and returns those that name it, too.
func tracked(b []byte) (t Tracked, e entry, ok bool) {
	for a, v := range netlink.Attributes(b) {
		switch a {
		case ctaOriginal:
			e.tuple = v
			t.Protocol, t.Source, t.Destination, ok = tupleOf(v)
		case ctaReply:
			_, t.ReplySource, t.Reply, _ = tupleOf(v)
		case ctaProtoinfo:
			tcp := netlink.Find(v, ctaInfoTCP)
			if state := netlink.Find(tcp, ctaTCPState); len(state) == 1 {
				t.state(state[0])
			}
			flags, reply := netlink.Find(tcp, ctaTCPFlags), netlink.Find(tcp, ctaTCPFlags+1)
			t.Midstream = len(flags) > 0 && len(reply) > 0 && flags[0]&reply[0]&liberal != 0
		case ctaMark:
			t.Mark = uint32(netlink.BE(v))
		case ctaZone:
			t.Zone = uint16(netlink.BE(v))
		}
	}
	return t, e, ok && t.ReplySource.IsValid()
}

// tupleOf reads a tuple. Protocols without ports have the ports 0.
func tupleOf(b []byte) (protocol uint8, src, dst netip.AddrPort, ok bool) {
	var from, to netip.Addr
	var sport, dport uint16
	for a, v := range netlink.Attributes(b) {
		for a2, v := range netlink.Attributes(v) {
			switch {
			case a == ctaTupleIP && (a2 == ctaSrc4 || a2 == ctaSrc6):
				from, _ = netip.AddrFromSlice(v)
			case a == ctaTupleIP && (a2 == ctaDst4 || a2 == ctaDst6):
				to, _ = netip.AddrFromSlice(v)
			case a == ctaTupleProto && a2 == ctaProtoNumber && len(v) == 1:
				protocol = v[0]
			case a == ctaTupleProto && a2 == ctaSrcPort:
				sport = uint16(netlink.BE(v))
			case a == ctaTupleProto && a2 == ctaDstPort:
				dport = uint16(netlink.BE(v))
			}
		}
	}
	return protocol, netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport), from.IsValid() && to.IsValid()
}
