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

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
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
			Via: netip.MustParseAddr("192.168.0.2"), End: netip.MustParseAddr("192.168.0.2"),
			Gateway: netip.MustParseAddr("10.244.2.1")},
		&model.Route{Node: "b", To: prefixes("fd00:2::/64")[0], Hop: model.Tunneled, MAC: far,
			Via: netip.MustParseAddr("192.168.0.2"), End: netip.MustParseAddr("192.168.0.2"),
			Gateway: netip.MustParseAddr("fe80::66:c0ff:fea8:2")},
		&model.Route{Node: "c", To: prefixes("10.244.3.0/24")[0], Hop: model.Tunneled,
			MAC: [6]byte{0x02, 0x66, 192, 168, 0, 4}, Via: netip.MustParseAddr("192.168.0.4"),
			End: netip.MustParseAddr("192.168.0.4"), Gateway: netip.MustParseAddr("10.244.3.1")},
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
	near, err := l.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0"}, w.wire)
	w.must(errors.Join(err, l.Up(1), l.AddAddress(1, netip.MustParsePrefix("fd99::1/128")),
		l.AddAddress(near, netip.MustParsePrefix("192.168.0.1/24"))))
	far, err := link.Dial(w.wire)
	w.must(err)
	defer far.Close()
	dev, err := far.Index("eth0")
	w.must(errors.Join(err, far.Up(dev), far.Await(t.Context(), dev), l.Await(t.Context(), near)))
	for _, a := range []string{"192.168.0.2/24", "192.168.0.3/24", "192.168.0.4/24"} {
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
	c, b := w.listeners[map[bool]int{true: 1}[six]], make([]byte, 1500)
	for arrived := false; ; arrived = true {
		w.must(c.SetReadDeadline(time.Now().Add(5 * time.Second)))
		n, _, err := c.ReadFrom(b)
		w.must(err)
		switch first, _, _ := strings.Cut(strings.TrimSpace(string(b[:n])), "%"); {
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

// overlayed returns a VXLAN packet around a datagram from a source to the node's own address; text is of even
// length.
func overlayed(vni uint32, source, text string) []byte {
	from, to := netip.MustParseAddr(source), netip.MustParseAddr("10.244.1.1")
	if from.Is6() {
		to = netip.MustParseAddr("fd00:1::1")
	}
	udp := append(binary.BigEndian.AppendUint16([]byte{0x10, 0, 0x27, 0x0f}, uint16(8+len(text))), 0, 0)
	udp = append(udp, text...)
	pseudo := sum(sum(uint32(len(udp))+17, from.AsSlice()), to.AsSlice())
	binary.BigEndian.PutUint16(udp[6:], fold(sum(pseudo, udp)))
	ends := slices.Concat(from.AsSlice(), to.AsSlice())
	kind, ip := uint16(0x0800), binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(20+len(udp)))
	ip = slices.Concat(ip, []byte{0, 0, 0, 0, 64, 17, 0, 0}, ends)
	if from.Is6() {
		kind, ip = 0x86dd, binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(udp)))
		ip = slices.Concat(ip, []byte{17, 64}, ends)
	} else {
		binary.BigEndian.PutUint16(ip[10:], fold(sum(0, ip)))
	}
	b := append([]byte{8, 0, 0, 0}, binary.BigEndian.AppendUint32(nil, vni<<8)...)
	b = append(append(b, mac[:]...), 0x02, 0x66, 192, 168, 0, 2)
	return slices.Concat(binary.BigEndian.AppendUint16(b, kind), ip, udp)
}

// TestOnlyEndsSendIPIP has outer packets of nodes and of others arrive, whose inner ones no device takes: the kernel
// may lack IPIP.
func TestOnlyEndsSendIPIP(t *testing.T) {
	w := newWorld(t)
	w.must(w.guard.Write(t.Context(), ownEnd(&model.Tunnel{Kind: model.IPIP, Local: localEnd}), nil))
	before, err := w.guard.Dropped()
	w.must(err)
	for _, test := range []struct{ outer, source, reason string }{
		{"192.168.0.2", "10.244.2.5", "ok"}, {"192.168.0.2", "192.168.0.2", "ok"},
		{"192.168.0.3", "10.244.2.5", "tunnel_peer"}, {"192.168.0.2", "10.244.3.5", "tunnel_source"},
		{"192.168.0.2", "10.244.1.2", "tunnel_source"},
		{"192.168.0.2", "192.168.0.4", "tunnel_source"},
	} {
		w.must(w.wire.Do(func() error {
			c, err := net.DialIP("ip4:4", &net.IPAddr{IP: net.ParseIP(test.outer)}, &net.IPAddr{IP: localEnd.AsSlice()})
			w.must(err)
			_, err = c.Write(overlayed(7, test.source, "test")[8+14:])
			return errors.Join(err, c.Close())
		}))
		before = w.dropped(before, map[string]uint64{test.reason: 1})
	}
}

var localEnd = netip.MustParseAddr("192.168.0.1")

// datagram sends a VXLAN packet to the node from an address on the wire, in fragments if of more bytes than a size.
func (w *world) datagram(from, to string, mtu int, b []byte) {
	w.Helper()
	w.must(w.wire.Do(func() error {
		l, err := link.Dial(w.wire)
		w.must(err)
		defer l.Close()
		w.must(exec.Command("ip", "-n", w.wire.Name, "link", "set", "dev", "eth0", "mtu", fmt.Sprint(mtu)).Run())
		local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))
		c, err := net.DialUDP("udp", local, &net.UDPAddr{IP: net.ParseIP(to), Port: 4789})
		w.must(err)
		w.must(c.SetDeadline(time.Now().Add(5 * time.Second)))
		raw, err := c.SyscallConn()
		w.must(err)
		w.must(raw.Control(func(fd uintptr) { // also where the route's MTU was learned to be larger
			w.must(unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT))
		}))
		_, err = c.Write(b)
		return errors.Join(err, c.Close())
	}))
}

// TestOnlyEndsUseTheTunnel has VXLAN packets arrive: from nodes and others, to the tunnel's end and to other addresses
// of the node, whole and in fragments, carrying what is behind their sender and what isn't.
func TestOnlyEndsUseTheTunnel(t *testing.T) {
	w := newWorld(t)
	before, err := w.guard.Dropped()
	w.must(err)
	const end, pods = "192.168.0.1", "10.244.1.1" // of the node
	w.must(exec.Command("ip", "-n", w.wire.Name, "route", "add", pods, "via", end).Run())
	for _, test := range []struct {
		outer, to string
		mtu       int
		vni       uint32
		source    string
		reason    string // "": arrives
	}{
		{"192.168.0.2", end, 1500, 7, "10.244.2.5", ""}, {"192.168.0.2", end, 1500, 7, "fd00:2::5", ""},
		{"192.168.0.2", end, 600, 7, "10.244.2.5", ""},   // in fragments
		{"192.168.0.2", end, 1500, 7, "192.168.0.2", ""}, // the other node itself
		{"192.168.0.4", end, 1500, 7, "10.244.3.5", ""},  // a third one
		{"192.168.0.3", end, 1500, 7, "10.244.2.5", "tunnel_peer"},
		{"192.168.0.3", end, 600, 7, "10.244.2.5", "tunnel_peer"},
		{"192.168.0.3", pods, 1500, 7, "10.244.2.5", "tunnel_peer"}, // another address of this node
		{"192.168.0.2", pods, 1500, 7, "10.244.2.5", "tunnel_peer"},
		{"192.168.0.3", pods, 600, 7, "10.244.2.5", "tunnel_peer"},
		{"192.168.0.2", end, 1500, 7, "10.244.3.5", "tunnel_source"}, // behind the third one
		{"192.168.0.4", end, 600, 7, "10.244.2.5", "tunnel_source"},
		{"192.168.0.4", end, 1500, 7, "fd00:2::5", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "192.168.0.4", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "8.8.8.8", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "10.244.1.2", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "10.96.0.1", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "fd00:1::2", "tunnel_source"},
		{"192.168.0.2", end, 1500, 7, "fe80::2", "tunnel_source"},
		{"192.168.0.2", end, 1500, 8, "10.244.2.5", "vni"}, // no device has it
	} {
		six := strings.Contains(test.source, ":")
		honest := map[bool]string{false: "10.244.2.9", true: "fd00:2::9"}[six]
		text := "test" + strings.Repeat(" ", 700)
		w.datagram(test.outer, test.to, test.mtu, overlayed(test.vni, test.source, text))
		w.datagram("192.168.0.2", end, 1500, overlayed(7, honest, "last"))
		if arrives := w.arrived(six, "test", "last"); arrives != (test.reason == "") {
			t.Errorf("%+v: arrived %t", test, arrives)
		}
		before = w.dropped(before, map[string]uint64{test.reason: 1})
	}
}

// TestClientsUseTheTunnel has a tunnel that carries packets of external clients too, for direct server return.
func TestClientsUseTheTunnel(t *testing.T) {
	w := newWorld(t)
	w.must(w.guard.Write(t.Context(), ownEnd(&model.Tunnel{VNI: 7, Port: 4789, Local: localEnd, AnySource: true}), nil))
	before, err := w.guard.Dropped()
	w.must(err)
	for source, reason := range map[string]string{"8.8.8.8": "", "10.244.2.5": "", "10.244.3.5": "tunnel_source",
		"10.244.1.2": "tunnel_source"} {
		w.datagram("192.168.0.2", "192.168.0.1", 1500, overlayed(7, source, "test"))
		w.datagram("192.168.0.2", "192.168.0.1", 1500, overlayed(7, "10.244.2.9", "last"))
		if arrives := w.arrived(false, "test", "last"); arrives != (reason == "") {
			t.Errorf("%s: arrived %t", source, arrives)
		}
		before = w.dropped(before, map[string]uint64{reason: 1})
	}
}

// TestPodsSendNothingToEnds has a pod send to the port of the overlay: to ends of nodes, and to others.
func TestPodsSendNothingToEnds(t *testing.T) {
	w := newWorld(t)
	w.must(w.guard.Write(t.Context(), ownEnd(&model.Tunnel{Kind: model.IPIP, Local: localEnd}), nil))
	before, err := w.guard.Dropped()
	w.must(err)
	send := func(network, to string, mtu int, b []byte) {
		w.must(exec.Command("ip", "-n", w.pods[0].Name, "link", "set", "dev", "eth0", "mtu", fmt.Sprint(mtu)).Run())
		w.must(w.pods[0].Do(func() error {
			c, err := net.Dial(network, to)
			w.must(err)
			_, err = c.Write(b)
			return errors.Join(err, c.Close())
		}))
	}
	for _, test := range []struct {
		network, to string
		mtu         int
		reason      string // "ok": not dropped here
	}{
		{"udp4", "192.168.0.2:4789", 1400, "pod_overlay"}, {"udp4", "192.168.0.2:4790", 1400, "ok"},
		{"udp4", "192.168.0.9:4789", 1400, "ok"},          // no node's end
		{"udp4", "192.168.0.1:4789", 1400, "tunnel_peer"}, // this node's own
		{"ip4:4", "192.168.0.2", 1400, "pod_overlay"}, {"ip4:4", "192.168.0.9", 1400, "ok"},
	} {
		send(test.network, test.to, test.mtu, overlayed(7, "10.244.2.5", "test"))
		w.from(0, "203.0.113.7") // what came before it is decided
		before = w.dropped(before, map[string]uint64{test.reason: 1})
	}
}

// TestInsideSourcesComeByTheirDevices has packets with sources of pods arrive by the uplink.
func TestInsideSourcesComeByTheirDevices(t *testing.T) {
	w := newWorld(t)
	before, err := w.guard.Dropped()
	w.must(err)
	w.must(exec.Command("ip", "-n", w.wire.Name, "route", "add", "10.244.1.1", "via", "192.168.0.1").Run())
	w.must(exec.Command("ip", "-n", w.node.Name, "address", "add", "fd97::1/64", "dev", "eth0", "nodad").Run())
	w.must(exec.Command("ip", "-n", w.wire.Name, "address", "add", "fd97::2/64", "dev", "eth0", "nodad").Run())
	out, err := exec.Command("ip", "-n", w.node.Name, "-br", "link", "show", "eth0").Output()
	w.must(err)
	w.must(exec.Command("ip", "-n", w.wire.Name, "neighbour", "replace", "fd97::1", "lladdr",
		strings.Fields(string(out))[2], "dev", "eth0").Run()) // no neighbour solicitation with the sources below
	for _, test := range []struct{ source, reason string }{
		{"192.168.0.9", "ok"}, {"198.51.100.7", "ok"}, {"fd98::7", "ok"}, // hosts on the wire, and beyond
		{"10.244.1.2", "inside_source"}, {"10.244.1.77", "inside_source"}, // this node's pods, and an address that none has
		{"10.244.2.5", "inside_source"}, // behind the tunnel
		{"fd00:1::2", "inside_source"}, {"fd00:2::5", "inside_source"},
	} {
		w.must(exec.Command("ip", "-n", w.wire.Name, "address", "add", test.source, "dev", "eth0", "nodad").Run())
		to := map[bool]string{false: "192.168.0.1:9999", true: "[fd97::1]:9999"}[strings.Contains(test.source, ":")]
		honest := map[bool]string{false: "192.168.0.2", true: "fd97::2"}[strings.Contains(test.source, ":")]
		w.must(w.wire.Do(func() error {
			for _, source := range []string{test.source, honest} {
				local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(source), 0))
				c, err := net.DialUDP("udp", local, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
				w.must(err)
				_, err = c.Write([]byte(source))
				w.must(errors.Join(err, c.Close()))
			}
			return nil
		}))
		if arrives := w.arrived(honest == "fd97::2", test.source, honest); arrives != (test.reason == "ok") {
			t.Errorf("%s: arrived %t", test.source, arrives)
		}
		before = w.dropped(before, map[string]uint64{test.reason: 1})
	}
}

// TestNftListsTheTable has the nft command list the table, which some of what the kernel takes would end.
func TestNftListsTheTable(t *testing.T) {
	w := newWorld(t)
	out, err := exec.Command("ip", "netns", "exec", w.node.Name, "nft", "list", "table", "inet", Table).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "goto behind") {
		t.Fatalf("%v\n%s", err, out)
	}
}
