// Package nfqueue reads the packets that rules send to a queue of one network namespace (nfnetlink_queue), and lets
// them go on. It knows no meaning of what it reads.
//
// Written against include/uapi/linux/netfilter/nfnetlink_queue.h and net/netfilter/nfnetlink_queue.c.
package nfqueue

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Packet is a packet that waits.
type Packet struct {
	ID      uint32
	Payload []byte // from its network header on, at most its first 16 KiB
}

// Queue reads a queue. Its methods may be called from any goroutine.
type Queue struct {
	s      *netlink.Socket
	number uint16

	mu       sync.Mutex
	accepted [recent]struct{ seq, id uint32 } // the last, by seq
}

// recent is how many packets may be accepted until the kernel has said that one of them was gone.
const recent = 1 << 10

// Attributes and commands of nfnetlink_queue.h.
const (
	msgPacket, msgVerdict, msgConfig     = 0, 1, 2
	attrHeader, attrVerdict, attrPayload = 1, 2, 10
	configCmd, configParams, configMax   = 1, 2, 3
	configMask, configFlags              = 4, 5
	cmdBind, copyPacket                  = 1, 2
	flagFailOpen                         = 1
	copied                               = 16 << 10
	socketBuffer                         = 8 << 20
)

// Open binds a queue in the calling thread's network namespace, in which so many packets may wait. What comes while it
// is full is accepted.
func Open(number uint16, length uint32) (*Queue, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, socketBuffer)
	if err != nil {
		return nil, fmt.Errorf("nfqueue: %w", err)
	}
	q := &Queue{s: s, number: number}
	for _, set := range []func(*netlink.Buffer){
		func(b *netlink.Buffer) { b.Bytes(configCmd, []byte{cmdBind, 0, 0, 0}) },
		func(b *netlink.Buffer) {
			b.Bytes(configParams, append(binary.BigEndian.AppendUint32(nil, copied), copyPacket))
		},
		func(b *netlink.Buffer) { b.BE32(configMax, length) },
		func(b *netlink.Buffer) { b.BE32(configFlags, flagFailOpen); b.BE32(configMask, flagFailOpen) },
	} {
		err := s.Request(unix.NFNL_SUBSYS_QUEUE<<8|msgConfig, 0, func(b *netlink.Buffer) { q.head(b); set(b) },
			func(netlink.Message) {})
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("nfqueue: bind queue %d: %w (EBUSY, EPERM: another program has it)", number, err)
		}
	}
	return q, nil
}

// head writes struct nfgenmsg.
func (q *Queue) head(b *netlink.Buffer) {
	*b = binary.BigEndian.AppendUint16(append(*b, unix.AF_UNSPEC, 0), q.number)
}

// Run calls f with each packet as it comes, gone with the ID of each that was gone when it was accepted, and lost
// whenever some didn't fit the socket, until ctx ends. A packet's payload is f's until it returns. The packet waits
// until Accept, or until any hook of netfilter goes in this network namespace: then the kernel drops all that wait
// (nf_queue_nf_hook_drop).
func (q *Queue) Run(ctx context.Context, f func(Packet), gone func(id uint32), lost func()) error {
	err := q.s.Receive(ctx, func(m netlink.Message) {
		if p, ok := packet(m); ok {
			f(p)
		} else if m.Type == unix.NLMSG_ERROR && errors.Is(m.Err(), unix.ENOENT) {
			q.mu.Lock()
			a := q.accepted[m.Seq%recent]
			q.mu.Unlock()
			if a.seq == m.Seq {
				gone(a.id)
			}
		}
	}, lost)
	if err != nil {
		return fmt.Errorf("nfqueue: %w", err)
	}
	return nil
}

// packet reads a packet of a message; its payload is the message's.
func packet(m netlink.Message) (p Packet, ok bool) {
	const header = 4 // of struct nfgenmsg
	if m.Type != unix.NFNL_SUBSYS_QUEUE<<8|msgPacket || len(m.Body) <= header {
		return p, false
	}
	b := m.Body[header:]
	id := netlink.Find(b, attrHeader)
	if len(id) < 4 {
		return p, false
	}
	return Packet{binary.BigEndian.Uint32(id), netlink.Find(b, attrPayload)}, true
}

// Accept lets a packet go on, with the next hook. Of one that is gone Run tells.
func (q *Queue) Accept(id uint32) error {
	const accept = 1 // NF_ACCEPT
	q.mu.Lock()      // so that Run knows the packet before the kernel's answer
	defer q.mu.Unlock()
	seq, err := q.s.Post(unix.NFNL_SUBSYS_QUEUE<<8|msgVerdict, func(b *netlink.Buffer) {
		q.head(b)
		b.Bytes(attrVerdict, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, accept), id))
	})
	if err != nil {
		return fmt.Errorf("nfqueue: accept a packet: %w", err)
	}
	q.accepted[seq%recent] = struct{ seq, id uint32 }{seq, id}
	return nil
}

// Close ends reading. The kernel drops the packets that wait, and accepts those that come.
func (q *Queue) Close() error { return q.s.Close() }
