package iptables

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/model"
)

// change is what becomes of what a family's tables hold.
type change struct {
	from    *held
	ruleset                      // as it is to be
	tables  map[string]*content  // nil: as they are
	pools   map[string]*heldPool // those that change; nil: gone
	bodies  map[string][]chain   // the chains of those that don't go
	sysctl  *bool                // the sysctl is wanted, or no longer
}

// change takes facts in. Nothing of h is changed.
func (h *held) change(put, del []Fact) *change {
	c := &change{from: h, ruleset: h.ruleset, pools: map[string]*heldPool{}, bodies: map[string][]chain{}}
	rebuild := h.wrong != ""
	frontends, health, remotes := map[model.Entry]*frontend{}, map[uint16]bool{}, map[netip.Addr]bool{}
	for _, f := range del {
		switch f.Key.Kind {
		case KindNode:
			c.node, rebuild = nil, true
		case KindPool:
			c.pools[f.Key.Name] = nil
		case KindFrontend:
			frontends[f.Key.Entry] = nil
		case KindHealth:
			health[f.Key.Entry.Port] = false
		case KindRemote:
			remotes[f.Key.Entry.Addr] = false
		case KindSysctl:
			c.sysctl = new(bool)
		}
	}
	for _, f := range put {
		switch f.Key.Kind {
		case KindNode:
			n := f.Body.(node)
			c.node, rebuild = &n, true
		case KindPool:
			c.putPool(f)
		case KindFrontend:
			frontends[f.Key.Entry] = f.Body.(*frontend)
		case KindHealth:
			health[f.Key.Entry.Port] = true
		case KindRemote:
			remotes[f.Key.Entry.Addr] = true
		case KindSysctl:
			yes := true
			c.sysctl = &yes
		}
	}
	if len(frontends) > 0 {
		c.frontends, rebuild = maps.Clone(h.frontends), true
		for e, f := range frontends {
			if f == nil {
				delete(c.frontends, e)
			} else {
				c.frontends[e] = f
			}
		}
	}
	c.health, rebuild = changed(h.health, health, rebuild)
	c.remotes, rebuild = changed(h.remotes, remotes, rebuild)
	if rebuild || c.sysctl != nil {
		c.tables = map[string]*content{} // built when it is known whose the sysctl is
	}
	return c
}

// changed returns a set with what is to be in it or not, and whether anything is to be rebuilt.
func changed[K comparable](of, by map[K]bool, rebuild bool) (map[K]bool, bool) {
	if len(by) == 0 {
		return of, rebuild
	}
	now := map[K]bool{}
	maps.Copy(now, of)
	maps.Copy(now, by)
	maps.DeleteFunc(now, func(_ K, wanted bool) bool { return !wanted })
	return now, true
}

// putPool takes in a pool.
func (c *change) putPool(f Fact) {
	made := poolOf(f.Body.(*model.Pool)).chains(f.Key.Name)
	is := &heldPool{value: f.Value}
	for _, m := range made {
		is.chains = append(is.chains, m.name)
	}
	c.pools[f.Key.Name], c.bodies[f.Key.Name] = is, made
}

// input returns what restore is told.
func (c *change) input() []byte {
	c.complete()
	order := tables
	if c.tables != nil && len(c.tables["filter"].chains) == 0 {
		order = []string{"raw", "filter", "nat"}
	}
	var b bytes.Buffer
	for _, table := range order {
		w := writer{}
		if c.tables != nil {
			w.content(c.from.tables[table], c.tables[table])
		}
		if table == "nat" {
			for _, name := range sortedKeys(c.pools) {
				w.pool(c.from.pools[name], c.bodies[name])
			}
		}
		w.Finish(&b, table)
	}
	return b.Bytes()
}

// complete builds what the tables are to hold.
func (c *change) complete() {
	if c.tables != nil && len(c.tables) == 0 {
		c.tables = c.build()
	}
}

// leads reports whether what leads from the filter table's built-in chains to ours changes.
func (c *change) leads() bool {
	c.complete()
	return c.tables != nil && !maps.EqualFunc(c.from.tables["filter"].leads, c.tables["filter"].leads, slices.Equal)
}

// writer collects a table's part of the input.
type writer struct{ xt.Restore }

// content writes the difference between what is and what is wanted.
func (w *writer) content(is, want *content) {
	for _, name := range sortedKeys(want.chains) {
		if there, ok := is.chains[name]; !ok || !slices.Equal(there, want.chains[name]) {
			w.Body(name, want.chains[name])
		}
	}
	for _, name := range sortedKeys(is.chains) {
		if _, stays := want.chains[name]; !stays {
			w.Remove(name)
		}
	}
	names := slices.Concat(sortedKeys(is.leads), sortedKeys(want.leads))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if !slices.Equal(is.leads[name], want.leads[name]) {
			w.Lead(name, is.policies[name], is.leads[name], want.leads[name])
		}
	}
}

// pool writes a pool's chains and removes those that it had and needs no more.
func (w *writer) pool(was heldPool, now []chain) {
	stays := map[string]bool{}
	for _, c := range now {
		stays[c.name] = true
		w.Body(c.name, c.rules)
	}
	for _, name := range was.chains {
		if !stays[name] {
			w.Remove(name)
		}
	}
}

// become takes in that a change is true.
func (h *held) become(c *change) {
	h.ruleset = c.ruleset
	if c.tables != nil {
		for table, t := range h.tables {
			c.tables[table].policies = t.policies
		}
		h.tables, h.wrong = c.tables, ""
	}
	for name, p := range c.pools {
		if p == nil {
			delete(h.pools, name)
		} else {
			h.pools[name] = *p
		}
	}
}
