package policytest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// connection is both ends of one of TCP.
type connection struct{ client, server net.Conn }

// connect opens a connection and says a word each way.
func (n *Network) connect(src, dst netip.Addr) (c connection) {
	n.Helper()
	var l net.Listener
	n.Must(n.Of[dst].Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(dst, 0).String())
		return err
	}))
	defer l.Close()
	n.Must(n.Of[src].Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(src, 0)), Timeout: 10 * time.Second}
		c.client, err = d.Dial("tcp", l.Addr().String())
		return err
	}))
	n.Cleanup(func() { c.client.Close() })
	var err error
	c.server, err = l.Accept()
	n.Must(err)
	n.Cleanup(func() { c.server.Close() })
	n.Must(errors.Join(say(c.client, c.server, 5*time.Second), say(c.server, c.client, 5*time.Second)))
	return c
}

// say sends a word from one end to the other.
func say(from, to net.Conn, wait time.Duration) error {
	_, err := from.Write([]byte("word"))
	if err == nil {
		to.SetReadDeadline(time.Now().Add(wait))
		_, err = to.Read(make([]byte, 9))
	}
	return err
}

// mark sets a bit of the marks of all connections that the node tracks.
func (n *Network) mark(bit, to uint32) {
	n.Helper()
	n.Must(n.Node.Do(func() error {
		m, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer m.Close()
		_, err = m.Remark(bit, func(conntrack.Tracked) uint32 { return to })
		return err
	}))
}

// packetFlows opens flows of UDP and SCTP, and sends a packet each way.
func (n *Network) packetFlows(src, dst netip.Addr) (l []*echo.Flow) {
	n.Helper()
	for _, p := range []echo.Port{{Number: 53, Protocol: model.UDP}, {Number: 80, Protocol: model.SCTP}} {
		n.Must(n.Of[src].Do(func() error {
			f, err := echo.Open(n.Context(), p.Protocol, netip.AddrPortFrom(dst, p.Number), echo.Options{})
			if err == nil {
				n.Cleanup(func() { f.Close() })
				l = append(l, f)
				_, err = f.Request(n.Context())
			}
			return err
		}))
	}
	return l
}

// tcpFlow opens a connection to port 80, and sends a word each way.
func (n *Network) tcpFlow(src, dst netip.Addr) (f *echo.Flow) {
	n.Helper()
	n.Must(n.Of[src].Do(func() (err error) {
		if f, err = echo.Open(n.Context(), model.TCP, netip.AddrPortFrom(dst, 80), echo.Options{}); err == nil {
			n.Cleanup(func() { f.Close() })
			_, err = f.Request(n.Context())
		}
		return err
	}))
	return f
}

// answered fails unless a packet of a flow is answered as expected.
func (n *Network) answered(f *echo.Flow, expected bool) {
	n.Helper()
	wait := 150 * time.Millisecond
	if expected {
		wait = 5 * time.Second
	}
	ctx, cancel := context.WithTimeout(n.Context(), wait)
	defer cancel()
	if _, err := f.Request(ctx); (err == nil) != expected {
		n.Errorf("%s: answered: %v, want %v", f.Local(), err, expected)
	}
}

// cut marks connections, has the engine cut them, and restores those that can go on.
func (s Suite[K]) cut(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	world := Decide(objects["none.yaml"])
	const bit = 1 << 30
	hold := func(mark uint32) {
		node := *world.Now.Node
		node.CutMark = mark
		world.Now.Node = &node
		e.hold(world)
	}
	hold(0)
	client, web := Behind[2], Behind[0]
	var tcp []connection
	var others []*echo.Flow
	for i := range client {
		tcp = append(tcp, e.connect(client[i], web[i]), e.connect(client[i], web[i]))
		others = append(others, e.packetFlows(client[i], web[i])...)
	}
	goOn := func() {
		t.Helper()
		for _, c := range tcp {
			e.Must(say(c.client, c.server, 5*time.Second))
		}
		for _, f := range others {
			e.answered(f, true)
		}
	}
	e.mark(bit>>1, bit>>1) // another program's
	hold(bit)
	goOn()
	hold(0)
	e.mark(bit, bit)
	goOn() // marks alone cut nothing
	hold(bit)
	for _, f := range others {
		e.answered(f, false)
	}
	for i, c := range tcp {
		ends := []net.Conn{c.client, c.server}
		if i%2 == 1 {
			slices.Reverse(ends)
		}
		for _, end := range ends {
			if err := say(end, end, 5*time.Second); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("an end that speaks: %v, want a reset", err)
			}
		}
	}
	other := e.connect(client[0], Behind[1][0])
	e.mark(bit, 0)
	for _, f := range others {
		e.answered(f, true)
	}
	hold(0)
	e.Must(say(other.client, other.server, 5*time.Second))
}

// midstream installs policies under connections that the kernel doesn't track yet: those that are allowed go on for
// good, also where they are idle meanwhile.
func (s Suite[K]) midstream(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	client, web := Behind[2], Behind[0]
	var running []connection
	for i := range client {
		for range 3 {
			running = append(running, e.connect(client[i], web[i]))
		}
	}
	var allowed []*echo.Flow
	for i := range client {
		for range 2 {
			allowed = append(allowed, e.tcpFlow(client[i], web[i]))
		}
	}
	e.hold(Decide(objects["selector-on-port.yaml"]))
	for i := range client {
		e.answered(allowed[2*i], true)
		if e.Passes(e.Packet(client[i], web[i], Served[1]), false) {
			t.Error("a new connection passes")
		}
		e.Must(say(running[3*i].client, running[3*i].server, 5*time.Second))
		e.Must(say(running[3*i+1].server, running[3*i+1].client, 5*time.Second))
	}
	e.Must(e.Node.Do(s.EndMidstream))
	if missing, extra := Read(t, e.Engine, e.held); len(missing)+len(extra) > 0 {
		t.Errorf("when the minute is over: missing %v, extra %v", missing, extra)
	}
	for _, f := range allowed {
		e.answered(f, true)
	}
	for i := range client {
		if err := say(running[3*i+2].client, running[3*i+2].server, 300*time.Millisecond); err == nil {
			t.Error("when the minute is over, a connection in mid-stream goes on")
		}
		e.Must(say(running[3*i].server, running[3*i].client, 5*time.Second))
	}
}
