package userspace

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// silences are how long a flow may be silent: without any answer yet, and with, as the kernel's connection tracking has
// it (nf_conntrack_udp_timeout, nf_conntrack_udp_timeout_stream).
var silences = [2]time.Duration{30 * time.Second, 120 * time.Second}

// flow is a client's datagrams to a front, by a socket of their own to the backend.
type flow struct {
	listener *listener
	client   netip.AddrPort
	name     unix.RawSockaddrInet6 // the client's, as it came
	pool     *pool
	backend  *backend
	fd       int
	watchID  uint32
	share    claim

	last       time.Time
	replied    int // 1 once the backend has
	prev, next *flow
}

// line is flows by the time of their last datagram, the longest silent first.
type line struct{ first, last *flow }

func (q *line) add(f *flow) {
	f.prev, f.next = q.last, nil
	if q.last == nil {
		q.first = f
	} else {
		q.last.next = f
	}
	q.last = f
}

func (q *line) remove(f *flow) {
	if f.prev == nil {
		q.first = f.next
	} else {
		f.prev.next = f.next
	}
	if f.next == nil {
		q.last = f.prev
	} else {
		f.next.prev = f.prev
	}
}

// touch records that a datagram has passed.
func (f *flow) touch(reply bool) {
	l := f.listener.loop
	l.flows[f.replied].remove(f)
	if reply {
		f.replied = 1
	}
	f.last = l.now
	l.flows[f.replied].add(f)
}

// rounds is how many batches of datagrams one socket may have before others have their turn.
const rounds = 16

// datagrams proxies what clients sent. UDP sockets are watched by level: what is left brings another event.
func (li *listener) datagrams() {
	p := li.loop.packets()
	for range rounds {
		n, err := p.receive(li.fd, true)
		if err != nil || n == 0 {
			return // none is left, or an error of an earlier answer, which asking has cleared
		}
		for first := 0; first < n; {
			from := p.from(first)
			last := first + 1
			for last < n && p.from(last) == from {
				last++
			}
			li.pass(p, first, last, from)
			first = last
		}
		if n < datagrams {
			return
		}
	}
}

// packets returns the loop's room for datagrams.
func (l *loop) packets() *packets {
	if l.batch == nil {
		l.batch = newPackets()
	}
	return l.batch
}

// pass sends a client's datagrams to its backend. What the backend's socket can't take is lost, as datagrams may be.
func (li *listener) pass(p *packets, first, last int, from netip.AddrPort) {
	f := li.flows[from]
	if f == nil {
		if f = li.begin(p, first, from); f == nil {
			return
		}
	}
	f.touch(false)
	for i := first; i < last; i++ {
		p.headers[i].header.Name, p.headers[i].header.Namelen = nil, 0
	}
	for try := 0; first < last && try < 2; {
		n, err := p.send(f.fd, first, last)
		first += n
		switch { // errors of an earlier datagram
		case errors.Is(err, unix.EMSGSIZE):
			f.tooLong()
			try++
		case errors.Is(err, unix.ECONNREFUSED):
			try++
		case err != nil:
			return
		}
	}
}

// begin opens a client's flow; nil where no backend takes it.
func (li *listener) begin(p *packets, i int, from netip.AddrPort) *flow {
	l := li.loop
	pool, action := li.front.decide(from.Addr())
	if pool == nil {
		if action == model.Reject {
			li.front.plane.voices.reject(li.at, from)
		}
		return nil
	}
	if li.front.plane.crowded() {
		li.front.starve()
		return nil
	}
	share, ok := li.front.plane.bounds.claim(li.front, from.Addr(), 1, l.now)
	if !ok {
		return nil
	}
	f := &flow{listener: li, client: from, name: p.names[i], pool: pool, last: l.now, share: share}
	if !f.connect() {
		li.front.plane.bounds.release(li.front, share)
		return nil
	}
	li.front.fed()
	li.front.plane.open.Add(1)
	if li.flows == nil {
		li.flows = map[netip.AddrPort]*flow{}
	}
	li.flows[from] = f
	l.flows[0].add(f)
	return f
}

// connect finds the flow a backend and opens its socket. It reports whether there is one.
func (f *flow) connect() bool {
	li := f.listener
	for tried := []*backend(nil); ; tried = append(tried, f.backend) {
		if f.backend = f.pool.pick(f.client, li.at.Addr(), tried, f.last); f.backend == nil {
			return false
		}
		if !li.front.plane.allows(model.UDP, f.client, f.backend.addr) {
			f.pool.releaseBackend(f.backend)
			return false
		}
		err := f.open()
		if err == nil {
			return true
		}
		f.pool.releaseBackend(f.backend)
		if starving(err) {
			li.front.starve()
			return false
		}
	}
}

// open makes the flow's socket.
func (f *flow) open() error {
	to := f.backend.addr
	fd, err := unix.Socket(inet.Family(to.Addr()), unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return err
	}
	if to.Addr().Is4() {
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
	}
	if err = unix.Connect(fd, inet.Sockaddr(to)); err == nil {
		f.watchID, err = f.listener.loop.watch(fd, unix.EPOLLIN, f)
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	f.fd = fd
	return nil
}

// ready implements watcher: it sends replies to the client. A backend that refuses ends the flow, and the client is
// told.
func (f *flow) ready(uint32) {
	p := f.listener.loop.packets()
	for range rounds {
		n, err := p.receive(f.fd, false)
		if errors.Is(err, unix.ECONNREFUSED) {
			li := f.listener
			f.close()
			li.front.plane.voices.reject(li.at, f.client)
			return
		}
		if errors.Is(err, unix.EMSGSIZE) {
			f.tooLong()
			return
		}
		if err != nil || n == 0 {
			return
		}
		f.touch(true)
		p.address(&f.name, n)
		for first := 0; first < n; {
			m, err := p.send(f.listener.fd, first, n)
			if err != nil {
				m = 1 // this one is lost; the others may pass
			}
			first += m
		}
		if n < datagrams {
			return
		}
	}
}

// tooLong reports the client that a datagram was too long for the path to the backend: it is lost, and the next goes in
// fragments, as if the client had sent it there itself.
func (f *flow) tooLong() {
	if mtu, err := unix.GetsockoptInt(f.fd, unix.IPPROTO_IPV6, unix.IPV6_MTU); err == nil {
		f.listener.front.plane.voices.tooLong(f.listener.at, f.client, mtu)
	}
}

// close ends the flow.
func (f *flow) close() {
	l := f.listener.loop
	l.flows[f.replied].remove(f)
	delete(f.listener.flows, f.client)
	l.forget(f.fd, f.watchID)
	unix.Close(f.fd)
	f.listener.front.plane.open.Add(-1)
	f.listener.front.plane.bounds.release(f.listener.front, f.share)
	f.pool.releaseBackend(f.backend)
}
