package policytest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// floodTime is for how long two worlds follow each other while datagrams are sent that both forbid.
const floodTime = 400 * time.Millisecond

// changes has worlds follow each other while datagrams are sent as fast as possible that the policies of both forbid:
// none may arrive.
func (s Suite[K]) changes(t *testing.T) {
	e := s.open(t)
	names, objects := Worlds(t)
	worlds := make([]*Decided, len(names))
	for i, name := range names {
		worlds[i] = Decide(objects[name])
	}
	r := rand.New(rand.NewPCG(11, 12))
	sent, pairs := uint64(0), 0
	for a := range worlds {
		for b := range a {
			both := e.forbidden(r, worlds[a].Now, worlds[b].Now)
			if len(both) == 0 {
				continue
			}
			n, arrived := e.alternate(worlds[a], worlds[b], both)
			if sent, pairs = sent+n, pairs+1; len(arrived) > 0 {
				t.Errorf("%s and %s follow each other: though both forbid it, %v", names[a], names[b], arrived)
			}
		}
	}
	t.Logf("%d pairs of worlds, %d forbidden datagrams", pairs, sent)
	if sent < 1000 {
		t.Error("too few to tell")
	}
}

// alternate has two worlds follow each other while datagrams are sent, and returns how many were, and which arrived.
func (e *engine[K]) alternate(a, b *Decided, packets []verdict.Packet) (sent uint64, arrived []string) {
	e.hold(b)
	there := e.held
	e.hold(a)
	stop := e.flood(packets)
	to, back := Difference(there, e.held), Difference(e.held, there)
	for end := time.Now().Add(floodTime); time.Now().Before(end); {
		e.Must(e.Write(e.T.Context(), to, back))
		e.Must(e.Write(e.T.Context(), back, to))
	}
	return stop()
}

// forbidden returns datagrams that two worlds forbid, of at most three pods that send.
func (n *Network) forbidden(r *rand.Rand, a, b *model.Policies) (l []verdict.Packet) {
	for _, p := range n.Packets(r, 400) {
		if p.Protocol != model.UDP || len(l) == 3 || slices.ContainsFunc(Own, func(o netip.Addr) bool {
			return o == p.Src.Addr() || o == p.Dst.Addr()
		}) || slices.Contains(unlisted, p.Src.Addr()) || slices.Contains(unlisted, p.Dst.Addr()) {
			continue
		}
		if end := dropsAt(a, p); end != "" && end == dropsAt(b, p) {
			l = append(l, p)
		}
	}
	return l
}

// dropsAt returns the pod and the direction whose policies drop a packet, or "". A packet may meet one world's in one
// direction and another's in the other.
func dropsAt(s *model.Policies, p verdict.Packet) string {
	o := verdict.Policy(s, p)
	if len(o.Steps) == 0 || o.Verdict != model.VerdictDrop {
		return ""
	}
	last := o.Steps[len(o.Steps)-1]
	return last.Direction.String() + " of " + last.Subject.Pod
}

// flood sends datagrams again and again, until the function that it returns is called: that returns how many were sent,
// and which arrived.
func (n *Network) flood(packets []verdict.Packet) (stop func() (sent uint64, arrived []string)) {
	var wg sync.WaitGroup
	var count atomic.Uint64
	done := make(chan struct{})
	receive := make([]func() int, len(packets))
	for i, p := range packets {
		receive[i] = n.receiver(p)
		fd := n.socket(p)
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				for range 100 {
					unix.Write(fd, []byte("flood"))
				}
				count.Add(100)
			}
		})
	}
	return func() (uint64, []string) {
		close(done)
		wg.Wait()
		var arrived []string
		for i, p := range packets {
			if came := receive[i](); came > 0 {
				arrived = append(arrived, fmt.Sprintf("%d of %v arrived", came, p))
			}
		}
		return count.Load(), arrived
	}
}

// socket returns a datagram socket from a packet's source to its destination.
func (n *Network) socket(p verdict.Packet) (fd int) {
	n.Must(n.Of[p.Src.Addr()].Do(func() (err error) {
		if fd, err = unix.Socket(inet.Family(p.Src.Addr()), unix.SOCK_DGRAM, 0); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, inet.Sockaddr(p.Src)), unix.Connect(fd, inet.Sockaddr(p.Dst)))
	}))
	n.Cleanup(func() { unix.Close(fd) })
	return fd
}

// receiver returns what reports whether datagrams of a packet's source have arrived at its destination.
func (n *Network) receiver(p verdict.Packet) (came func() int) {
	family, header := unix.AF_INET, 20
	if p.Src.Addr().Is6() {
		family, header = unix.AF_INET6, 0
	}
	var fd int
	n.Must(n.Of[p.Dst.Addr()].Do(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
		return err
	}))
	n.Cleanup(func() { unix.Close(fd) })
	return func() (count int) {
		for b := make([]byte, 200); ; {
			l, _, err := unix.Recvfrom(fd, b, 0)
			if errors.Is(err, unix.EAGAIN) {
				return count
			}
			n.Must(err)
			if l >= header+8 && binary.BigEndian.Uint16(b[header:]) == p.Src.Port() {
				count++
			}
		}
	}
}
