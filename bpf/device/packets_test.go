package device

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// What becomes of packets, one after the other, by programs that the kernel runs on them alone (BPF_PROG_TEST_RUN).

// next and redirected are what a program says of a packet that goes on, and of one that is sent somewhere else.
const (
	next       = ^uint32(0)
	redirected = 7
)

// ends returns a client, the entry that it sends to, and the backend, of a family by index.
func ends(six int) (client, entry, server netip.AddrPort) {
	return netip.AddrPortFrom(clients[six], 1234), netip.AddrPortFrom(entries[six], 80),
		netip.AddrPortFrom(servers[six], 8080)
}

var small = service.Sizes{Frontends: 16, Pools: 16, Slots: 64}

// world is programs at work on maps that hold a Service of each family and protocol: address :80 leads to backend
// :8080, and :81 to none.
type world struct {
	t        testing.TB
	folder   string
	maps     *Maps
	programs *Programs
}

var clients, entries, servers = pair(
	"192.0.2.9",
	"2001:db8::9",
), pair(
	"10.96.0.1",
	"fd00:96::1",
), pair(
	"10.244.0.1",
	"fd00:244::1",
)

func pair(a, b string) [2]netip.Addr {
	return [2]netip.Addr{netip.MustParseAddr(a), netip.MustParseAddr(b)}
}

func newWorld(t testing.TB) *world {
	t.Helper()
	return newWorldOf(t, Options{}, service.Frontend{}, 0)
}

// newWorldOf is newWorld with frontends that fare so, and backends of that weight.
func newWorldOf(t testing.TB, o Options, fare service.Frontend, weight uint16) *world {
	t.Helper()
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	layout, err := Layout(small)
	if err != nil {
		t.Fatal(err)
	}
	m, err := CreateMaps(filepath.Join(folder, layout), small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close(); os.RemoveAll(folder) })
	m.Pools[2] = service.Pool{Id: 2, Extent: 1} // none
	var keys []service.Entry
	var values []service.Frontend
	for i := range entries {
		at := uint32(4 + 2*i)
		m.Slots[at].Header().Count = 1
		b := service.Backend{Port: bpf.Port(8080), Threshold: 0xffff, Weight: weight}
		b.Address.Word = bpf.Words(servers[i])
		*m.Slots[at+1].Backend() = b
		m.Pools[3+i] = service.Pool{Id: uint64(3 + i), Extent: at}
		for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			for port, pool := range map[uint16]uint32{80: uint32(3 + i), 81: 2} {
				k := service.Entry{Port: bpf.Port(port), Protocol: p}
				k.Address.Word = bpf.Words(entries[i])
				fare.Internal, fare.External = pool, pool
				keys, values = append(keys, k), append(values, fare)
				m.Enter(k)
			}
		}
	}
	if err := m.PutFrontends(keys, values); err != nil {
		t.Fatal(err)
	}
	p, err := m.LoadForDevices(o, headers...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return &world{t, folder, m, p}
}

// skBuff is the beginning of struct __sk_buff that a run may be told.
type skBuff struct {
	_              [9]uint32
	IngressIfindex uint32
	Ifindex        uint32
}

// see runs a program on a packet that came in by a device.
func (w *world) see(program string, packet []byte) (verdict uint32, after []byte) {
	w.t.Helper()
	o := &ebpf.RunOptions{
		Data:    packet,
		DataOut: make([]byte, len(packet)+128),
		Context: skBuff{IngressIfindex: 1, Ifindex: 1},
	}
	verdict, err := w.programs.by[program].Run(o)
	if err != nil {
		w.t.Fatal(err)
	}
	return verdict, o.DataOut
}

// packet is what these tests write and read of one.
type packet struct {
	src, dst   netip.AddrPort
	protocol   uint8
	flags      uint8 // of TCP
	id, offset uint16
	more       bool
	dsrOption  []byte // that stands between the IP header and the next, but for the number of what is next in IPv6
	payload    []byte
}

func sum(parts ...[]byte) uint16 {
	s := uint32(0)
	for _, p := range parts {
		for i := 0; i < len(p); i += 2 {
			if i+1 < len(p) {
				s += uint32(p[i])<<8 | uint32(p[i+1])
			} else {
				s += uint32(p[i]) << 8
			}
		}
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// pseudo returns the pseudo header, of either family.
func pseudo(src, dst netip.Addr, protocol uint8, length int) []byte {
	b := append(src.AsSlice(), dst.AsSlice()...)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, uint32(protocol)), uint32(length))
}

// checksumAt returns the offset of the checksum in a transport header.
func checksumAt(protocol uint8) int {
	return map[uint8]int{unix.IPPROTO_TCP: 16, unix.IPPROTO_UDP: 6, unix.IPPROTO_ICMP: 2, unix.IPPROTO_ICMPV6: 2}[protocol]
}

// transport writes the header behind IP's and the payload.
func (p packet) transport() (b []byte) {
	if p.offset > 0 {
		return p.payload
	}
	switch p.protocol {
	case unix.IPPROTO_TCP:
		b = make([]byte, 20)
		b[4+3], b[12], b[13] = 7, 5<<4, p.flags
	case unix.IPPROTO_UDP:
		b = make([]byte, 8)
		binary.BigEndian.PutUint16(b[4:], uint16(8+len(p.payload)))
	default:
		b = p.payload
	}
	if p.protocol == unix.IPPROTO_TCP || p.protocol == unix.IPPROTO_UDP {
		binary.BigEndian.PutUint16(b, p.src.Port())
		binary.BigEndian.PutUint16(b[2:], p.dst.Port())
		b = append(b, p.payload...)
	}
	begin := pseudo(p.src.Addr(), p.dst.Addr(), p.protocol, len(b))
	if p.protocol == unix.IPPROTO_ICMP {
		begin = nil
	}
	binary.BigEndian.PutUint16(b[checksumAt(p.protocol):], sum(begin, b))
	return b
}

// ip writes the packet from its IP header on.
func (p packet) ip() []byte {
	body := p.transport()
	if p.src.Addr().Is6() {
		b := make([]byte, 40, 40+len(body))
		b[0], b[6], b[7] = 6<<4, p.protocol, 64
		dsrOption := bytes.Clone(p.dsrOption)
		if len(dsrOption) > 0 {
			b[6], dsrOption[0] = unix.IPPROTO_DSTOPTS, p.protocol
		}
		binary.BigEndian.PutUint16(b[4:], uint16(len(dsrOption)+len(body)))
		copy(b[8:], p.src.Addr().AsSlice())
		copy(b[24:], p.dst.Addr().AsSlice())
		return append(append(b, dsrOption...), body...)
	}
	b := make([]byte, 20, 20+len(body))
	b[0], b[8], b[9] = 4<<4|5+uint8(len(p.dsrOption)/4), 64, p.protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(p.dsrOption)+len(body)))
	binary.BigEndian.PutUint16(b[4:], p.id)
	fragment := p.offset / 8
	if p.more {
		fragment |= 0x2000
	}
	binary.BigEndian.PutUint16(b[6:], fragment)
	copy(b[12:], p.src.Addr().AsSlice())
	copy(b[16:], p.dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[10:], sum(b, p.dsrOption))
	return append(append(b, p.dsrOption...), body...)
}

// frame writes the packet behind an Ethernet header.
func (p packet) frame() []byte {
	e := []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0}
	if p.src.Addr().Is6() {
		e[12], e[13] = 0x86, 0xdd
	}
	return append(e, p.ip()...)
}

// read is the inverse of frame, and looks at every checksum.
func (w *world) read(frame []byte) (p packet) {
	w.t.Helper()
	b := frame[14:]
	var src, dst netip.Addr
	if b[0]>>4 == 6 {
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		p.protocol = b[6]
		b = b[40 : 40+binary.BigEndian.Uint16(b[4:])]
		if p.protocol == unix.IPPROTO_DSTOPTS {
			p.protocol, p.dsrOption, b = b[0], b[:8+8*b[1]], b[8+8*b[1]:]
		}
	} else {
		header := int(b[0]&15) * 4
		if sum(b[:header]) != 0 {
			w.t.Errorf("the IP header's checksum is wrong: %x", b[:header])
		}
		p.dsrOption = b[20:header]
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		p.protocol, p.offset = b[9], binary.BigEndian.Uint16(b[6:])&0x1fff*8
		p.more = b[6]&0x20 != 0
		b = b[header:binary.BigEndian.Uint16(b[2:])]
	}
	p.src, p.dst, p.payload = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0), b
	if p.offset > 0 {
		return p
	}
	begin := pseudo(src, dst, p.protocol, len(b))
	if p.protocol == unix.IPPROTO_ICMP {
		begin = nil
	}
	if sum(begin, b) != 0 && !p.more {
		w.t.Errorf("the checksum of protocol %d is wrong: %x", p.protocol, b)
	}
	if p.protocol == unix.IPPROTO_TCP || p.protocol == unix.IPPROTO_UDP {
		p.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(b))
		p.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:]))
	}
	if p.protocol == unix.IPPROTO_TCP {
		p.flags = b[13]
	}
	return p
}

// each runs f for both families, by index, and both protocols.
func each(t *testing.T, f func(w *world, six int, protocol uint8)) {
	w := newWorld(t)
	for six := range entries {
		for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f(w, six, p)
		}
	}
}

const fin, syn, rst, ack = 1, 2, 4, 16

func TestPacketThereAndBack(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry, server := ends(six)
		verdict, out := w.see(
			"arrive-14",
			packet{src: client, dst: entry, protocol: protocol, flags: syn, payload: []byte("ask")}.frame(),
		)
		if p := w.read(out); verdict != next || p.src != client || p.dst != server {
			t.Errorf("a packet to the entry goes from %s to %s (%d)", p.src, p.dst, verdict)
		}
		verdict, out = w.see(
			"leave-14",
			packet{src: server, dst: client, protocol: protocol, flags: syn | ack, payload: []byte("reply")}.frame(),
		)
		if p := w.read(out); verdict != next || p.src != entry || p.dst != client {
			t.Errorf("the reply goes from %s to %s (%d)", p.src, p.dst, verdict)
		}
	})
}

func TestPacketForNoService(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client := netip.AddrPortFrom(clients[six], 1234)
		for _, to := range []netip.AddrPort{
			netip.AddrPortFrom(entries[six], 82),
			netip.AddrPortFrom(servers[six], 80),
			netip.AddrPortFrom(servers[six], 8080),
		} {
			for _, program := range []string{"arrive-14", "leave-14"} {
				in := packet{src: client, dst: to, protocol: protocol, flags: syn}.frame()
				if verdict, out := w.see(program, in); verdict != next || !bytes.Equal(in, out) {
					t.Errorf("%s: a packet to %s is changed to %x (%d)", program, to, out, verdict)
				}
			}
		}
	})
}

// A packet to an entry without endpoint is rejected, also in a frame that was padded.
func TestPacketIsRefused(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry := netip.AddrPortFrom(clients[six], 1234), netip.AddrPortFrom(entries[six], 81)
		in := packet{src: client, dst: entry, protocol: protocol, flags: syn, payload: []byte("ask")}
		verdict, out := w.see("arrive-14", append(in.frame(), 0, 0, 0, 0))
		p := w.read(out)
		if verdict != redirected || p.src.Addr() != entry.Addr() || p.dst.Addr() != client.Addr() ||
			!bytes.Equal(out[:6], in.frame()[6:12]) {
			t.Errorf("the answer goes from %s to %s (%d)", p.src, p.dst, verdict)
		}
		switch {
		case protocol == unix.IPPROTO_TCP:
			if got := binary.BigEndian.Uint32(
				p.payload[8:],
			); p.flags != rst|ack || got != 7+1+3 || p.src != entry ||
				p.dst != client {
				t.Errorf("the answer from %s to %s has the flags %#x and acknowledges %d", p.src, p.dst, p.flags, got)
			}
		case six == 0 && (p.payload[0] != 3 || p.payload[1] != 3), six == 1 && (p.payload[0] != 1 || p.payload[1] != 4):
			t.Errorf("the answer is of type %d and code %d", p.payload[0], p.payload[1])
		case !bytes.HasPrefix(in.ip(), p.payload[8:]):
			t.Errorf("the answer tells of %x, not of %x", p.payload[8:], in.ip())
		}
	})
}

func TestPacketsAreCounted(t *testing.T) {
	w := newWorld(t)
	client := netip.AddrPortFrom(clients[0], 1234)
	for range 2 { // the second is of the same flow
		w.see("arrive-14", packet{src: client, dst: netip.AddrPortFrom(entries[0], 80), protocol: unix.IPPROTO_UDP}.frame())
		w.see("arrive-14", packet{src: client, dst: netip.AddrPortFrom(entries[0], 81), protocol: unix.IPPROTO_UDP}.frame())
	}
	if c, err := w.maps.PacketCounts(); err != nil || c != (PacketCounts{Began: 1, Rejected: 2}) {
		t.Errorf("counted: %+v, %v", c, err)
	}
}

// Where the backend of a UDP flow is none any more, its next packet goes elsewhere; of TCP, where it went.
func TestFlowsOfABackendThatWent(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry, _ := ends(six)
		request := func() netip.AddrPort {
			_, out := w.see("arrive-14", packet{src: client, dst: entry, protocol: protocol, flags: ack}.frame())
			return w.read(out).dst
		}
		was := request()
		held := w.maps.Slots[5+2*six].Backend()
		held.Port = bpf.Port(bpf.Port(held.Port) + 1)
		*w.maps.Changes++
		if now := request(); (now != was) != (protocol == unix.IPPROTO_UDP) {
			t.Errorf("protocol %d: from %s to %s", protocol, was, now)
		}
		held.Port = bpf.Port(bpf.Port(held.Port) - 1)
		*w.maps.Changes++
	})
}

// Headers with options, and datagrams without a checksum, are changed as others are.
func TestOutOfTheOrdinary(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry, server := ends(six)
		options := []byte{1, 1, 1, 0} // of IPv4: nothing, to the end
		if six == 1 {
			options = []byte{0, 0, 1, 4, 0, 0, 0, 0} // padding
		}
		for id := range uint16(100) { // for other checksums
			_, out := w.see(
				"arrive-14",
				packet{
					src:       client,
					dst:       entry,
					protocol:  protocol,
					flags:     syn,
					dsrOption: options,
					id:        id,
					payload:   []byte("ask"),
				}.frame(),
			)
			if p := w.read(out); p.src != client || p.dst != server {
				t.Fatalf("there: from %s to %s", p.src, p.dst)
			}
			_, out = w.see(
				"leave-14",
				packet{
					src:       server,
					dst:       client,
					protocol:  protocol,
					flags:     syn | ack,
					dsrOption: options,
					id:        id,
					payload:   []byte("told"),
				}.frame(),
			)
			if p := w.read(out); p.src != entry || p.dst != client {
				t.Fatalf("back: from %s to %s", p.src, p.dst)
			}
		}
		if six == 1 || protocol == unix.IPPROTO_TCP {
			return
		}
		const check = 14 + 20 + 6
		bare := packet{src: client, dst: entry, protocol: protocol, payload: []byte("ask")}.frame()
		bare[check], bare[check+1] = 0, 0
		_, out := w.see("arrive-14", bare)
		if got := netip.AddrFrom4(
			[4]byte(out[30:34]),
		); got != server.Addr() || out[check] != 0 || out[check+1] != 0 ||
			sum(out[14:34]) != 0 {
			t.Errorf("to %s with the checksum %x", got, out[check:check+2])
		}
	})
}

// forgetUses clears the bits that programs set.
func (m *Maps) forgetPortBits() {
	for _, of := range []*devicePortBits{m.portBits.ports, m.portBits.addresses} {
		for i := range of.Of {
			of.Of[i] &= uint16(devicePortBitBIT_SERVICE | devicePortBitBIT_NODE_PORT)
		}
	}
}

// The tables by which packets are told may be of another form in another version, which has flows: they are made anew.
func TestFlowsOfAnotherVersion(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry, server := ends(six)
		back := func() netip.AddrPort {
			_, out := w.see("leave-14", packet{src: server, dst: client, protocol: protocol, flags: ack}.frame())
			return w.read(out).src
		}
		w.see("arrive-14", packet{src: client, dst: entry, protocol: protocol, flags: syn}.frame())
		w.maps.forgetPortBits()
		if got := back(); got != server {
			t.Fatalf("by no port, yet from %s", got)
		}
		if !w.maps.portBits.recall {
			t.Fatal("the tables were made anew, and nothing is to be recalled")
		}
		if err := w.maps.Recall(); err != nil {
			t.Fatal(err)
		}
		if got := back(); got != entry {
			t.Errorf("the answer comes from %s", got)
		}
		_, out := w.see("arrive-14", packet{src: client, dst: entry, protocol: protocol, flags: ack}.frame())
		if got := w.read(out).dst; got != server {
			t.Errorf("what follows goes to %s", got)
		}
	})
}

// What has begun goes on when there is no frontend any more. What begins then has no frontend, like what goes elsewhere
// from the first.
func TestFlowsOfAFrontendThatWent(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		if protocol == unix.IPPROTO_UDP {
			return
		}
		entry := netip.AddrPortFrom(entries[six], 80)
		requests := func(port uint16) netip.Addr {
			_, out := w.see(
				"arrive-14",
				packet{src: netip.AddrPortFrom(clients[six], port), dst: entry, protocol: unix.IPPROTO_TCP, flags: ack}.frame(),
			)
			return w.read(out).dst.Addr()
		}
		if got := requests(1234); got != servers[six] {
			t.Fatalf("to %s", got)
		}
		k := service.Entry{Port: bpf.Port(80), Protocol: unix.IPPROTO_TCP}
		k.Address.Word = bpf.Words(entries[six])
		if err := w.maps.DeleteFrontends([]service.Entry{k}); err != nil {
			t.Fatal(err)
		}
		for range 2 { // there is one of UDP, too
			w.maps.Exit(k)
		}
		if begun, other := requests(1234), requests(1235); begun != servers[six] || other != entries[six] {
			t.Errorf("the open connection goes to %s, a new one to %s", begun, other)
		}
	})
}

// Once retired, what has begun goes on, nothing new begins, and it is told when the last connection has ended.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	request := func(six int, port uint16, protocol, flags uint8) (translated bool) {
		client, entry := netip.AddrPortFrom(clients[six], port), netip.AddrPortFrom(entries[six], 80)
		_, out := w.see("arrive-14", packet{src: client, dst: entry, protocol: protocol, flags: flags}.frame())
		return w.read(out).dst == netip.AddrPortFrom(servers[six], 8080)
	}
	left := func(want int) {
		t.Helper()
		if n, err := Drain(w.folder); n != want || err != nil {
			t.Errorf("%d connections (%v), not %d", n, err, want)
		}
	}
	for six := range entries {
		if !request(six, 1234, unix.IPPROTO_TCP, syn) || !request(six, 1235, unix.IPPROTO_TCP, syn) ||
			!request(six, 1234, unix.IPPROTO_UDP, 0) {
			t.Fatal("the entry leads nowhere")
		}
	}
	left(4)
	for six := range entries {
		if !request(six, 1234, unix.IPPROTO_TCP, ack) {
			t.Error("a connection that has begun ends")
		}
		if request(six, 1236, unix.IPPROTO_TCP, syn) || request(six, 1234, unix.IPPROTO_UDP, 0) {
			t.Error("something new begins")
		}
		request(six, 1235, unix.IPPROTO_TCP, rst)
	}
	left(2)
	for six := range clients {
		request(six, 1234, unix.IPPROTO_TCP, fin|ack)
		w.reply(six, 1234, fin|ack)
	}
	left(2) // LAST_ACK
	for six := range clients {
		request(six, 1234, unix.IPPROTO_TCP, ack)
	}
	left(0)
}

// reply has the backend answer a client's TCP connection, and returns the source address that the client sees.
func (w *world) reply(six int, port uint16, flags uint8) netip.AddrPort {
	w.t.Helper()
	_, out := w.see("leave-14", packet{src: netip.AddrPortFrom(servers[six], 8080),
		dst: netip.AddrPortFrom(clients[six], port), protocol: unix.IPPROTO_TCP, flags: flags}.frame())
	return w.read(out).src
}

// Retired programs translate no packet of a new connection from a port that was used before, whatever became of the one
// before. A SYN whose SYN, ACK is on its way may come again.
func TestDrainedReusedPort(t *testing.T) {
	w := newWorld(t)
	ends := [][2]uint8{{syn, syn | ack}, {fin | ack, fin | ack}, {fin | ack, ack}, {rst, 0}, {ack, ack}}
	for six := range entries {
		to, entry := netip.AddrPortFrom(servers[six], 8080), netip.AddrPortFrom(entries[six], 80)
		request := func(port uint16, flags uint8) netip.AddrPort {
			_, out := w.see("arrive-14", packet{src: netip.AddrPortFrom(clients[six], port), dst: entry,
				protocol: unix.IPPROTO_TCP, flags: flags}.frame())
			return w.read(out).dst
		}
		if err := w.serveAgain(six); err != nil {
			t.Fatal(err)
		}
		for i, end := range ends {
			port := uint16(1000 + i)
			for _, flags := range [][2]uint8{{syn, syn | ack}, {ack, ack}, end} {
				if i == 0 && flags != end {
					continue
				}
				if got := request(port, flags[0]); got != to {
					t.Fatalf("port %d: a packet goes to %s", port, got)
				}
				if flags[1] != 0 {
					w.reply(six, port, flags[1])
				}
			}
		}
		if _, err := Drain(w.folder); err != nil {
			t.Fatal(err)
		}
		for i := range ends {
			port, opening := uint16(1000+i), i == 0
			if got := request(port, syn); (got == to) != opening {
				t.Errorf("after %v, a SYN goes to %s", ends[i], got)
			}
			if got := w.reply(six, port, syn|ack); (got == entry) != opening {
				t.Errorf("after %v, a SYN, ACK comes from %s", ends[i], got)
			}
			if got := request(port, ack); (got == to) != opening {
				t.Errorf("after %v, what follows a SYN goes to %s", ends[i], got)
			}
		}
	}
}

// serveAgain has a world's entry of a family lead to its backend, as at first.
func (w *world) serveAgain(six int) error {
	k := service.Entry{Port: bpf.Port(80), Protocol: unix.IPPROTO_TCP}
	k.Address.Word = bpf.Words(entries[six])
	pool := uint32(3 + six)
	return w.maps.PutFrontends([]service.Entry{k}, []service.Frontend{{Internal: pool, External: pool}})
}

// A SYN from a port whose connection's endpoint is gone is served by another.
func TestReusedPortOfGoneBackend(t *testing.T) {
	w := newWorld(t)
	for six := range entries {
		request := func(flags uint8) netip.AddrPort {
			_, out := w.see("arrive-14", packet{src: netip.AddrPortFrom(clients[six], 1234),
				dst: netip.AddrPortFrom(entries[six], 80), protocol: unix.IPPROTO_TCP, flags: flags}.frame())
			return w.read(out).dst
		}
		was := request(syn)
		w.reply(six, 1234, syn|ack)
		request(ack)
		w.maps.Slots[5+2*six].Backend().Port = bpf.Port(8081)
		if got := request(ack); got != was {
			t.Errorf("an open connection goes on to %s, not %s", got, was)
		}
		if got := request(syn); got.Port() != 8081 {
			t.Errorf("a new one goes to %s", got)
		}
	}
}

// Maps of another version's form are an error that says so.
func TestDrainOtherForm(t *testing.T) {
	w := newWorld(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(filepath.Join(w.folder, bpf.StateFolder, pinNames[deviceMapFlNatDst]+"-00000000")); err != nil {
		t.Fatal(err)
	}
	if _, err := Drain(w.folder); !errors.Is(err, bpf.ErrForm) {
		t.Errorf("retire: %v", err)
	}
}

// Fragments follow their first, which alone tells the ports.
func TestFragments(t *testing.T) {
	w := newWorld(t)
	client, entry, server := ends(0)
	for _, c := range []packet{
		{src: client, dst: entry, protocol: unix.IPPROTO_UDP, id: 5, more: true, payload: make([]byte, 24)},
		{src: client, dst: entry, protocol: unix.IPPROTO_UDP, id: 5, offset: 32, payload: make([]byte, 8)},
	} {
		verdict, out := w.see("arrive-14", c.frame())
		if p := w.read(out); verdict != next || p.dst.Addr() != server.Addr() || p.src.Addr() != client.Addr() {
			t.Errorf("the fragment at %d goes from %s to %s (%d)", c.offset, p.src, p.dst, verdict)
		}
	}
	other := packet{
		src:      client,
		dst:      entry,
		protocol: unix.IPPROTO_UDP,
		id:       6,
		offset:   32,
		payload:  make([]byte, 8),
	}.frame()
	if _, out := w.see("arrive-14", other); !bytes.Equal(out, other) {
		t.Error("a fragment whose first was never seen is changed")
	}
}

// An ICMP error about a translated packet tells its sender of the packet as it was sent, on both ways.
func TestErrorsAreTranslated(t *testing.T) {
	each(t, func(w *world, six int, protocol uint8) {
		client, entry, server := ends(six)
		w.see("arrive-14", packet{src: client, dst: entry, protocol: protocol, flags: syn}.frame())
		router := pair("203.0.113.1", "2001:db8:5::1")[six]
		icmp, kind := uint8(unix.IPPROTO_ICMP), []byte{3, 4, 0, 0, 0, 0, 5, 0} // fragmentation needed, MTU 1280
		if six == 1 {
			icmp, kind = unix.IPPROTO_ICMPV6, []byte{2, 0, 0, 0, 0, 0, 5, 0}
		}
		dsrOption := func(of packet) []byte {
			whole := of.ip()
			return append(bytes.Clone(kind), whole[:len(whole)-len(of.transport())+8]...)
		}
		about := packet{src: client, dst: server, protocol: protocol}
		_, out := w.see(
			"leave-14",
			packet{src: netip.AddrPortFrom(router, 0), dst: client, protocol: icmp, payload: dsrOption(about)}.frame(),
		)
		inner := w.inner(w.read(out).payload[8:])
		if inner.src != client || inner.dst != entry {
			t.Errorf("the client hears of its packet from %s to %s", inner.src, inner.dst)
		}
		about = packet{src: entry, dst: client, protocol: protocol}
		_, out = w.see(
			"arrive-14",
			packet{src: client, dst: netip.AddrPortFrom(entry.Addr(), 0), protocol: icmp, payload: dsrOption(about)}.frame(),
		)
		p := w.read(out)
		if inner = w.inner(p.payload[8:]); inner.src != server || inner.dst != client || p.dst.Addr() != server.Addr() {
			t.Errorf("%s hears of a packet from %s to %s", p.dst, inner.src, inner.dst)
		}
	})
}

// inner reads the packet that an ICMP error tells of, of which there are 8 bytes behind the IP header.
func (w *world) inner(b []byte) (p packet) {
	at := 20
	src, dst := netip.Addr{}, netip.Addr{}
	if b[0]>>4 == 6 {
		at = 40
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
	} else {
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		if sum(b[:20]) != 0 {
			w.t.Errorf("the checksum of the IP header within is wrong: %x", b[:20])
		}
	}
	p.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(b[at:]))
	p.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[at+2:]))
	return p
}

// BenchmarkPacket has packets run through the programs: for no Service, and of a flow.
func BenchmarkPacket(b *testing.B) {
	w := newWorld(b)
	client, entry, _ := ends(0)
	for name, p := range map[string]packet{
		"nobody": {
			src: client, dst: netip.AddrPortFrom(servers[0], 9000), protocol: unix.IPPROTO_TCP, flags: ack,
		},
		"at an entry's port": {src: client, dst: netip.AddrPortFrom(servers[0], 80), protocol: unix.IPPROTO_TCP, flags: ack},
		"entry":              {src: client, dst: entry, protocol: unix.IPPROTO_TCP, flags: ack},
	} {
		for _, program := range []string{"arrive-14", "leave-14"} {
			b.Run(name+"/"+program, func(b *testing.B) {
				o := &ebpf.RunOptions{
					Data:    p.frame(),
					DataOut: make([]byte, 256),
					Repeat:  uint32(b.N),
					Context: skBuff{IngressIfindex: 1, Ifindex: 1},
				}
				if _, err := w.programs.by[program].Run(o); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}
