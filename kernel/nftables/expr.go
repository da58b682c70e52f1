package nftables

import (
	"bytes"
	"encoding/binary"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// Reg is one of the sixteen 32-bit data registers of a rule, R(0) to R(15). Longer values take consecutive ones.
type Reg uint32

// R returns the i-th 32-bit register (NFT_REG32_00 + i).
func R(i int) Reg { return Reg(8 + i) }

// Verdict ends a rule or names the chain to go on with.
type Verdict struct {
	Code  int32
	Chain string
}

// Accept, DropIt and Return are verdicts without a chain.
var (
	Accept = Verdict{Code: 1}
	DropIt = Verdict{Code: 0}
	Return = Verdict{Code: -5}
)

// Goto goes on in a chain and does not come back.
func Goto(chain string) Verdict { return Verdict{Code: -4, Chain: chain} }

// Jump goes on in a chain and comes back.
func Jump(chain string) Verdict { return Verdict{Code: -3, Chain: chain} }

// Word puts a 32-bit number as registers hold it.
func Word(b []byte, v uint32) []byte { return binary.NativeEndian.AppendUint32(b, v) }

// PortWord puts a port as a register holds it.
func PortWord(b []byte, p uint16) []byte { return append(binary.BigEndian.AppendUint16(b, p), 0, 0) }

// Join makes one rule of pieces.
func Join(pieces ...[]Expr) []Expr { return slices.Concat(pieces...) }

// Exprs makes a piece of a rule.
func Exprs(e ...Expr) []Expr { return e }

// Clear puts 16 bytes of 0 at register r. A key that begins there may go on with what a map gave. The kernel would take
// a key of a map's value alone; the nft command (seen with 1.0.6, mended later) stops dead on it when it lists the
// table, as it thinks such a value has no length. The constant's length satisfies it.
func Clear(r Reg) Expr { return Load(r, make([]byte, 16)) }

// Expr is one instruction of a rule, as the kernel takes it.
type Expr []byte

// expr encodes an instruction of a kind with its attributes.
func expr(kind string, attrs func(b *netlink.Buffer)) Expr {
	var b netlink.Buffer
	b.Nest(nftaListElem, func() {
		b.Text(nftaExprName, kind)
		b.Nest(nftaExprData, func() { attrs(&b) })
	})
	return Expr(b)
}

// Base is where a Payload load counts from.
type Base uint32

// The payload bases.
const (
	NetworkHeader   Base = 1
	TransportHeader Base = 2
)

// Payload loads n bytes of the packet into dst.
func Payload(base Base, offset, n uint32, dst Reg) Expr {
	return expr("payload", func(b *netlink.Buffer) {
		b.BE32(1, uint32(dst))
		b.BE32(2, uint32(base))
		b.BE32(3, offset)
		b.BE32(4, n)
	})
}

// MetaKey is a property of a packet beside its bytes.
type MetaKey uint32

// The meta keys in use (enum nft_meta_keys).
const (
	MetaMark     MetaKey = 3
	MetaIIF      MetaKey = 4
	MetaOIF      MetaKey = 5
	MetaIIFName  MetaKey = 6
	MetaOIFName  MetaKey = 7
	MetaIIFType  MetaKey = 8
	MetaNFProto  MetaKey = 15
	MetaL4Proto  MetaKey = 16
	MetaIIFGroup MetaKey = 21

	metaSocketUser MetaKey = 10 // ends the rule without a socket
)

// Meta loads a property into dst.
func Meta(k MetaKey, dst Reg) Expr {
	return expr("meta", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, uint32(k)) })
}

// InterfaceName returns what to compare a name that Meta loaded with: all of it, or its beginning.
func InterfaceName(name string, prefix bool) []byte {
	b := []byte(name)
	if !prefix {
		b = append(b, make([]byte, unix.IFNAMSIZ-len(b))...)
	}
	return b
}

// SetMark sets the packet's mark to what is at src.
func SetMark(src Reg) Expr {
	return expr("meta", func(b *netlink.Buffer) { b.BE32(2, uint32(MetaMark)); b.BE32(3, uint32(src)) })
}

// SetAddress writes the IPv4 address at src into the packet, at an offset of its header, and mends its checksums.
func SetAddress(offset uint32, src Reg) Expr {
	const header, pseudo = 1, 1 // NFT_PAYLOAD_CSUM_INET, NFT_PAYLOAD_L4CSUM_PSEUDOHDR
	return expr("payload", func(b *netlink.Buffer) {
		b.BE32(2, uint32(NetworkHeader))
		b.BE32(3, offset)
		b.BE32(4, 4)
		b.BE32(5, uint32(src))
		b.BE32(6, header)
		b.BE32(7, 10)
		b.BE32(8, pseudo)
	})
}

// CtKey is a property of a packet's connection.
type CtKey uint32

// The conntrack keys in use (enum nft_ct_keys).
const (
	CtState     CtKey = 0
	CtDirection CtKey = 1
	CtStatus    CtKey = 2
	CtMark      CtKey = 3
	CtProtocol  CtKey = 10
	CtProtoSrc  CtKey = 11
	CtProtoDst  CtKey = 12
	CtSrcIP     CtKey = 19
	CtDstIP     CtKey = 20
	CtSrcIP6    CtKey = 21
	CtDstIP6    CtKey = 22
)

// StatusDNAT is the bit of CtStatus that says that the destination was translated (IPS_DST_NAT).
const StatusDNAT uint32 = 1 << 5

// Values of CtState (NF_CT_STATE_BIT) and CtDirection.
const (
	StateEstablished uint32 = 1 << 1
	StateRelated     uint32 = 1 << 2
	DirectionReply          = 1
)

// Ct loads a property of the connection into dst.
func Ct(k CtKey, dst Reg) Expr {
	return expr("ct", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, uint32(k)) })
}

// CtOriginal loads a property of the connection's original direction into dst.
func CtOriginal(k CtKey, dst Reg) Expr {
	return expr("ct", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, uint32(k)); b.Uint8(3, 0) })
}

// CtReply loads a property of the connection's replies into dst.
func CtReply(k CtKey, dst Reg) Expr {
	return expr("ct", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, uint32(k)); b.Uint8(3, DirectionReply) })
}

// CmpOp is a comparison.
type CmpOp uint32

// The comparisons.
const (
	Eq CmpOp = iota
	Neq
	Lt
	Lte
	Gt
	Gte
)

// Cmp goes on with the rule only if src compares so to v, in the order of bytes.
func Cmp(op CmpOp, src Reg, v []byte) Expr {
	return expr("cmp", func(b *netlink.Buffer) { b.BE32(1, uint32(src)); b.BE32(2, uint32(op)); value(b, 3, string(v)) })
}

// And masks src into dst; the mask's length is the value's.
func And(src, dst Reg, mask []byte) Expr { return bitwise(src, dst, mask, make([]byte, len(mask))) }

// Or puts src into dst with some bits set, as long as they are.
func Or(src, dst Reg, bits []byte) Expr {
	mask := slices.Clone(bits)
	for i := range mask {
		mask[i] ^= 0xff
	}
	return bitwise(src, dst, mask, bits)
}

// bitwise puts src & mask ^ xor into dst.
func bitwise(src, dst Reg, mask, xor []byte) Expr {
	return expr("bitwise", func(b *netlink.Buffer) {
		b.BE32(1, uint32(src))
		b.BE32(2, uint32(dst))
		b.BE32(3, uint32(len(mask)))
		value(b, 4, string(mask))
		value(b, 5, string(xor))
	})
}

// Copy puts n bytes from src at dst.
func Copy(src, dst Reg, n int) Expr { return And(src, dst, bytes.Repeat([]byte{0xff}, n)) }

// Load puts a constant of at most 16 bytes into dst.
func Load(dst Reg, v []byte) Expr {
	return expr("immediate", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); value(b, 2, string(v)) })
}

// Do ends the rule with a verdict.
func Do(v Verdict) Expr {
	return expr("immediate", func(b *netlink.Buffer) { b.BE32(1, 0); verdict(b, 2, v) })
}

// Member goes on with the rule only if the key that begins at src is in the set.
func Member(set string, src Reg) Expr {
	return expr("lookup", func(b *netlink.Buffer) { b.Text(1, set); b.BE32(2, uint32(src)) })
}

// NotMember goes on with the rule only if the key that begins at src is not in the set.
func NotMember(set string, src Reg) Expr {
	const inverted = 1 // NFT_LOOKUP_F_INV
	return expr("lookup", func(b *netlink.Buffer) { b.Text(1, set); b.BE32(2, uint32(src)); b.BE32(5, inverted) })
}

// Map inspects the key that begins at src up and puts the value at dst; without one the rule ends.
func Map(set string, src, dst Reg) Expr {
	return expr("lookup", func(b *netlink.Buffer) { b.Text(1, set); b.BE32(2, uint32(src)); b.BE32(3, uint32(dst)) })
}

// VMap inspects the key that begins at src up and does what the verdict there says; without one the rule ends.
func VMap(set string, src Reg) Expr { return Map(set, src, 0) }

// Local kinds of an address (RTN_LOCAL of the route table).
const rtnLocal = 2

// FibLocal goes on with the rule only if the packet's source (or destination) is an address of this host; it uses tmp.
func FibLocal(source bool, tmp Reg) []Expr {
	flag := uint32(1 << 1) // NFTA_FIB_F_DADDR
	if source {
		flag = 1 << 0
	}
	load := expr("fib", func(b *netlink.Buffer) { b.BE32(1, uint32(tmp)); b.BE32(2, 3); b.BE32(3, flag) })
	return []Expr{load, Cmp(Eq, tmp, binary.NativeEndian.AppendUint32(nil, rtnLocal))}
}

// FibReverse goes on with the rule only if a route back to the packet's source leads to the device that it came in by,
// as with rp_filter in strict mode (RFC 3704). It uses tmp. It is for hooks before and at forwarding.
func FibReverse(tmp Reg) []Expr {
	const device, source, input = 1, 1 << 0, 1 << 3 // NFT_FIB_RESULT_OIF, NFTA_FIB_F_SADDR and NFTA_FIB_F_IIF
	load := expr("fib", func(b *netlink.Buffer) { b.BE32(1, uint32(tmp)); b.BE32(2, device); b.BE32(3, source|input) })
	return []Expr{load, Cmp(Neq, tmp, make([]byte, 4))}
}

// OwnSocket goes on with the rule only if a socket of this host's network namespace has sent the packet. It uses tmp.
func OwnSocket(tmp Reg) Expr { return Meta(metaSocketUser, tmp) }

// Random puts an equally distributed number from 0 to n-1 into dst, in the host's byte order.
func Random(n uint32, dst Reg) Expr {
	return expr("numgen", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, n); b.BE32(3, 1); b.BE32(4, 0) })
}

// RoundRobin puts one number from 0 to n-1 after the other into dst, in the host's byte order; the rule counts.
func RoundRobin(n uint32, dst Reg) Expr {
	return expr("numgen", func(b *netlink.Buffer) { b.BE32(1, uint32(dst)); b.BE32(2, n); b.BE32(3, 0); b.BE32(4, 0) })
}

// Hash puts a number from 0 to n-1 that depends on the size bytes at src alone into dst (jhash, always of the same
// seed).
func Hash(src Reg, size, n uint32, dst Reg) Expr {
	return expr("hash", func(b *netlink.Buffer) {
		b.BE32(1, uint32(src))
		b.BE32(2, uint32(dst))
		b.BE32(3, size)
		b.BE32(4, n)
		b.BE32(5, 1)
		b.BE32(7, 0)
	})
}

// SNAT translates the source to the address at addr, by the same port if that is free; family is as DNAT's.
func SNAT(family uint8, addr Reg) Expr {
	return expr("nat", func(b *netlink.Buffer) {
		b.BE32(1, 0)
		b.BE32(2, uint32(family))
		b.BE32(3, uint32(addr))
	})
}

// DNAT translates the destination to the address at addr and the port at port; family is NFPROTO_IPV4 or NFPROTO_IPV6.
func DNAT(family uint8, addr, port Reg) Expr {
	return expr("nat", func(b *netlink.Buffer) {
		b.BE32(1, 1)
		b.BE32(2, uint32(family))
		b.BE32(3, uint32(addr))
		b.BE32(5, uint32(port))
	})
}

// Masquerade sets the packet's source to the address of the device it leaves through and a random port.
func Masquerade() Expr {
	const randomFully = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
	return expr("masq", func(b *netlink.Buffer) { b.BE32(1, randomFully) })
}

// RejectTCP answers with a TCP reset.
func RejectTCP() Expr { return expr("reject", func(b *netlink.Buffer) { b.BE32(1, 1); b.Uint8(2, 0) }) }

// RejectPort answers with ICMP or ICMPv6 port unreachable.
func RejectPort() Expr {
	return expr("reject", func(b *netlink.Buffer) { b.BE32(1, 2); b.Uint8(2, 1) })
}

// Remember adds (or, if it is there, refreshes) the element of key with data for a time. A full set ends the rule.
func Remember(set string, key, data Reg, timeout time.Duration) Expr {
	return expr("dynset", func(b *netlink.Buffer) {
		b.Text(1, set)
		b.BE32(3, 1)
		b.BE32(4, uint32(key))
		b.BE32(5, uint32(data))
		b.BE64(6, uint64(timeout.Milliseconds()))
	})
}

// Meter goes on with the rule only if an instruction does for the element of key alone, which it adds with a state of
// its own, and refreshes for a time. A full set ends the rule.
func Meter(set string, key Reg, timeout time.Duration, own Expr) Expr {
	const update = 1
	return expr("dynset", func(b *netlink.Buffer) {
		b.Text(1, set)
		b.BE32(3, update)
		b.BE32(4, uint32(key))
		b.BE64(6, uint64(timeout.Milliseconds()))
		b.Nest(7, func() { *b = append(*b, own[unix.SizeofNlAttr:]...) })
	})
}

// Forget removes the element of key, if it is there. For a map the kernel wants a register of data to be named too.
func Forget(set string, key, data Reg) Expr {
	return expr("dynset", func(b *netlink.Buffer) {
		b.Text(1, set)
		b.BE32(3, 2)
		b.BE32(4, uint32(key))
		b.BE32(5, uint32(data))
	})
}

// Log sends the first bytes of the packet, with a prefix, to the readers of a group of nflog.
func Log(group uint16, prefix string, bytes uint32) Expr {
	return expr("log", func(b *netlink.Buffer) {
		b.Bytes(1, binary.BigEndian.AppendUint16(nil, group))
		b.Text(2, prefix)
		b.BE32(3, bytes)
	})
}

// Queue sends the packet to the program that listens to a queue, through the target NFQUEUE of x_tables (nft_compat),
// which kernels without nf_tables' own have too. Where none listens the packet is accepted.
func Queue(number uint16) Expr {
	const revision, bypass = 3, 1
	info := binary.NativeEndian.AppendUint16(nil, number) // struct xt_NFQ_info_v3
	info = binary.NativeEndian.AppendUint16(info, 1)      // queues
	info = binary.NativeEndian.AppendUint16(info, bypass)
	return expr("target", func(b *netlink.Buffer) {
		b.Text(1, "NFQUEUE")
		b.BE32(2, revision)
		b.Bytes(3, append(info, 0, 0)) // padded as XT_ALIGN does
	})
}

// Counter counts the packets that come to it: see Conn.Counters.
func Counter() Expr { return expr("counter", func(*netlink.Buffer) {}) }

// Limit goes on with the rule for at most so many packets in a second, and a burst of more.
func Limit(perSecond uint64, burst uint32) Expr {
	return expr("limit", func(b *netlink.Buffer) {
		b.BE64(1, perSecond)
		b.BE64(2, 1)
		b.BE32(3, burst)
		b.BE32(4, 0)
	})
}
