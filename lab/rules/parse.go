package rules

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

type addrPort = netip.AddrPort

// word is a word of a rule. Quoted ones are never options.
type word struct {
	text   string
	quoted bool
}

func (w word) isOption() bool { return !w.quoted && (strings.HasPrefix(w.text, "-") || w.text == "!") }

// words splits a line as iptables-restore does: at blanks, with quotes and backslashes.
func words(line string) (l []word, err error) {
	for line = strings.TrimLeft(line, " \t"); line != ""; line = strings.TrimLeft(line, " \t") {
		if line[0] != '"' {
			text, rest, _ := strings.Cut(line, " ")
			l, line = append(l, word{text: text}), rest
			continue
		}
		var b strings.Builder
		i := 1
		for ; i < len(line) && line[i] != '"'; i++ {
			if line[i] == '\\' && i+1 < len(line) {
				i++
			}
			b.WriteByte(line[i])
		}
		if i == len(line) {
			return nil, fmt.Errorf("a quote has no end in %q", line)
		}
		l, line = append(l, word{b.String(), true}), line[i+1:]
	}
	return l, nil
}

// option is one option of a match or target: its name, whether "!" stood before it, and what follows it.
type option struct {
	name   string
	not    bool
	values []string
}

// value returns the option's only value.
func (o option) value() string {
	if len(o.values) == 1 {
		return o.values[0]
	}
	return ""
}

// clause is a match or target with its options.
type clause struct {
	name    string
	options []option
}

// get returns an option by any of its names.
func (c clause) get(names ...string) (option, bool) {
	for _, o := range c.options {
		if slices.Contains(names, o.name) {
			return o, true
		}
	}
	return option{}, false
}

// only refuses options that aren't among those.
func (c clause) only(names ...string) error {
	for _, o := range c.options {
		if !slices.Contains(names, o.name) {
			return fmt.Errorf("%s: option %s is not understood", c.name, o.name)
		}
	}
	return nil
}

// add reads "-A CHAIN …" (or "[1:2] -A CHAIN …").
func (t *IPTables) add(table map[string]*chain, line string) error {
	l, err := words(line)
	if err != nil {
		return err
	}
	if len(l) > 0 && strings.HasPrefix(l[0].text, "[") {
		l = l[1:]
	}
	if len(l) < 2 || l[0].text != "-A" {
		return fmt.Errorf("%q is not understood: only -A is", line)
	}
	c := chainOf(table, l[1].text)
	r, err := t.rule(table, l[2:])
	if err != nil {
		return fmt.Errorf("chain %s: %w", c.name, err)
	}
	c.rules = append(c.rules, r)
	return nil
}

// rule reads a rule's clauses.
func (t *IPTables) rule(table map[string]*chain, l []word) (r rule, err error) {
	general, current, targets := clause{name: "rule"}, (*clause)(nil), (*clause)(nil)
	var matches []*clause
	for i := 0; i < len(l); {
		o := option{name: l[i].text}
		if o.name == "!" && !l[i].quoted {
			if i++; i == len(l) {
				return r, errors.New("! stands at the end")
			}
			o.not, o.name = true, l[i].text
		}
		if !strings.HasPrefix(o.name, "-") {
			return r, fmt.Errorf("%q is no option", o.name)
		}
		for i++; i < len(l) && !l[i].isOption(); i++ {
			o.values = append(o.values, l[i].text)
		}
		switch o.name {
		case "-m":
			current = &clause{name: o.value()}
			matches = append(matches, current)
		case "-j", "-g":
			current = &clause{name: o.value()}
			targets, r.away = current, o.name == "-g"
		case "-s", "-d", "-i", "-o", "-p":
			general.options = append(general.options, o)
		default:
			if current == nil {
				return r, fmt.Errorf("option %s is not understood", o.name)
			}
			current.options = append(current.options, o)
		}
	}
	if r.matches, err = generalMatches(general); err != nil {
		return r, err
	}
	for _, c := range matches {
		m, err := t.match(*c)
		if err != nil {
			return r, err
		}
		r.matches = append(r.matches, m...)
	}
	return r, t.target(table, targets, &r)
}

// match reads a match.
func (t *IPTables) match(c clause) ([]match, error) {
	if c.name == "set" {
		return t.setMatches(c)
	}
	read := matchers[c.name]
	if read == nil {
		return nil, fmt.Errorf("match %s is not understood", c.name)
	}
	return read(c)
}

// target reads what a rule does.
func (t *IPTables) target(table map[string]*chain, c *clause, r *rule) (err error) {
	if c == nil {
		return nil
	}
	if read := targets[c.name]; read != nil {
		r.target, err = read(*c)
		return err
	}
	if r.to = table[c.name]; r.to == nil || len(c.options) > 0 {
		return fmt.Errorf("target %s is not understood, and no chain", c.name)
	}
	return nil
}

// prefix reads an address, with or without a mask.
func prefix(s string) (netip.Prefix, error) {
	addr, mask, masked := strings.Cut(s, "/")
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits := a.BitLen()
	if masked {
		if bits, err = strconv.Atoi(mask); err != nil {
			if bits, err = maskBits(mask); err != nil {
				return netip.Prefix{}, err
			}
		}
	}
	p, err := a.Prefix(bits)
	return p, err
}

// maskBits reads a mask such as 255.255.255.128.
func maskBits(s string) (int, error) {
	m, err := netip.ParseAddr(s)
	if err != nil {
		return 0, err
	}
	n, ended := 0, false
	for _, b := range m.AsSlice() {
		for i := 7; i >= 0; i-- {
			one := b>>i&1 == 1
			if one && ended {
				return 0, fmt.Errorf("mask %s has holes: it is not understood", s)
			}
			if ended = ended || !one; one {
				n++
			}
		}
	}
	return n, nil
}

// protocol reads a protocol's name or number; 0 is any.
func protocol(s string) (model.Protocol, error) {
	switch s {
	case "all", "ip", "0":
		return 0, nil
	case "tcp", "6":
		return model.TCP, nil
	case "udp", "17":
		return model.UDP, nil
	case "sctp", "132":
		return model.SCTP, nil
	case "icmp", "1":
		return 1, nil
	case "ipv6-icmp", "icmpv6", "icmp6", "58":
		return 58, nil
	}
	return 0, fmt.Errorf("protocol %q is not understood", s)
}

// ports reads "80" or "80:90", either end of which may be left out.
func ports(s string) (first, last uint16, err error) {
	a, b, ranged := strings.Cut(s, ":")
	if !ranged {
		b = a
	}
	number := func(s string, otherwise uint64) uint16 {
		n := otherwise
		if s != "" {
			var e error
			n, e = strconv.ParseUint(s, 10, 16)
			err = errors.Join(err, e)
		}
		return uint16(n)
	}
	if !ranged && a == "" {
		return 0, 0, errors.New("a port is missing")
	}
	return number(a, 0), number(b, 65535), err
}

// masked is a value of some bits of a mark.
type masked struct{ value, mask uint32 }

// marks reads "0x4000" or "0x4000/0x4000".
func marks(s string) (m masked, err error) {
	v, k, has := strings.Cut(s, "/")
	if !has {
		k = "0xffffffff"
	}
	value, err1 := strconv.ParseUint(v, 0, 32)
	mask, err2 := strconv.ParseUint(k, 0, 32)
	return masked{uint32(value), uint32(mask)}, errors.Join(err1, err2)
}
