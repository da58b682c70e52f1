package device

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// What happens to packets with direct server return, on the node that the client sends to and on the backend's.

// outside is the origin of clients outside, as a bit (model.FromExternal).
const outside = 1 << 2

// askedNode is a world whose backends run on another node; backendNode is that one's.
func receivingNode(t *testing.T) *world {
	return newWorldOf(t, Options{DSR: true}, service.Frontend{Masquerade: outside, Dsr: outside}, service.Remote)
}

func backendNode(t *testing.T) *world {
	return newWorldOf(t, Options{DSR: true}, service.Frontend{Masquerade: outside, Dsr: outside}, service.Local)
}

// eachEnd runs f for both families, by index, and both protocols, between two nodes.
func eachEnd(t *testing.T, f func(a, b *world, six int, protocol uint8)) {
	a, b := receivingNode(t), backendNode(t)
	for six := range entries {
		for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f(a, b, six, p)
		}
	}
}

// dsrOption returns the option that carries an entry.
func dsrOption(entry netip.AddrPort) []byte {
	port := binary.BigEndian.AppendUint16(nil, entry.Port())
	if entry.Addr().Is4() {
		return slices.Concat([]byte{0x9e, 8}, port, entry.Addr().AsSlice())
	}
	return slices.Concat([]byte{0, 2, 1, 0, 0x1e, 18}, port, entry.Addr().AsSlice())
}

// same reports whether two options carry the same, but for the next header.
func same(a, b []byte) bool {
	return len(a) == len(b) && (len(a) == 0 || len(a) == 8 && bytes.Equal(a, b) || bytes.Equal(a[1:], b[1:]))
}

// The packet that opens a flow passes the entry to the backend's node, and so do all of UDP. That node translates the
// backend's replies, and shows it the packet as the client sent it.
func TestBackendsNodeAnswers(t *testing.T) {
	eachEnd(t, func(a, b *world, six int, protocol uint8) {
		client, entry, server := ends(six)
		reply := packet{src: server, dst: client, protocol: protocol, flags: syn | ack, payload: []byte("reply")}.frame()
		for i, flags := range []uint8{syn, syn, ack} {
			in := packet{src: client, dst: entry, protocol: protocol, flags: flags, payload: []byte("ask")}
			verdict, out := a.see("arrive-14", in.frame())
			on := a.read(out)
			carries := protocol == unix.IPPROTO_UDP || flags == syn
			if verdict != next || on.src != client || on.dst != server || same(on.dsrOption, dsrOption(entry)) != carries ||
				!carries && len(on.dsrOption) > 0 {
				t.Fatalf("packet %d goes on from %s to %s and tells %x (%d)", i, on.src, on.dst, on.dsrOption, verdict)
			}
			verdict, got := b.see("arrive-14", out)
			in.dst = server
			if verdict != next || !bytes.Equal(got, in.frame()) {
				t.Errorf("packet %d comes to the backend as\n%x, not\n%x (%d)", i, got, in.frame(), verdict)
			}
			verdict, got = b.see("leave-14", reply)
			if p := b.read(got); verdict != next || p.src != entry || p.dst != client {
				t.Errorf("reply %d goes from %s to %s (%d)", i, p.src, p.dst, verdict)
			}
		}
	})
}

// Both nodes wait for such a connection when they are retired, until each has seen an end of it: they don't see both.
func TestDSRDrains(t *testing.T) {
	a, b := receivingNode(t), backendNode(t)
	client, entry, server := ends(0)
	request := func(flags uint8) {
		_, out := a.see("arrive-14", packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP, flags: flags}.frame())
		b.see("arrive-14", out)
		b.see("leave-14", packet{src: server, dst: client, protocol: unix.IPPROTO_TCP, flags: flags | ack}.frame())
	}
	request(syn)
	for _, want := range []int{1, 0} {
		for i, w := range []*world{a, b} {
			if n, err := Drain(w.folder); n != want || err != nil {
				t.Errorf("node %d: %d connections (%v), not %d", i, n, err, want)
			}
		}
		request(fin | ack)
	}
}

// knows has a world know a node's address, and a node port 30080 of both protocols that leads where port 80 does.
func (w *world) knows(six int, node netip.Addr) {
	w.t.Helper()
	if err := w.maps.PutPrefix(netip.PrefixFrom(node, node.BitLen()), service.Nodes); err != nil {
		w.t.Fatal(err)
	}
	w.also(
		netip.AddrPortFrom([2]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[six], 30080),
		six,
		service.Frontend{Masquerade: outside, Dsr: outside, NodePort: 1},
	)
}

// also adds an entry that leads where port 80 does.
func (w *world) also(entry netip.AddrPort, six int, f service.Frontend) {
	w.t.Helper()
	f.Internal, f.External = uint32(3+six), uint32(3+six)
	var keys []service.Entry
	for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		k := service.Entry{Port: bpf.Port(entry.Port()), Protocol: p}
		k.Address.Word = bpf.Words(entry.Addr())
		keys = append(keys, k)
	}
	if err := w.maps.PutFrontends(keys, []service.Frontend{f, f}); err != nil {
		w.t.Fatal(err)
	}
	w.maps.Enter(keys[0])
}

// A node has its backends answer in the name of nothing but an entry of theirs with direct server return: a packet
// with another option passes as it is.
func TestOnlyEntriesAreAnswered(t *testing.T) {
	a, strange := pair("198.18.0.1", "2001:db8:9::1"), pair("198.18.0.2", "2001:db8:9::2")
	none := [2]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	on := Options{DSR: true}
	at := func(addrs [2]netip.Addr, port uint16) func(int) netip.AddrPort {
		return func(six int) netip.AddrPort { return netip.AddrPortFrom(addrs[six], port) }
	}
	for name, c := range map[string]struct {
		o      Options
		fare   service.Frontend
		weight uint16
		entry  func(six int) netip.AddrPort
		yes    bool
	}{
		"its own":                {on, service.Frontend{Dsr: outside}, service.Local, at(entries, 80), true},
		"a node port":            {on, service.Frontend{Dsr: outside}, service.Local, at(a, 30080), true},
		"a foreign node port":    {on, service.Frontend{Dsr: outside}, service.Local, at(strange, 30080), false},
		"a node port of all":     {on, service.Frontend{Dsr: outside}, service.Local, at(none, 30080), false},
		"no entry":               {on, service.Frontend{Dsr: outside}, service.Local, at(entries, 82), false},
		"another's":              {on, service.Frontend{Dsr: outside}, service.Local, at(entries, 81), false},
		"one that others answer": {on, service.Frontend{}, service.Local, at(entries, 80), false},
		"of an elsewhere":        {on, service.Frontend{Dsr: outside}, service.Remote, at(entries, 80), false},
		"one that shuts it out":  {on, service.Frontend{Dsr: outside, Restricted: 1}, service.Local, at(entries, 80), false},
		"off":                    {Options{}, service.Frontend{Dsr: outside}, service.Local, at(entries, 80), false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorldOf(t, c.o, c.fare, c.weight)
			for six := range entries {
				w.knows(six, a[six])
				for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
					client, _, server := ends(six)
					entry := c.entry(six)
					in := packet{src: client, dst: server, protocol: protocol, flags: syn, dsrOption: dsrOption(entry)}.frame()
					if verdict, out := w.see("arrive-14", in); verdict != next || bytes.Equal(in, out) == c.yes {
						t.Errorf("a packet that tells of %s goes on as %x (%d)", entry, out, verdict)
					}
					reply := packet{src: server, dst: client, protocol: protocol, flags: syn | ack}.frame()
					if verdict, out := w.see(
						"leave-14",
						reply,
					); verdict != next || (w.read(out).src == entry) != c.yes ||
						bytes.Equal(reply, out) == c.yes {
						t.Errorf("the answer goes on from %s (%d)", w.read(out).src, verdict)
					}
				}
			}
		})
	}
}

// What a client's own packet tells of changes nothing for it.
func TestDSROptionOfClientsIgnored(t *testing.T) {
	w := receivingNode(t)
	client, entry, server := ends(0)
	in := packet{
		src:       client,
		dst:       entry,
		protocol:  unix.IPPROTO_UDP,
		dsrOption: dsrOption(netip.MustParseAddrPort("198.18.0.9:53")),
	}
	_, out := w.see("arrive-14", in.frame())
	if p := w.read(out); p.dst != server || !bytes.Equal(p.dsrOption, append(dsrOption(entry), in.dsrOption...)) {
		t.Errorf("its packet goes on to %s and tells %x", p.dst, p.dsrOption)
	}
}

// state returns the state of a NAT entry: 0 for none.
func (w *world) state(entries string, src, dst netip.AddrPort, protocol uint8) uint32 {
	k := Tuple{Sport: bpf.Port(src.Port()), Dport: bpf.Port(dst.Port()), Protocol: protocol}
	k.Source.Word, k.Destination.Word = bpf.Words(src.Addr()), bpf.Words(dst.Addr())
	var held NatEntry
	if w.maps.named[entries].Lookup(k, &held) != nil {
		return 0
	}
	return held.State
}

// A client that the backend's node can't answer is masqueraded, as without.
func TestMasqueradedDespiteDSR(t *testing.T) {
	a, strange := pair("198.18.0.1", "2001:db8:9::1"), pair("198.18.0.2", "2001:db8:9::2")
	for name, c := range map[string]struct {
		weight               uint16
		client, to           [2]netip.Addr
		port                 uint16
		masqueraded, telling bool
	}{
		"a client outside":                     {service.Remote, clients, entries, 80, false, true},
		"by a node port":                       {service.Remote, clients, a, 30080, false, true},
		"the backend is here":                  {service.Local, clients, entries, 80, false, false},
		"the backend is on no node":            {0, clients, entries, 80, true, false},
		"the client is a node":                 {service.Remote, a, entries, 80, true, false},
		"the client is the backend":            {service.Remote, servers, entries, 80, true, false},
		"by an address that others don't know": {service.Remote, clients, strange, 30080, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorldOf(t, Options{DSR: true}, service.Frontend{Masquerade: outside, Dsr: outside}, c.weight)
			for six := range entries {
				w.knows(six, a[six])
				if err := w.maps.PutPrefix(netip.PrefixFrom(strange[six], strange[six].BitLen()), service.NodePorts); err != nil {
					t.Fatal(err)
				}
				if err := w.maps.PutPrefix(netip.PrefixFrom(a[six], a[six].BitLen()), service.Nodes|service.NodePorts); err != nil {
					t.Fatal(err)
				}
				for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
					client, server := netip.AddrPortFrom(c.client[six], 1234), netip.AddrPortFrom(servers[six], 8080)
					_, out := w.see(
						"arrive-14",
						packet{src: client, dst: netip.AddrPortFrom(c.to[six], c.port), protocol: protocol, flags: syn}.frame(),
					)
					p := w.read(out)
					if p.dst != server || (len(p.dsrOption) > 0) != c.telling {
						t.Errorf("a packet goes on to %s and tells %x", p.dst, p.dsrOption)
					}
					if masqueraded := w.state(
						deviceMapFlNatSrc,
						client,
						server,
						protocol,
					)&uint32(
						deviceNatStateMASQ_PENDING,
					) > 0; masqueraded != c.masqueraded {
						t.Errorf("it is masqueraded: %t", masqueraded)
					}
				}
			}
		})
	}
}

// A client that asks two entries from one port and is given one backend is told apart by its port here: the backend's
// node couldn't.
func TestTwoEntriesFromOnePort(t *testing.T) {
	w := receivingNode(t)
	w.also(netip.AddrPortFrom(entries[0], 83), 0, service.Frontend{Masquerade: outside, Dsr: outside})
	client, server := netip.AddrPortFrom(clients[0], 1234), netip.AddrPortFrom(servers[0], 8080)
	var seen []packet
	for _, port := range []uint16{80, 83} {
		_, out := w.see(
			"arrive-14",
			packet{src: client, dst: netip.AddrPortFrom(entries[0], port), protocol: unix.IPPROTO_UDP}.frame(),
		)
		seen = append(seen, w.read(out))
	}
	if len(seen[0].dsrOption) == 0 || len(seen[1].dsrOption) > 0 || seen[1].src == client ||
		w.state(deviceMapFlNatSrc, seen[1].src, server, unix.IPPROTO_UDP)&uint32(deviceNatStateMASQ_PENDING) == 0 {
		t.Errorf("%+v", seen)
	}
}

// Of a datagram in fragments, the first tells of the entry: it alone has ports.
func TestOnlyFirstFragmentCarriesOption(t *testing.T) {
	a, b := receivingNode(t), backendNode(t)
	client, entry, server := ends(0)
	for _, c := range []packet{
		{src: client, dst: entry, protocol: unix.IPPROTO_UDP, id: 5, more: true, payload: make([]byte, 24)},
		{src: client, dst: entry, protocol: unix.IPPROTO_UDP, id: 5, offset: 32, payload: make([]byte, 8)},
	} {
		_, out := a.see("arrive-14", c.frame())
		if p := a.read(out); p.dst.Addr() != server.Addr() || (len(p.dsrOption) > 0) != (c.offset == 0) {
			t.Errorf("the fragment at %d goes to %s and tells %x", c.offset, p.dst, p.dsrOption)
		}
		if _, out = b.see("arrive-14", out); len(b.read(out).dsrOption) > 0 || !b.read(out).more != !c.more {
			t.Errorf("the fragment at %d comes as %x", c.offset, out)
		}
	}
}

// A router that finds a packet too long has the client leave room for what it tells of.
func TestErrorMTUAllowsForOption(t *testing.T) {
	for six, size := range []int{8, 24} {
		w := receivingNode(t)
		client, entry, server := ends(six)
		_, sent := w.see(
			"arrive-14",
			packet{src: client, dst: entry, protocol: unix.IPPROTO_UDP, payload: make([]byte, 99)}.frame(),
		)
		icmp, kind := uint8(unix.IPPROTO_ICMP), []byte{3, 4, 0, 0, 0, 0, 5, 220}
		if six == 1 {
			icmp, kind = unix.IPPROTO_ICMPV6, []byte{2, 0, 0, 0, 0, 0, 5, 220}
		}
		for _, k := range []struct{ kind, want int }{{0, 1500 - size}, {1, 1500}} { // and another error is left as it is
			copy(kind, [2][2][]byte{{{3, 4}, {3, 3}}, {{2}, {3}}}[six][k.kind])
			payload := append(bytes.Clone(kind), sent[14:14+[2]int{20, 40}[six]+size+8]...)
			router := netip.AddrPortFrom(pair("203.0.113.1", "2001:db8:5::1")[six], 0)
			_, out := w.see("leave-14", packet{src: router, dst: client, protocol: icmp, payload: payload}.frame())
			p := w.read(out)
			if mtu := int(binary.BigEndian.Uint16(p.payload[6:])); mtu != k.want {
				t.Errorf("the client hears of %d bytes, not %d", mtu, k.want)
			}
			to := p.payload[8+16 : 8+20]
			if six == 1 {
				to = p.payload[8+24 : 8+40]
			}
			if !bytes.Equal(to, entry.Addr().AsSlice()) || bytes.Equal(to, server.Addr().AsSlice()) {
				t.Errorf("the client hears of its packet to %x", to)
			}
		}
	}
}

// A node sees one side of a flow whose answers don't come by it: what that side ends is over.
func TestDirectFlowsEnd(t *testing.T) {
	const fin = 1
	client, entry, server := ends(0)
	request := packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP}
	t.Run("where the client asks", func(t *testing.T) {
		w := receivingNode(t)
		began := func(flags uint8, want uint64) {
			t.Helper()
			request.flags = flags
			w.see("arrive-14", request.frame())
			if c, err := w.maps.PacketCounts(); err != nil || c.Began != want {
				t.Errorf("flags %#x: %d flows began, not %d (%v)", flags, c.Began, want, err)
			}
		}
		answered := func() bool {
			return w.state(deviceMapFlNatDst, client, entry, unix.IPPROTO_TCP)&uint32(deviceNatStateSEEN_REPLY) > 0
		}
		began(syn, 1)
		began(syn, 1)
		if answered() {
			t.Error("a SYN counts as the answer to another")
		}
		began(ack, 1)
		if !answered() {
			t.Error("an ACK doesn't show that the client was answered")
		}
		began(ack|fin, 1)
		began(syn, 2)
		held := w.maps.Slots[5].Backend()
		held.Port = bpf.Port(8081) // the backend that was is none any more, and another there
		began(ack, 2)
		began(syn, 3)
	})
	t.Run("where the backend is", func(t *testing.T) {
		w := backendNode(t)
		arrive := func(dsrOption []byte) {
			w.see(
				"arrive-14",
				packet{src: client, dst: server, protocol: unix.IPPROTO_TCP, flags: syn, dsrOption: dsrOption}.frame(),
			)
		}
		from := func(when string, flags uint8, want netip.AddrPort) {
			t.Helper()
			_, out := w.see("leave-14", packet{src: server, dst: client, protocol: unix.IPPROTO_TCP, flags: flags}.frame())
			if got := w.read(out).src; got != want {
				t.Errorf("%s, the backend answers as %s, not %s", when, got, want)
			}
		}
		arrive(dsrOption(entry))
		from("asked by way of the entry", syn|ack, entry)
		arrive(nil)
		from("meanwhile a SYN to the backend itself", ack, entry)
		from("at the end", fin|ack, entry)
		from("behind the end", ack, entry)
		arrive(nil)
		from("then asked itself", syn|ack, server)
	})
}
