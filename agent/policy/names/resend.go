package names

import (
	"bytes"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/policy/packet"
	"fairlead.dev/fairlead/kernel/nfqueue"
)

// copies are those of the last answers that waited, by ID.
type copies [256]nfqueue.Packet

// add copies a packet.
func (c *copies) add(p nfqueue.Packet) {
	c[p.ID%uint32(len(c))] = nfqueue.Packet{ID: p.ID, Payload: bytes.Clone(p.Payload)}
}

// remove returns what was added under an ID, once; nil: nothing.
func (c *copies) remove(id uint32) []byte {
	p := &c[id%uint32(len(c))]
	if p.ID != id {
		return nil
	}
	b := p.Payload
	p.Payload = nil
	return b
}

// again sends an answer again that the kernel has dropped while it waited, as it does with all packets in queues
// whenever a hook of netfilter goes: a client sends its query again after seconds. TCP does that itself.
func (l *Learner) again(id uint32) {
	l.mu.Lock()
	b := l.copies.remove(id)
	l.mu.Unlock()
	p, ok := packet.Parse(b)
	if !ok || p.Protocol != unix.IPPROTO_UDP {
		return
	}
	if err := l.ns.Do(func() error { return resend(p) }); err != nil {
		l.options.Log.Warn("an answer about a domain name was dropped while it waited, and can't be sent again",
			"pod", p.Dst, "error", err)
		return
	}
	l.tally(resent)
}

// resend sends a datagram with its own source, which may be no address of the node.
func resend(p packet.Packet) (err error) {
	family, level, transparent := unix.AF_INET, unix.SOL_IP, unix.IP_TRANSPARENT
	if p.Src.Is6() {
		family, level, transparent = unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	from, to := p.Ports()
	if err := errors.Join(unix.SetsockoptInt(fd, level, transparent, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sockaddr(p.Src, from))); err != nil {
		return err
	}
	return unix.Sendto(fd, p.Payload(), 0, sockaddr(p.Dst, to))
}

func sockaddr(a netip.Addr, port uint16) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Port: int(port), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(port), Addr: a.As16()}
}
