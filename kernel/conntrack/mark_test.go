package conntrack

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// tracking switches connection tracking on in a namespace with its loopback up. Connections begin with a mark of
// another owner's.
const tracking = `table inet t {
	chain translate {
		type nat hook output priority -100
		ip daddr 127.0.9.9 udp dport 53 dnat ip to 127.0.0.1:5353
		ip6 daddr ::1 udp dport 53 redirect to :5353
	}
	chain out {
		type filter hook output priority 0
		ct state new ct mark set 0x10
	}
	chain raw {
		type filter hook output priority -300
		ip daddr 127.0.7.7 tcp flags & syn == syn notrack
		ip saddr 127.0.7.7 tcp flags & syn == syn notrack
	}
}`

// in runs a test in a namespace that tracks connections.
func in(t testing.TB, body func(m *Conn)) {
	netnstest.Do(t, func() {
		for _, c := range [][]string{{"ip", "link", "set", "lo", "up"}, {"nft", "-f", "-"}} {
			cmd := exec.Command(c[0], c[1:]...)
			cmd.Stdin = strings.NewReader(tracking)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %v: %s", c, err, out)
				return
			}
		}
		m, err := Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer m.Close()
		body(m)
	})
}

// send sends a datagram to each of so many ports from first on.
func send(t testing.TB, host string, first, count int) {
	c, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	for i := range count {
		to := netip.AddrPortFrom(netip.MustParseAddr(host), uint16(first+i))
		if _, err := c.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(to)); err != nil {
			t.Error(to, err)
		}
	}
}

// marks returns the marks of all connections, by protocol and destination.
func marks(t testing.TB, m *Conn) map[string]uint32 {
	all := map[string]uint32{}
	_, err := m.Remark(1<<31, func(c Tracked) uint32 {
		all[fmt.Sprintf("%d %s %s", c.Protocol, c.Destination, c.ReplySource)] = c.Mark
		return c.Mark
	})
	if err != nil {
		t.Error(err)
	}
	return all
}

func TestRemarkChangesItsBitsOnly(t *testing.T) {
	in(t, func(m *Conn) {
		send(t, "127.0.0.1", 1000, 1)
		send(t, "::1", 53, 1)
		send(t, "127.0.9.9", 53, 1)
		ping, err := net.Dial("ip4:icmp", "127.0.0.3")
		if err == nil {
			_, err = ping.Write([]byte{8, 0, 0xf7, 0xfe, 0, 1, 0, 0}) // an echo request
		}
		if err != nil {
			t.Error(err)
			return
		}
		defer ping.Close()
		want := map[string]uint32{"17 127.0.0.1:1000 127.0.0.1:1000": 0x10, "17 [::1]:53 [::1]:5353": 0x10,
			"17 127.0.9.9:53 127.0.0.1:5353": 0x10, "1 127.0.0.3:0 127.0.0.3:0": 0x10}
		check := func() {
			got := marks(t, m)
			for k, v := range want {
				if got[k] != v {
					t.Errorf("%s has mark %#x, want %#x", k, got[k], v)
				}
			}
			if len(got) != len(want) {
				t.Errorf("connections %v, want %v", got, want)
			}
		}
		check()
		for _, c := range []struct {
			mask, set uint32
			changed   int
		}{{1 << 31, 1 << 31, 4}, {1 << 31, 1 << 31, 0}, {0x3, 0xff, 4}, {1 << 31, 0, 4}} {
			changed, err := m.Remark(c.mask, func(Tracked) uint32 { return c.set })
			if err != nil || changed != c.changed {
				t.Errorf("%+v: %d changed, %v", c, changed, err)
			}
			for k := range want {
				want[k] = want[k]&^c.mask | c.set&c.mask
			}
			check()
		}
	})
}

func TestRemarkOfManyMoreThanABatch(t *testing.T) {
	in(t, func(m *Conn) {
		const count = 3*batchLength + 7
		send(t, "127.0.0.1", 2000, count)
		if changed, err := m.Remark(1, func(Tracked) uint32 { return 1 }); changed != count || err != nil {
			t.Errorf("%d changed, %v", changed, err)
		}
		for k, v := range marks(t, m) {
			if v != 0x11 {
				t.Errorf("%s has mark %#x", k, v)
			}
		}
	})
}

func TestRemarkUnmarked(t *testing.T) {
	in(t, func(m *Conn) {
		send(t, "127.0.0.1", 2000, 3)
		mark := func(port uint16) func(Tracked) uint32 {
			return func(c Tracked) uint32 {
				if c.Destination.Port() == port {
					return 2
				}
				return 0
			}
		}
		if changed, err := m.Remark(2, mark(2001)); changed != 1 || err != nil {
			t.Errorf("%d changed, %v", changed, err)
		}
		seen := 0
		changed, err := m.RemarkUnmarked(2, func(c Tracked) uint32 { seen++; return mark(2002)(c) })
		if seen != 2 || changed != 1 || err != nil {
			t.Errorf("%d seen and %d changed, %v: want 2 and 1", seen, changed, err)
		}
		for k, v := range marks(t, m) {
			if want := uint32(0x12); strings.Contains(k, ":2000 ") && v != 0x10 || !strings.Contains(k, ":2000 ") && v != want {
				t.Errorf("%s has mark %#x", k, v)
			}
		}
	})
}

func TestRemarkOfAConnectionThatEnded(t *testing.T) {
	in(t, func(m *Conn) {
		c, err := Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		send(t, "127.0.0.1", 2000, 2)
		changed, err := m.Remark(1, func(f Tracked) uint32 {
			_, err := c.Cut(func(o Flow) bool { return o == f.Flow && o.Destination.Port() == 2000 })
			if err != nil {
				t.Error(err)
			}
			return 1
		})
		if changed != 1 || err != nil {
			t.Errorf("%d changed, %v: want 1 and none", changed, err)
		}
	})
}

func TestMidstream(t *testing.T) {
	in(t, func(m *Conn) {
		for addr, midstream := range map[string]bool{"127.0.0.1": false, "127.0.7.7": true} {
			l, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			seen := false
			_, err = m.Remark(0, func(f Tracked) uint32 {
				if f.Destination.Addr().String() == addr && f.Protocol == unix.IPPROTO_TCP {
					if seen = true; f.Midstream != midstream {
						t.Errorf("%+v: want midstream %v", f, midstream)
					}
				}
				return 0
			})
			if err != nil || !seen {
				t.Errorf("%s: seen %v, %v", addr, seen, err)
			}
		}
	})
}

func FuzzTracked(f *testing.F) {
	var b netlink.Buffer
	b.Nest(ctaOriginal, func() {
		b.Nest(ctaTupleIP, func() { b.Bytes(ctaSrc4, []byte{10, 0, 0, 1}); b.Bytes(ctaDst4, []byte{10, 0, 0, 2}) })
		b.Nest(ctaTupleProto, func() { b.Uint8(ctaProtoNumber, 6); b.BE16(ctaSrcPort, 1); b.BE16(ctaDstPort, 2) })
	})
	f.Add([]byte(b))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, _, ok := tracked(b); ok && !c.ReplySource.Addr().IsValid() {
			t.Errorf("%+v has no reply", c)
		}
	})
}

func BenchmarkRemark(b *testing.B) {
	in(b, func(m *Conn) {
		for i := range 5 {
			send(b, fmt.Sprintf("127.0.0.%d", i+1), 1000, 20000)
		}
		for _, arm := range []struct {
			name string
			flip uint32
		}{{"read", 0}, {"write", 1}} {
			b.Run(arm.name, func(b *testing.B) {
				n := 0
				for b.Loop() {
					if _, err := m.Remark(1, func(c Tracked) uint32 { n++; return c.Mark ^ arm.flip }); err != nil {
						b.Error(err)
					}
				}
				b.ReportMetric(float64(n)/float64(b.N), "connections/op")
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/connection")
			})
		}
		b.Run("unmarked", func(b *testing.B) { // of which there are none
			if _, err := m.Remark(1, func(Tracked) uint32 { return 1 }); err != nil {
				b.Error(err)
			}
			for b.Loop() {
				if _, err := m.RemarkUnmarked(1, func(Tracked) uint32 { return 1 }); err != nil {
					b.Error(err)
				}
			}
		})
	})
}
