package ebpf_test

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	cebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/network/masquerade"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// TestNoRedirectPastHooksAcross is TestNoRedirectPastHooks for packets to a pod of another node. What is at the device
// that leads there sees those that are redirected.
func TestNoRedirectPastHooksAcross(t *testing.T) {
	withPodsOf(t, podsWorld{across: true}, func(w *twoPods) {
		w.redirects("with nothing in the way")
		for _, c := range pastHooks {
			if c.stays {
				continue // it would stay for those behind it
			}
			w.run(c.put)
			wait := patience
			if c.silent {
				wait = silence
			}
			for i := range 6 { // of the first, one may be due by the stack
				six := i%2 == 0
				if _, n, err := w.request(model.UDP, six, wait, echo.Options{}); n != 0 && c.slow != "device" ||
					(err != nil) != c.silent {
					t.Errorf("%s, IPv6 %t: %d packets were redirected, answered: %v", c.name, six, n, err)
				}
			}
			w.run(c.undo)
			w.watched(func() { w.redirects("without " + c.name) })
		}
	})
}

// TestProgramsAcross has a program at the device that leads to another node handle what is redirected there.
func TestProgramsAcross(t *testing.T) {
	drop := dropper(t, cebpf.SchedCLS, 2 /* TC_ACT_SHOT */)
	withPodsOf(t, podsWorld{across: true}, func(w *twoPods) {
		w.redirects("with nothing in the way")
		i, err := net.InterfaceByName("b")
		if err != nil {
			t.Fatal(err)
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: i.Index, Program: drop, Attach: cebpf.AttachTCXEgress})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		redirected := uint64(0)
		for range 4 {
			each(func(protocol model.Protocol, six bool) {
				_, n, err := w.request(protocol, six, silence, echo.Options{})
				if redirected += n; err == nil {
					t.Errorf("%s (IPv6 %t) passes a program that drops", protocol, six)
				}
			})
		}
		if redirected == 0 {
			t.Error("no packet was redirected to the program")
		}
	})
}

// TestNoRedirectToTunnels has nothing redirected to a device without Ethernet headers: one of many ends, such as
// IPIP's, finds the one that a packet is for by its route, which no redirected packet has.
func TestNoRedirectToTunnels(t *testing.T) {
	withPodsOf(t, podsWorld{across: true}, func(w *twoPods) {
		w.redirects("with nothing in the way")
		w.run("ip tuntap add name tunnel mode tun && ip link set tunnel up")
		w.route("replace", "b", "tunnel")
		for i := range 10 {
			if _, n, err := w.request(model.UDP, i%2 == 0, silence/3, echo.Options{}); n != 0 || err == nil {
				t.Errorf("%d packets were redirected to a tunnel, answered: %v", n, err)
			}
		}
	})
}

// TestTapAcross has a listener at the device that leads to another node see what is redirected there.
func TestTapAcross(t *testing.T) {
	withPodsOf(t, podsWorld{across: true}, func(w *twoPods) {
		tap := openTap(t, "b")
		defer unix.Close(tap)
		w.redirects("beside a tap")
		for frame := make([]byte, 2048); ; {
			n, err := unix.Read(tap, frame)
			if err != nil {
				t.Fatalf("no packet to another node was seen: %v", err)
			}
			if n > 34 && frame[11] == 1 && netip.AddrFrom4([4]byte(frame[30:])).String() == podAddrs["b"][false] {
				return
			}
		}
	})
}

// TestNextHopMoves has another node's link-layer address change without a word: the kernel has to notice while all is
// redirected.
func TestNextHopMoves(t *testing.T) {
	withPodsOf(t, podsWorld{across: true}, func(w *twoPods) {
		w.run("for f in ipv4 ipv6; do sysctl -qw net.$f.neigh.b.base_reachable_time_ms=500 " +
			"net.$f.neigh.b.delay_first_probe_time=1 net.$f.neigh.b.retrans_time_ms=100; done")
		w.redirects("at first")
		for _, six := range []bool{false, true} { // nothing looks for it, unless packets use it
			w.run("ip neigh replace " + podAddrs["b"][six] + " dev b lladdr 02:00:00:00:02:02 nud stale")
		}
		w.run(strings.ReplaceAll("ip -n B link set dev eth0 address 02:00:00:00:02:99; "+
			"for a in 169.254.1.1 fe80::1; do ip -n B neigh replace $a dev eth0 lladdr 02:00:00:00:02:01; done", // gone with it
			"B", w.pods["b"].Name))
		for _, six := range []bool{false, true} {
			for end := time.Now().Add(30 * time.Second); ; {
				who, _, err := w.request(model.UDP, six, silence, echo.Options{})
				if err == nil && who == "b" {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("IPv6 %t: no packet reaches the node at its new link-layer address", six)
				}
			}
		}
		w.redirects("to the new link-layer address")
	})
}

// TestAcrossInOwnNetwork has packets to pods of other nodes redirected where the pod network is Fairlead's, but none to
// nodes themselves: the guard judges these.
func TestAcrossInOwnNetwork(t *testing.T) {
	withPodsOf(t, podsWorld{network: true, across: true}, func(w *twoPods) {
		p, err := masquerade.NewDevice()
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		write := func(podsOnly bool) {
			var facts []masquerade.RangeFact
			for _, six := range []bool{false, true} {
				host := func(pod string) netip.Prefix {
					a := netip.MustParseAddr(podAddrs[pod][six])
					return netip.PrefixFrom(a, a.BitLen())
				}
				facts = append(facts, p.Render(&model.Network{Ranges: []netip.Prefix{host("a")},
					Masquerade: &model.Masquerade{}})...)
				facts = append(facts, p.Render(&model.Route{To: host("b"), PodsOnly: podsOnly})...)
			}
			if err := p.Write(t.Context(), facts, nil); err != nil {
				t.Fatal(err)
			}
		}
		write(true)
		time.Sleep(64 * 10 * time.Millisecond) // cached routes have expired
		for range 100 {
			for _, six := range []bool{false, true} {
				if _, n, err := w.request(model.UDP, six, patience, echo.Options{}); err != nil || n > 1 {
					t.Fatalf("%d packets to a node and back were redirected: %v", n, err)
				}
			}
		}
		write(false)
		w.redirects("to pods of another node")
		if c, err := w.plane.PacketCounts(); err != nil || c.Redirected == 0 {
			t.Error(fmt.Sprint(c), err)
		}
	})
}
