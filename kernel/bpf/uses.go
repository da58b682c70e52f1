package bpf

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// uses is how programs tell at a glance packets that may be for a frontend: by their port and their destination.
type uses struct {
	ports, addresses []byte // union uses
	held             *held  // nil until there is a frontend
	recall           bool   // they were made anew, maybe beside flows of an earlier version
}

// held counts frontends.
type held struct{ atPort, anywhere, atAddress [1 << 16]uint32 }

// Enter has packets to a frontend looked at.
func (m *Maps) Enter(k Entry) {
	if m.uses.held == nil {
		m.uses.held = &held{}
	}
	m.uses.each(k, func(bits []byte, bit packetsUse, n *uint32, at uint16) {
		*n++
		set(bits, at, bit, true)
	})
}

// Exit undoes Enter. Packets to where there was the last frontend are looked at while there are flows.
func (m *Maps) Exit(k Entry) {
	if m.uses.held == nil {
		return
	}
	m.uses.each(k, func(bits []byte, bit packetsUse, n *uint32, at uint16) {
		if *n = max(*n, 1) - 1; *n == 0 {
			set(bits, at, bit, false)
		}
	})
}

// Recall has packets of all flows looked at where what tells them was made anew: an earlier version's may have had another form. To be
// called again once programs that note new flows there are attached. Some that needn't are looked at, too.
func (m *Maps) Recall() error {
	if !m.uses.recall {
		return nil
	}
	u := m.uses
	err := all(m.named[packetsMapDestinations], func(t Tuple, _ Way) {
		set(u.addresses, shortHash(t.Destination.Word), packetsUseUSE_ASKED, true)
		set(u.ports, t.To, packetsUseUSE_ASKED|packetsUseUSE_TAKEN, true)
	})
	if err != nil {
		return err
	}
	return all(m.named[packetsMapSources], func(t Tuple, _ Way) {
		set(u.ports, t.From, packetsUseUSE_BACKEND, true)
		set(u.ports, t.To, packetsUseUSE_HIDDEN, true)
	})
}

// each calls f with each byte that an entry has a bit in, and with how many entries have it. A node port is at any address: that its
// port says so comes first.
func (u *uses) each(k Entry, f func(bits []byte, bit packetsUse, n *uint32, at uint16)) {
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
func set(bits []byte, at uint16, bit packetsUse, is bool) {
	var b [4]byte
	b[at%4] = byte(bit)
	word, mask := (*uint32)(unsafe.Pointer(&bits[at&^3])), binary.NativeEndian.Uint32(b[:])
	if is {
		atomic.OrUint32(word, mask)
	} else {
		atomic.AndUint32(word, ^mask)
	}
}
