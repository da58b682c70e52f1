// Package nfhooks lists the hooks that netfilter has in the calling thread's network namespace, as `nft list hooks`
// does.
package nfhooks

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// include/uapi/linux/netfilter/nfnetlink_hook.h
const (
	subsystem    = 12 // NFNL_SUBSYS_HOOK
	attrHookNum  = 1
	attrFunction = 4
	attrChain    = 6
	chainDesc    = 1
	descTable    = 1
	descFamily   = 2
	descName     = 3
	inPreRouting = 0
	inForward    = 2
	inPost       = 4
	typeMask     = 0x3fff // NLA_TYPE_MASK
)

// families are those of nf_tables' tables, as nft names them.
var families = map[byte]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6"}

// Forwarding returns the hooks that see what the namespace forwards of a family: chains of nf_tables such as
// "table ip nat chain POSTROUTING", functions of the kernel by name. Each is named once.
func Forwarding(family uint8) (names []string, err error) {
	for _, hook := range []uint32{inPreRouting, inForward, inPost} {
		l, err := list(family, hook)
		if err != nil {
			return nil, err
		}
		for _, name := range l {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names, nil
}

// list returns the hooks at one point, in the order in which packets meet them.
func list(family uint8, hook uint32) (names []string, err error) {
	r := nl.NewNetlinkRequest(subsystem<<8, unix.NLM_F_DUMP)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	r.AddData(nl.NewRtAttr(attrHookNum, binary.BigEndian.AppendUint32(nil, hook)))
	messages, err := r.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("nfhooks: list hook %d of family %d: %w", hook, family, err)
	}
	for _, m := range messages {
		if name := nameOf(m); name != "" {
			names = append(names, name)
		}
	}
	return names, nil
}

// nameOf returns the name of the hook that a message describes, "" where it has none.
func nameOf(message []byte) string {
	if len(message) < nl.SizeofNfgenmsg {
		return ""
	}
	hook := attributes(message[nl.SizeofNfgenmsg:])
	if desc := attributes(attributes(hook[attrChain])[chainDesc]); len(desc[descFamily]) > 0 && desc[descName] != nil {
		return fmt.Sprintf("table %s %s chain %s", families[desc[descFamily][0]], text(desc[descTable]), text(desc[descName]))
	}
	return text(hook[attrFunction])
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// attributes returns the values of netlink attributes by type, as far as they are whole.
func attributes(b []byte) map[uint16][]byte {
	m := map[uint16][]byte{}
	for len(b) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			break
		}
		m[binary.NativeEndian.Uint16(b[2:])&typeMask] = b[unix.SizeofNlAttr:length]
		b = b[min((length+3)&^3, len(b)):]
	}
	return m
}
