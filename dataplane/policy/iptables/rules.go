package iptables

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// Prefix begins the name of each of our chains.
const Prefix = xt.PolicyPrefix

// LogGroup is the nflog group that denials and what audited policies would deny go to.
const LogGroup = 4271

// The prefixes of what is logged.
const (
	PrefixDeny   = "deny"
	PrefixAudit  = "audit"
	PrefixForged = "forged"
)

// Chains that there is one of in each family.
const (
	chainDeny    = Prefix + "DENY"    // logs, drops
	chainAudit   = Prefix + "AUDIT"   // logs what audited policies would deny
	chainCut     = Prefix + "CUT"     // ends connections that lost their permission
	chainDevice  = Prefix + "DV"      // the tree of the subjects' devices
	chainPods    = Prefix + "DP"      // the tree of pods' devices
	chainForeign = Prefix + "FOREIGN" // what a pod's device doesn't admit
	chainForged  = Prefix + "FORGED"  // logs, drops what has a forged source
)

// hooks are the built-in chains that lead to ours, each to the one of that name.
var hooks = []string{"FORWARD", "INPUT", "OUTPUT"}

// filter is the table of iptables that all rules are in.
const filter = "filter"

// side is one direction and stage.
type side struct {
	direction model.Direction
	stage     int
}

// sides are all there are: the first stages before the second ones.
var sides = []side{{model.Egress, 0}, {model.Ingress, 0}, {model.Egress, 1}, {model.Ingress, 1}}

// String returns "E0" for the first stage of egress.
func (s side) String() string { return fmt.Sprintf("%c%d", "EI"[s.direction], s.stage) }

// root names the tree of subjects that have a ruleset of that side; of the first stage: all subjects.
func (s side) root() string { return Prefix + s.String() }

// own and other return the options that match the pod's address, and the other end's in a set.
func (s side) own() string { return [...]string{model.Egress: "-s", model.Ingress: "-d"}[s.direction] }
func (s side) other() string {
	return [...]string{model.Egress: "dst", model.Ingress: "src"}[s.direction]
}

// act returns the end of a rule that does what a decision says. What is accepted returns to the hook's chain: no chain
// on the way was entered otherwise than by goto. What is left to the next stage goes to the tree of that.
func (s side) act(d model.Decision) string {
	next := d.Verdict == model.VerdictNext && s.stage < model.StageLast
	switch {
	case d.Verdict == model.VerdictDrop:
		return "-g " + chainDeny
	case next && d.Report:
		return "-g " + chainAudit + "-" + side{s.direction, s.stage + 1}.String()
	case next:
		return "-g " + side{s.direction, s.stage + 1}.root()
	case d.Report:
		return "-g " + chainAudit
	}
	return "-j RETURN"
}

// constant returns the chains that don't depend on pods and policies. devices: what comes in by pods' own is checked.
func constant(f iptables.Family, cut uint32, devices bool) map[string][]string {
	log := func(prefix string) string {
		return fmt.Sprintf("-m limit --limit 100/sec --limit-burst 200 -j NFLOG --nflog-prefix %s --nflog-group %d "+
			"--nflog-size 128", prefix, LogGroup)
	}
	chains := map[string][]string{
		chainDeny:   {log(PrefixDeny), "-j DROP"},
		chainForged: {log(PrefixForged), "-j DROP"},
		chainAudit:  {log(PrefixAudit)},
	}
	chains[chainForeign] = foreign(f)
	for _, s := range sides {
		if s.stage > 0 {
			chains[chainAudit+"-"+s.String()] = []string{log(PrefixAudit), "-g " + s.root()}
		}
	}
	if cut != 0 {
		chains[chainCut] = []string{"-p tcp -j REJECT --reject-with tcp-reset", "-j DROP"}
	}
	for _, h := range hooks {
		var rules []string
		if cut != 0 {
			rules = append(rules, fmt.Sprintf("-m connmark --mark %#x/%#x -m conntrack ! --ctstate RELATED -g %s", cut, cut,
				chainCut))
		}
		const known = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"
		if devices && h != "OUTPUT" { // who sends as an end of an open TCP connection has to know its sequence numbers
			rules = append(rules, "-p tcp "+known, "-j "+chainPods)
		}
		rules = append(rules, known)
		if f == iptables.IPv6 {
			rules = append(rules, discovery()...)
		}
		chains[Prefix+h] = append(rules, evaluate(f, h)...)
	}
	return chains
}

// foreign returns the rules for what a pod's device doesn't admit. What IPv6 sends by itself, to groups on the link, is
// not logged.
func foreign(f iptables.Family) (rules []string) {
	if f == iptables.IPv6 {
		rules = append(discovery(), "-s fe80::/10 -d ff00::/8 -j DROP", "-s ::/128 -d ff00::/8 -j DROP")
	}
	return append(rules, "-g "+chainForged)
}

// discovery accepts neighbour discovery, which has the highest hop limit: it was not routed.
func discovery() (rules []string) {
	for t := 133; t <= 137; t++ { // from router solicitation to redirect
		rules = append(rules, fmt.Sprintf("-p ipv6-icmp -m icmp6 --icmpv6-type %d -m hl --hl-eq 255 -j RETURN", t))
	}
	return rules
}

// evaluate returns the rules that packets meet that open a connection.
func evaluate(f iptables.Family, hook string) []string {
	in := func(set, where string) string {
		return fmt.Sprintf("-m set --match-set %s%s %s ", setPrefix(f), set, where)
	}
	egress, ingress := side{model.Egress, 0}, side{model.Ingress, 0}
	own := in(setNode, "src") + "-j RETURN" // counts where packets have no device that they came in by, or loopback
	if hook != "OUTPUT" {
		own = "-i lo " + own
	}
	rules := []string{own}
	if hook != "OUTPUT" {
		rules = append(rules, "-j "+chainDevice)
	}
	switch hook {
	case "INPUT": // what is delivered to the node
		rules = append(rules, in(setUntranslated, "dst")+"-j RETURN")
	case "FORWARD":
		rules = append(rules, "-o "+model.ProxyDevice+" "+in(setUntranslated, "dst")+"-j RETURN")
	}
	rules = append(rules, "-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN "+in(setMidstream, "src")+"-j RETURN",
		"-j "+egress.root())
	if hook != "INPUT" {
		rules = append(rules, in(setNode, "dst")+"-j RETURN", "-j "+ingress.root())
	}
	return rules
}

// tableChain and rulesetChain name the chains of a peer table and of a ruleset at a side.
func tableChain(s side, id uint64) string   { return fmt.Sprintf("%sT%s%016x", Prefix, s, id) }
func rulesetChain(s side, id uint64) string { return fmt.Sprintf("%sR%s%016x", Prefix, s, id) }

// The trees are wide and not deep: the kernel's nf_tables follows chains to 16 levels, jumps and gotos alike. With both
// stages and reports there are 12 beside the levels of port entries, with one below the roots of subjects' trees.
const (
	bucket       = 3 // port entries, or subjects, that need no branches
	portLevels   = 2 // below the chain of a ruleset
	legacyLevels = 8 // in the legacy variant, where no depth is bounded
)

// share returns how many of n items each branch of a chain has, so that there are so many levels below it, all of about
// the same width.
func share(n, levels int) int {
	width := max(bucket, int(math.Ceil(math.Pow(float64(n), 1/float64(levels+1)))))
	return (n + width - 1) / width
}

// facts returns the chains of a ruleset with so many levels below it, those of its peer tables, and their sets.
func (c *Chains) facts(levels int) (facts []Fact) {
	f := iptables.IPv4
	if c.six {
		f = iptables.IPv6
	}
	leads := map[uint64]string{} // to tables
	for _, t := range tablesOf(c.ruleset) {
		sets := setsOf(t)
		why, closed := c.closed[t.ID]
		switch {
		case closed:
			leads[t.ID] = "-g " + chainDeny
			name := fmt.Sprintf("peer table %016x", t.ID)
			facts = append(facts, Fact{Key: Key{Kind: KindClosed, Family: f, Name: name}, Value: why})
			continue
		case len(sets) == 0:
			leads[t.ID] = c.act(t.Otherwise)
			continue
		}
		var rules []string
		for _, d := range sets {
			set := tableSet(f, t, d)
			facts = append(facts, setFact(f, set))
			rules = append(rules, fmt.Sprintf("-m set --match-set %s %s %s", set, c.other(), c.act(d)))
		}
		name := tableChain(c.side, t.ID)
		leads[t.ID] = "-g " + name
		facts = append(facts, chain(f, name, append(rules, c.act(t.Otherwise))))
	}
	g := ports{c: c, leads: leads, chains: map[string][]string{}}
	of := slices.DeleteFunc(slices.Clone(c.ruleset.Ports), func(e model.PortEntry) bool {
		return !hasPorts(e.Protocol) && e.First > 0 // which no packet is of
	})
	g.grow(rulesetChain(c.side, c.ruleset.ID), of, levels)
	for name, rules := range g.chains {
		facts = append(facts, chain(f, name, rules))
	}
	return facts
}

// ports builds the tree of a ruleset's port entries: a rule for each branch, or for each entry, then the default's.
type ports struct {
	c      *Chains
	leads  map[uint64]string
	chains map[string][]string
}

// grow adds to a chain with so many levels below it what leads to the peer tables of entries, then to the default's.
func (g *ports) grow(name string, of []model.PortEntry, levels int) {
	each := 1
	if levels > 0 && len(of) > bucket {
		each = share(len(of), levels)
	}
	add := func(parts ...string) { g.chains[name] = append(g.chains[name], strings.Join(parts, " ")) }
	for len(of) > 0 {
		n := 1
		for n < min(each, len(of)) && of[n].Protocol == of[0].Protocol {
			n++
		}
		test := portMatch(of[0].Protocol, of[0].First, of[n-1].Last)
		if n == 1 {
			add(test, g.leads[of[0].PeerTable.ID])
		} else {
			branch := Prefix + "S" + g.c.side.String() + hashed(g.c.ruleset.ID, test, levels)
			add(test, "-g", branch)
			g.grow(branch, of[:n], levels-1)
		}
		of = of[n:]
	}
	add(g.leads[g.c.ruleset.Default.PeerTable.ID])
}

// hasPorts reports whether packets of a protocol have ports; all others are as with port 0.
func hasPorts(p model.Protocol) bool { return p == model.TCP || p == model.UDP || p == model.SCTP }

// portMatch matches destination ports of a protocol.
func portMatch(p model.Protocol, from, to uint16) string {
	switch {
	case from == 0 && to == 65535 || !hasPorts(p):
		return fmt.Sprintf("-p %s", p)
	case from == to:
		return fmt.Sprintf("-p %[1]s -m %[1]s --dport %d", p, from)
	}
	return fmt.Sprintf("-p %[1]s -m %[1]s --dport %d:%d", p, from, to)
}

// isTree reports whether a chain is of the trees that lead to subjects.
func isTree(name string) bool {
	rest, ours := strings.CutPrefix(name, Prefix)
	return ours && len(rest) >= 2 && (rest[0] == 'E' || rest[0] == 'I') && (rest[1] == '0' || rest[1] == '1') ||
		strings.HasPrefix(name, chainDevice) || strings.HasPrefix(name, chainPods)
}
