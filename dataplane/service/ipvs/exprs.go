package ipvs

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
)

// Properties of packets and connections beyond those that kernel/nftables names (nf_tables.h).
const (
	metaMark    nft.MetaKey = 3
	ctState     nft.CtKey   = 0
	ctDirection nft.CtKey   = 1
	ctProtocol  nft.CtKey   = 10
	ctProtoSrc  nft.CtKey   = 11
	ctSrcIP     nft.CtKey   = 19
	ctSrcIP6    nft.CtKey   = 21

	stateEstablished uint32 = 1 << 1 // NF_CT_STATE_BIT
	stateRelated     uint32 = 1 << 2
	directionReply          = 1
)

// attribute encodes a netlink attribute.
func attribute(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, -len(b)&3)...)
}

func number(kind uint16, v uint32) []byte {
	return attribute(kind, binary.BigEndian.AppendUint32(nil, v))
}

// instruction encodes an instruction that kernel/nftables has no word for.
func instruction(kind string, attributes ...[]byte) nft.Expr {
	var data []byte
	for _, a := range attributes {
		data = append(data, a...)
	}
	body := append(attribute(1, append([]byte(kind), 0)), attribute(2|unix.NLA_F_NESTED, data)...)
	return attribute(1|unix.NLA_F_NESTED, body)
}

// setMark gives the packet the mark at src.
func setMark(src nft.Reg) nft.Expr {
	return instruction("meta", number(2, uint32(metaMark)), number(3, uint32(src)))
}

// mark gives the packet a constant mark by way of tmp.
func mark(v uint32, tmp nft.Reg) []nft.Expr { return exprs(nft.Load(tmp, word(nil, v)), setMark(tmp)) }

// setAddress gives the packet the IPv4 address in src, at an offset of its header, and mends its checksums.
func setAddress(offset uint32, src nft.Reg) nft.Expr {
	const header, pseudo = 1, 1 // NFT_PAYLOAD_CSUM_INET, NFT_PAYLOAD_L4CSUM_PSEUDOHDR
	return instruction("payload", number(2, uint32(nft.NetworkHeader)), number(3, offset), number(4, 4), number(5, uint32(src)),
		number(6, header), number(7, 10), number(8, pseudo))
}

// ctReply loads a property of the connection's replies into dst.
func ctReply(k nft.CtKey, dst nft.Reg) nft.Expr {
	return instruction("ct", number(1, uint32(dst)), number(2, uint32(k)), attribute(3, []byte{directionReply}))
}

// notLocal goes on with the rule only if the packet's source (or destination) is no address of this host.
func notLocal(source bool, tmp nft.Reg) []nft.Expr {
	return exprs(nft.FibLocal(source, tmp)[0], nft.Cmp(nft.Neq, tmp, word(nil, unix.RTN_LOCAL)))
}
