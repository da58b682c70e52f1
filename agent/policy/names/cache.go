package names

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Bounds of what is remembered: pods choose which names below a domain they query for, and their owners the answers.
const (
	maxAddresses = 100  // of one name
	maxPerDomain = 1000 // names of one domain of policies
	maxNames     = 8192 // of all
)

// cache is the addresses of domain names, and until when.
type cache struct {
	names   map[string]*entry
	domains map[string]int // names of each domain of policies
	evicted uint64         // addresses that others took the space of
}

// entry is the addresses of one name.
type entry struct {
	domain  string // of policies, by which it was learned
	expires map[netip.Addr]time.Time
	latest  time.Time // of expires
}

func newCache() cache { return cache{names: map[string]*entry{}, domains: map[string]int{}} }

// learn adds addresses of a name, or has them live longer. It returns the names whose addresses are others now.
func (c *cache) learn(domain, name string, addresses []netip.Addr, until time.Time) (changed []string) {
	e := c.names[name]
	if e == nil && len(addresses) > 0 {
		changed = c.makeSpace(domain)
		e = &entry{domain: domain, expires: map[netip.Addr]time.Time{}}
		c.names[name] = e
		c.domains[domain]++
	}
	other := false
	for _, a := range addresses {
		was, there := e.expires[a]
		if !there {
			other = true
			if len(e.expires) >= maxAddresses {
				delete(e.expires, first(e.expires))
				c.evicted++
			}
		}
		if until.After(was) {
			e.expires[a] = until
		}
		e.latest = maxTime(e.latest, until)
	}
	if other {
		changed = append(changed, name)
	}
	return changed
}

// first returns the address that expires first.
func first(m map[netip.Addr]time.Time) (a netip.Addr) {
	for b, t := range m {
		if !a.IsValid() || t.Before(m[a]) {
			a = b
		}
	}
	return a
}

func maxTime(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// makeSpace removes the name that expires first of a domain that has all that it may have, or, where all together have,
// of the domain with most names. It returns the names that it removed.
func (c *cache) makeSpace(domain string) (removed []string) {
	switch {
	case c.domains[domain] >= maxPerDomain:
	case len(c.names) >= maxNames:
		for d, n := range c.domains {
			if n > c.domains[domain] {
				domain = d
			}
		}
	default:
		return nil
	}
	oldest := ""
	for name, e := range c.names {
		if e.domain == domain && (oldest == "" || e.latest.Before(c.names[oldest].latest)) {
			oldest = name
		}
	}
	if oldest == "" {
		return nil
	}
	c.evicted += uint64(len(c.names[oldest].expires))
	c.remove(oldest)
	return []string{oldest}
}

func (c *cache) remove(name string) {
	domain := c.names[name].domain
	delete(c.names, name)
	if c.domains[domain]--; c.domains[domain] == 0 {
		delete(c.domains, domain)
	}
}

// due reports whether an address has expired by now.
func (c *cache) due(now time.Time) bool {
	for _, e := range c.names {
		for _, t := range e.expires {
			if !t.After(now) {
				return true
			}
		}
	}
	return false
}

// expire removes addresses that have expired by now, but has those that are in use live for some more time. It returns
// the names whose addresses are others now, and how many addresses went.
func (c *cache) expire(now time.Time, inUse func(netip.Addr) bool, more time.Duration) (changed []string, gone uint64) {
	for name, e := range c.names {
		before := len(e.expires)
		for a, t := range e.expires {
			switch {
			case t.After(now):
			case inUse(a):
				e.expires[a] = now.Add(more)
				e.latest = maxTime(e.latest, now.Add(more))
			default:
				delete(e.expires, a)
			}
		}
		if n := len(e.expires); n < before {
			changed, gone = append(changed, name), gone+uint64(before-n)
			if n == 0 {
				c.remove(name)
			}
		}
	}
	return changed, gone
}

// addresses returns those of a name, sorted.
func (c *cache) addresses(name string) []netip.Addr {
	e := c.names[name]
	if e == nil {
		return nil
	}
	return slices.SortedFunc(maps.Keys(e.expires), netip.Addr.Compare)
}

// count returns how many names there are, and how many addresses they have.
func (c *cache) count() (names, addresses int) {
	for _, e := range c.names {
		addresses += len(e.expires)
	}
	return len(c.names), addresses
}
