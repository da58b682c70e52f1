package echo

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// maxConnections is how many connections a server serves at once; further ones wait in the kernel.
const maxConnections = 1024

// Server answers on the ports of one pod.
type Server struct {
	pod   string
	slots chan struct{} // one taken per connection
	wg    sync.WaitGroup
	raw   []rawPort // answered by rawSCTP

	mu     sync.Mutex
	open   map[*socket]bool
	closed bool
}

// Serve opens all ports for IPv4 and IPv6 in the calling thread's network namespace and answers on them until Close.
// A port that can't be opened leaves none open.
func Serve(pod string, ports []Port) (*Server, error) {
	s := &Server{pod: pod, slots: make(chan struct{}, maxConnections), open: map[*socket]bool{}}
	if err := s.serve(ports); err != nil {
		return nil, errors.Join(fmt.Errorf("serve %s: %w", pod, err), s.Close())
	}
	return s, nil
}

func (s *Server) serve(ports []Port) error {
	var sctp []uint16
	for _, p := range ports {
		if p.Protocol == model.SCTP {
			sctp = append(sctp, p.Number)
		}
	}
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		for _, p := range ports {
			if err := s.port(netip.AddrPortFrom(all, p.Number), p.Protocol); err != nil {
				return fmt.Errorf("port %s: %w", p, err)
			}
		}
	}
	if len(sctp) > 0 && !haveSCTP() {
		if err := s.rawSCTP(sctp); err != nil {
			return fmt.Errorf("SCTP: %w", err)
		}
	}
	return nil
}

// port opens one port for one family, unless it is rawSCTP's.
func (s *Server) port(at netip.AddrPort, p model.Protocol) error {
	switch {
	case p == model.UDP:
		return s.packets(at, unix.SOCK_DGRAM, p, s.datagram)
	case p == model.TCP:
		return s.stream(at, p)
	case p == model.SCTP && haveSCTP():
		return s.eachAddress(at)
	case p == model.SCTP:
		return nil
	}
	return errors.New("echo knows tcp, udp and sctp")
}

// eachAddress opens an SCTP port at each address that this network namespace has now, apart: a socket for all of them
// would offer them all to its peers (RFC 9260, section 3.3.3.1), and answer from whichever it likes.
func (s *Server) eachAddress(at netip.AddrPort) error {
	if !at.Addr().IsUnspecified() {
		return s.stream(at, model.SCTP)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || p.Addr().Is4() != at.Addr().Is4() || p.Addr().IsLinkLocalUnicast() {
			continue
		}
		if err := s.stream(netip.AddrPortFrom(p.Addr(), at.Port()), model.SCTP); err != nil {
			return err
		}
	}
	return nil
}

// track records an open socket for Close, or closes it where that has been called.
func (s *Server) track(k *socket) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		k.Close()
		return false
	}
	s.open[k] = true
	return true
}

func (s *Server) drop(k *socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, k)
	k.Close()
}

// Close closes all ports and connections and waits until nothing serves any more.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for k := range s.open {
		k.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	rawPorts.add(s.raw, -1)
	s.raw = nil
	return nil
}

// stream listens, and serves each connection in a goroutine of its own.
func (s *Server) stream(at netip.AddrPort, p model.Protocol) error {
	l, err := listen(at, p)
	if err != nil {
		return err
	}
	s.track(l)
	s.wg.Go(func() {
		defer s.drop(l)
		for {
			c, err := l.accept()
			switch {
			case errors.Is(err, unix.ECONNABORTED):
				continue
			case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS),
				errors.Is(err, unix.ENOMEM):
				time.Sleep(10 * time.Millisecond) // the client waits in the kernel until there is room
				continue
			case err != nil:
				return // closed
			}
			s.slots <- struct{}{}
			if !s.track(c) {
				<-s.slots
				return
			}
			s.wg.Go(func() {
				s.converse(c, p.String())
				s.drop(c)
				<-s.slots
			})
		}
	})
	return nil
}

func listen(at netip.AddrPort, p model.Protocol) (*socket, error) {
	l, err := open(inet.Family(at.Addr()), unix.SOCK_STREAM, p)
	if err != nil {
		return nil, err
	}
	err = l.option(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = l.bind(at)
	}
	if err == nil {
		err = l.control(func(fd int) error { return unix.Listen(fd, 1024) })
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	l.listens = true
	return l, nil
}

// converse answers each line, and each HTTP request, until the client has said all or an answer can't be sent.
func (s *Server) converse(c *socket, proto string) {
	client, err := c.name(unix.Getpeername)
	server, err2 := c.name(unix.Getsockname)
	if err != nil || err2 != nil {
		return
	}
	in := bufio.NewReader(c)
	for {
		if start, _ := in.Peek(1); len(start) == 0 {
			return
		}
		if isHTTP(in) {
			if !s.http(c, in, replyLine(s.pod, "http", client, server, nil)) {
				return
			}
			continue
		}
		line, err := readLine(in)
		if err != nil {
			return
		}
		if _, err := c.Write(replyLine(s.pod, proto, client, server, line)); err != nil {
			return
		}
	}
}

// readLine reads up to a newline: MaxSize bytes at most.
func readLine(in *bufio.Reader) (line []byte, err error) {
	for len(line) <= MaxSize {
		part, err := in.ReadSlice('\n')
		if line = append(line, part...); err != bufio.ErrBufferFull {
			return line, err
		}
	}
	return nil, bufio.ErrBufferFull
}

// methods are the starts of HTTP requests that tell them from other lines, at most 8 bytes each.
var methods = [][]byte{[]byte("GET "), []byte("HEAD "), []byte("POST "), []byte("PUT "), []byte("DELETE "),
	[]byte("OPTIONS ")}

// isHTTP reports whether the next bytes start an HTTP request. It waits for no more than those that decide.
func isHTTP(in *bufio.Reader) bool {
	for n := 1; ; n++ {
		start, err := in.Peek(n)
		possible := slices.ContainsFunc(methods, func(m []byte) bool { return bytes.HasPrefix(m, start) })
		if err != nil || !possible {
			return false
		}
		if slices.ContainsFunc(methods, func(m []byte) bool { return bytes.Equal(m, start) }) {
			return true
		}
	}
}

// http answers one request and reports whether the connection goes on.
func (s *Server) http(c io.Writer, in *bufio.Reader, body []byte) bool {
	r, err := http.ReadRequest(in)
	if err != nil {
		fmt.Fprintf(c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
		return false
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return false
	}
	connection := "keep-alive"
	if r.Close {
		connection = "close"
	}
	head := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: %s\r\nContent-Length: "+
		"%d\r\n\r\n",
		connection, len(body))
	if r.Method == http.MethodHead {
		body = nil
	}
	_, err = c.Write(append([]byte(head), body...))
	return err == nil && !r.Close
}

// packets answers packets that come to an unconnected socket from the address that each was sent to. A nil answer is
// none.
func (s *Server) packets(at netip.AddrPort, kind int, p model.Protocol,
	reply func(data []byte, from, to netip.AddrPort) []byte) error {
	k, err := open(inet.Family(at.Addr()), kind, p)
	if err != nil {
		return err
	}
	err = k.byFamily(unix.IP_PKTINFO, unix.IPV6_RECVPKTINFO, 1)
	if err == nil && kind == unix.SOCK_DGRAM {
		err = k.bind(at)
	}
	if err != nil {
		k.Close()
		return err
	}
	s.track(k)
	s.wg.Go(func() {
		defer s.drop(k)
		buf := make([]byte, MaxSize+2048)
		for {
			q, err := k.receive(buf)
			if err != nil {
				return // closed: such a socket hears of no ICMP errors
			}
			to, control := destination(q.control)
			if b := reply(q.data, q.from, netip.AddrPortFrom(to, at.Port())); b != nil {
				k.send(packet{b, control, q.from}) // an answer that can't be sent is one lost on the way
			}
		}
	})
	return nil
}

// datagram answers a UDP datagram, unless it is itself an answer: two servers must not talk for ever.
func (s *Server) datagram(data []byte, from, to netip.AddrPort) []byte {
	if len(data) > 0 && data[0] == '{' {
		return nil
	}
	return replyLine(s.pod, "udp", from, to, data)
}

// rawSCTP answers INIT chunks to the ports given with an INIT ACK, to those that no server of this process has in this
// network namespace with an ABORT.
func (s *Server) rawSCTP(ports []uint16) error {
	space, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	for _, n := range ports {
		s.raw = append(s.raw, rawPort{space, n})
	}
	rawPorts.add(s.raw, 1)
	answer := func(data []byte, from, to netip.AddrPort) []byte {
		in, err := parseSegment(payload(data, from.Addr().Is4()))
		if err != nil || in.Chunk != chunkInit || in.Tag != 0 {
			return nil
		}
		out := segment{Src: in.Dst, Dst: in.Src, Tag: in.Init, Chunk: chunkAbort}
		switch at := (rawPort{space, in.Dst}); {
		case slices.Contains(s.raw, at):
			out.Chunk, out.Init = chunkInitAck, rand.Uint32()|1
			out.Cookie = replyLine(s.pod, "sctp", netip.AddrPortFrom(from.Addr(), in.Src),
				netip.AddrPortFrom(to.Addr(), in.Dst), nil)
		case rawPorts.has(at):
			return nil
		}
		return out.marshal()
	}
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if err := s.packets(netip.AddrPortFrom(all, 0), unix.SOCK_RAW, model.SCTP, answer); err != nil {
			return err
		}
	}
	return nil
}

// rawPort is an SCTP port of a network namespace, by the namespace's link in procfs.
type rawPort struct {
	space string
	n     uint16
}

// rawPorts is what rawSCTP answers for: raw sockets hear all ports, and can't tell which ones another has taken.
var rawPorts = rawPortUsers{users: map[rawPort]int{}}

type rawPortUsers struct {
	sync.Mutex
	users map[rawPort]int
}

func (u *rawPortUsers) add(ports []rawPort, n int) {
	u.Lock()
	defer u.Unlock()
	for _, p := range ports {
		if u.users[p] += n; u.users[p] == 0 {
			delete(u.users, p)
		}
	}
}

func (u *rawPortUsers) has(p rawPort) bool {
	u.Lock()
	defer u.Unlock()
	return u.users[p] > 0
}

// payload is what a raw socket's packet carries: an IPv4 one comes with its IP header.
func payload(b []byte, v4 bool) []byte {
	if !v4 {
		return b
	}
	if len(b) == 0 || len(b) < int(b[0]&15)*4 {
		return nil
	}
	return b[int(b[0]&15)*4:]
}
