package userspace

import (
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// bounded has the plane's connections and flows together have no more than n file descriptors.
func (s *stage) bounded(n int64) {
	s.plane.limit = n
	s.plane.bounds.set(n)
}

// reports has the plane report its bounds to a channel.
func (s *stage) reports() <-chan string {
	texts := make(chan string, 100)
	s.plane.OnWarning(func(text string) { texts <- text })
	return texts
}

// await waits until holds.
func (s *stage) await(what string, holds func() bool) {
	s.Helper()
	for end := time.Now().Add(patience); !holds(); {
		if time.Now().After(end) {
			s.Fatal(what)
		}
		time.Sleep(time.Millisecond)
	}
}

// visit connects the client and reads until the connection's end.
func (s *stage) visit(to string) error {
	c, err := s.dial("tcp4", to)
	if err == nil {
		_, err = io.ReadAll(c)
	}
	return err
}

// leadsTo returns a frontend at the vip with a port there as its only backend.
func leadsTo(protocol model.Protocol, port, to uint16) (*model.Frontend, *model.Pool) {
	p := &model.Pool{ID: 1000 + uint64(port), Name: "loop", Protocol: protocol,
		Backends: []model.Backend{{Addr: netip.AddrPortFrom(vip, to)}}}
	t := model.Target{Pool: p}
	return &model.Frontend{Service: "loop", Entry: model.Entry{Addr: vip, Port: port, Protocol: protocol}, Internal: t,
		External: t}, p
}

// A frontend that has itself as its backend takes its share of file descriptors and no more, while others are served.
func TestLoopingFrontendLeavesDescriptorsToOthers(t *testing.T) {
	const limit = 2000
	s := newStage(t)
	s.bounded(limit)
	texts := s.reports()
	l := s.listen(8080)
	s.udp(53)
	loopTCP, pool1 := leadsTo(model.TCP, 90, 90)
	loopUDP, pool2 := leadsTo(model.UDP, 91, 91)
	tcp, pool3 := serves(model.TCP, 80, 8080)
	udp, pool4 := serves(model.UDP, 80, 53)
	s.check(s.apply(pool1, pool2, pool3, pool4, loopTCP, loopUDP, tcp, udp))
	refused := func() uint64 { return s.plane.Refused().Frontend + s.plane.Refused().Client }

	datagrams, err := s.dial("udp4", vip.String()+":91")
	s.check(err)
	s.await("a datagram that goes around meets no bound", func() bool {
		_, err := datagrams.Write([]byte("around")) // again, since a first one may be lost
		s.check(err)
		return refused() > 0
	})
	for round := range 5 {
		before := refused()
		if err := s.visit(vip.String() + ":90"); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("round %d: a connection that goes around ends with %v", round, err)
		}
		if refused() == before {
			t.Errorf("round %d: no connection was refused", round)
		}
		client, server := s.pair(l)
		s.exchange(client, server, "served")
		other, err := s.dial("udp4", vip.String()+":80")
		s.check(err)
		if a, err := s.roundTrip(other, "x"); err != nil || a != "53 x" {
			t.Errorf("round %d: another frontend answers %q, %v", round, a, err)
		}
	}
	for _, f := range []*model.Frontend{loopTCP, loopUDP} {
		s.plane.bounds.mu.Lock()
		if n := s.plane.fronts[f.Entry].claimed; n > limit/frontendShare {
			t.Errorf("%s has %d file descriptors of %d", f.Entry, n, limit)
		}
		s.plane.bounds.mu.Unlock()
	}
	if text := <-texts; !strings.Contains(text, "frontend "+loopUDP.Entry.String()) ||
		!strings.Contains(text, "LimitNOFILE") {
		t.Errorf("the report says %q", text)
	}
	if len(texts) > 0 {
		t.Errorf("a second report within a minute: %q", <-texts)
	}
	s.check(s.apply())
	s.await("claims are left when all has ended", func() bool {
		s.plane.bounds.mu.Lock()
		defer s.plane.bounds.mu.Unlock()
		return len(s.plane.bounds.clients) <= 1 // the connections that were served go on
	})
}

// A client with its share is refused at once, and others are served.
func TestClientHasNoMoreThanItsShare(t *testing.T) {
	s := newStage(t)
	texts := s.reports()
	s.bounded(8 * clientShare) // a client has 8: 3 connections and 2 flows
	l := s.listen(8080)
	s.udp(53)
	tcp, pool1 := serves(model.TCP, 80, 8080)
	udp, pool2 := serves(model.UDP, 80, 53)
	s.check(s.apply(pool1, pool2, tcp, udp))
	for range 3 {
		s.pair(l)
	}
	for range 2 {
		c, err := s.dial("udp4", vip.String()+":80")
		s.check(err)
		if a, err := s.roundTrip(c, "x"); err != nil || a != "53 x" {
			t.Errorf("a flow within the share: %q, %v", a, err)
		}
	}
	if err := s.visit(vip.String() + ":80"); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a connection beyond the share ends with %v", err)
	}
	d, err := s.dial("udp4", vip.String()+":80")
	s.check(err)
	s.await("no datagram was refused", func() bool {
		_, err := d.Write([]byte("x"))
		s.check(err)
		return s.plane.Refused().Client > 1
	})
	if n := s.plane.open.Load(); n != 8 {
		t.Errorf("%d file descriptors are open, of a share of 8", n)
	}
	if text := <-texts; !strings.Contains(text, "client 10.1.0.2 of frontend") {
		t.Errorf("the report says %q", text)
	}
	another, err := s.dialFrom(s.node, "tcp4", vip.String()+":80")
	s.check(err)
	server, err := l.AcceptTCP()
	s.check(err)
	defer server.Close()
	s.exchange(another, server, "another client")
}
