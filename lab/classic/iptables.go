package classic

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strings"
)

// hash returns the first n letters of the base32 of a text's SHA-256, as kube-proxy names chains.
func hash(n int, text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])[:n]
}

// chain names a Service's chain of iptables: SVC for its endpoints, EXT for its node port.
func (s *Service) chain(kind string) string {
	return "KUBE-" + kind + "-" + hash(16, s.Name+s.Protocol.String())
}

// endpointChain names an endpoint's chain of iptables.
func (s *Service) endpointChain(e netip.AddrPort) string {
	return "KUBE-SEP-" + hash(16, s.Name+s.Protocol.String()+e.String())
}

// table is the text of one table for iptables-restore.
type table struct{ chains, rules strings.Builder }

// chain declares a chain, which empties it if it is there.
func (t *table) chain(name string) { fmt.Fprintf(&t.chains, ":%s - [0:0]\n", name) }

// add appends a rule to a chain.
func (t *table) add(chain, format string, a ...any) {
	fmt.Fprintf(&t.rules, "-A "+chain+" "+format+"\n", a...)
}

func (t *table) text(name string) string {
	return "*" + name + "\n" + t.chains.String() + t.rules.String() + "COMMIT\n"
}

// masqueradeMark is the bit of a packet's mark that has its source hidden.
const masqueradeMark = "0x4000/0x4000"

// base returns the rules that lead from the hooks to kube-proxy's chains. They are written once.
func (l Layout) base() string {
	var nat, filter table
	for _, c := range []string{"KUBE-SERVICES", "KUBE-POSTROUTING"} {
		nat.chain(c)
	}
	const portals = `-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`
	nat.add("PREROUTING", portals)
	nat.add("OUTPUT", portals)
	nat.add("POSTROUTING", `-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`)

	const first, outside = "-m conntrack --ctstate NEW ",
		`-m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES`
	const firewall, forward = `-m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL`,
		`-m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD`
	for _, c := range l.filterChains() {
		filter.chain(c)
	}
	if l == IPTables19 {
		filter.add("INPUT", first+outside)
		filter.add("FORWARD", forward)
		filter.add("FORWARD", first+portals)
		filter.add("OUTPUT", first+portals)
	} else {
		filter.add("INPUT", first+firewall)
		filter.add("INPUT", `-m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS`)
		filter.add("INPUT", first+outside)
		filter.add("FORWARD", first+firewall)
		filter.add("FORWARD", forward)
		filter.add("FORWARD", first+portals)
		filter.add("FORWARD", first+outside)
		filter.add("OUTPUT", first+firewall)
		filter.add("OUTPUT", first+portals)
	}
	filter.add("INPUT", "-j KUBE-FIREWALL")
	filter.add("OUTPUT", "-j KUBE-FIREWALL")
	return filter.text("filter") + nat.text("nat")
}

// filterChains returns kube-proxy's chains of the table filter.
func (l Layout) filterChains() []string {
	if l == IPTables19 {
		return []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-FIREWALL"}
	}
	return []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-FIREWALL", "KUBE-NODEPORTS",
		"KUBE-PROXY-FIREWALL"}
}

// filter returns the table filter of kube-proxy's chains. It follows no Service that has endpoints.
func (l Layout) filter(c *Cluster) string {
	var t table
	for _, c := range l.filterChains() {
		t.chain(c)
	}
	const known = `-m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`
	t.add("KUBE-FORWARD", "-m conntrack --ctstate INVALID -j DROP")
	t.add("KUBE-FORWARD", `-m comment --comment "kubernetes forwarding rules" -m mark --mark %s -j ACCEPT`, masqueradeMark)
	switch {
	case l != IPTables19:
		t.add("KUBE-FORWARD", known)
		t.add("KUBE-FIREWALL",
			`! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`)
	default:
		if c.Pods.IsValid() {
			t.add("KUBE-FORWARD", "-s %s "+known, c.Pods)
			t.add("KUBE-FORWARD", "-d %s "+known, c.Pods)
		}
		t.add("KUBE-FIREWALL",
			`-m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP`)
	}
	return t.text("filter")
}

// nat returns the table nat: what leads to every Service, and its chains.
func (l Layout) nat(c *Cluster) string {
	var t table
	for _, c := range []string{"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"} {
		t.chain(c)
	}
	if l == IPTables19 {
		t.add("KUBE-POSTROUTING",
			`-m comment --comment "kubernetes service traffic requiring SNAT" -m mark --mark %s -j MASQUERADE`, masqueradeMark)
	} else {
		t.add("KUBE-POSTROUTING", "-m mark ! --mark %s -j RETURN", masqueradeMark)
		t.add("KUBE-POSTROUTING", "-j MARK --xor-mark 0x4000")
		t.add("KUBE-POSTROUTING",
			`-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`)
	}
	t.add("KUBE-MARK-MASQ", "-j MARK --or-mark 0x4000")
	for i := range c.Services {
		l.service(&t, c, &c.Services[i])
		l.balance(&t, c, &c.Services[i])
	}
	t.add("KUBE-SERVICES",
		`-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS`)
	return t.text("nat")
}

// service writes the rules that lead to a Service.
func (l Layout) service(t *table, c *Cluster, s *Service) {
	own := s.chain("SVC")
	to := func(what string) string {
		return fmt.Sprintf(`-d %s/32 -p %s -m comment --comment "%s %s" -m %[2]s --dport %[5]d`, s.Address, s.Protocol,
			s.Name, what, s.Port)
	}
	if l == IPTables19 && c.Pods.IsValid() {
		t.add("KUBE-SERVICES", "! -s %s %s -j KUBE-MARK-MASQ", c.Pods, to("cluster IP"))
	}
	t.add("KUBE-SERVICES", "%s -j %s", to("cluster IP"), own)
	if s.NodePort == 0 {
		return
	}
	port := fmt.Sprintf(`-p %s -m comment --comment "%s" -m %[1]s --dport %[3]d`, s.Protocol, s.Name, s.NodePort)
	if l == IPTables19 {
		t.add("KUBE-NODEPORTS", "%s -j KUBE-MARK-MASQ", port)
		t.add("KUBE-NODEPORTS", "%s -j %s", port, own)
		return
	}
	t.add("KUBE-NODEPORTS", "%s -j %s", port, s.chain("EXT"))
}

// balance writes a Service's own chains.
func (l Layout) balance(t *table, c *Cluster, s *Service) {
	own := s.chain("SVC")
	t.chain(own)
	if l == IPTables && c.Pods.IsValid() {
		t.add(own, `! -s %s -d %s/32 -p %s -m comment --comment "%s cluster IP" -m %[3]s --dport %[5]d -j KUBE-MARK-MASQ`,
			c.Pods, s.Address, s.Protocol, s.Name, s.Port)
	}
	if ext := s.chain("EXT"); l == IPTables && s.NodePort != 0 {
		t.chain(ext)
		t.add(ext, `-m comment --comment "masquerade traffic for %s external destinations" -j KUBE-MARK-MASQ`, s.Name)
		t.add(ext, "-j %s", own)
	}
	for i, e := range s.Endpoints {
		chain, says, draw := s.endpointChain(e), s.Name, ""
		if l == IPTables {
			says += " -> " + e.String()
		}
		if left := len(s.Endpoints) - i; left > 1 {
			draw = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
		}
		t.add(own, `-m comment --comment "%s" %s-j %s`, says, draw, chain)
		t.chain(chain)
		t.add(chain, `-s %s/32 -m comment --comment "%s" -j KUBE-MARK-MASQ`, e.Addr(), s.Name)
		t.add(chain, `-p %s -m comment --comment "%s" -m %[1]s -j DNAT --to-destination %[3]s`, s.Protocol, s.Name, e)
	}
}
