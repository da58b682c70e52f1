package rules

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// IPTables is a parsed rule set of iptables or ip6tables, either variant.
type IPTables struct {
	tables map[string]map[string]*chain // by table and chain
	sets   map[string]*ipset
	recent map[listed]bool // what packets have written into lists (xt_recent); their age is not looked at
}

// listed is an address in a list of recent ones.
type listed struct {
	list string
	addr netip.Addr
}

// chain is a chain with its rules.
type chain struct {
	name   string
	policy string // ACCEPT or DROP, "" for a chain without a hook
	rules  []rule
}

// rule matches if all of its matches do.
type rule struct {
	matches []match
	target  target // nil: the rule only counts
	to      *chain // jump or goto instead of a target
	away    bool   // goto
}

// match reports whether a rule's packet matches.
type match func(*walk) bool

// target does something to a packet that matched.
type target func(*walk) verdict

// verdict returns how it goes on.
type verdict uint8

const (
	next verdict = iota // with the next rule
	back                // with the caller's next rule
	accept
	drop
	reject
)

// ParseIPTables reads what iptables-save or ip6tables-save prints, of either variant, and what `ipset save` does; the
// latter may be empty where no rule asks for a set.
func ParseIPTables(save, sets string) (*IPTables, error) {
	t := &IPTables{tables: map[string]map[string]*chain{}}
	var err error
	if t.sets, err = parseSets(sets); err != nil {
		return nil, err
	}
	var table map[string]*chain
	var name string
	number := 0
	for line := range strings.Lines(save) {
		number++
		line = strings.TrimSpace(line)
		var err error
		switch {
		case line == "" || line[0] == '#' || line == "COMMIT":
		case line[0] == '*':
			name = line[1:]
			if table = t.tables[name]; table == nil {
				table = map[string]*chain{}
				t.tables[name] = table
			}
		case table == nil:
			err = errors.New("no table was named yet")
		case line[0] == ':':
			err = declare(table, line)
		default:
			err = t.add(table, line)
		}
		if err != nil {
			return nil, fmt.Errorf("iptables rules: line %d, table %s: %w", number, name, err)
		}
	}
	return t, t.check()
}

// declare reads ":CHAIN POLICY [0:0]". A chain that stands already, as in the text of a restore, keeps its rules.
func declare(table map[string]*chain, line string) error {
	f := strings.Fields(line)
	if len(f) < 2 {
		return fmt.Errorf("%q declares no chain", line)
	}
	c := chainOf(table, f[0][1:])
	if f[1] != "-" {
		c.policy = f[1]
	}
	return nil
}

// chainOf returns a chain, new if need be: a restore's text need not declare the hooks' chains.
func chainOf(table map[string]*chain, name string) *chain {
	c := table[name]
	if c == nil {
		c = &chain{name: name}
		table[name] = c
	}
	return c
}

// check refuses what the walk does not know of.
func (t *IPTables) check() error {
	for name, chains := range t.tables {
		switch name {
		case "raw", "mangle", "nat", "filter":
			continue
		}
		for _, c := range chains {
			if len(c.rules) > 0 {
				return fmt.Errorf("iptables rules: table %s has rules: only raw, mangle, nat and filter are understood", name)
			}
		}
	}
	return nil
}

// Rules returns the number of rules in all tables.
func (t *IPTables) Rules() (n int) {
	for _, chains := range t.tables {
		for _, c := range chains {
			n += len(c.rules)
		}
	}
	return n
}

// stop is a table at a hook.
type stop struct{ table, chain string }

// stops are the tables at each hook, in the order of their priorities (include/uapi/linux/netfilter_ipv4.h).
var stops = [...][]stop{
	prerouting:  {{"raw", "PREROUTING"}, {"mangle", "PREROUTING"}, {"nat", "PREROUTING"}},
	input:       {{"mangle", "INPUT"}, {"filter", "INPUT"}, {"nat", "INPUT"}},
	forward:     {{"mangle", "FORWARD"}, {"filter", "FORWARD"}},
	output:      {{"raw", "OUTPUT"}, {"mangle", "OUTPUT"}, {"nat", "OUTPUT"}, {"filter", "OUTPUT"}},
	postrouting: {{"mangle", "POSTROUTING"}, {"nat", "POSTROUTING"}},
}

// walk is a packet on its way.
type walk struct {
	*Packet
	*chance
	rules      *IPTables // nil in nf_tables
	hook       int
	mark       uint32
	from       addrPort
	to         addrPort
	untracked  bool // connection tracking was told to leave the packet alone
	translated bool
	depth      int
	done       Outcome
}

func newWalk(p *Packet, c *chance) *walk {
	w := &walk{Packet: p, chance: c, mark: p.Mark, from: p.Src, to: p.Dst}
	w.done.Verdict = "accept"
	return w
}

// walk implements Ruleset.
func (t *IPTables) walk(p *Packet, c *chance) (Outcome, error) {
	w := newWalk(p, c)
	w.rules = t
	for _, w.hook = range p.Path.hooks() {
		for _, s := range stops[w.hook] {
			v, err := t.stop(w, s)
			if err != nil {
				return Outcome{}, err
			}
			if v == drop || v == reject {
				w.done.Verdict = [...]string{drop: "drop", reject: "reject"}[v]
				w.done.Dst = w.to
				return w.done, nil
			}
		}
	}
	w.done.Dst = w.to
	return w.done, nil
}

// stop has a table see the packet at the hook. Of a connection that is known the nat table sees nothing: what was
// decided for its first packet is done again by connection tracking.
func (t *IPTables) stop(w *walk, s stop) (verdict, error) {
	if s.table == "nat" && (w.Established || w.untracked) {
		w.again(w.hook == prerouting || w.hook == output)
		return accept, nil
	}
	c := t.tables[s.table][s.chain]
	if c == nil {
		return accept, nil
	}
	w.depth = 0
	v, err := w.chain(c)
	if v == next || v == back {
		v = accept
		if c.policy == "DROP" {
			v = drop
		}
	}
	return v, err
}

// again translates a known connection's packet as its first one was.
func (w *walk) again(destination bool) {
	if destination && w.Established && w.To.IsValid() {
		w.to, w.translated = w.To, true
	}
}

// A walk is given up where chains call one another deeper than the kernel allows, or where it meets so many rules.
const (
	deepest   = 1000
	mostRules = 10_000_000
)

// enter counts a chain that was come to. The error says that there is no end of it.
func (w *walk) enter(name string) error {
	if w.depth++; w.depth > deepest || w.done.Rules > mostRules {
		return fmt.Errorf("rules: chain %s: chains call one another in a circle, or without end", name)
	}
	return nil
}

// chain tests rules until one decides.
func (w *walk) chain(c *chain) (verdict, error) {
	if err := w.enter(c.name); err != nil {
		return drop, err
	}
	defer func() { w.depth-- }()
	for i := range c.rules {
		r := &c.rules[i]
		w.done.Rules++
		if !w.all(r.matches) {
			continue
		}
		v, err := w.follow(r)
		if err != nil || v >= accept {
			return v, err
		}
		if v == back || r.away {
			return back, nil
		}
	}
	return back, nil
}

// follow does what a rule that matched says.
func (w *walk) follow(r *rule) (verdict, error) {
	switch {
	case r.to != nil:
		w.done.Jumps++
		v, err := w.chain(r.to)
		if err == nil && v == back {
			v = next
			if !r.away {
				w.done.Returns++
			}
		}
		return v, err
	case r.target != nil:
		return r.target(w), nil
	}
	return next, nil
}

func (w *walk) all(matches []match) bool {
	for _, m := range matches {
		if !m(w) {
			return false
		}
	}
	return true
}

// header writes the packet's headers as they are at this point: network, then transport.
func (w *walk) header() (network, transport []byte) {
	src, dst := w.from.Addr().AsSlice(), w.to.Addr().AsSlice()
	if len(dst) == 4 {
		network = make([]byte, 12, 20)
		network[0], network[3], network[8], network[9] = 0x45, 40, 64, byte(w.Protocol)
	} else {
		network = make([]byte, 8, 40)
		network[0], network[5], network[6], network[7] = 0x60, 20, byte(w.Protocol), 64
	}
	network = append(append(network, src...), dst...)
	transport = make([]byte, 20)
	binary.BigEndian.PutUint16(transport, w.from.Port())
	binary.BigEndian.PutUint16(transport[2:], w.to.Port())
	transport[12], transport[13] = 5<<4, w.flags()
	return network, transport
}
