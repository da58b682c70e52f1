package ebpf

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
)

// policies returns what so many policies on two pods come to, each with a port and a peer of its own, and so many more
// peers: the one for the port lets the other pod pass.
func policies(n, peers int, port uint16, src, dst netip.Addr) []model.PolicyPart {
	id := uint64(0)
	next := func() uint64 { id++; return id }
	l := []model.PolicyPart{&model.PolicyNode{}}
	deny := &model.PeerTable{ID: next(), Otherwise: model.Decision{Verdict: model.VerdictDrop}}
	l = append(l, deny)
	ruleset := func(allowed netip.Addr, net byte) *model.Ruleset {
		r := &model.Ruleset{ID: next(), Default: model.PortEntry{PeerTable: deny}}
		for i := range n {
			t := &model.PeerTable{ID: next(), Otherwise: deny.Otherwise}
			at, a := port+uint16(i), netip.AddrFrom4([4]byte{10, net, byte(i >> 8), byte(i)})
			if i == 0 {
				a = allowed
			}
			p := &model.Peer{Range: model.Range{First: a, Last: a}, Identity: &model.Identity{ID: next()}}
			r.Ports = append(r.Ports, model.PortEntry{Protocol: model.TCP, First: at, Last: at, PeerTable: t})
			l = append(l, t, p, &model.PeerVerdict{PeerTable: t, Identity: p.Identity})
		}
		l = append(l, r)
		return r
	}
	l = append(l, &model.Subject{Addr: src, Out: [2]*model.Ruleset{nil, ruleset(dst, 200)}},
		&model.Subject{Addr: dst, In: [2]*model.Ruleset{nil, ruleset(src, 201)}})
	others := &model.Identity{ID: next()}
	for i := range peers {
		a := netip.AddrFrom4([4]byte{100, byte(i >> 16), byte(i >> 8), byte(i)})
		l = append(l, &model.Peer{Range: model.Range{First: a, Last: a}, Identity: others})
	}
	return l
}

// arm is a node with pods, and what it costs to connect from one to another.
type arm struct {
	name        string
	client      *policytest.Network
	at          string
	conn        net.Conn
	open, round []float64 // CPU time by block, in ns
}

// connections is how many make a block; trips, how many round trips.
const connections, trips = 60, 600

func spent() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// newArm returns an arm with a server that sends back what it gets.
func newArm(b *testing.B, name string, install func(n *policytest.Network)) *arm {
	n := policytest.NewNetwork(b)
	a := &arm{name: name, client: n}
	n.Must(n.Of[web[0]].Do(func() error {
		l, err := net.Listen("tcp", netip.AddrPortFrom(web[0], 20000).String())
		if err != nil {
			return err
		}
		b.Cleanup(func() { l.Close() })
		a.at = l.Addr().String()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { io.Copy(c, c); c.Close() }()
			}
		}()
		return nil
	}))
	install(n)
	n.Must(n.Of[client[0]].Do(func() (err error) {
		a.conn, err = net.Dial("tcp", a.at)
		return err
	}))
	b.Cleanup(func() { a.conn.Close() })
	return a
}

// block measures one block of connections and one of round trips.
func (a *arm) block() error {
	return a.client.Of[client[0]].Do(func() error {
		begin := spent()
		for range connections {
			c, err := net.Dial("tcp", a.at)
			if err != nil {
				return err
			}
			if err := c.(*net.TCPConn).SetLinger(0); err != nil {
				return err
			}
			c.Close()
		}
		half := spent()
		a.open = append(a.open, float64(half-begin)/connections)
		word := make([]byte, 64)
		for range trips {
			if _, err := a.conn.Write(word); err != nil {
				return err
			}
			if _, err := io.ReadFull(a.conn, word); err != nil {
				return err
			}
		}
		a.round = append(a.round, float64(spent()-half)/trips)
		return nil
	})
}

func median(l []float64) float64 {
	slices.Sort(l)
	return l[len(l)/2]
}

// BenchmarkConnection measures a new TCP connection and a round trip between two pods of a node, in CPU time of both,
// by blocks of arms in random order, against no netfilter at all: connection tracking alone, and policies in both
// directions. A second arm without anything shows the noise.
func BenchmarkConnection(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	with := func(count, peers int) func(*policytest.Network) {
		return func(n *policytest.Network) {
			p := open(n)
			l := policies(count, peers, 20000, client[0], web[0])
			n.Must(p.Write(b.Context(), slices.Collect(maps.Values(policytest.Facts(b, p, l))), nil))
		}
	}
	arms := []*arm{
		newArm(b, "none", func(*policytest.Network) {}),
		newArm(b, "none-again", func(*policytest.Network) {}),
		newArm(b, "conntrack", func(n *policytest.Network) {
			n.Must(n.Node.Do(func() error {
				return exec.Command("nft", "add table inet t; add chain inet t f { type filter hook forward priority 0; }; "+
					"add rule inet t f ct state established,related accept").Run()
			}))
		}),
		newArm(b, "ebpf-10", with(10, 0)),
		newArm(b, "ebpf-10000", with(10_000, 100_000)),
	}
	b.ResetTimer()
	for range b.N {
		rand.Shuffle(len(arms), func(i, j int) { arms[i], arms[j] = arms[j], arms[i] })
		for _, a := range arms {
			if err := a.block(); err != nil {
				b.Fatal(err)
			}
		}
	}
	slices.SortFunc(arms, func(a, b *arm) int { return cmp.Compare(a.name, b.name) })
	base := arms[slices.IndexFunc(arms, func(a *arm) bool { return a.name == "none" })]
	open, round := median(base.open), median(base.round)
	b.ReportMetric(open/1000, "none-µs/connection")
	b.ReportMetric(round/1000, "none-µs/trip")
	for _, a := range arms {
		if a != base {
			b.ReportMetric(median(a.open)/open, fmt.Sprint(a.name, "-connection"))
			b.ReportMetric(median(a.round)/round, fmt.Sprint(a.name, "-trip"))
		}
	}
}
