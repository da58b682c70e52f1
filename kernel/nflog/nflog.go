// Package nflog hears what netfilter logs to a group in one network namespace (nfnetlink_log): what rules send there,
// and, to group 0, the traces of ip_tables. It knows no meaning of what it hears.
//
// Written against include/uapi/linux/netfilter/nfnetlink_log.h and net/netfilter/nfnetlink_log.c.
package nflog

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// Entry is one logged packet.
type Entry struct {
	Prefix  string // what the rule or the tracer says
	Payload []byte // the packet from its network header on, at most its first bytes
	In      int    // the index of the interface that it came in by, 0: none
}

// Log hears a group of a network namespace.
type Log struct {
	s      *netlink.Socket
	sysctl *sysctl.File // nil: unchanged
	logger string       // what it said before
	copied uint32       // how many bytes of each packet the kernel passes
}

// Headers is how many bytes the headers of a packet have at most, as far as they are of interest.
const Headers = 128

// Attributes and commands of nfnetlink_log.h.
const (
	msgPacket, msgConfig    = 0, 1
	configCmd, configMode   = 1, 2
	configThreshold         = 5
	cmdBind                 = 1
	copyPacket              = 2
	attrPayload, attrPrefix = 9, 10
	attrIn                  = 4
	socketBuffer            = 16 << 20
	sysctlName              = "net/netfilter/nf_log/2" // NFPROTO_IPV4
	loggerName              = "nfnetlink_log"
)

// Open begins to hear group 0 in the calling thread's network namespace, and has the kernel send traces of IPv4 packets
// there instead of to its own log, which tells of the first namespace only.
func Open() (*Log, error) {
	f, err := sysctl.Open(sysctlName)
	if err != nil {
		return nil, fmt.Errorf("nflog: %w (the kernel needs CONFIG_NETFILTER_NETLINK_LOG, and root)", err)
	}
	before, _ := f.Get()
	l := &Log{sysctl: f, logger: before, copied: Headers}
	if l.s, err = netlink.Open(unix.NETLINK_NETFILTER, socketBuffer); err == nil {
		err = l.bind(0)
	}
	if err == nil {
		err = f.Set(loggerName)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("nflog: %w", err)
	}
	return l, nil
}

// Listen begins to hear a group in the calling thread's network namespace. The kernel passes so many bytes of each
// packet.
func Listen(group uint16, bytes uint32) (*Log, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, socketBuffer)
	if err != nil {
		return nil, fmt.Errorf("nflog: %w", err)
	}
	l := &Log{s: s, copied: bytes}
	if err := l.bind(group); err != nil {
		s.Close()
		return nil, fmt.Errorf("nflog: %w", err)
	}
	return l, nil
}

// bind takes a group, each packet at once.
func (l *Log) bind(group uint16) error {
	for _, set := range []func(*netlink.Buffer){
		func(b *netlink.Buffer) { b.Uint8(configCmd, cmdBind) },
		func(b *netlink.Buffer) {
			b.Bytes(configMode, append(binary.BigEndian.AppendUint32(nil, l.copied), copyPacket, 0))
		},
		func(b *netlink.Buffer) { b.BE32(configThreshold, 1) },
	} {
		err := l.s.Request(unix.NFNL_SUBSYS_ULOG<<8|msgConfig, 0, func(b *netlink.Buffer) {
			*b = binary.BigEndian.AppendUint16(append(*b, unix.AF_INET, 0), group)
			set(b)
		}, func(netlink.Message) {})
		if err != nil {
			return fmt.Errorf("bind group %d: %w (EPERM: another program has it)", group, err)
		}
	}
	return nil
}

// Receive returns what has come by now. It doesn't wait: the kernel logs a packet when it meets the rule.
func (l *Log) Receive() (entries []Entry, err error) {
	err = l.s.Pending(func(m netlink.Message) {
		if e, ok := entry(m); ok {
			e.Payload = bytes.Clone(e.Payload)
			entries = append(entries, e)
		}
	})
	if err != nil {
		return entries, fmt.Errorf("nflog: %w", err)
	}
	return entries, nil
}

// entry reads a packet of a message; its payload is the message's.
func entry(m netlink.Message) (e Entry, ok bool) {
	const header = 4 // of struct nfgenmsg
	if m.Type != unix.NFNL_SUBSYS_ULOG<<8|msgPacket || len(m.Body) <= header {
		return e, false
	}
	b := m.Body[header:]
	e = Entry{Prefix: netlink.Text(netlink.Find(b, attrPrefix)), Payload: netlink.Find(b, attrPayload)}
	if in := netlink.Find(b, attrIn); len(in) == 4 {
		e.In = int(binary.BigEndian.Uint32(in))
	}
	return e, true
}

// Run calls f with each packet as it comes, and lost whenever some didn't fit the socket, until ctx ends. An entry's
// payload is f's until it returns. The kernel waits for no reader: its rules go on whatever becomes of a log.
func (l *Log) Run(ctx context.Context, f func(Entry), lost func()) error {
	err := l.s.Receive(ctx, func(m netlink.Message) {
		if e, ok := entry(m); ok {
			f(e)
		}
	}, lost)
	if err != nil {
		return fmt.Errorf("nflog: %w", err)
	}
	return nil
}

// Close ends hearing and has the kernel log as before.
func (l *Log) Close() error {
	if l.s != nil {
		l.s.Close()
	}
	if l.sysctl == nil {
		return nil
	}
	return errors.Join(l.sysctl.Set(l.logger), l.sysctl.Close())
}
