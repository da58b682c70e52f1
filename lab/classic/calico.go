package classic

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Calico is the network policies of one node as Felix, Calico's agent, wrote them in early 2019 (v3.6, felix/rules), in
// the iptables and ipset of that node. Only what a forwarded TCP connection over IPv4 meets is there: no host
// endpoints, no floating addresses, no tunnel, nothing of what comes to the node itself. Each namespace and service
// account has the profile that Kubernetes' has with Calico, which lets everything through that no policy selects.
type Calico struct {
	Pool netip.Prefix // addresses of all pods; their connections to others leave as the node's
	Pods []Pod        // of this node
}

// Pod is a pod with policies for what comes to it. None is for what it sends.
type Pod struct {
	Name     string // "namespace/name"
	Addr     netip.Addr
	Port     uint16         // TCP, that each of the policies lets clients in to
	Policies [][]netip.Addr // the clients of each, in the order in which they are asked
}

// Device is the name of the node's end of the pod's veth.
func (p *Pod) Device() string {
	sum := sha1.Sum([]byte(strings.Replace(p.Name, "/", ".", 1)))
	return "cali" + hex.EncodeToString(sum[:])[:11]
}

// policy names one of a pod's.
func (p *Pod) policy(i int) string { return hash(16, fmt.Sprintf("%s policy %d", p.Name, i)) }

// Bits of packets' marks (IptablesMarkMask 0xffff0000): of those that are let through, of those that are left to
// profiles, and of those from pods.
const (
	calicoAccept = "0x10000"
	calicoPass   = "0x20000"
	calicoFrom   = "0x40000"
)

const (
	calicoPools = "cali40all-ipam-pools"
	calicoMasq  = "cali40masq-ipam-pools"
)

// Sets returns the sets that the rules ask for, as input for `ipset restore`.
func (c *Calico) Sets() string {
	var b strings.Builder
	for _, s := range []string{calicoPools, calicoMasq} {
		fmt.Fprintf(&b, "create %s hash:net family inet\nadd %[1]s %s\n", s, c.Pool)
	}
	for i := range c.Pods {
		p := &c.Pods[i]
		for j, clients := range p.Policies {
			fmt.Fprintf(&b, "create cali40s:%s hash:net family inet\n", p.policy(j))
			for _, a := range clients {
				fmt.Fprintf(&b, "add cali40s:%s %s\n", p.policy(j), a)
			}
		}
	}
	return b.String()
}

// Text returns the rules, with those that lead to them from the hooks, as input for `iptables-restore --noflush`.
func (c *Calico) Text() string {
	var raw, mangle, nat, filter table
	for t, hooks := range map[*table][]string{&raw: {"PREROUTING"}, &mangle: {"PREROUTING"},
		&nat: {"PREROUTING", "POSTROUTING"}, &filter: {"FORWARD"}} {
		for _, h := range hooks {
			t.chain("cali-" + h)
			t.add(h, "-j cali-%s", h)
		}
	}
	accepted := "-m mark --mark " + calicoAccept + "/" + calicoAccept

	raw.chain("cali-from-host-endpoint")
	raw.add("cali-PREROUTING", "-j MARK --set-xmark 0x0/0xf0000")
	raw.add("cali-PREROUTING", "-i cali+ -j MARK --set-xmark %s/%[1]s", calicoFrom)
	raw.add("cali-PREROUTING", "-m mark --mark %s/%[1]s -m rpfilter --invert -j DROP", calicoFrom)
	raw.add("cali-PREROUTING", "-m mark --mark 0x0/%s -j cali-from-host-endpoint", calicoFrom)
	raw.add("cali-PREROUTING", "%s -j ACCEPT", accepted)

	mangle.chain("cali-from-host-endpoint")
	mangle.add("cali-PREROUTING", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	mangle.add("cali-PREROUTING", "%s -j ACCEPT", accepted)
	mangle.add("cali-PREROUTING", "-j cali-from-host-endpoint")
	mangle.add("cali-PREROUTING", `-m comment --comment "Host endpoint policy accepted packet." %s -j ACCEPT`, accepted)

	for _, chain := range []string{"cali-fip-dnat", "cali-fip-snat", "cali-nat-outgoing"} {
		nat.chain(chain)
	}
	nat.add("cali-PREROUTING", "-j cali-fip-dnat")
	nat.add("cali-POSTROUTING", "-j cali-fip-snat")
	nat.add("cali-POSTROUTING", "-j cali-nat-outgoing")
	nat.add("cali-nat-outgoing", "-m set --match-set %s src -m set ! --match-set %s dst -j MASQUERADE", calicoMasq,
		calicoPools)

	for _, chain := range []string{"cali-from-hep-forward", "cali-to-hep-forward", "cali-pro-kns.default",
		"cali-pri-kns.default", "cali-pro-ksa.default.default", "cali-pri-ksa.default.default"} {
		filter.chain(chain)
	}
	for _, chain := range []string{"cali-pro-kns.default", "cali-pri-kns.default"} { // those of service accounts are empty
		filter.add(chain, "-j MARK --set-xmark %s/%[1]s", calicoAccept)
		filter.add(chain, "%s -j RETURN", accepted)
	}
	c.dispatch(&filter, "cali-from-wl-dispatch", "-i", "cali-fw-")
	c.dispatch(&filter, "cali-to-wl-dispatch", "-o", "cali-tw-")
	filter.add("cali-FORWARD", "-j MARK --set-xmark 0x0/0xe0000")
	filter.add("cali-FORWARD", "-m mark --mark 0x0/%s -j cali-from-hep-forward", calicoAccept)
	filter.add("cali-FORWARD", "-i cali+ -j cali-from-wl-dispatch")
	filter.add("cali-FORWARD", "-o cali+ -j cali-to-wl-dispatch")
	filter.add("cali-FORWARD", "-j cali-to-hep-forward")
	filter.add("cali-FORWARD", `-m comment --comment "Policy explicitly accepted packet." %s -j ACCEPT`, accepted)
	for i := range c.Pods {
		c.Pods[i].endpoint(&filter)
	}
	return raw.text("raw") + mangle.text("mangle") + nat.text("nat") + filter.text("filter")
}

// dispatch writes what leads from a device to its pod's chain: by the first letter in which devices differ, where
// several have it.
func (c *Calico) dispatch(t *table, chain, flag, to string) {
	t.chain(chain)
	const drop = `-m comment --comment "Unknown interface" -j DROP`
	byLetter, letters := map[string][]string{}, []string(nil)
	var devices []string
	for i := range c.Pods {
		devices = append(devices, c.Pods[i].Device())
	}
	slices.Sort(devices)
	common := len(commonPrefix(devices))
	for _, d := range devices {
		t.chain(to + d)
		letter := d[common:min(len(d), common+1)]
		if byLetter[letter] == nil {
			letters = append(letters, letter)
		}
		byLetter[letter] = append(byLetter[letter], d)
	}
	for _, letter := range letters {
		l := byLetter[letter]
		if len(l) == 1 {
			t.add(chain, "%s %s -g %s", flag, l[0], to+l[0])
			continue
		}
		own := chain + "-" + letter
		t.chain(own)
		t.add(chain, "%s %s+ -g %s", flag, l[0][:common+1], own)
		for _, d := range l {
			t.add(own, "%s %s -g %s", flag, d, to+d)
		}
		t.add(own, "%s", drop)
	}
	t.add(chain, "%s", drop)
}

// commonPrefix is how all of a sorted list begin.
func commonPrefix(l []string) string {
	if len(l) == 0 {
		return ""
	}
	first, last := l[0], l[len(l)-1]
	n := 0
	for n < min(len(first), len(last)) && first[n] == last[n] {
		n++
	}
	return first[:n]
}

// endpoint writes a pod's chains: of what it sends, of what comes to it, and of its policies.
func (p *Pod) endpoint(t *table) {
	const accepted, passed = "-m mark --mark " + calicoAccept + "/" + calicoAccept, "-m mark --mark 0x0/" + calicoPass
	begin := func(chain string) {
		t.add(chain, "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
		t.add(chain, "-m conntrack --ctstate INVALID -j DROP")
		t.add(chain, "-j MARK --set-xmark 0x0/%s", calicoAccept)
	}
	profiles := func(chain, kind string) {
		for _, name := range []string{"kns.default", "ksa.default.default"} {
			t.add(chain, "-j cali-%s-%s", kind, name)
			t.add(chain, `-m comment --comment "Return if profile accepted" %s -j RETURN`, accepted)
		}
		t.add(chain, `-m comment --comment "Drop if no profiles matched" -j DROP`)
	}
	from, to := "cali-fw-"+p.Device(), "cali-tw-"+p.Device()
	begin(from)
	profiles(from, "pro")

	begin(to)
	if len(p.Policies) > 0 {
		t.add(to, `-m comment --comment "Start of policies" -j MARK --set-xmark 0x0/%s`, calicoPass)
	}
	for i := range p.Policies {
		policy := "cali-pi-" + p.policy(i)
		t.chain(policy)
		t.add(policy, "-p tcp -m set --match-set cali40s:%s src -m multiport --dports %d -j MARK --set-xmark %s/%[3]s",
			p.policy(i), p.Port, calicoAccept)
		t.add(policy, "%s -j RETURN", accepted)
		t.add(to, "%s -j %s", passed, policy)
		t.add(to, `-m comment --comment "Return if policy accepted" %s -j RETURN`, accepted)
	}
	if len(p.Policies) > 0 {
		t.add(to, `-m comment --comment "Drop if no policies passed packet" %s -j DROP`, passed)
	}
	profiles(to, "pri")
}

// Install writes sets and rules into the calling thread's network namespace, where there must be none of Calico's.
func (c *Calico) Install(ctx context.Context, v Variant) error {
	if err := run(ctx, c.Sets(), "ipset", "restore"); err != nil {
		return err
	}
	return IPTables.Restore(ctx, v, c.Text())
}
