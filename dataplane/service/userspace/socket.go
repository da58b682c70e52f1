package userspace

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// backlog is how many connections may wait to be taken; the kernel's net.core.somaxconn may say fewer.
const backlog = 4096

// listen makes a socket at an entry's address in the calling thread's network namespace, the netns. A program keeps out
// what it refuses, in silence.
func listen(at netip.AddrPort, protocol model.Protocol, program []unix.SockFilter) (fd int, err error) {
	kind := unix.SOCK_STREAM
	if protocol == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err = unix.Socket(inet.Family(at.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return -1, fmt.Errorf("make a socket for %s/%s: %w", at, protocol, err)
	}
	if err := prepare(fd, at, protocol, program); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen at %s/%s: %w", at, protocol, err)
	}
	return fd, nil
}

func prepare(fd int, at netip.AddrPort, protocol model.Protocol, program []unix.SockFilter) error {
	six := at.Addr().Is6()
	option := func(level, name, value int) func() error {
		return func() error { return unix.SetsockoptInt(fd, level, name, value) }
	}
	var steps []func() error
	if six {
		steps = append(steps, option(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
			option(unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1))
	} else {
		steps = append(steps, option(unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1))
	}
	if protocol == model.TCP {
		steps = append(steps, option(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), option(unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
			option(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1), option(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, idle))
	} else if !six {
		// large answers go in fragments
		steps = append(steps, option(unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT))
	}
	steps = append(steps, func() error { return filter(fd, program) },
		func() error { return unix.Bind(fd, inet.Sockaddr(at)) })
	if protocol == model.TCP {
		steps = append(steps, func() error { return unix.Listen(fd, backlog) })
	}
	for _, s := range steps {
		if err := s(); err != nil {
			return err
		}
	}
	return nil
}

// idle is after how many seconds of silence a connection's ends are asked whether they are there still.
const idle = 600

// filter has a socket let in what a program accepts; without one, everything.
func filter(fd int, program []unix.SockFilter) error {
	if len(program) == 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil && err != unix.ENOENT {
			return fmt.Errorf("detach filter: %w", err)
		}
		return nil
	}
	f := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &f); err != nil {
		return fmt.Errorf("attach a filter of %d instructions: %w", len(program), err)
	}
	return nil
}

// reset closes a connection with a reset.
func reset(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}

// datagrams is how many are received or sent by one system call.
const datagrams = 32

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	length uint32
	_      [4]byte
}

// packets is a batch of datagrams and their peers' addresses.
type packets struct {
	headers [datagrams]mmsghdr
	vectors [datagrams]unix.Iovec
	names   [datagrams]unix.RawSockaddrInet6 // large enough for IPv4's too
	bytes   [datagrams][]byte
}

// newPackets makes room for datagrams of any size.
func newPackets() *packets {
	p := &packets{}
	for i := range p.headers {
		p.bytes[i] = make([]byte, 1<<16)
		p.vectors[i].Base = &p.bytes[i][0]
		p.headers[i].header.Iov = &p.vectors[i]
		p.headers[i].header.Iovlen = 1
	}
	return p
}

// receive takes what is there, and returns how many datagrams that is.
func (p *packets) receive(fd int, named bool) (int, error) {
	for i := range p.headers {
		p.vectors[i].Len = 1 << 16
		p.headers[i].header.Name, p.headers[i].header.Namelen = nil, 0
		if named {
			p.headers[i].header.Name, p.headers[i].header.Namelen = (*byte)(unsafe.Pointer(&p.names[i])),
				uint32(unsafe.Sizeof(p.names[i]))
		}
	}
	for {
		n, _, e := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&p.headers[0])), datagrams,
			unix.MSG_DONTWAIT, 0, 0)
		if e == 0 {
			return int(n), nil
		}
		if e != unix.EINTR {
			return 0, e
		}
	}
}

// send sends the datagrams from first to before last as they were received, and returns how many went out.
func (p *packets) send(fd, first, last int) (int, error) {
	for i := first; i < last; i++ {
		p.vectors[i].SetLen(int(p.headers[i].length))
	}
	for {
		n, _, e := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&p.headers[first])),
			uintptr(last-first), unix.MSG_DONTWAIT, 0, 0)
		if e == 0 {
			return int(n), nil
		}
		if e != unix.EINTR {
			return 0, e
		}
	}
}

// from returns the peer of the i-th datagram.
func (p *packets) from(i int) netip.AddrPort {
	name := &p.names[i]
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&name.Port))[:])
	if name.Family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(name)).Addr), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(name.Addr), port)
}

// address sets the destination of the datagrams before last.
func (p *packets) address(to *unix.RawSockaddrInet6, last int) {
	for i := range last {
		p.headers[i].header.Name, p.headers[i].header.Namelen = nil, 0
		if to == nil {
			continue
		}
		p.headers[i].header.Name, p.headers[i].header.Namelen = (*byte)(unsafe.Pointer(to)), unix.SizeofSockaddrInet6
		if to.Family == unix.AF_INET {
			p.headers[i].header.Namelen = unix.SizeofSockaddrInet4
		}
	}
}
