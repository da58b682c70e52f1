package bpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// What becomes of packets where a backend's node answers the client itself, on the node that the client asks and on the backend's.

// outside is the origin of clients outside, as a bit (model.FromOutside).
const outside = 1 << 2

// askedNode is a world whose backends run on another node; backendNode is that one's.
func askedNode(t *testing.T) *world {
	return newWorldOf(t, DeviceOptions{Direct: true}, Frontend{Hide: outside, Direct: outside}, Away)
}

func backendNode(t *testing.T) *world {
	return newWorldOf(t, DeviceOptions{Direct: true}, Frontend{Hide: outside, Direct: outside}, Local)
}

// eachEnd runs f for both families, by index, and both protocols, between two nodes.
func eachEnd(t *testing.T, f func(a, b *world, six int, protocol uint8)) {
	a, b := askedNode(t), backendNode(t)
	for six := range entries {
		for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f(a, b, six, p)
		}
	}
}

// told gives what a packet tells of an entry by.
func told(entry netip.AddrPort) []byte {
	port := binary.BigEndian.AppendUint16(nil, entry.Port())
	if entry.Addr().Is4() {
		return slices.Concat([]byte{0x9e, 8}, port, entry.Addr().AsSlice())
	}
	return slices.Concat([]byte{0, 2, 1, 0, 0x1e, 18}, port, entry.Addr().AsSlice())
}

// same says whether two packets tell the same, but for what is next.
func same(a, b []byte) bool {
	return len(a) == len(b) && (len(a) == 0 || len(a) == 8 && bytes.Equal(a, b) || bytes.Equal(a[1:], b[1:]))
}

// The packet that opens a flow tells the backend's node of the entry, and so do all of UDP. That node has the backend answer in
// the entry's name, and see the packet as the client sent it.
func TestBackendsNodeAnswers(t *testing.T) {
	eachEnd(t, func(a, b *world, six int, protocol uint8) {
		client, entry, server := netip.AddrPortFrom(clients[six], 1234), netip.AddrPortFrom(entries[six], 80), netip.AddrPortFrom(servers[six], 8080)
		reply := packet{src: server, dst: client, protocol: protocol, flags: syn | ack, payload: []byte("reply")}.frame()
		for i, flags := range []uint8{syn, syn, ack} {
			in := packet{src: client, dst: entry, protocol: protocol, flags: flags, payload: []byte("ask")}
			verdict, out := a.see("arrive-14", in.frame())
			on := a.read(out)
			tells := protocol == unix.IPPROTO_UDP || flags == syn
			if verdict != next || on.src != client || on.dst != server || same(on.told, told(entry)) != tells || !tells && len(on.told) > 0 {
				t.Fatalf("packet %d goes on from %s to %s and tells %x (%d)", i, on.src, on.dst, on.told, verdict)
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
