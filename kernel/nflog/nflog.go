// Package nflog hears what netfilter logs to group 0 in one network namespace (nfnetlink_log): what rules send there, and
// the traces of ip_tables. It knows no meaning of what it hears.
//
// Written against include/uapi/linux/netfilter/nfnetlink_log.h and net/netfilter/nfnetlink_log.c.
package nflog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Entry is one logged packet.
type Entry struct {
	Prefix  string // what the rule or the tracer says
	Payload []byte // the packet from its network header on, at most its first bytes
}

// Log hears group 0 of a network namespace.
type Log struct {
	s      *nl.NetlinkSocket
	sysctl *os.File // open, so that it stays this namespace's whatever thread writes
	logger string   // what it said before
}

// copied is how many bytes of each packet the kernel passes: the headers.
const copied = 128

// Attributes and commands of nfnetlink_log.h.
const (
	msgPacket, msgConfig    = 0, 1
	configCmd, configMode   = 1, 2
	configThreshold         = 5
	cmdBind                 = 1
	copyPacket              = 2
	attrPayload, attrPrefix = 9, 10
	socketBuffer            = 16 << 20
	sysctlName              = "/proc/sys/net/netfilter/nf_log/2" // NFPROTO_IPV4
	loggerName              = "nfnetlink_log"
)

// Open begins to hear group 0 in the calling thread's network namespace, and has the kernel send traces of IPv4 packets
// there instead of to its own log, which tells of the first namespace only.
func Open() (*Log, error) {
	f, err := os.OpenFile(sysctlName, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("nflog: open sysctl nf_log/2: %w (the kernel needs CONFIG_NETFILTER_NETLINK_LOG, and root)", err)
	}
	before := make([]byte, 64)
	n, _ := f.ReadAt(before, 0)
	l := &Log{sysctl: f, logger: strings.TrimSpace(string(before[:n]))}
	if l.s, err = nl.Subscribe(unix.NETLINK_NETFILTER); err == nil {
		err = errors.Join(unix.SetsockoptInt(l.s.GetFd(), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuffer), l.bind())
	}
	if err == nil {
		_, err = f.WriteAt([]byte(loggerName), 0)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("nflog: %w", err)
	}
	return l, nil
}

// bind takes group 0, whole headers, each packet at once.
func (l *Log) bind() error {
	mode := append(binary.BigEndian.AppendUint32(nil, copied), copyPacket, 0)
	for _, a := range []*nl.RtAttr{
		nl.NewRtAttr(configCmd, []byte{cmdBind}),
		nl.NewRtAttr(configMode, mode),
		nl.NewRtAttr(configThreshold, binary.BigEndian.AppendUint32(nil, 1)),
	} {
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_ULOG<<8|msgConfig, unix.NLM_F_ACK)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		req.AddData(a)
		if err := l.s.Send(req); err != nil {
			return fmt.Errorf("ask for group 0: %w", err)
		}
		messages, _, err := l.s.Receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if e := refusal(m); e != 0 {
				return fmt.Errorf("take group 0: %w (EPERM: somebody else hears it)", e)
			}
		}
	}
	return nil
}

func refusal(m syscall.NetlinkMessage) unix.Errno {
	if m.Header.Type != unix.NLMSG_ERROR || len(m.Data) < 4 {
		return 0
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
}

// Heard gives what has come by now. It doesn't wait: the kernel logs a packet when it meets the rule.
func (l *Log) Heard() (entries []Entry, err error) {
	b := make([]byte, 256<<10)
	for {
		n, _, err := unix.Recvfrom(l.s.GetFd(), b, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return entries, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return entries, fmt.Errorf("nflog: receive: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(b[:n])
		if err != nil {
			return entries, fmt.Errorf("nflog: read: %w", err)
		}
		for _, m := range messages {
			if m.Header.Type == unix.NFNL_SUBSYS_ULOG<<8|msgPacket && len(m.Data) > nl.SizeofNfgenmsg {
				entries = append(entries, entry(m.Data[nl.SizeofNfgenmsg:]))
			}
		}
	}
}

func entry(b []byte) (e Entry) {
	attrs, err := nl.ParseRouteAttr(b)
	if err != nil {
		return e
	}
	for _, a := range attrs {
		switch a.Attr.Type & 0x3fff {
		case attrPrefix:
			e.Prefix = string(bytes.TrimRight(a.Value, "\x00"))
		case attrPayload:
			e.Payload = bytes.Clone(a.Value)
		}
	}
	return e
}

// Close ends hearing and has the kernel log as before.
func (l *Log) Close() error {
	if l.s != nil {
		l.s.Close()
	}
	_, err := l.sysctl.WriteAt([]byte(l.logger), 0)
	return errors.Join(err, l.sysctl.Close())
}
