package device

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// portBits are the bitmaps by which programs find at a glance packets that may be for a frontend: by port and
// destination.
type portBits struct {
	ports, addresses *devicePortBits
	held             *held // nil until there is a frontend
	recall           bool  // they were created anew, maybe beside flows of an earlier version
}

// held counts frontends, and prefixes of Services' addresses.
type held struct{ atPort, anywhere, atAddress, inNetwork [1 << 16]uint32 }

// Enter sets the bits of a frontend.
func (m *Maps) Enter(k service.Entry) {
	m.portBits.prepare()
	m.portBits.each(k, more)
}

// Exit undoes Enter. The bits that programs set for flows stay.
func (m *Maps) Exit(k service.Entry) {
	m.portBits.prepare()
	m.portBits.each(k, fewer)
}

// enterNetwork sets the bits of a prefix of Services' addresses.
func (m *Maps) enterNetwork(p netip.Prefix) {
	m.portBits.prepare()
	m.portBits.eachNetwork(p, more)
}

// exitNetwork undoes enterNetwork.
func (m *Maps) exitNetwork(p netip.Prefix) {
	m.portBits.prepare()
	m.portBits.eachNetwork(p, fewer)
}

// prepare creates the counts.
func (u *portBits) prepare() {
	if u.held == nil {
		u.held = &held{}
	}
}

// more increments a count, and sets its bit.
func more(of *devicePortBits, bit devicePortBit, n *uint32, at uint16) {
	*n++
	set(of, at, bit, true)
}

// fewer undoes more.
func fewer(of *devicePortBits, bit devicePortBit, n *uint32, at uint16) {
	if *n = max(*n, 1) - 1; *n == 0 {
		set(of, at, bit, false)
	}
}

// eachNetwork calls f as each does, for a prefix of addresses that only Services have.
func (u *portBits) eachNetwork(p netip.Prefix, f func(of *devicePortBits, bit devicePortBit, n *uint32, at uint16)) {
	if p.IsSingleIP() {
		at := shortHash(bpf.Words(p.Addr()))
		f(u.addresses, devicePortBitBIT_SERVICE, &u.held.atAddress[at], at)
		return
	}
	network := func(words ...uint32) {
		var w [4]uint32
		copy(w[:], words)
		at := shortHash(w)
		f(u.addresses, devicePortBitBIT_SERVICE_NET, &u.held.inNetwork[at], at)
	}
	if w := bpf.Words(p.Addr()); p.Addr().Is6() {
		network(w[0], w[1]) // ServiceCIDRs of IPv6 are no wider
		return
	}
	four := p.Masked().Addr().As4()
	for range 1 << max(0, 16-p.Bits()) {
		network(bpf.Words(netip.AddrFrom4([4]byte{four[0], four[1]}))[3])
		binary.BigEndian.PutUint16(four[:], binary.BigEndian.Uint16(four[:])+1)
	}
}

// Recall copies the flows of maps of another size, and sets the bits of all flows where the bitmaps were created
// anew: an earlier version's may have had another form. It is to be called again once programs that set bits there
// are attached. Some bits are set without need.
func (m *Maps) Recall() error {
	if err := m.copyFlows(); err != nil {
		return err
	}
	if !m.portBits.recall {
		return nil
	}
	return m.setPortBits(atomic.LoadUint32(&m.portBits.ports.Generation))
}

// RebuildPortBits has the programs that work on the maps in a folder set bits in the other generation, sets those of
// all flows there, and clears those of the previous generation: ports of flows that have ended no longer cost packets
// a lookup. While another process does so, it does nothing.
func RebuildPortBits(folder string, s service.Sizes) error {
	m, err := OpenMaps(folder, s)
	if err != nil {
		return err
	}
	defer m.Close()
	lock, err := os.Open(filepath.Join(filepath.Dir(folder), bpf.StateFolder))
	if err != nil {
		return fmt.Errorf("bpf: open the folder of state maps: %w", err)
	}
	defer lock.Close()
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("bpf: lock the folder of state maps: %w", err)
	}
	grace, err := bpf.NewGrace()
	if err != nil {
		return err
	}
	defer grace.Close()
	return m.rebuildPortBits(grace.Wait)
}

// rebuildPortBits is RebuildPortBits. wait returns once all programs that are running have ended. A program writes a
// flow's entries before it sets their bits: what ran by the previous generation has written by then what is read
// here, and what runs later sets bits of the other generation.
func (m *Maps) rebuildPortBits(wait func() error) error {
	before := atomic.LoadUint32(&m.portBits.ports.Generation)
	for _, of := range []*devicePortBits{m.portBits.ports, m.portBits.addresses} {
		atomic.StoreUint32(&of.Generation, 1-before)
	}
	if err := wait(); err != nil {
		return err
	}
	if err := m.setPortBits(1 - before); err != nil {
		return err // those of the generation before stay
	}
	ours := devicePortBitBIT_CLIENT | devicePortBitBIT_BACKEND | devicePortBitBIT_MASQ_BACKEND | devicePortBitBIT_MASQ_PORT
	bits := ^(ofGeneration(ours, before) * 0x10001)
	for _, of := range []*devicePortBits{m.portBits.ports, m.portBits.addresses} {
		for at := 0; at < len(of.Of); at += 2 {
			if word := (*uint32)(unsafe.Pointer(&of.Of[at])); atomic.LoadUint32(word)&^bits != 0 {
				atomic.AndUint32(word, bits)
			}
		}
	}
	return nil
}

// setPortBits sets the bits of all flows, in a generation.
func (m *Maps) setPortBits(generation uint32) error {
	now, err := bpf.Seconds()
	if err != nil {
		return err
	}
	set := func(of *devicePortBits, at uint16, bit devicePortBit) {
		set(of, at, devicePortBit(ofGeneration(bit, generation)), true)
	}
	err = bpf.ReadAll(m.named[deviceMapFlNatDst], func(t Tuple, w NatEntry) {
		switch {
		case expired(w, t.Protocol, now):
		case deviceNatState(w.State)&deviceNatStateDIR_ORIGINAL != 0:
			set(m.portBits.addresses, shortHash(t.Destination.Word), devicePortBitBIT_CLIENT)
			set(m.portBits.ports, t.Dport, devicePortBitBIT_CLIENT)
		default:
			set(m.portBits.ports, t.Dport, devicePortBitBIT_MASQ_PORT)
		}
	})
	if err != nil {
		return err
	}
	return bpf.ReadAll(m.named[deviceMapFlNatSrc], func(t Tuple, w NatEntry) {
		switch {
		case expired(w, t.Protocol, now):
		case deviceNatState(w.State)&deviceNatStateDIR_REPLY != 0:
			set(m.portBits.ports, t.Sport, devicePortBitBIT_BACKEND)
		default:
			set(m.portBits.ports, t.Dport, devicePortBitBIT_MASQ_BACKEND)
		}
	})
}

// ofGeneration returns bits that programs set, of a generation.
func ofGeneration(bit devicePortBit, generation uint32) uint32 {
	return uint32(bit) << (generation * generationShift)
}

// generationShift is BIT_GENERATION_SHIFT of service.h.
const generationShift = 8

// each calls f with each bit of an entry, and the number of entries that have it. A node port is at any address: its
// port's bit for that comes first.
func (u *portBits) each(k service.Entry, f func(of *devicePortBits, bit devicePortBit, n *uint32, at uint16)) {
	if bpf.Addr(k.Address.Word).IsUnspecified() {
		f(u.ports, devicePortBitBIT_NODE_PORT, &u.held.anywhere[k.Port], k.Port)
	} else {
		at := shortHash(k.Address.Word)
		f(u.addresses, devicePortBitBIT_SERVICE, &u.held.atAddress[at], at)
	}
	f(u.ports, devicePortBitBIT_SERVICE, &u.held.atPort[k.Port], k.Port)
}

// shortHash is the programs' short_hash.
func shortHash(a [4]uint32) uint16 {
	return uint16((a[0] ^ a[1] ^ a[2] ^ a[3]) * 0x9e3779b1 >> 16)
}

// set sets or clears bits atomically: programs set others in the same word.
func set(of *devicePortBits, at uint16, bit devicePortBit, is bool) {
	var b [4]byte
	binary.NativeEndian.PutUint16(b[at%2*2:], uint16(bit))
	word, mask := (*uint32)(unsafe.Pointer(&of.Of[at&^1])), binary.NativeEndian.Uint32(b[:])
	if is {
		atomic.OrUint32(word, mask)
	} else {
		atomic.AndUint32(word, ^mask)
	}
}
