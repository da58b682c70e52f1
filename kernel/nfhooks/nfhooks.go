// Package nfhooks lists the hooks that netfilter has in the calling thread's network namespace, as `nft list hooks`
// does.
package nfhooks

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
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

// header is the length of struct nfgenmsg: the family, a version and two bytes more.
const header = 4

// list returns the hooks at one point, in the order in which packets meet them.
func list(family uint8, hook uint32) (names []string, err error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("nfhooks: %w", err)
	}
	defer s.Close()
	err = netlink.Stable(func() error {
		names = nil
		return s.Request(subsystem<<8, unix.NLM_F_DUMP, func(b *netlink.Buffer) {
			*b = append(*b, family, 0, 0, 0)
			b.BE32(attrHookNum, hook)
		}, func(m netlink.Message) {
			if name := nameOf(m.Body); name != "" {
				names = append(names, name)
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("nfhooks: list hook %d of family %d: %w", hook, family, err)
	}
	return names, nil
}

// nameOf returns the name of the hook that a message describes, "" where it has none.
func nameOf(message []byte) string {
	if len(message) < header {
		return ""
	}
	hook := message[header:]
	desc := netlink.Find(netlink.Find(hook, attrChain), chainDesc)
	family, name := netlink.Find(desc, descFamily), netlink.Find(desc, descName)
	if len(family) > 0 && name != nil {
		table := netlink.Text(netlink.Find(desc, descTable))
		return fmt.Sprintf("table %s %s chain %s", families[family[0]], table, netlink.Text(name))
	}
	return netlink.Text(netlink.Find(hook, attrFunction))
}
