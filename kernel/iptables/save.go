package iptables

import (
	"errors"
	"fmt"
	"strings"
)

// Table is what a table holds: chains in the order in which save prints them, and the rules of each, in order, as save
// prints them after "-A CHAIN ".
type Table struct {
	Chains []string
	Rules  map[string][]string
}

// ErrForeign reports that a table can't be read by the iptables commands.
var ErrForeign = errors.New("the nft command put rules there that the iptables commands can't read; remove those, or " +
	"use the data plane nftables")

// Parse reads what iptables-save prints, by tables' names; a table that it can't print, see ErrForeign, is nil. Rules
// are parts of text: they keep it in memory.
func Parse(text string) (map[string]*Table, error) {
	tables := map[string]*Table{}
	var t *Table
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimRight(line, "\r\n")
		wrong := ""
		switch {
		case line == "":
		case line[0] == '#':
			if name, ok := foreign(line); ok {
				tables[name] = nil
			}
		case line[0] == '*':
			if t = tables[line[1:]]; t == nil {
				t = &Table{Rules: map[string][]string{}}
				tables[line[1:]] = t
			}
		case t == nil:
			wrong = "stands in no table"
		case line == "COMMIT":
			t = nil
		default:
			wrong = t.line(line)
		}
		if wrong != "" {
			return nil, fmt.Errorf("line %d: %q: %s", n, line, wrong)
		}
	}
	if t != nil {
		return nil, fmt.Errorf("line %d: the text ends before COMMIT", n)
	}
	return tables, nil
}

// foreign returns the table that a comment such as "# Table `nat' is incompatible, use 'nft' tool." speaks of.
func foreign(line string) (name string, ok bool) {
	name, ok = strings.CutPrefix(line, "# Table `")
	if !ok {
		return "", false
	}
	name, rest, _ := strings.Cut(name, "'")
	return name, strings.HasPrefix(rest, " is incompatible")
}

// listed adds what the option -S prints of chains.
func (t *Table) listed(text string) error {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		said := line
		if strings.HasPrefix(line, "-N ") || strings.HasPrefix(line, "-P ") {
			said = ":" + line[len("-N "):] + " "
		}
		if wrong := t.line(said); wrong != "" {
			return fmt.Errorf("%q: %s", line, wrong)
		}
	}
	return nil
}

// line reads a line that declares a chain or adds a rule, and says what is wrong with it, or "".
func (t *Table) line(line string) (wrong string) {
	if name, ok := strings.CutPrefix(line, ":"); ok {
		name, _, ok = strings.Cut(name, " ")
		if _, twice := t.Rules[name]; !ok || name == "" || twice {
			return "declares no new chain with a policy"
		}
		t.Chains = append(t.Chains, name)
		t.Rules[name] = nil
		return ""
	}
	rest, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return "is neither a chain nor a rule"
	}
	chain, rule, _ := strings.Cut(rest, " ")
	if _, known := t.Rules[chain]; !known {
		return "adds to a chain that was not declared"
	}
	t.Rules[chain] = append(t.Rules[chain], rule)
	return ""
}
