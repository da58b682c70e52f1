package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// Prefix begins the name of each of our chains.
const Prefix = "FAIRLEAD-"

// Chains that there is one of. Those of rejections are ends in the table nat, where nothing can be refused, and refuse
// in the table filter.
const (
	chainState          = Prefix + "STATE"      // never entered: its comments say what the node fact is
	chainReject         = Prefix + "REJECT"     // answers that no endpoint is there
	chainDrop           = Prefix + "DROP"       // says nothing
	chainLeave          = Prefix + "LEAVE"      // hides the source of translated packets that need it
	chainMasquerade     = Prefix + "MASQUERADE" // does it
	chainRejectDispatch = Prefix + "FILTER"     // finds frontends that may reject, ClusterIPs and unallocated addresses
	chainNode           = Prefix + "NODEPORT"   // packets to this node's own addresses
	chainPorts          = Prefix + "PORTS"      // to those that take node ports
	chainRemotes        = Prefix + "NODES"      // packets to other nodes' addresses that take node ports
	chainRemote         = Prefix + "REMOTE"     // to one of those: this node and pods go on
	chainRemotePorts    = Prefix + "RPORTS"     // to the node ports there
	chainGuard          = Prefix + "GUARD"      // drops packets to loopback addresses from outside
	chainHealth         = Prefix + "HEALTH"     // accepts packets to health checks
	// accepts translated connections, and drops what connection tracking calls invalid
	chainFwd = Prefix + "FORWARD"
)

// The kernel's counters that rules count in.
const (
	invalidDropped    = "fairlead-invalid-dropped"    // forwarded packets that connection tracking calls invalid
	localhostAccepted = "fairlead-localhost-accepted" // connections to node ports at loopback addresses
)

// counting returns a match that counts packets, as save prints it.
func counting(counter string) string { return "-m nfacct --nfacct-name  " + counter + " " }

// tables are those that hold rules of ours, in the order in which they are written: the filter rejects at a ClusterIP
// what nat doesn't translate, so it comes last, and goes first.
var tables = []string{"raw", "nat", "filter"}

// builtIn are the chains that lead to ours, by table.
var builtIn = map[string][]string{
	"raw":    {"PREROUTING"},
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"nat":    {"PREROUTING", "OUTPUT", "POSTROUTING"},
}

// content is what a table holds of ours, pools aside.
type content struct {
	chains map[string][]string // our chains' rules
	leads  map[string][]string // the rules of built-in chains that lead to ours
	// how many rules at the head of built-in chains lead to the policy engine's; read, never built
	policies map[string]int
}

func newContent() *content {
	return &content{chains: map[string][]string{}, leads: map[string][]string{}, policies: map[string]int{}}
}

// masqueradeChain names the chain that notes that packets of some origins have their source hidden.
func masqueradeChain(m model.Origins) string { return fmt.Sprintf("%sFROM-%d", Prefix, m) }

// ruleset is what a family's tables are built of.
type ruleset struct {
	family    iptables.Family
	node      *node // nil: none
	frontends map[model.Entry]*frontend
	remotes   map[netip.Addr]bool // of other nodes, where node ports are served
	health    map[uint16]bool     // ports of health checks
	localnet  bool                // the sysctl route_localnet was changed by us
	mark      uint32              // the bit of the packet mark that is ours
}

// build returns every table's content.
func (w *ruleset) build() map[string]*content {
	out := map[string]*content{"raw": newContent(), "filter": newContent(), "nat": newContent()}
	if w.node == nil && len(w.frontends)+len(w.health)+len(w.remotes) == 0 && !w.localnet {
		return out
	}
	var all, closed []*frontend
	for _, f := range w.frontends {
		if !f.everyPort() { // which nothing serves
			all = append(all, f)
		}
		if f.closed() {
			closed = append(closed, f)
		}
	}
	slices.SortFunc(all, order)
	slices.SortFunc(closed, order)
	w.nat(out["nat"], all)
	if len(closed) > 0 || w.node != nil && len(w.node.services) > 0 {
		w.filter(out["filter"], closed)
	}
	if w.node != nil {
		w.forward(out["filter"])
	}
	if len(w.health) > 0 {
		w.healthChecks(out["filter"])
	}
	// as long as the sysctl is ours to answer for, whatever was asked for since
	if w.localnet || w.node != nil && w.node.localhost {
		raw := out["raw"]
		raw.chains[chainGuard] = []string{"-j DROP"}
		raw.leads["PREROUTING"] = []string{"-d 127.0.0.0/8 ! -i lo -j " + chainGuard}
	}
	return out
}

// nat translates.
func (w *ruleset) nat(c *content, of []*frontend) {
	c.chains[chainState] = w.state()
	for _, rejection := range []string{chainReject, chainDrop} {
		c.chains[rejection] = []string{"-j ACCEPT"}
	}
	t := &tree{chains: c.chains, masquerading: map[string]masquerading{},
		forget: fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", w.mark)}
	for m, h := range w.masqueradings() {
		t.masquerading[masqueradeChain(m)] = h
		c.chains[masqueradeChain(m)] = h.rules
	}
	c.chains[chainLeave] = []string{
		fmt.Sprintf("-m mark --mark %#x/%#x -g %s", w.mark, w.mark, chainMasquerade),
		fmt.Sprintf("-m bpf --bytecode %q -m addrtype ! --src-type LOCAL -j %s", sameAddresses[w.family], masquerade),
	}
	if w.node != nil && w.node.localhost && w.node.counted {
		count := "-m conntrack --ctorigdst 127.0.0.0/8 " + strings.TrimSpace(counting(localhostAccepted))
		c.chains[chainLeave] = slices.Insert(c.chains[chainLeave], 0, count)
	}
	c.chains[chainMasquerade] = []string{t.forget, "-j " + masquerade}
	c.leads["POSTROUTING"] = []string{"-m conntrack --ctstate DNAT -j " + chainLeave}

	addressed, ports := apart(of)
	var leads []string
	for _, door := range doors(addressed) {
		p := shared(door)
		name := prefixChain(p, false)
		t.root(name, door)
		leads = append(leads, within(p)+"-j "+name)
	}
	if len(ports) > 0 {
		leads = append(leads, toNode)
		w.nodePorts(t, ports)
	}
	leads = append(leads, w.remotePorts(t, ports)...)
	c.leads["PREROUTING"], c.leads["OUTPUT"] = leads, leads
	w.branches(c.chains, of, func(goal string) string { return "-g " + goal })
}

// filter refuses what nat did not translate.
func (w *ruleset) filter(c *content, of []*frontend) {
	w.rejections(c.chains)
	t := &tree{chains: c.chains}
	addressed, ports := apart(of)
	c.chains[chainRejectDispatch] = nil
	for _, door := range doors(addressed) {
		p := shared(door)
		t.root(prefixChain(p, false), door)
		t.add(chainRejectDispatch, within(p)+"-j "+prefixChain(p, false))
	}
	if len(ports) > 0 {
		t.add(chainRejectDispatch, toNode)
		w.nodePorts(t, ports)
	}
	for _, lead := range w.remotePorts(t, ports) {
		t.add(chainRejectDispatch, lead)
	}
	if w.node != nil {
		for _, r := range w.node.services {
			t.add(chainRejectDispatch, fmt.Sprintf("-m iprange --dst-range %s %s-g %s", r, notToNode, chainDrop))
		}
	}
	w.branches(c.chains, of, func(goal string) string {
		if rejects(goal) {
			return "-g " + goal
		}
		return "-j RETURN"
	})
	for _, chain := range builtIn["filter"] {
		c.leads[chain] = []string{"-m conntrack ! --ctstate INVALID,RELATED,ESTABLISHED,DNAT -j " + chainRejectDispatch}
	}
}

// forward accepts what this plane forwards where other rules, or the chain's policy, would drop it: established
// connections and packets whose source is to be masqueraded. It drops packets that connection tracking calls invalid:
// they are not translated, and the host that gets one from an address that it doesn't know resets the connection.
// Refusals come first: a packet that is refused may carry the mark.
func (w *ruleset) forward(c *content) {
	c.chains[chainFwd] = []string{"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"}
	if !w.node.liberal {
		count := ""
		if w.node.counted {
			count = counting(invalidDropped)
		}
		c.chains[chainFwd] = append(c.chains[chainFwd], "-m conntrack --ctstate INVALID "+count+"-j DROP")
	}
	c.chains[chainFwd] = append(c.chains[chainFwd], fmt.Sprintf("-m mark --mark %#x/%#x -j ACCEPT", w.mark, w.mark))
	c.leads["FORWARD"] = append(c.leads["FORWARD"], "-j "+chainFwd)
}

// healthChecks accepts packets to health checks, whatever the policy of INPUT.
func (w *ruleset) healthChecks(c *content) {
	for _, port := range slices.Sorted(maps.Keys(w.health)) {
		c.chains[chainHealth] = append(c.chains[chainHealth], fmt.Sprintf("-p tcp -m tcp --dport %d -j ACCEPT", port))
	}
	c.leads["INPUT"] = append(c.leads["INPUT"], "-p tcp -j "+chainHealth)
}

// masquerade has the kernel draw ports at random: two connections that begin at once seldom draw the same one.
const masquerade = "MASQUERADE --random-fully"

// rejections returns the chains that refuse.
func (w *ruleset) rejections(chains map[string][]string) {
	unreachable := "icmp-port-unreachable"
	if w.family == iptables.IPv6 {
		unreachable = "icmp6-port-unreachable"
	}
	chains[chainReject] = []string{"-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with " + unreachable}
	chains[chainDrop] = []string{"-j DROP"}
}

// toNode leads packets to this node's addresses to the node ports.
const toNode = "-m addrtype --dst-type LOCAL -j " + chainNode

// notToNode matches packets to other addresses than this node's.
const notToNode = "-m addrtype ! --dst-type LOCAL "

// apart parts sorted frontends with addresses from node ports.
func apart(of []*frontend) (addressed, ports []*frontend) {
	n := 0
	for n < len(of) && of[n].entry.AnyAddr() {
		n++
	}
	return of[n:], of[:n]
}

// nodePorts lets the addresses that take node ports find one.
func (w *ruleset) nodePorts(t *tree, of []*frontend) {
	t.chains[chainNode] = nil
	if w.node != nil {
		for _, r := range w.node.ports {
			match := fmt.Sprintf("-m iprange --dst-range %s ", r)
			if whole(r) {
				match = ""
			}
			t.add(chainNode, match+"-g "+chainPorts)
		}
	}
	t.root(chainPorts, of)
}

// remotePorts has this node and its pods find those of node ports that are served at other nodes' addresses, and
// returns what leads there. In the table nat the tree of addresses also says which they are, when nothing leads there.
func (w *ruleset) remotePorts(t *tree, of []*frontend) (leads []string) {
	var ports, nodes []*frontend
	for _, f := range of {
		if f.remote {
			there := *f
			there.masqueradeFrom &^= model.OriginsOf(model.FromPod)
			ports = append(ports, &there)
		}
	}
	if len(w.remotes) == 0 || t.masquerading == nil && len(ports) == 0 {
		return nil
	}
	for a := range w.remotes {
		nodes = append(nodes, &frontend{entry: model.Entry{Addr: a}, internal: chainRemote, external: chainRemote})
	}
	slices.SortFunc(nodes, order)
	own := tree{masquerading: t.masquerading, forget: t.forget, remote: true, chains: t.chains}
	own.root(chainRemotes, nodes)
	own.root(chainRemotePorts, ports)
	t.chains[chainRemote] = nil
	for _, clients := range append([]string{"-m addrtype --src-type LOCAL "}, w.node.fromPods()...) {
		t.add(chainRemote, clients+"-g "+chainRemotePorts)
	}
	if len(ports) > 0 {
		leads = append(leads, within(shared(nodes))+"-j "+chainRemotes)
	}
	return leads
}

// whole reports whether a range holds every address of its family.
func whole(r model.Range) bool {
	return r.First.IsUnspecified() && !r.Last.Next().IsValid()
}

// within matches a destination in a prefix.
func within(p netip.Prefix) string {
	if p.Bits() == 0 {
		return ""
	}
	return "-d " + p.String() + " "
}

// state returns what the node fact is, in comments.
func (w *ruleset) state() (rules []string) {
	if w.node != nil {
		for _, item := range w.node.items() {
			rules = append(rules, comment(item))
		}
	}
	if w.localnet {
		rules = append(rules, comment(localnetSet))
	}
	return rules
}

// localnetSet reports that the sysctl was changed by us, so that it is changed back.
const localnetSet = "route_localnet was 0"

// comment is a rule that says something. One without anything but letters would be printed without quotes.
func comment(text string) string {
	if strings.Trim(text, "abcdefghijklmnopqrstuvwxyz") == "" {
		return "-m comment --comment " + text
	}
	return fmt.Sprintf("-m comment --comment %q", text)
}

// masqueradings returns, for each set of origins, the rules that note that their packets' source is to be hidden. Rules
// that would be the same for two sets, or none, stand only in a chain that names the set.
func (w *ruleset) masqueradings() map[model.Origins]masquerading {
	all, first := map[model.Origins]masquerading{}, map[string]model.Origins{"": 0}
	for m := model.Origins(1); m <= model.AllOrigins; m++ {
		h := w.masquerading(m)
		text := strings.Join(h.rules, "\n")
		if other, twice := first[text]; twice {
			h.inline = false
			all[other] = masquerading{all[other].rules, false}
		}
		first[text], all[m] = m, h
	}
	delete(all, 0)
	return all
}

// masquerading returns the rules that note, for packets of the origins in m, that their source is to be hidden.
func (w *ruleset) masquerading(m model.Origins) masquerading {
	pods := w.node.fromPods()
	const local, notLocal = "-m addrtype --src-type LOCAL ", "-m addrtype ! --src-type LOCAL "
	marking := fmt.Sprintf("-j MARK --set-xmark %#x/%#x", w.mark, w.mark)
	if m == model.AllOrigins {
		return masquerading{[]string{marking}, true}
	}
	h := masquerading{inline: true}
	add := func(parts ...string) { h.rules = append(h.rules, strings.Join(parts, "")) }
	foreign := notLocal // a source that is judged as a pod's or outside's, not as the node's
	if m.Has(model.FromNode) {
		add(local, marking)
		foreign = ""
	}
	switch in, out := m.Has(model.FromPod), m.Has(model.FromExternal); {
	case in && out:
		add(foreign, marking)
	case in:
		for _, p := range pods {
			add(p, foreign, marking)
		}
	case out && len(pods) == 1 && pods[0] != "":
		add("! ", pods[0], foreign, marking)
	case out:
		h.inline = len(pods) == 0
		for _, p := range pods {
			add(p, "-j RETURN")
		}
		add(foreign, marking)
	}
	return h
}

// from matches a source.
func from(p netip.Prefix) string {
	if p.Bits() == 0 {
		return ""
	}
	return "-s " + p.String() + " "
}

// sameAddresses are programs for the kernel's classic BPF: whether a packet is sent to where it comes from. No match of
// iptables compares two fields of a packet.
var sameAddresses = map[iptables.Family]string{
	iptables.IPv4: "6,32 0 0 12,7 0 0 0,32 0 0 16,29 0 1 0,6 0 0 1,6 0 0 0",
	iptables.IPv6: "18,32 0 0 8,7 0 0 0,32 0 0 24,29 0 13 0,32 0 0 12,7 0 0 0,32 0 0 28,29 0 9 0," +
		"32 0 0 16,7 0 0 0,32 0 0 32,29 0 5 0,32 0 0 20,7 0 0 0,32 0 0 36,29 0 1 0,6 0 0 1,6 0 0 0",
}

// first returns the chain that a frontend's packets go to.
func (f *frontend) first() string {
	switch {
	case f.restricted:
		return f.admission()
	case f.internal != f.external:
		return f.sides()
	}
	return f.internal
}

// admission and sides name the chains that look at who sends.
func (f *frontend) admission() string { return hashed("SRC", f.entry.String()) }
func (f *frontend) sides() string     { return hashed("TWO", f.entry.String()) }

// branches adds the chains of frontends that look at who sends: whether it is let in, and whether it is inside. Do
// returns the end of a rule that leads to a goal.
func (w *ruleset) branches(chains map[string][]string, of []*frontend, do func(goal string) string) {
	for _, f := range of {
		end := do(f.internal)
		if f.internal != f.external {
			var rules []string
			rules = append(rules, "-m addrtype --src-type LOCAL "+end)
			for _, p := range w.node.fromPods() {
				rules = append(rules, p+end)
			}
			chains[f.sides()] = append(rules, do(f.external))
			end = "-g " + f.sides()
		}
		if f.restricted {
			var rules []string
			for _, s := range f.sources {
				rules = append(rules, from(s)+end)
			}
			chains[f.admission()] = append(rules, "-g "+chainDrop)
		}
	}
}
