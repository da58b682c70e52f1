package userspace

import (
	"errors"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// conn is a TCP connection of a client, and ours to a backend.
type conn struct {
	loop           *loop
	front          *front
	from, to       netip.AddrPort // the client, and what it asked for
	client, server end
	up, down       stream // from client to server, and back
	pool           *pool
	backend        *backend
	tried          []*backend
	connected      bool
	share          claim
	undetain       func() // removes the rule by which the connection outlives its frontend
}

// end is one of a conn's two sockets.
type end struct {
	fd      int
	watchID uint32
}

// stream is one direction.
type stream struct {
	conn     *conn
	src, dst *end
	pipe     *pipe // nil while nothing waits in it
	waiting  int   // bytes in it
	full     bool  // dst takes no more for now
	ended    bool  // src has said that no more comes
	over     bool  // and dst has been told
	queued   bool
	lately   int  // bytes that it moved of late, much at once
	thick    bool // what comes next is let gather: see gather
}

// perConn is how many file descriptors a connection has; it borrows pipes only while bytes wait.
const perConn = 2

// accepted begins to proxy a connection. It may end at once.
func (l *loop) accepted(fd int, from netip.AddrPort, li *listener, share claim) error {
	c := &conn{loop: l, front: li.front, from: from, to: li.at, share: share, client: end{fd: fd}, server: end{fd: -1}}
	c.up = stream{conn: c, src: &c.client, dst: &c.server}
	c.down = stream{conn: c, src: &c.server, dst: &c.client}
	l.conns[c] = struct{}{}
	li.front.plane.open.Add(perConn)
	c.pool, _ = li.front.decide(from.Addr())
	return c.dial()
}

// dial connects to a backend that was not tried yet. Without one it ends the connection.
func (c *conn) dial() (err error) {
	for c.pool != nil {
		if c.backend = c.pool.pick(c.from, c.to.Addr(), c.tried, c.loop.now); c.backend == nil {
			break
		}
		if !c.front.plane.allows(model.TCP, c.from, c.backend.addr) {
			break // another would be tried only where this one is out of order
		}
		if err = c.connect(); err == nil {
			return nil
		}
		c.leave()
		if starving(err) {
			break
		}
	}
	c.abort()
	return err
}

// leave returns the backend up.
func (c *conn) leave() {
	if c.server.fd >= 0 {
		c.loop.forget(c.server.fd, c.server.watchID)
		unix.Close(c.server.fd)
		c.server.fd = -1
	}
	c.pool.releaseBackend(c.backend)
	c.tried = append(c.tried, c.backend)
	c.backend = nil
}

// edges are what a conn's sockets are watched for: whatever changes.
const edges = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

// impatience is how often a SYN is repeated before another backend is tried: 7 seconds in all.
const impatience = 2

func (c *conn) connect() error {
	fd, err := unix.Socket(inet.Family(c.backend.addr.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC,
		unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	hasten(fd)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SYNCNT, impatience)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, idle)
	err = unix.Connect(fd, inet.Sockaddr(c.backend.addr))
	if err == nil || errors.Is(err, unix.EINPROGRESS) {
		c.server.watchID, err = c.loop.watch(fd, edges, serverSide{c})
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	c.server.fd = fd
	return nil
}

// hasten has Cubic control the way to a backend where the node has BBR, which paces each packet by a timer (tcp_bbr.c).
// That serves long ways with little room in their queues, not those within a cluster, and costs a stream a third of its
// throughput.
func hasten(fd int) {
	if name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); err == nil &&
		strings.HasPrefix(name, "bbr") {
		unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic") // where it is in the kernel
	}
}

// serverSide and clientSide take the events of a conn's sockets.
type (
	serverSide struct{ *conn }
	clientSide struct{ *conn }
)

const (
	input = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	space = unix.EPOLLOUT | unix.EPOLLHUP | unix.EPOLLERR
)

func (s serverSide) ready(events uint32) {
	c := s.conn
	if !c.connected && !c.established(events) {
		return
	}
	c.serve(events, &c.down, &c.up)
}

func (s clientSide) ready(events uint32) { s.serve(events, &s.up, &s.down) }

// serve moves what an event at one of the sockets lets move: what comes from there, and what was held up on the way
// there. Where there is an error at the socket and nothing to move, the connection ends.
func (c *conn) serve(events uint32, from, to *stream) {
	if events&space != 0 && to.full && !c.move(to) {
		return
	}
	if events&input != 0 && !from.full {
		if !c.move(from) {
			return
		}
	}
	if events&unix.EPOLLERR != 0 && (from.full || from.over) {
		c.abort() // nothing will be read from there by which to learn of the reset
	}
}

// established reports whether the backend has answered; if it has refused, the next one is dialled, while the client is
// there.
func (c *conn) established(events uint32) bool {
	if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		return false
	}
	if e, err := unix.GetsockoptInt(c.server.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || e != 0 {
		if c.leave(); c.deserted() {
			c.abort()
		} else {
			c.dial()
		}
		return false
	}
	var err error
	if c.client.watchID, err = c.loop.watch(c.client.fd, edges, clientSide{c}); err != nil {
		c.abort()
		return false
	}
	c.connected, c.tried = true, nil
	return true
}

// deserted reports whether the client has reset the connection. One that has only said all it has to say waits for an
// answer.
func (c *conn) deserted() bool {
	p := []unix.PollFd{{Fd: int32(c.client.fd)}}
	n, _ := unix.Poll(p, 0)
	return n > 0 && p[0].Revents&unix.POLLERR != 0
}

// quantum is how many bytes one stream may move before others have their turn.
const quantum = 4 << 20

const (
	muchAtOnce = 64 << 10 // bytes that a stream moves at once, each time, while it flows
	sustained  = 1 << 20  // bytes that it has moved so of late for its next ones to be let gather
	gathered   = 2 << 20  // bytes that wake the loop while they gather, before the time is up
)

// gather has what comes next wait until lingering is over, where a stream flows: it has just moved much, and before
// that. At the end of each message it forgets half, so that messages of less than half of what is sustained wait for
// nothing. Otherwise the next bytes wake the loop at once. To be woken, and to acknowledge, for every few packets takes
// more of the processors, the sender's too, than to proxy what they bring. While fewer wait than are gathered
// (SO_RCVLOWAT), the kernel acknowledges at once, on the processor that the sender's packets come in on
// (net/ipv4/tcp_input.c, __tcp_ack_snd_check). Were it the loop's, the sender would go on there while it still sends
// from its own, out of order.
func (s *stream) gather(moved int) {
	if s.lately = min(s.lately+moved, 4*sustained); moved < muchAtOnce {
		s.lately /= 2
	}
	thick := s.lately >= sustained && !s.ended && s.conn.loop.linger(s)
	if thick == s.thick {
		return
	}
	s.thick = thick
	least := 1
	if thick {
		least = gathered
	}
	unix.SetsockoptInt(s.src.fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, least)
}

// move copies bytes as long as both sockets let it. It reports whether the connection is still there.
func (c *conn) move(s *stream) bool {
	if _, here := c.loop.conns[c]; !here || s.over {
		return here
	}
	s.full = false
	if s.pipe == nil {
		p, err := c.loop.borrow()
		if err != nil {
			c.front.starve()
			c.abort()
			return false
		}
		s.pipe = p
	}
	for moved := 0; moved < quantum; {
		n, err := splice(s.src.fd, s.pipe.in, capacity)
		if err != nil && err != unix.EAGAIN { // nothing comes for now, or that the pipe is full
			c.abort()
			return false
		}
		s.ended = s.ended || n == 0 && err == nil
		if s.waiting += n; s.waiting == 0 {
			s.gather(moved)
			return c.rest(s)
		}
		n, err = splice(s.pipe.out, s.dst.fd, s.waiting)
		if err == unix.EAGAIN {
			s.full = true
			return true
		}
		if err != nil {
			c.abort()
			return false
		}
		s.waiting -= n
		moved += n
	}
	if !s.queued {
		s.queued = true
		c.loop.again = append(c.loop.again, s)
	}
	return true
}

// resume implements waiting.
func (s *stream) resume() {
	s.queued = false
	s.conn.move(s)
}

// rest ends a stream's work for now, or for good when its source has ended: then its other end is told, and when both
// directions have ended, so has the connection.
func (c *conn) rest(s *stream) bool {
	c.loop.returnPipe(s.pipe)
	s.pipe = nil
	if !s.ended {
		return true
	}
	s.over = true
	if c.up.over && c.down.over {
		c.end(func(fd int) { unix.Close(fd) })
		return false
	}
	if err := unix.Shutdown(s.dst.fd, unix.SHUT_WR); err != nil {
		c.abort()
		return false
	}
	return true
}

// splice moves up to n bytes. No bytes and no error: the source has ended.
func splice(from, to, n int) (int, error) {
	for {
		m, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if err != unix.EINTR {
			return int(max(m, 0)), err
		}
	}
}

// abort ends the connection with resets.
func (c *conn) abort() { c.end(reset) }

// end returns all that the connection has.
func (c *conn) end(shut func(fd int)) {
	l := c.loop
	delete(l.conns, c)
	for _, s := range []*stream{&c.up, &c.down} {
		if s.pipe != nil {
			l.discard(s.pipe) // bytes may wait in it
			s.pipe = nil
		}
	}
	if c.connected {
		l.forget(c.client.fd, c.client.watchID)
	}
	if c.server.fd >= 0 {
		l.forget(c.server.fd, c.server.watchID)
		shut(c.server.fd)
	}
	shut(c.client.fd)
	if c.backend != nil {
		c.pool.releaseBackend(c.backend)
	}
	if c.undetain != nil {
		c.undetain()
	}
	c.front.plane.open.Add(-perConn)
	c.front.plane.bounds.release(c.front, c.share)
}

// starving reports whether an error means that there are no more file descriptors, or no memory for them.
func starving(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) ||
		errors.Is(err, unix.ENOMEM)
}
