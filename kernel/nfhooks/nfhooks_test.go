package nfhooks

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// attribute writes a netlink attribute of nested ones, or of one value.
func attribute(kind uint16, values ...[]byte) (b []byte) {
	for _, v := range values {
		b = append(b, v...)
	}
	length := unix.SizeofNlAttr + len(b)
	head := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, uint16(length)), kind)
	return append(append(head, b...), make([]byte, -length&3)...)
}

// message is what the kernel says of a hook (net/netfilter/nfnetlink_hook.c).
func message(attributes ...[]byte) []byte {
	b := []byte{unix.NFPROTO_IPV4, 0, 0, 0}
	for _, a := range attributes {
		b = append(b, a...)
	}
	return b
}

var (
	function = attribute(attrFunction, []byte("nft_do_chain_ipv4\x00"))
	priority = attribute(2, []byte{0, 0, 0, 100})
	desc     = attribute(chainDesc|unix.NLA_F_NESTED, attribute(descTable, []byte("nat\x00")),
		attribute(descFamily, []byte{unix.NFPROTO_IPV4}), attribute(descName, []byte("POSTROUTING\x00")))
	chain = attribute(attrChain|unix.NLA_F_NESTED, desc, attribute(2, []byte{0, 0, 0, 1}))
)

func TestNamesOfHooks(t *testing.T) {
	for _, c := range []struct {
		message []byte
		want    string
	}{
		{message(function, priority, chain), "table ip nat chain POSTROUTING"},
		{message(attribute(attrFunction, []byte("ipv4_conntrack_in\x00")), priority), "ipv4_conntrack_in"},
		{message(priority), ""},
		{nil, ""},
	} {
		if name := nameOf(c.message); name != c.want {
			t.Errorf("%x is named %q, want %q", c.message, name, c.want)
		}
	}
}

func FuzzNameOf(f *testing.F) {
	f.Add(message(function, priority, chain))
	f.Add(message(chain)[:20])
	f.Fuzz(func(_ *testing.T, b []byte) { nameOf(b) })
}
