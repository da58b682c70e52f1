package bpf

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
)

// uses is how programs tell at a glance packets that may be for a frontend: by their port and their destination.
type uses struct {
	ports, addresses *packetsUses
	held             *held // nil until there is a frontend
	recall           bool  // they were made anew, maybe beside flows of an earlier version
}

// held counts frontends, and prefixes of Services' addresses.
type held struct{ atPort, anywhere, atAddress, inNetwork [1 << 16]uint32 }

// Enter has packets to a frontend looked at.
func (m *Maps) Enter(k Entry) {
	m.uses.prepare()
	m.uses.each(k, more)
}

// Exit undoes Enter. Packets to where there was the last frontend are looked at while there are flows.
func (m *Maps) Exit(k Entry) {
	m.uses.prepare()
	m.uses.each(k, fewer)
}

// enterNetwork has packets to a prefix looked at, whatever their port.
func (m *Maps) enterNetwork(p netip.Prefix) {
	m.uses.prepare()
	m.uses.eachNetwork(p, more)
}

// exitNetwork undoes enterNetwork.
func (m *Maps) exitNetwork(p netip.Prefix) {
	m.uses.prepare()
	m.uses.eachNetwork(p, fewer)
}

// prepare makes what counts.
func (u *uses) prepare() {
	if u.held == nil {
		u.held = &held{}
	}
}

// more counts one more at a place, and sets the bit there.
func more(of *packetsUses, bit packetsUse, n *uint32, at uint16) {
	*n++
	set(of, at, bit, true)
}

// fewer undoes more.
func fewer(of *packetsUses, bit packetsUse, n *uint32, at uint16) {
	if *n = max(*n, 1) - 1; *n == 0 {
		set(of, at, bit, false)
	}
}

// eachNetwork calls f as each does, for a prefix of addresses that only Services have.
func (u *uses) eachNetwork(p netip.Prefix, f func(of *packetsUses, bit packetsUse, n *uint32, at uint16)) {
	if p.IsSingleIP() {
		at := shortHash(Words(p.Addr()))
		f(u.addresses, packetsUseUSE_ENTRY, &u.held.atAddress[at], at)
		return
	}
	network := func(words ...uint32) {
		var w [4]uint32
		copy(w[:], words)
		at := shortHash(w)
		f(u.addresses, packetsUseUSE_SERVICES, &u.held.inNetwork[at], at)
	}
	if w := Words(p.Addr()); p.Addr().Is6() {
		network(w[0], w[1]) // ServiceCIDRs of IPv6 are no wider
		return
	}
	four := p.Masked().Addr().As4()
	for range 1 << max(0, 16-p.Bits()) {
		network(Words(netip.AddrFrom4([4]byte{four[0], four[1]}))[3])
		binary.BigEndian.PutUint16(four[:], binary.BigEndian.Uint16(four[:])+1)
	}
}

// Recall copies the flows of maps of another size, and has packets of all flows looked at where what tells them was
// made anew: an earlier version's may have had another form. To be called again once programs that note new flows there
// are attached. Some that needn't are looked at, too.
func (m *Maps) Recall() error {
	if err := m.copyFlows(); err != nil {
		return err
	}
	if !m.uses.recall {
		return nil
	}
	return m.setUses(atomic.LoadUint32(&m.uses.ports.Generation))
}

// RebuildUses has the programs that work on the maps in a folder set bits in the other generation, sets those of all
// flows there, and clears those of the generation before: ports of flows that are over no longer cost packets a
// look-up. While another process does so, it does nothing.
func RebuildUses(folder string, s Sizes) error {
	m, err := OpenMaps(folder, s)
	if err != nil {
		return err
	}
	defer m.Close()
	lock, err := os.Open(filepath.Join(filepath.Dir(folder), stateFolder))
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
	grace, err := NewGrace()
	if err != nil {
		return err
	}
	defer grace.Close()
	return m.rebuildUses(grace.Wait)
}

// rebuildUses is RebuildUses. wait returns once no program runs any more that ran before. A program writes a flow's
// entries before it sets their bits: what ran by the generation before has written by then what is read here, and what
// runs later sets bits of the other generation.
func (m *Maps) rebuildUses(wait func() error) error {
	before := atomic.LoadUint32(&m.uses.ports.Generation)
	for _, of := range []*packetsUses{m.uses.ports, m.uses.addresses} {
		atomic.StoreUint32(&of.Generation, 1-before)
	}
	if err := wait(); err != nil {
		return err
	}
	if err := m.setUses(1 - before); err != nil {
		return err // those of the generation before stay
	}
	bits := ^(ofGeneration(packetsUseUSE_ASKED|packetsUseUSE_BACKEND|packetsUseUSE_HIDDEN|packetsUseUSE_TAKEN,
		before) * 0x10001)
	for _, of := range []*packetsUses{m.uses.ports, m.uses.addresses} {
		for at := 0; at < len(of.Of); at += 2 {
			if word := (*uint32)(unsafe.Pointer(&of.Of[at])); atomic.LoadUint32(word)&^bits != 0 {
				atomic.AndUint32(word, bits)
			}
		}
	}
	return nil
}

// setUses sets the bits of all flows, in a generation.
func (m *Maps) setUses(generation uint32) error {
	now, err := seconds()
	if err != nil {
		return err
	}
	set := func(of *packetsUses, at uint16, use packetsUse) {
		set(of, at, packetsUse(ofGeneration(use, generation)), true)
	}
	err = all(m.named[packetsMapDestinations], func(t Tuple, w Way) {
		switch {
		case expired(w, t.Protocol, now):
		case packetsWayState(w.State)&packetsWayStateASKS != 0:
			set(m.uses.addresses, shortHash(t.Destination.Word), packetsUseUSE_ASKED)
			set(m.uses.ports, t.To, packetsUseUSE_ASKED)
		default:
			set(m.uses.ports, t.To, packetsUseUSE_TAKEN)
		}
	})
	if err != nil {
		return err
	}
	return all(m.named[packetsMapSources], func(t Tuple, w Way) {
		switch {
		case expired(w, t.Protocol, now):
		case packetsWayState(w.State)&packetsWayStateREPLIES != 0:
			set(m.uses.ports, t.From, packetsUseUSE_BACKEND)
		default:
			set(m.uses.ports, t.To, packetsUseUSE_HIDDEN)
		}
	})
}

// ofGeneration returns bits that programs set, of a generation.
func ofGeneration(use packetsUse, generation uint32) uint32 {
	return uint32(use) << (generation * useShift)
}

// useShift is USE_SHIFT of bpf/service.h.
const useShift = 8

// each calls f with each byte that an entry has a bit in, and with how many entries have it. A node port is at any address: that its
// port says so comes first.
func (u *uses) each(k Entry, f func(of *packetsUses, bit packetsUse, n *uint32, at uint16)) {
	if Addr(k.Address.Word).IsUnspecified() {
		f(u.ports, packetsUseUSE_ANY, &u.held.anywhere[k.Port], k.Port)
	} else {
		at := shortHash(k.Address.Word)
		f(u.addresses, packetsUseUSE_ENTRY, &u.held.atAddress[at], at)
	}
	f(u.ports, packetsUseUSE_ENTRY, &u.held.atPort[k.Port], k.Port)
}

// shortHash is the programs' short_hash.
func shortHash(a [4]uint32) uint16 {
	return uint16((a[0] ^ a[1] ^ a[2] ^ a[3]) * 0x9e3779b1 >> 16)
}

// set sets or clears bits beside programs that set others.
func set(of *packetsUses, at uint16, bit packetsUse, is bool) {
	var b [4]byte
	binary.NativeEndian.PutUint16(b[at%2*2:], uint16(bit))
	word, mask := (*uint32)(unsafe.Pointer(&of.Of[at&^1])), binary.NativeEndian.Uint32(b[:])
	if is {
		atomic.OrUint32(word, mask)
	} else {
		atomic.AndUint32(word, ^mask)
	}
}
