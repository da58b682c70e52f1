package ipvs

import (
	"encoding/binary"
	"hash/fnv"

	nft "fairlead.dev/fairlead/kernel/nftables"
)

// Marks of packets. Their low 12 bits say that they are ours, the others which virtual service is meant: 0 for
// whichever has the connection already. No other owner sees the mark of a service, only claimed and sent.
const (
	claimed uint32 = 0x05e // a frontend takes the packet: to be delivered to this host, where IPVS is
	sent    uint32 = 0x05f // IPVS has sent it on
	lingers uint32 = 0x05c // in place of a service's mark: the frontend is no more, but some of its connections are
	looped  uint32 = 0x05d // from 127.0.0.1, which has been let in: see loopback
	ourBits uint32 = 0xfff
	tcpBit  uint32 = 0x1000 // in the mark of a service: of a pool of TCP
)

// numbering states by which mark each pool's virtual service goes. A pool's ID is too long for a mark, and two IDs may
// have their first bits in common: so which pool has which mark stands in the kernel, beside the services.
type numbering struct {
	mark map[uint64]uint32
	pool map[uint32]uint64
}

func newNumbering() *numbering {
	return &numbering{map[uint64]uint32{}, map[uint32]uint64{}}
}

// add records what the kernel says.
func (n *numbering) add(pool uint64, mark uint32) { n.mark[pool], n.pool[mark] = mark, pool }

// isTCP reports whether the mark is that of a TCP pool's service.
func isTCP(mark uint32) bool { return mark&tcpBit != 0 }

// acquire marks the pool with a free mark, and reports whether it is new.
func (n *numbering) acquire(pool uint64, tcp bool) (mark uint32, isNew bool) {
	if m, ok := n.mark[pool]; ok {
		return m, false
	}
	if s, ok := foreignMark(pool); ok {
		return s, false
	}
	h := fnv.New32a()
	h.Write(ofPool(pool))
	for i := h.Sum32(); ; i++ {
		m := i<<13 | claimed
		if tcp {
			m |= tcpBit
		}
		if _, acquired := n.pool[m]; !acquired && m != claimed {
			n.add(pool, m)
			return m, true
		}
	}
}

// drop frees a pool's mark.
func (n *numbering) drop(pool uint64) {
	delete(n.pool, n.mark[pool])
	delete(n.mark, pool)
}

// A mark of ours in the kernel whose pool is not known stands for one whose ID begins with strange.
const strange = 0xffffffff << 32

// id returns the pool that a mark stands for.
func (n *numbering) id(mark uint32) uint64 {
	switch pool, ok := n.pool[mark]; {
	case mark == claimed:
		return 0
	case ok:
		return pool
	}
	return strange | uint64(mark)
}

// of returns the mark of a pool that has one; what has none is never sent anywhere.
func (n *numbering) of(pool uint64) uint32 {
	if s, ok := foreignMark(pool); ok {
		return s
	}
	if m, ok := n.mark[pool]; ok {
		return m
	}
	return claimed
}

// foreignMark returns the mark of a pool that is not known.
func foreignMark(pool uint64) (mark uint32, is bool) { return uint32(pool), pool>>32 == strange>>32 }

// inKernel returns an element as the kernel has it, with a mark where the fact names a pool.
func (n *numbering) inKernel(set, key, value string) (k, v string) {
	mark := func(b string) string { return string(nft.Word(nil, n.of(id(b)))) }
	switch base(set) {
	case "service":
		return key, mark(value) + value[8:]
	case "sticky":
		return mark(key), value
	case "member":
		return string(nft.Word(nil, 0)) + mark(key) + key[8:], value
	}
	return key, value
}

// lingering is which services have connections of a frontend that is no more: that of clients inside, and that of
// clients outside.
type lingering struct{ internal, external uint32 }

// element returns what leads on these connections. No packet is told to do anything by what stands for deed and origins
// here.
func (l lingering) element(key string) nft.Element {
	return nft.Element{Key: key, Data: string(nft.Word(nft.Word(nft.Word(nil, lingers), l.internal), l.external))}
}

// lingeringIn reads an element of a frontend that is no more, if that is what it is.
func lingeringIn(set, value string) (l lingering, is bool) {
	if base(set) != "service" || len(value) != 12 || unword(value) != lingers {
		return l, false
	}
	return lingering{unword(value[4:]), unword(value[8:])}, true
}

// inFact returns the fact of an element of the kernel.
func (n *numbering) inFact(set, key, value string) Fact {
	pool := func(b string) string { return string(ofPool(n.id(unword(b)))) }
	switch b := base(set); {
	case b == "service" && len(value) == 12:
		value = pool(value) + value[4:]
	case b == "sticky" && len(key) == 4:
		key = pool(key)
	case b == "member" && len(key) > 8:
		key = pool(key[4:]) + key[8:]
	}
	return fact(KindElement, set, key, value)
}

// id and unword read a pool's ID and a word that bytes begin with.
func id(b string) uint64     { return binary.BigEndian.Uint64([]byte(b)) }
func unword(b string) uint32 { return binary.NativeEndian.Uint32([]byte(b)) }

// base returns a set's name without its family.
func base(set string) string { return set[:max(len(set)-1, 0)] }

// poolElement is what says by which mark a pool goes.
func poolElement(pool uint64, mark uint32) nft.Element {
	return nft.Element{Key: string(ofPool(pool)), Data: string(nft.Word(nil, mark))}
}
