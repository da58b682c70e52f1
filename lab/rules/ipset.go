package rules

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

// ipset is a set of ipset.
type ipset struct {
	fields  []string        // such as ip, port, net; mac and others are not understood
	exact   map[string]bool // elements of single addresses and ports, as text
	ranges  [][]field       // the others
	members []*ipset        // of a list of sets
}

// field is a part of an element.
type field func(w *walk, source bool) bool

// parseSets reads what `ipset save` prints.
func parseSets(save string) (map[string]*ipset, error) {
	sets := map[string]*ipset{}
	number := 0
	for line := range strings.Lines(save) {
		number++
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if err := parseSet(sets, f); err != nil {
			return nil, fmt.Errorf("ipset: line %d: %w", number, err)
		}
	}
	return sets, nil
}

// parseSet reads "create NAME hash:ip,port …" or "add NAME 10.0.0.1,tcp:80 …".
func parseSet(sets map[string]*ipset, f []string) error {
	if len(f) < 3 {
		return fmt.Errorf("%q is not understood", strings.Join(f, " "))
	}
	switch f[0] {
	case "create":
		kind, fields, _ := strings.Cut(f[2], ":")
		if kind != "hash" && kind != "bitmap" && f[2] != "list:set" {
			return fmt.Errorf("a set of type %s is not understood", f[2])
		}
		sets[f[1]] = &ipset{fields: strings.Split(fields, ","), exact: map[string]bool{}}
		return nil
	case "add":
		s := sets[f[1]]
		if s == nil {
			return fmt.Errorf("set %s was not created", f[1])
		}
		if slices.Contains(f[3:], "nomatch") {
			return fmt.Errorf("set %s: nomatch is not understood", f[1])
		}
		return s.add(sets, f[2])
	}
	return fmt.Errorf("%q is not understood", f[0])
}

// add reads an element.
func (s *ipset) add(sets map[string]*ipset, text string) error {
	if s.fields[0] == "set" {
		m := sets[text]
		if m == nil {
			return fmt.Errorf("member %s was not created", text)
		}
		s.members = append(s.members, m)
		return nil
	}
	parts := strings.Split(text, ",")
	if len(parts) != len(s.fields) {
		return fmt.Errorf("%s has %d parts, its set %d", text, len(parts), len(s.fields))
	}
	var fields []field
	simple := true
	for i, p := range parts {
		f, one, err := parseField(s.fields[i], p)
		if err != nil {
			return fmt.Errorf("element %s: %w", text, err)
		}
		fields, simple = append(fields, f), simple && one
	}
	if simple {
		s.exact[text] = true
	} else {
		s.ranges = append(s.ranges, fields)
	}
	return nil
}

// parseField reads a part of an element, and reports whether it is a single value as key returns it.
func parseField(kind, text string) (f field, one bool, err error) {
	switch kind {
	case "ip", "net":
		return addrField(text)
	case "port":
		return portField(text)
	}
	return nil, false, fmt.Errorf("a field %s is not understood", kind)
}

func addrField(text string) (f field, one bool, err error) {
	var r model.Range
	if strings.Contains(text, "/") {
		p, err := prefix(text)
		return func(w *walk, source bool) bool { return p.Contains(side(source)(w).Addr()) }, false, err
	}
	r, err = addrRange(text)
	return func(w *walk, source bool) bool { return r.Contains(side(source)(w).Addr()) }, r.First.String() == text, err
}

// portField reads "tcp:80", "80", "tcp:80-90" or "80-90".
func portField(text string) (field, bool, error) {
	name, number, named := strings.Cut(text, ":")
	if !named {
		name, number = "", text
	}
	var p model.Protocol
	var err error
	if named {
		if p, err = protocol(name); err != nil {
			return nil, false, err
		}
	}
	a, b, ranged := strings.Cut(number, "-")
	if !ranged {
		b = a
	}
	first, err1 := strconv.ParseUint(a, 10, 16)
	last, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil {
		return nil, false, fmt.Errorf("%s is no port", text)
	}
	return func(w *walk, source bool) bool {
		n := uint64(side(source)(w).Port())
		return (p == 0 || p == w.Protocol) && first <= n && n <= last
	}, fmt.Sprintf("%s:%d", p, first) == text, nil
}

// has reports whether the packet is a member. The directions tell for each field whether it is the source's.
func (s *ipset) has(w *walk, directions []bool) bool {
	if s.members != nil {
		return slices.ContainsFunc(s.members, func(m *ipset) bool { return m.has(w, directions) })
	}
	if len(s.fields) > len(directions) {
		return false
	}
	if s.exact[s.key(w, directions)] {
		return true
	}
	return slices.ContainsFunc(s.ranges, func(fields []field) bool {
		for i, f := range fields {
			if !f(w, directions[i]) {
				return false
			}
		}
		return true
	})
}

// key writes the packet's part of an element as parseField reads single values.
func (s *ipset) key(w *walk, directions []bool) string {
	var l []string
	for i, kind := range s.fields {
		of := side(directions[i])(w)
		if kind == "port" {
			l = append(l, fmt.Sprintf("%s:%d", w.Protocol, of.Port()))
		} else {
			l = append(l, of.Addr().String())
		}
	}
	return strings.Join(l, ",")
}

// setMatches reads "--match-set NAME src,dst".
func (t *IPTables) setMatches(c clause) ([]match, error) {
	return each(c, func(o option) (match, error) {
		if o.name != "--match-set" || len(o.values) != 2 {
			return nil, errOption
		}
		s := t.sets[o.values[0]]
		if s == nil {
			return nil, fmt.Errorf("set %s is not among those of ipset save", o.values[0])
		}
		var directions []bool
		for _, d := range strings.Split(o.values[1], ",") {
			if d != "src" && d != "dst" {
				return nil, errOption
			}
			directions = append(directions, d == "src")
		}
		if s.fields[0] != "set" && len(directions) < len(s.fields) {
			return nil, fmt.Errorf("set %s has %d fields, the rule names %d", o.values[0], len(s.fields), len(directions))
		}
		return func(w *walk) bool { return s.has(w, directions) }, nil
	})
}
