package classic

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
)

// PolicyList is the network policies of one pod as a list of rules, as engines of 2016 wrote them: what is established
// first, then a rule for each policy in turn, then the end. Without a policy it is connection tracking alone.
type PolicyList struct {
	Pod, Client netip.Addr
	Ports       []PortRange // of each policy, TCP, from the client
}

// PortRange is the ports that a policy allows.
type PortRange struct{ First, Last uint16 }

// IPTables returns the list as input for `iptables-restore --noflush`.
func (l PolicyList) IPTables() string {
	var filter table
	filter.chain("policies")
	filter.add("FORWARD", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	if len(l.Ports) > 0 {
		filter.add("FORWARD", "-d %s/32 -j policies", l.Pod)
		for _, p := range l.Ports {
			filter.add("policies", "-s %s/32 -p tcp -m tcp --dport %s -j ACCEPT", l.Client, p.text(":"))
		}
		filter.add("policies", "-j DROP")
	}
	return filter.text("filter")
}

// NFTables returns the list as input for `nft -f -`.
func (l PolicyList) NFTables() string {
	var b strings.Builder
	b.WriteString("table ip policies {\n\tchain allow {\n")
	for _, p := range l.Ports {
		fmt.Fprintf(&b, "\t\tip saddr %s tcp dport %s accept\n", l.Client, p.text("-"))
	}
	if len(l.Ports) > 0 {
		b.WriteString("\t\tdrop\n")
	}
	b.WriteString("\t}\n\tchain forward {\n\t\ttype filter hook forward priority 0;\n" +
		"\t\tct state established,related accept\n")
	if len(l.Ports) > 0 {
		fmt.Fprintf(&b, "\t\tip daddr %s jump allow\n", l.Pod)
	}
	b.WriteString("\t}\n}\n")
	return b.String()
}

// text returns "80", or both ends with a separator.
func (p PortRange) text(separator string) string {
	if p.First == p.Last {
		return fmt.Sprint(p.First)
	}
	return fmt.Sprint(p.First, separator, p.Last)
}

// Install writes the list into the calling thread's network namespace: by iptables-legacy, or by nft.
func (l PolicyList) Install(ctx context.Context, v Variant) error {
	if v == NFT {
		return NFTables.Restore(ctx, NFT, l.NFTables())
	}
	return IPTables.Restore(ctx, v, l.IPTables())
}
