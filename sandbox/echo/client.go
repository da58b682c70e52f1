package echo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Options say how to ask. The zero value asks from any address and port, by a connected socket.
type Options struct {
	From        netip.AddrPort // local address, local port, or both; zero parts are the kernel's choice
	Unconnected bool           // UDP: by a socket that isn't connected, each datagram with its address
	// bytes of each question, MaxSize at most, and of its answer; fewer than the text are the text's
	Size int
}

// Request queries once: a new connection, or a datagram from a new port. It is called on the thread whose network
// namespace the question leaves from, such as within sandbox.Host.Do, and waits until ctx ends. One thing it can't see:
// where neither the kernel nor a Server speaks SCTP on the asker's own host, a question to an address of that very host
// is met with silence, since the asking raw socket itself counts as a taker.
func Request(ctx context.Context, p model.Protocol, to netip.AddrPort, o Options) (Reply, error) {
	h, err := Open(ctx, p, to, o)
	if err != nil {
		return Reply{}, err
	}
	defer h.Close()
	return h.Request(ctx)
}

// Flow is a connection that can be asked again and again: a TCP or SCTP connection, or packets from one port.
type Flow struct {
	s        *socket
	what     string // for errors
	proto    model.Protocol
	to       netip.AddrPort
	local    netip.AddrPort
	opts     Options
	packet   bool   // packets, not a stream
	rest     []byte // of a stream: bytes after the last whole line
	requests int
}

// Open connects as Ask does. Later calls of the Held's methods may be made on any thread, by one goroutine at a time.
func Open(ctx context.Context, p model.Protocol, to netip.AddrPort, o Options) (*Flow, error) {
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	h := &Flow{proto: p, to: to, opts: o, what: fmt.Sprintf("ask %s/%s", to, p)}
	kind := unix.SOCK_STREAM
	switch {
	case p == model.UDP:
		kind, h.packet = unix.SOCK_DGRAM, true
	case p == model.SCTP && !haveSCTP():
		kind, h.packet = unix.SOCK_RAW, true
	case p != model.TCP && p != model.SCTP:
		return nil, fmt.Errorf("%s: echo knows tcp, udp and sctp", h.what)
	}
	var err error
	if h.s, err = open(inet.Family(to.Addr()), kind, p); err != nil {
		return nil, fmt.Errorf("%s: %w", h.what, err)
	}
	defer h.s.during(ctx)()
	if err := h.connect(kind); err != nil {
		h.Close()
		return nil, classify(ctx, h.what, err)
	}
	return h, nil
}

// ports counts the local ports that were chosen, by the inode of the network namespace: *atomic.Uint32.
var ports sync.Map

// nextPort returns a local port for a flow of packets, of the kernel's usual range: one that none of the calling
// thread's network namespace has had since all others. The kernel chooses by chance, perhaps one of a flow that
// connection tracking has not forgotten, whose packets are then of that flow, whatever policies say of new ones.
func nextPort() (uint16, error) {
	inode, err := netns.Inode()
	first := new(atomic.Uint32)
	first.Store(rand.Uint32N(1 << 16))
	n, _ := ports.LoadOrStore(inode, first)
	return uint16(32768 + n.(*atomic.Uint32).Add(1)%28232), err
}

func (h *Flow) connect(kind int) (err error) {
	from := h.opts.From
	if !from.Addr().IsValid() {
		from = netip.AddrPortFrom(inet.Unspecified(h.to.Addr()), from.Port())
	}
	if from.Port() == 0 && h.packet {
		port, err := nextPort()
		if err != nil {
			return err
		}
		from = netip.AddrPortFrom(from.Addr(), port)
	}
	if kind == unix.SOCK_RAW { // no ports: those are ours to choose
		h.local = from
		return h.attach(netip.AddrPortFrom(from.Addr(), 0), netip.AddrPortFrom(h.to.Addr(), 0))
	}
	if err := h.attach(from, h.to); err != nil {
		return err
	}
	h.local, err = h.s.name(unix.Getsockname)
	return err
}

// attach binds the socket where an address or port is given, and connects it unless it is to stay unconnected.
func (h *Flow) attach(from, to netip.AddrPort) error {
	if from.Port() != 0 {
		// A port that was used a moment ago is free at once, and free again when we leave.
		if err := h.s.option(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
	}
	if from.Port() != 0 || !from.Addr().IsUnspecified() {
		if err := h.s.bind(from); err != nil {
			return err
		}
	}
	if h.packet || h.proto == model.SCTP { // else an ICMP error is not heard of
		if err := h.s.byFamily(unix.IP_RECVERR, unix.IPV6_RECVERR, 1); err != nil {
			return err
		}
	}
	if h.proto == model.SCTP && !h.packet {
		if err := h.s.hurry(); err != nil {
			return err
		}
	}
	if h.opts.Unconnected && h.proto == model.UDP {
		return nil
	}
	return h.s.connect(to)
}

// Local is the address and port that the Held asks from. Where packets choose their address as they leave, it is
// 0.0.0.0 or ::.
func (h *Flow) Local() netip.AddrPort { return h.local }

// Close ends the connection. One from a port that was asked for is reset, so that the port is free at once.
func (h *Flow) Close() error {
	if h.opts.From.Port() != 0 && !h.packet {
		h.s.control(func(fd int) error {
			return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		})
	}
	return h.s.Close()
}

// Request queries once more. Late answers to earlier questions are passed over.
func (h *Flow) Request(ctx context.Context) (Reply, error) {
	defer h.s.during(ctx)()
	h.requests++
	request := h.line
	switch {
	case h.packet && h.proto == model.SCTP:
		request = h.init
	case h.packet:
		request = h.datagram
	}
	a, err := request(strconv.Itoa(h.requests))
	return a, classify(ctx, h.what, err)
}

// line queries over a stream.
func (h *Flow) line(message string) (a Reply, err error) {
	if _, err := h.s.Write(padded([]byte(message), h.opts.Size)); err != nil {
		return a, err
	}
	for a.Said != message {
		l, err := h.readLine()
		if err != nil {
			return a, err
		}
		if a, err = parseReply(l); err != nil {
			return a, err
		}
	}
	return a, nil
}

// readLine reads up to a newline. A line that comes in parts, over several calls, is whole in the last.
func (h *Flow) readLine() ([]byte, error) {
	for len(h.rest) < MaxSize+2048 {
		if line, rest, whole := bytes.Cut(h.rest, []byte{'\n'}); whole {
			h.rest = rest
			return line, nil
		}
		buf := make([]byte, 2048)
		n, err := h.s.Read(buf)
		h.rest = append(h.rest, buf[:n]...)
		if err == io.EOF {
			return nil, errors.New("connection closed without an answer")
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, errors.New("answer without an end")
}

// datagram queries by UDP. A question that is too long for the path is asked again, once a router's ICMP message has
// said so: then the kernel knows.
func (h *Flow) datagram(message string) (a Reply, err error) {
	q := packet{data: padded([]byte(message), h.opts.Size)}
	if h.opts.Unconnected {
		q.from = h.to
	}
	if err := h.s.send(q); err != nil {
		return a, err
	}
	buf := make([]byte, h.opts.Size+2048)
	for a.Said != message {
		r, err := h.s.receive(buf)
		if errors.Is(err, unix.EMSGSIZE) {
			if err := h.s.send(q); err != nil {
				return a, err
			}
			continue
		}
		if err != nil {
			return a, err
		}
		if r.from != h.to {
			return a, fmt.Errorf("answer comes from %s", r.from)
		}
		if a, err = parseReply(r.data); err != nil {
			return a, err
		}
	}
	return a, nil
}

// init queries by an SCTP INIT chunk over a raw socket.
func (h *Flow) init(string) (a Reply, err error) {
	tag := rand.Uint32() | 1
	q := segment{Src: h.local.Port(), Dst: h.to.Port(), Chunk: chunkInit, Init: tag}
	if err := h.s.send(packet{data: q.marshal()}); err != nil {
		return a, err
	}
	buf := make([]byte, 2048)
	for {
		r, err := h.s.receive(buf)
		if err != nil {
			return a, err
		}
		in, err := parseSegment(payload(r.data, h.to.Addr().Is4()))
		switch {
		case err != nil, in.Src != q.Dst, in.Dst != q.Src, in.Tag != tag:
			continue // not ours, or not whole
		case in.Chunk == chunkAbort:
			return a, fmt.Errorf("SCTP ABORT: %w", unix.ECONNREFUSED)
		case in.Chunk == chunkInitAck:
			return parseReply(in.Cookie)
		}
	}
}
