package ebpf_test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// The Service that is attacked, of pod b, by family.
var attacked = map[bool]netip.AddrPort{false: addrPort("10.96.0.1:80"), true: addrPort("[fd00:96::1]:80")}

// The addresses of the victim, pod c, by family.
var victim = map[bool]netip.Addr{false: netip.MustParseAddr("10.244.1.3"), true: netip.MustParseAddr("fd00:244::c")}

// attackedParts returns that Service's parts, on a node.
func attackedParts(n *model.ServiceNode) []model.ServicePart {
	parts := []model.ServicePart{n}
	for six, entry := range attacked {
		p := &model.Pool{ID: 7, Name: "b", Protocol: model.TCP,
			Backends: []model.Backend{{Addr: netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 9090),
				Local: true}}}
		if six {
			p.ID = 8
		}
		f := frontendOf(entry.String(), p)
		f.Masquerade, f.DSR = model.OriginsOf(model.FromExternal), model.OriginsOf(model.FromExternal)
		if !n.DSR {
			f.Masquerade, f.DSR = 0, 0
		}
		parts = append(parts, p, f)
	}
	return parts
}

// withVictim runs f where pod a can forge packets of pod c, a client of the Service.
func withVictim(t *testing.T, n *model.ServiceNode, f func(*twoPods)) {
	t.Helper()
	withPods(t, func(w *twoPods) {
		for six, a := range victim {
			family, bits := "-4", 32
			if six {
				family, bits = "-6", 128
			}
			w.run(fmt.Sprintf("ip -n %[1]s addr add %[2]s/%[3]d dev eth0 nodad && ip -n %[1]s addr del %[6]s/%[3]d "+
				"dev eth0 && ip %[4]s route add %[2]s dev %[5]s",
				w.pods["c"].Name, a, bits, family, "c", podAddrs["b"][six]))
		}
		w.in("b", func() {
			l, err := net.Listen("tcp", ":9090")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go func() { defer c.Close(); io.Copy(c, c) }()
				}
			}()
		})
		change(t, w.plane, []model.ServicePart{theNode}, attackedParts(n))
		f(w)
	})
}

// dials opens a connection of pod c to the Service.
func (w *twoPods) dials(six bool, port int) (c net.Conn, err error) {
	w.Helper()
	w.in("c", func() {
		d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: victim[six].AsSlice(), Port: port}}
		c, err = d.Dial("tcp", attacked[six].String())
	})
	return c, err
}

// exchange sends a byte by a connection and reads it back.
func exchange(c net.Conn) error {
	c.SetDeadline(time.Now().Add(patience))
	_, err := c.Write([]byte{1})
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	return err
}

// forge has a pod send a TCP packet of another source, with bytes behind IP's header that stand for an option.
func forge(fd int, mac [6]byte, from, to netip.AddrPort, flags byte, dsrOption []byte) error {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[7], tcp[12], tcp[13], tcp[14] = 1, 5<<4, flags, 0xff
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	pseudo := append(append(append([]byte{}, src...), dst...), 0, unix.IPPROTO_TCP, 0, 20)
	binary.BigEndian.PutUint16(tcp[16:], ^folded(pseudo, tcp))
	frame := append(append(mac[:], mac[:]...), 8, 0)
	if from.Addr().Is6() {
		frame[12], frame[13] = 0x86, 0xdd
		frame = append(frame, 6<<4, 0, 0, 0, 0, byte(len(dsrOption)+20), unix.IPPROTO_TCP, 64)
		frame = append(append(append(frame, src...), dst...), dsrOption...)
		if len(dsrOption) > 0 {
			frame[14+6], frame[14+40] = unix.IPPROTO_DSTOPTS, unix.IPPROTO_TCP
		}
	} else {
		ip := append(append([]byte{4<<4 | byte(5+len(dsrOption)/4), 0, 0, byte(40 + len(dsrOption)), 0, 0, 0, 0, 64,
			unix.IPPROTO_TCP, 0, 0}, append(src, dst...)...), dsrOption...)
		binary.BigEndian.PutUint16(ip[10:], ^folded(ip))
		frame = append(frame, ip...)
	}
	_, err := unix.Write(fd, append(frame, tcp...))
	return err
}

// folded is the Internet's sum of parts of even lengths.
func folded(parts ...[]byte) uint16 {
	var s uint32
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			s += uint32(b[i])<<8 | uint32(b[i+1])
		}
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// counts returns what became of packets.
func (w *twoPods) counts() ebpf.PacketCounts {
	w.Helper()
	c, err := w.plane.PacketCounts()
	if err != nil || c == nil {
		w.Fatal(c, err)
	}
	return *c
}

// sweep has pod a send SYNs of the victim from all its ephemeral ports, and returns what became of packets meanwhile.
func (w *twoPods) sweep(six bool) (began, forged uint64) {
	w.Helper()
	before := w.counts()
	w.in("a", func() {
		fd := openTap(w.T, "eth0")
		defer unix.Close(fd)
		for port := 32768; port < 61000; port++ {
			if err := forge(fd, [6]byte{2, 0, 0, 0, 1, 1}, netip.AddrPortFrom(victim[six], uint16(port)), attacked[six],
				2, nil); err != nil {
				w.Fatal(err)
			}
		}
	})
	after := w.counts()
	return after.Began - before.Began, after.Forged - before.Forged
}

// SYNs that a pod forges with another pod's address, for every port that it may have, begin no flow, and break no
// connection of that pod.
func TestForgedSourceBeginsNoFlow(t *testing.T) {
	withVictim(t, theNode, func(w *twoPods) {
		for _, six := range []bool{false, true} {
			var open []net.Conn
			for range 6 {
				c, err := w.dials(six, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				open = append(open, c)
			}
			if began, forged := w.sweep(six); began != 0 || forged != 61000-32768 {
				t.Errorf("IPv6 %t: %d flows began, %d packets were dropped as forged", six, began, forged)
			}
			for i, c := range open {
				if err := exchange(c); err != nil {
					t.Errorf("IPv6 %t: open connection %d: %v", six, i, err)
				}
			}
			for i := range 20 {
				c, err := w.dials(six, 0)
				if err == nil {
					err = exchange(c)
					c.Close()
				}
				if err != nil {
					t.Errorf("IPv6 %t: new connection %d: %v", six, i, err)
				}
			}
		}
	})
}

// requestBeyond connects to the Service from pod a where no hook sees it: by its packets.
func (w *twoPods) requestBeyond(six bool) (err error) {
	w.Helper()
	root, err := cgroup.Root()
	if err != nil {
		w.Fatal(err)
	}
	return cgroup.Do(root, func() error {
		var c net.Conn
		w.in("a", func() { c, err = net.DialTimeout("tcp", attacked[six].String(), patience) })
		if err == nil {
			err = exchange(c)
			c.Close()
		}
		return err
	})
}

// Of a route with several next hops each device is one that its packets come by. The route of a bridge leads to the
// bridge, whose ports packets come by.
func TestReversePathOfSeveralDevices(t *testing.T) {
	withVictim(t, theNode, func(w *twoPods) {
		far := netip.MustParseAddr("203.0.113.9")
		w.run("ip route add 203.0.113.9 nexthop dev a nexthop dev b nexthop dev c; sysctl -qw " +
			"net.ipv4.fib_multipath_hash_policy=0")
		w.in("a", func() {
			fd := openTap(t, "eth0")
			defer unix.Close(fd)
			for port := range uint16(200) {
				if err := forge(fd, [6]byte{2, 0, 0, 0, 1, 1}, netip.AddrPortFrom(far, 2000+port), attacked[false], 2,
					nil); err != nil {
					t.Fatal(err)
				}
			}
		})
		if c := w.counts(); c.Began < 190 || c.Began+c.Forged != 200 { // (2/3)¹⁶ are 0.3 of 200
			t.Errorf("of 200 packets by one of three next hops: %+v", c)
		}
		w.run(
			`ip link add br0 address 02:00:00:00:01:01 type bridge && ip link set dev br0 up
			ip addr add fe80::1/64 dev br0 nodad
			ip addr flush dev a; ip link set dev a master br0
			ip route replace 10.244.1.1 dev br0 && ip -6 route replace fd00:244::a dev br0
			ip -6 route del fd00:244::a dev a || true`,
		)
		attach(t, w.plane)
		await(t, "a bridge", func(l map[string]bool) bool { return len(l) == 2*4+1 })
		for _, six := range []bool{false, true} {
			before := w.counts()
			if err := w.requestBeyond(six); err != nil || w.counts().Began != before.Began+1 {
				t.Errorf("IPv6 %t: behind a bridge: %v, %+v", six, err, w.counts())
			}
			if began, forged := w.sweep(six); began != 0 || forged != 61000-32768 {
				t.Errorf("IPv6 %t: behind a bridge, %d flows began, %d packets were dropped as forged", six, began,
					forged)
			}
		}
	})
}

// The check can be switched off where routes are asymmetric, by an agent that starts again.
func TestReversePathCheckOff(t *testing.T) {
	withVictim(t, theNode, func(w *twoPods) {
		p := opened(t, ebpf.Options{Cgroup: w.plane.Cgroup, NoReversePathCheck: true})
		defer p.Close()
		facts, err := p.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var old []ebpf.Fact
		for _, f := range facts {
			if f.Key.Kind == ebpf.KindDevices {
				old = append(old, f)
			}
		}
		var now []ebpf.Fact
		for _, f := range p.Render(theNode) {
			if f.Key.Kind == ebpf.KindDevices {
				now = append(now, f)
			}
		}
		write(t, p, now, old)
		for _, six := range []bool{false, true} {
			if began, forged := w.sweep(six); began != 61000-32768 || forged != 0 {
				t.Errorf("IPv6 %t: %d flows began, %d packets were dropped as forged", six, began, forged)
			}
		}
	})
}

// dsrOption returns the option that carries an entry, as bpf/device/dsr.h has it.
func dsrOption(entry netip.AddrPort) []byte {
	port := binary.BigEndian.AppendUint16(nil, entry.Port())
	if entry.Addr().Is4() {
		return append(append([]byte{0x9e, 8}, port...), entry.Addr().AsSlice()...)
	}
	return append(append([]byte{0, 2, 1, 0, 0x1e, 18}, port...), entry.Addr().AsSlice()...)
}

// repliesTo has pod a forge a packet with an option that opens a connection of pod c, and returns the source of the
// reply of b.
func (w *twoPods) repliesTo(six bool, port uint16) (from netip.Addr) {
	server := netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 9090)
	client := netip.AddrPortFrom(victim[six], port)
	var tap int
	w.in("c", func() { tap = openTap(w.T, "eth0") })
	defer unix.Close(tap)
	w.in("a", func() {
		fd := openTap(w.T, "eth0")
		defer unix.Close(fd)
		if err := forge(fd, [6]byte{2, 0, 0, 0, 1, 1}, client, server, 2, dsrOption(attacked[six])); err != nil {
			w.Fatal(err)
		}
	})
	header := 20
	if six {
		header = 40
	}
	for frame := make([]byte, 2048); ; {
		n, err := unix.Read(tap, frame)
		if err != nil {
			w.Fatalf("the backend doesn't answer: %v", err)
		}
		if n < 14+header+20 || binary.BigEndian.Uint16(frame[14+header+2:]) != port ||
			frame[14+header+13] != 2|16 {
			continue
		}
		if six {
			return netip.AddrFrom16([16]byte(frame[14+8:]))
		}
		return netip.AddrFrom4([4]byte(frame[14+12:]))
	}
}

// The option of direct server return is believed by devices that other Nodes are reached by, and never by a pod's.
func TestForgedOptionIsNotBelieved(t *testing.T) {
	node := copyOfNode()
	node.DSR = true
	node.Nodes = []netip.Addr{netip.MustParseAddr("198.51.100.2")}
	withVictim(t, &node, func(w *twoPods) {
		for _, six := range []bool{false, true} {
			if from := w.repliesTo(six, 40000); from != netip.MustParseAddr(podAddrs["b"][six]) {
				t.Errorf("IPv6 %t: by a pod's device the option is believed: %s answers", six, from)
			}
		}
		w.run("ip route add 198.51.100.2 dev a")
		_, stop := watched(t, w.plane)
		defer stop()
		folder, _, _ := bpf.Folder()
		uplinks, _ := filepath.Glob(filepath.Join(folder, "maps-*", "uplinks"))
		m, err := cebpf.LoadPinnedMap(strings.Join(uplinks, " "), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		a, err := net.InterfaceByName("a")
		if err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			var is uint32
			if m.Lookup(uint32(a.Index), &is) == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the device that leads to a Node isn't known")
			}
		}
		for _, six := range []bool{false, true} {
			if from := w.repliesTo(six, 40001); from != attacked[six].Addr() {
				t.Errorf("IPv6 %t: by a device that leads to a Node, %s answers", six, from)
			}
		}
	})
}

// hideAll has the Service hide all its clients.
func (w *twoPods) masqueradeAll() {
	w.Helper()
	w.run("ip addr add 10.0.0.1/32 dev lo; ip route replace 10.244.1.2 dev b src 10.0.0.1; ip route add " +
		"10.96.0.0/16 dev lo src 10.0.0.1")
	parts := attackedParts(theNode)
	for _, p := range parts {
		if f, ok := p.(*model.Frontend); ok {
			f.Masquerade = model.AllOrigins
		}
	}
	change(w.T, w.plane, attackedParts(theNode), parts)
}

// Hidden clients have packets to the ports behind which they are go by the node's stack only until their flows are over
// and the ports' bits are rebuilt.
func TestFastPathAfterSweepOfPorts(t *testing.T) {
	withVictim(t, theNode, func(w *twoPods) {
		w.redirects("with nothing in the way")
		w.masqueradeAll()
		root, err := cgroup.Root()
		if err != nil {
			t.Fatal(err)
		}
		port := uint16(41000)
		redirected := func() uint64 {
			from := netip.AddrPortFrom(netip.MustParseAddr("10.244.1.1"), port)
			_, n, err := w.request(model.UDP, false, patience, echo.Options{From: from})
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := redirected(); n != 2 {
			t.Fatalf("%d packets were redirected before the sweep", n)
		}
		err = cgroup.Do(root, func() (err error) {
			w.in("a", func() {
				var c net.Conn
				if c, err = net.DialTimeout("tcp", attacked[false].String(), patience); err == nil {
					err = c.Close()
				}
			})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		folder, _, _ := bpf.Folder()
		eachFlow(t, folder, "destinations", func(k device.Tuple, v *device.NatEntry) {
			if v.Origin == 0 { // not a client's: it is known there by this port
				port = bpf.Port(k.Dport)
			}
		})
		maps, _ := filepath.Glob(filepath.Join(folder, "maps-*"))
		rebuild := func() {
			if err := device.RebuildPortBits(maps[0], ebpf.DefaultSizes); err != nil {
				t.Fatal(err)
			}
		}
		if n := redirected(); n != 1 { // the question, and not the answer
			t.Errorf("%d packets were redirected of a port with which a client is masqueraded", n)
		}
		rebuild()
		if n := redirected(); n != 1 {
			t.Errorf("%d packets were redirected of such a port after a rebuild", n)
		}
		age(t, folder, 300)
		rebuild()
		if n := redirected(); n != 2 {
			t.Errorf("%d packets were redirected when the flows were over", n)
		}
	})
}

// age has all flows of a node be without packets for so many seconds more.
func age(t *testing.T, folder string, seconds uint32) {
	t.Helper()
	for _, name := range []string{"destinations", "sources"} {
		eachFlow(t, folder, name, func(_ device.Tuple, v *device.NatEntry) { v.Seen -= seconds })
	}
}

// eachFlow calls f with the entries of a map of flows of a node, and writes what f changes.
func eachFlow(t *testing.T, folder, name string, f func(device.Tuple, *device.NatEntry)) {
	t.Helper()
	paths, _ := filepath.Glob(filepath.Join(folder, "state", name+"-*"))
	for _, path := range paths {
		m, err := cebpf.LoadPinnedMap(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		held := map[device.Tuple]device.NatEntry{}
		var k device.Tuple
		var v device.NatEntry
		for i := m.Iterate(); i.Next(&k, &v); {
			held[k] = v
		}
		for k, v := range held {
			f(k, &v)
			if err := m.Put(k, v); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Connections of masqueraded clients, and of the node's own that no hook sees, outlast a silence, whoever speaks
// first then.
func TestIdleConnectionsLast(t *testing.T) {
	withVictim(t, theNode, func(w *twoPods) {
		w.masqueradeAll()
		root, err := cgroup.Root()
		if err != nil {
			t.Fatal(err)
		}
		folder, _, _ := bpf.Folder()
		dial := func(from string) (c net.Conn) {
			err := cgroup.Do(root, func() (err error) {
				dial := func() { c, err = net.DialTimeout("tcp", attacked[false].String(), patience) }
				if from == "" {
					dial()
				} else {
					w.in(from, dial)
				}
				return err
			})
			if err != nil {
				t.Fatalf("from %q: %v", from, err)
			}
			return c
		}
		var open []net.Conn
		for _, from := range []string{"", "a"} {
			c := dial(from)
			defer c.Close()
			open = append(open, c)
		}
		w.settle(folder)
		age(t, folder, 4*24*3600)
		for i, c := range open {
			if err := exchange(c); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		}
	})
}

// settle waits until no entry of a flow waits for its handshake: the last packet of it may be on its way.
func (w *twoPods) settle(folder string) {
	w.Helper()
	const unassured = 1 << 14
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		n := 0
		for _, name := range []string{"destinations", "sources"} {
			paths, _ := filepath.Glob(filepath.Join(folder, "state", name+"-*"))
			for _, path := range paths {
				m, err := cebpf.LoadPinnedMap(path, nil)
				if err != nil {
					w.Fatal(err)
				}
				var k device.Tuple
				var v device.NatEntry
				for i := m.Iterate(); i.Next(&k, &v); {
					if v.State&unassured != 0 {
						n++
					}
				}
				m.Close()
			}
		}
		if n == 0 {
			return
		}
		if time.Now().After(end) {
			out, _ := exec.Command("ip", "route").Output()
			w.Fatalf("%d entries are of no complete handshake\n%s", n, out)
		}
	}
}
