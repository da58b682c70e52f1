package node

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/nftables"
)

// Firewall reads what rules of a network namespace do with packets by default.
type Firewall struct {
	ns  *netns.Namespace
	nft *nftables.Conn // nil: the kernel has no nf_tables
}

// OpenFirewall opens that of the calling thread's namespace.
func OpenFirewall() (*Firewall, error) {
	nft, err := nftables.Open()
	if err != nil && !errors.Is(err, nftables.ErrAbsent) {
		return nil, err
	}
	ns, err := netns.Current()
	if err != nil && nft != nil {
		nft.Close()
	}
	return &Firewall{ns, nft}, err
}

// Close closes the handles.
func (f *Firewall) Close() {
	if f.ns.Close(); f.nft != nil {
		f.nft.Close()
	}
}

// families are those of nf_tables, as the command nft calls them.
var families = map[uint8]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}

// Dropping returns the chains whose policy drops forwarded packets, each as the command that lists it.
func (f *Firewall) Dropping() (commands []string, err error) {
	if f.nft != nil {
		chains, err := f.nft.Dropping(unix.NF_INET_FORWARD)
		if err != nil {
			return nil, err
		}
		for _, c := range chains {
			commands = append(commands, fmt.Sprintf("nft list chain %s %s %s", families[c.Family], c.Table, c.Name))
		}
	}
	err = f.ns.Do(func() error {
		for _, family := range iptables.Families {
			drops, err := iptables.LegacyForwardDrops(family)
			if err != nil {
				return err
			}
			if command := map[iptables.Family]string{iptables.IPv4: "iptables", iptables.IPv6: "ip6tables"}[family]; drops {
				commands = append(commands, command+"-legacy -S FORWARD")
			}
		}
		return nil
	})
	return commands, err
}
