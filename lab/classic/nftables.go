package classic

import (
	"fmt"
	"net/netip"
	"strings"
)

// Table is the name of nft-classic's table, of the ip family.
const Table = "kube-proxy"

func (s *Service) nftChain(kind string) string {
	return kind + "-" + hash(8, s.path()) + "-" + s.path()
}

func (s *Service) nftEndpoint(e netip.AddrPort) string {
	p := fmt.Sprintf("%s__%s/%d", s.path(), e.Addr(), e.Port())
	return "endpoint-" + hash(8, p) + "-" + p
}

// nftBaseRules are the rules of chains that no Service has for itself.
var nftBaseRules = [][2]string{
	{"cluster-ips-check", "ip daddr @cluster-ips reject"},
	{"filter-prerouting-pre-dnat", "ct state new jump firewall-check"},
	{"filter-forward", "ct state new jump service-endpoints-check"},
	{"filter-forward", "ct state new jump cluster-ips-check"},
	{"filter-input", "ct state new jump nodeport-endpoints-check"},
	{"filter-input", "ct state new jump service-endpoints-check"},
	{"filter-output", "ct state new jump service-endpoints-check"},
	{"filter-output-pre-dnat", "ct state new jump firewall-check"},
	{"filter-output", "ct state new jump cluster-ips-check"},
	{"firewall-check", "ip daddr . meta l4proto . th dport vmap @firewall-ips"},
	{"mark-for-masquerade", "meta mark set meta mark or 0x4000"},
	{"masquerading", "meta mark and 0x4000 == 0 return"},
	{"masquerading", "meta mark set meta mark xor 0x4000"},
	{"masquerading", "masquerade fully-random"},
	{"nat-output", "jump services"},
	{"nat-postrouting", "jump masquerading"},
	{"nat-prerouting", "jump services"},
	{"nodeport-endpoints-check", "ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports"},
	{"reject-chain", "reject"},
	{"services", "ip daddr . meta l4proto . th dport vmap @service-ips"},
	{"services", "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports"},
	{"service-endpoints-check", "ip daddr . meta l4proto . th dport vmap @no-endpoint-services"},
}

// nftBase returns the table without Services. Written again, it empties the chains of rules that it writes.
func nftBase(c *Cluster) string {
	var b strings.Builder
	add := func(format string, a ...any) { fmt.Fprintf(&b, "add "+format+"\n", a...) }
	add("table ip %s { comment \"rules for kube-proxy\"; }", Table)
	for name, hook := range map[string]string{
		"filter-prerouting-pre-dnat": "filter hook prerouting priority -110",
		"filter-output-pre-dnat":     "filter hook output priority -110",
		"filter-forward":             "filter hook forward priority 0", "filter-input": "filter hook input priority 0",
		"filter-output":  "filter hook output priority 0",
		"nat-prerouting": "nat hook prerouting priority -100", "nat-output": "nat hook output priority -100",
		"nat-postrouting": "nat hook postrouting priority 100",
	} {
		add("chain ip %s %s { type %s; }", Table, name, hook)
		fmt.Fprintf(&b, "flush chain ip %s %s\n", Table, name)
	}
	for _, name := range []string{"cluster-ips-check", "firewall-check", "mark-for-masquerade", "masquerading",
		"nodeport-endpoints-check", "reject-chain", "services", "service-endpoints-check"} {
		add("chain ip %s %s", Table, name)
		fmt.Fprintf(&b, "flush chain ip %s %s\n", Table, name)
	}
	for _, name := range []string{"cluster-ips", "nodeport-ips"} {
		add("set ip %s %s { type ipv4_addr; }", Table, name)
	}
	for name, typ := range map[string]string{
		"firewall-ips": "ipv4_addr . inet_proto . inet_service", "no-endpoint-services": "ipv4_addr . inet_proto . " +
			"inet_service", "service-ips": "ipv4_addr . inet_proto . inet_service",
		"no-endpoint-nodeports": "inet_proto . inet_service", "service-nodeports": "inet_proto . inet_service",
	} {
		add("map ip %s %s { type %s : verdict; }", Table, name, typ)
	}
	for _, r := range nftBaseRules {
		add("rule ip %s %s %s", Table, r[0], r[1])
	}
	for _, a := range c.Node {
		add("element ip %s nodeport-ips { %s }", Table, a)
	}
	return b.String()
}

// nftService returns a Service's chains and what leads to them, new or again.
func nftService(c *Cluster, s *Service) string {
	var b strings.Builder
	add := func(format string, a ...any) { fmt.Fprintf(&b, "add "+format+"\n", a...) }
	chain := func(name string) {
		add("chain ip %s %s", Table, name)
		fmt.Fprintf(&b, "flush chain ip %s %s\n", Table, name)
	}
	own, ext := s.nftChain("service"), s.nftChain("external")
	for _, e := range s.Endpoints {
		name := s.nftEndpoint(e)
		chain(name)
		add("rule ip %s %s ip saddr %s jump mark-for-masquerade", Table, name, e.Addr())
		add("rule ip %s %s meta l4proto %s dnat to %s", Table, name, s.Protocol, e)
	}
	chain(own)
	if c.Pods.IsValid() {
		add("rule ip %s %s ip daddr %s ip saddr != %s jump mark-for-masquerade", Table, own, s.Address, c.Pods)
	}
	var draws []string
	for i, e := range s.Endpoints {
		draws = append(draws, fmt.Sprintf("%d : goto %s", i, s.nftEndpoint(e)))
	}
	add("rule ip %s %s numgen random mod %d vmap { %s }", Table, own, len(draws), strings.Join(draws, ", "))
	add("element ip %s cluster-ips { %s }", Table, s.Address)
	add("element ip %s service-ips { %s . %s . %d : goto %s }", Table, s.Address, s.Protocol, s.Port, own)
	if s.NodePort != 0 {
		chain(ext)
		add("rule ip %s %s jump mark-for-masquerade", Table, ext)
		add("rule ip %s %s goto %s", Table, ext, own)
		add("element ip %s service-nodeports { %s . %d : goto %s }", Table, s.Protocol, s.NodePort, ext)
	}
	return b.String()
}
