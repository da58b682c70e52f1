package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// held is what a family's tables hold of ours.
type held struct {
	ruleset
	pools  map[string]heldPool // by their first chain
	tables map[string]*content
	wrong  string // what is not as this plane writes it, pools aside; or ""
}

// heldPool is a pool's fact and its chains.
type heldPool struct {
	value  string
	chains []string
}

// understand finds out what facts the tables stand for. Rules are read loosely; then all that they would have come from
// is built again and must be what is there, word for word.
func understand(f iptables.Family, mark uint32, read map[string]*iptables.Table) *held {
	h := &held{ruleset: ruleset{family: f, mark: mark, frontends: map[model.Entry]*frontend{}, health: map[uint16]bool{},
		remotes: map[netip.Addr]bool{}},
		pools: map[string]heldPool{}, tables: map[string]*content{}}
	for _, table := range tables {
		h.tables[table] = newContent()
	}
	for table, t := range read {
		h.parseTable(table, t)
	}
	nat := h.tables["nat"]
	h.nodeOf(nat.chains[chainState])
	h.climb(nat)
	for _, r := range h.tables["filter"].chains[chainHealth] {
		if port := parseRule(r).port; port != 0 {
			h.health[port] = true
		}
	}
	h.clusterIPs(h.tables["filter"])
	if h.wrong == "" {
		should := h.build()
		h.identify(should)
		h.wrong = differs(h.tables, should)
	}
	return h
}

// identify puts in place of each rule that leads to us and can't be read the one that should lead there.
func (h *held) identify(should map[string]*content) {
	for table, c := range h.tables {
		for name, rules := range c.leads {
			for i, r := range rules {
				if !strings.HasPrefix(r, iptables.Unreadable) {
					continue
				}
				leadsThere := func(want string) bool { return parseRule(want).target == parseRule(r).target }
				if k := slices.IndexFunc(should[table].leads[name], leadsThere); k >= 0 {
					rules[i] = should[table].leads[name][k]
				}
			}
		}
	}
}

// parseTable sorts what a table holds of ours: pools, which are understood at once, other chains, and what leads to
// them.
func (h *held) parseTable(table string, t *iptables.Table) {
	c := h.tables[table]
	others := map[string][]string{}
	for _, name := range t.Chains {
		rules := t.Rules[name]
		name = strings.Clone(name) // what is kept must not keep all that was read
		if !strings.HasPrefix(name, Prefix) {
			for i, r := range rules {
				if i == c.policies[name] && xt.Leads(r, xt.PolicyPrefix) {
					c.policies[name]++
				}
				if xt.Leads(r, Prefix) {
					c.leads[name] = append(c.leads[name], strings.Clone(r))
				}
			}
			continue
		}
		switch first, other := isPool(name); {
		case table != "nat" || !first && !other:
			c.chains[name] = make([]string, len(rules))
			for i, r := range rules {
				c.chains[name][i] = strings.Clone(r)
			}
		case first:
			others[name] = slices.Clip(others[name])
		default:
			main := name[:len(name)-3]
			others[main] = append(others[main], name)
		}
	}
	for name, l := range others {
		h.pools[name] = understandPool(name, l, t.Rules)
	}
}

// understandPool finds out what a pool's chains stand for.
func understandPool(name string, others []string, rules map[string][]string) heldPool {
	p := heldPool{value: altered + "chain " + name, chains: others}
	if _, there := rules[name]; there {
		p.chains = append([]string{name}, others...)
	}
	is := readPool(name, rules)
	if len(is.backends) == 0 {
		return p
	}
	should := is.chains(name)
	if len(should) != len(p.chains) {
		return p
	}
	for _, c := range should {
		if there, ok := rules[c.name]; !ok || !slices.Equal(there, c.rules) {
			return p
		}
	}
	p.value = is.String()
	return p
}

// nodeOf reads the node fact out of comments.
func (h *held) nodeOf(rules []string) {
	var items []string
	for _, r := range rules {
		item := strings.Trim(strings.TrimPrefix(r, "-m comment --comment "), `"`)
		if item == localnetSet {
			h.localnet = true
		} else {
			items = append(items, item)
		}
	}
	if len(items) == 0 {
		return
	}
	n, err := parseNode(items)
	if err != nil {
		h.wrong = altered + err.Error()
	}
	h.node = &n
}

// differs returns where tables are not as they should be, or "".
func differs(are, should map[string]*content) string {
	for _, table := range tables {
		is, want := are[table], should[table]
		for _, l := range []struct {
			what     string
			is, want map[string][]string
		}{{"chain", is.chains, want.chains}, {"what leads to us from", is.leads, want.leads}} {
			names := slices.Sorted(maps.Keys(l.is))
			for name := range l.want {
				if _, there := l.is[name]; !there {
					names = append(names, name)
				}
			}
			for _, name := range names {
				there, known := l.want[name]
				found, present := l.is[name]
				if !slices.Equal(there, found) || l.what == "chain" && known != present {
					return fmt.Sprintf("%s%s %s of table %s", altered, l.what, name, table)
				}
			}
		}
	}
	return ""
}

// clusterIPs collects the ClusterIPs from the rules that reject packets to them.
func (h *held) clusterIPs(filter *content) {
	for _, rules := range filter.chains {
		for _, text := range rules {
			if r := parseRule(text); r.to.IsValid() && r.to.IsSingleIP() && r.protocol == 0 && r.target == chainReject {
				f := &frontend{entry: model.Entry{Addr: r.to.Addr()}, internal: chainReject, external: chainReject}
				h.frontends[f.entry] = f
			}
		}
	}
}

// climb collects the frontends of the tree, from the rules that lead into it.
func (h *held) climb(nat *content) {
	c := &climber{nat: nat, found: h.frontends, markings: map[string]model.Origins{}}
	for m, r := range h.masqueradings() {
		if r.inline {
			c.markings[strings.Join(r.rules, "\n")] = m
		}
		c.markings["-j "+masqueradeChain(m)] = m
	}
	for _, r := range nat.leads["PREROUTING"] {
		if r := parseRule(r); r.target != chainNode && r.target != chainRemotes {
			c.walk(r.target, 0, 160, netip.Addr{})
		}
	}
	any := netip.IPv4Unspecified()
	if h.family == iptables.IPv6 {
		any = netip.IPv6Unspecified()
	}
	c.walk(chainPorts, 0, 160, any)
	h.climbRemotes(c, any)
}

// climbRemotes collects other nodes' addresses, and which node ports are served there.
func (h *held) climbRemotes(c *climber, any netip.Addr) {
	for _, rules := range c.nat.chains {
		for _, text := range rules {
			if r := parseRule(text); r.target == chainRemote && r.to.IsValid() && r.to.IsSingleIP() {
				h.remotes[r.to.Addr()] = true
			}
		}
	}
	there := climber{nat: c.nat, found: map[model.Entry]*frontend{}, markings: c.markings}
	there.walk(chainRemotePorts, 0, 160, any)
	for e := range there.found {
		if f := c.found[e]; f != nil {
			f.remote = true
		}
	}
}

// climber walks the tree of a table.
type climber struct {
	nat      *content
	found    map[model.Entry]*frontend
	markings map[string]model.Origins // whose source is hidden, by the rules that note it
}

// rule is what the climber sees in a rule.
type rule struct {
	to       netip.Prefix // destination, if any
	source   netip.Prefix
	protocol model.Protocol
	port     uint16 // a single one
	target   string
}

func parseRule(text string) (r rule) {
	words := strings.Fields(text)
	for i := 0; i+1 < len(words); i++ {
		switch value := words[i+1]; words[i] {
		case "-d":
			r.to, _ = netip.ParsePrefix(value)
		case "-s":
			r.source, _ = netip.ParsePrefix(value)
		case "-p":
			r.protocol, _ = parseProtocol(value)
		case "--dport":
			if n, err := strconv.ParseUint(value, 10, 16); err == nil {
				r.port = uint16(n)
			}
		case "-j", "-g":
			r.target = value
		}
	}
	return r
}

// walk goes through a chain. Any is the address of entries that name none.
func (c *climber) walk(chain string, masqueradeFrom model.Origins, depth int, any netip.Addr) {
	if depth == 0 {
		return
	}
	var marking []string
	own := map[model.Entry]model.Origins{} // noted for one frontend
	for _, text := range c.nat.chains[chain] {
		r := parseRule(text)
		if r.port == 0 && (r.target == "MARK" || strings.HasPrefix(r.target, masqueradeChainPrefix)) {
			marking = append(marking, text)
			if m, ok := c.markings[strings.Join(marking, "\n")]; ok {
				masqueradeFrom = m
			}
			continue
		}
		e := model.Entry{Addr: any, Port: r.port, Protocol: r.protocol}
		if r.to.IsValid() {
			e.Addr = r.to.Addr()
		}
		switch {
		case r.port == 0 || !e.Addr.IsValid():
			c.walk(r.target, masqueradeFrom, depth-1, any)
		case strings.HasPrefix(r.target, masqueradeChainPrefix):
			own[e] = c.markings["-j "+r.target]
		default:
			f := &frontend{entry: e, masqueradeFrom: masqueradeFrom | own[e]}
			c.branch(f, r.target)
			f.normalize()
			c.found[e] = f
		}
	}
}

const masqueradeChainPrefix = Prefix + "FROM-"

// branch finds out where a frontend's packets go by who sends them.
func (c *climber) branch(f *frontend, goal string) {
	if strings.HasPrefix(goal, Prefix+"SRC") {
		f.restricted = true
		rules := c.nat.chains[goal]
		goal = chainDrop
		for i, text := range rules {
			if r := parseRule(text); i < len(rules)-1 {
				if !r.source.IsValid() {
					r.source = netip.PrefixFrom(f.any(), 0)
				}
				f.sources = append(f.sources, r.source)
				goal = r.target
			}
		}
	}
	f.internal, f.external = goal, goal
	if rules := c.nat.chains[goal]; strings.HasPrefix(goal, Prefix+"TWO") && len(rules) > 0 {
		f.internal, f.external = parseRule(rules[0]).target, parseRule(rules[len(rules)-1]).target
	}
}

// any returns the unspecified address of the frontend's family.
func (f *frontend) any() netip.Addr {
	if f.entry.Addr.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// parseAddrPort returns an address and port, or neither.
func parseAddrPort(text string) netip.AddrPort {
	a, _ := netip.ParseAddrPort(text)
	return a
}
