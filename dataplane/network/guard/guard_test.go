package guard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/dataplane/network/attachment"
	"fairlead.dev/fairlead/dataplane/network/route"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// world is a node on a wire with two pods, and its planes.
type world struct {
	*testing.T
	node, wire *netns.Namespace
	pods       []*netns.Namespace
	guard      *Plane
	listeners  []net.PacketConn // of both families, on the node
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

var mac = [6]byte{0x02, 0x66, 192, 168, 0, 1}

// parts returns all of the node's parts.
func (w *world) parts() []model.NetworkPart {
	addresses := func(l ...string) (out []netip.Addr) {
		for _, s := range l {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	prefixes := func(l ...string) (out []netip.Prefix) {
		for _, s := range l {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	far := [6]byte{0x02, 0x66, 192, 168, 0, 2}
	l := []model.NetworkPart{
		&model.Network{Node: "a", Ranges: prefixes("10.244.1.0/24", "fd00:1::/64"), MTU: 1400, Tunnel: &model.Tunnel{VNI: 7,
			Port: 4789, Local: netip.MustParseAddr("192.168.0.1"), MAC: mac, Uplink: "eth0", MTU: 1400,
			Own: addresses("10.244.1.1", "fd00:1::1")}},
		&model.Route{Node: "b", To: prefixes("10.244.2.0/24")[0], Hop: model.Tunneled, MAC: far,
			Via: netip.MustParseAddr("192.168.0.2"), Gateway: netip.MustParseAddr("10.244.2.1")},
		&model.Route{Node: "b", To: prefixes("fd00:2::/64")[0], Hop: model.Tunneled, MAC: far,
			Via: netip.MustParseAddr("192.168.0.2"), Gateway: netip.MustParseAddr("fe80::66:c0ff:fea8:2")},
	}
	for i, ns := range w.pods {
		a := &model.Attachment{ID: fmt.Sprint("c", i), Interface: "eth0", Device: fmt.Sprint("fl0000", i), MTU: 1400,
			NetNS:     filepath.Join(netns.Dir, ns.Name),
			Addresses: addresses(fmt.Sprint("10.244.1.", i+2), fmt.Sprint("fd00:1::", i+2)),
			MACs:      model.Ends{Node: [6]byte{2, 1, 0, 0, 0, byte(i)}, Pod: [6]byte{2, 2, 0, 0, 0, byte(i)}}}
		if i == 0 {
			a.Sources = prefixes("203.0.113.0/24", "2001:db8::/64")
		}
		l = append(l, a)
	}
	return l
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, node: netnstest.New(t), wire: netnstest.New(t)}
	w.pods = []*netns.Namespace{netnstest.New(t), netnstest.New(t)}
	w.must(sysctl.Set(w.node, sysctl.Setting{Name: "net/ipv6/conf/all/accept_dad", Value: "0"},
		sysctl.Setting{Name: "net/ipv6/conf/default/accept_dad", Value: "0"}))
	l, err := link.Dial(w.node)
	w.must(err)
	defer l.Close()
	dev, err := l.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0"}, w.wire)
	w.must(errors.Join(err, l.Up(1), l.AddAddress(1, netip.MustParsePrefix("fd99::1/128")),
		l.AddAddress(dev, netip.MustParsePrefix("192.168.0.1/24"))))
	far, err := link.Dial(w.wire)
	w.must(err)
	defer far.Close()
	dev, err = far.Index("eth0")
	w.must(errors.Join(err, far.Up(dev)))
	for _, a := range []string{"192.168.0.2/24", "192.168.0.3/24"} {
		w.must(far.AddAddress(dev, netip.MustParsePrefix(a)))
	}
	w.must(w.node.Do(func() error {
		attachments, err := attachment.New()
		w.must(err)
		defer attachments.Close()
		routes, err := route.New()
		w.must(err)
		defer routes.Close()
		w.guard, err = New()
		w.must(err)
		t.Cleanup(func() { w.guard.Close() })
		w.must(errors.Join(write(w, attachments), write(w, routes), write(w, w.guard)))
		tunnel, err := l.Index(route.Device)
		w.must(err)
		w.must(l.Await(t.Context(), tunnel, netip.MustParseAddr("fd00:1::1"))) // its addresses come with an event
		for _, a := range []string{"0.0.0.0:9999", "[::]:9999"} {
			c, err := net.ListenPacket("udp"+map[bool]string{true: "6", false: "4"}[strings.Contains(a, "[")], a)
			w.must(err)
			t.Cleanup(func() { c.Close() })
			w.listeners = append(w.listeners, c)
		}
		return nil
	}))
	return w
}

// write has a plane make all parts true.
func write[K dataplane.Key, V comparable](w *world, p dataplane.Plane[model.NetworkPart, K, V]) error {
	var facts []dataplane.Fact[K, V]
	seen := map[K]bool{}
	for _, part := range w.parts() {
		for _, f := range p.Render(part) {
			if !seen[f.Key] {
				facts = append(facts, f)
			}
			seen[f.Key] = true
		}
	}
	slices.SortStableFunc(facts, func(a, b dataplane.Fact[K, V]) int { return a.Key.Rank() - b.Key.Rank() })
	return p.Write(w.Context(), facts, nil)
}

// from sends a datagram from a pod with a source, then one that arrives, and reports whether the first arrived too.
func (w *world) from(pod int, source string) bool {
	w.Helper()
	a := netip.MustParseAddr(source)
	six := a.Is6()
	honest, to := fmt.Sprint("10.244.1.", pod+2), "192.168.0.1:9999"
	if six {
		honest, to = fmt.Sprint("fd00:1::", pod+2), "[fd99::1]:9999"
	}
	w.must(w.pods[pod].Do(func() error {
		l, err := link.Dial(w.pods[pod])
		w.must(err)
		defer l.Close()
		dev := 1 // lo: no duplicate address detection
		if a.IsLinkLocalUnicast() {
			dev, err = l.Index("eth0")
			w.must(err)
		}
		if source != honest {
			w.must(l.AddAddress(dev, netip.PrefixFrom(a, a.BitLen())))
			w.must(l.Await(w.Context(), dev, a))
		}
		for _, s := range []string{source, honest} {
			if a.IsLinkLocalUnicast() && s == source {
				s += "%eth0"
			}
			local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(s), 0))
			c, err := net.DialUDP("udp", local, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
			w.must(err)
			_, err = c.Write([]byte(s))
			w.must(errors.Join(err, c.Close()))
		}
		return nil
	}))
	return w.arrived(six, source, honest)
}

// arrived reports whether a datagram of one text came before that of another, which must come.
func (w *world) arrived(six bool, text, last string) bool {
	w.Helper()
	c, b := w.listeners[map[bool]int{true: 1}[six]], make([]byte, 100)
	for arrived := false; ; arrived = true {
		w.must(c.SetReadDeadline(time.Now().Add(5 * time.Second)))
		n, _, err := c.ReadFrom(b)
		w.must(err)
		switch first, _, _ := strings.Cut(string(b[:n]), "%"); {
		case first == last:
			return arrived
		case first != text || arrived:
			w.Fatalf("%q arrived", first)
		}
	}
}

// dropped checks how many packets were dropped since the last call.
func (w *world) dropped(before map[string]uint64, want map[string]uint64) map[string]uint64 {
	w.Helper()
	now, err := w.guard.Dropped()
	w.must(err)
	for reason, n := range now {
		if n-before[reason] != want[reason] {
			w.Errorf("%s: %d packets, want %d", reason, n-before[reason], want[reason])
		}
	}
	return now
}

func TestForgedSourcesAreDropped(t *testing.T) {
	w := newWorld(t)
	before, err := w.guard.Dropped()
	w.must(err)
	for _, test := range []struct {
		source  string
		arrives bool
	}{
		{"203.0.113.7", true}, {"2001:db8::7", true}, // allowed
		{"10.244.1.3", false}, {"fd00:1::3", false}, // the other pod's
		{"192.168.0.9", false}, {"10.244.2.5", false}, {"8.8.8.8", false}, // on the wire, on another node, anywhere
		{"fd99::9", false}, {"fd00:2::5", false}, {"fe80::5", false},
	} {
		if w.from(0, test.source) != test.arrives {
			t.Errorf("source %s: want arrival %t", test.source, test.arrives)
		}
		before = w.dropped(before, map[string]uint64{"forged_source": map[bool]uint64{false: 1}[test.arrives]})
	}
	if w.from(1, "203.0.113.8") { // allowed to the first pod alone
		t.Error("a source that another pod is allowed arrived")
	}
	for _, part := range w.parts() { // packets of a released device, which the node still handles
		if a, is := part.(*model.Attachment); is {
			w.must(exec.Command("ip", "-n", w.node.Name, "link", "set", "dev", a.Device, "group",
				fmt.Sprint(link.ReleasedGroup)).Run())
		}
	}
	if w.from(0, "8.8.4.4") {
		t.Error("a forged source arrived from a released device")
	}
}

// sum adds words to an Internet checksum.
func sum(n uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		n += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return n
}

func fold(n uint32) uint16 {
	for n>>16 != 0 {
		n = n&0xffff + n>>16
	}
	return ^uint16(n)
}

// inner returns a VXLAN packet that carries a datagram from a source to the node's own address; text is of even length.
func inner(vni uint32, source, text string) []byte {
	from, to := netip.MustParseAddr(source), netip.MustParseAddr("10.244.1.1")
	if from.Is6() {
		to = netip.MustParseAddr("fd00:1::1")
	}
	udp := append(binary.BigEndian.AppendUint16([]byte{0x10, 0, 0x27, 0x0f}, uint16(8+len(text))), 0, 0)
	udp = append(udp, text...)
	pseudo := sum(sum(uint32(len(udp))+17, from.AsSlice()), to.AsSlice())
	binary.BigEndian.PutUint16(udp[6:], fold(sum(pseudo, udp)))
	kind, ip := uint16(0x0800), append([]byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, 17, 0, 0},
		append(from.AsSlice(), to.AsSlice()...)...)
	if from.Is6() {
		kind, ip = 0x86dd, append([]byte{0x60, 0, 0, 0, 0, byte(len(udp)), 17, 64},
			append(from.AsSlice(), to.AsSlice()...)...)
	} else {
		binary.BigEndian.PutUint16(ip[10:], fold(sum(0, ip)))
	}
	b := append([]byte{8, 0, 0, 0}, binary.BigEndian.AppendUint32(nil, vni<<8)...)
	b = append(append(b, mac[:]...), 0x02, 0x66, 192, 168, 0, 2)
	return slices.Concat(binary.BigEndian.AppendUint16(b, kind), ip, udp)
}

// TestOnlyPeersSendIPIP has outer packets of nodes and of others arrive, whose inner ones no device takes: the kernel
// may lack IPIP.
func TestOnlyPeersSendIPIP(t *testing.T) {
	w := newWorld(t)
	before, err := w.guard.Dropped()
	w.must(err)
	local := netip.MustParseAddr("192.168.0.1")
	end := outer(&model.Tunnel{Kind: model.IPIP, Local: local})
	w.must(w.guard.Write(t.Context(), []network.TableFact{end}, nil))
	for from, dropped := range map[string]uint64{"192.168.0.2": 0, "192.168.0.3": 1} {
		w.must(w.wire.Do(func() error {
			c, err := net.DialIP("ip4:4", &net.IPAddr{IP: net.ParseIP(from)}, &net.IPAddr{IP: local.AsSlice()})
			w.must(err)
			_, err = c.Write(inner(7, "10.244.2.5", "test")[8+14:])
			return errors.Join(err, c.Close())
		}))
		want := map[string]uint64{}
		if dropped > 0 {
			want["tunnel_peer"] = dropped
		}
		before = w.dropped(before, want)
	}
}

func TestOnlyPeersAndPodsUseTheTunnel(t *testing.T) {
	w := newWorld(t)
	before, err := w.guard.Dropped()
	w.must(err)
	for _, test := range []struct {
		outer  string
		vni    uint32
		source string
		reason string // "": arrives
	}{
		{"192.168.0.2", 7, "10.244.2.5", ""}, {"192.168.0.2", 7, "fd00:2::5", ""},
		{"192.168.0.2", 7, "192.168.0.2", ""}, // the other node itself
		{"192.168.0.3", 7, "10.244.2.5", "tunnel_peer"},
		{"192.168.0.2", 7, "10.244.1.2", "tunnel_source"}, {"192.168.0.2", 7, "10.96.0.1", "tunnel_source"},
		{"192.168.0.2", 7, "fd00:1::2", "tunnel_source"}, {"192.168.0.2", 7, "fe80::2", "tunnel_source"},
		{"192.168.0.2", 8, "10.244.2.5", "vni"}, // no device has it
	} {
		six := strings.Contains(test.source, ":")
		honest := map[bool]string{false: "10.244.2.9", true: "fd00:2::9"}[six]
		w.must(w.wire.Do(func() error {
			for _, p := range []struct {
				outer, source, text string
				vni                 uint32
			}{{test.outer, test.source, "test", test.vni}, {"192.168.0.2", honest, "last", 7}} {
				local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(p.outer), 0))
				c, err := net.DialUDP("udp", local, &net.UDPAddr{IP: net.IPv4(192, 168, 0, 1), Port: 4789})
				w.must(err)
				_, err = c.Write(inner(p.vni, p.source, p.text))
				w.must(errors.Join(err, c.Close()))
			}
			return nil
		}))
		if arrives := w.arrived(six, "test", "last"); arrives != (test.reason == "") {
			t.Errorf("%+v: arrived %t", test, arrives)
		}
		before = w.dropped(before, map[string]uint64{test.reason: 1})
	}
}
