package policy

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"fairlead.dev/fairlead/model"
)

// figures are what a plan comes to at most, counted without making any of it.
type figures struct {
	policies int
	rules    int // rules, and the default, in each port entry that they are part of
	entries  int // port entries
	pieces   int // prefixes of port numbers that these come to
	named    int // peers of rules with named ports, each once for each number
}

// cost returns how much memory the figures stand for, about: one is a rule in a port entry.
func (f *figures) cost() int { return f.policies/2 + f.rules + 3*f.pieces + 4*f.named }

// blockWeight is how many other peers with a named port one CIDR counts for: each pod with that port is compared with
// it.
const blockWeight = 15

// weight returns how much s counts for as the peer of a rule with named ports.
func (s *peerSpec) weight() int {
	n := 1 + len(s.text)/textUnit
	if s.kind == block {
		n += blockWeight
	}
	return n
}

// measure counts what p comes to, and adds it to what all plans want.
func (r *Resolver) measure(p *plan) {
	f := &p.figures
	f.policies = len(p.policies)
	for _, q := range p.policies {
		f.rules += len(q.compiled.clauses[p.direction])
	}
	if f.rules <= r.limits.Products { // else it is beyond its bound, whatever the ports
		f.rules = 0
		r.measurePorts(p)
	}
	l := r.limits
	switch {
	case f.named > l.Ports:
		p.excess = fmt.Sprintf("its rules with named ports come to more than %d peers, each once for each number", l.Ports)
	case f.rules > l.Products:
		p.excess = fmt.Sprintf("its policies come to %d rules in port entries, %d are the limit", f.rules, l.Products)
	case f.entries > l.Ports:
		p.excess = fmt.Sprintf("its policies come to %d port entries, %d are the limit", f.entries, l.Ports)
	}
	if p.excess != "" {
		*f = figures{}
	}
	r.wanted += f.cost()
}

// measurePorts counts the port entries of p, and the rules in them.
func (r *Resolver) measurePorts(p *plan) {
	f, always := &p.figures, 0
	for i := range r.spans {
		r.spans[i] = r.spans[i][:0]
	}
	add := func(s span) {
		at := slices.Index(protocols[:], s.protocol)
		r.spans[at] = append(r.spans[at], portRange{s.first, s.last})
	}
	for _, q := range p.policies {
		if q.ref.Audit && q.ref.Tier == model.TierNetworkPolicy {
			always++ // its isolation
		}
		for i := range q.compiled.clauses[p.direction] {
			c := &q.compiled.clauses[p.direction][i]
			if c.allPorts {
				always++
				continue
			}
			r.numbered(c, p, func(spans []span, on *port) bool {
				if on != nil {
					f.named += c.weight
					add(span{protocol: on.protocol, first: on.number, last: on.number})
				}
				for _, s := range spans {
					add(s)
				}
				return f.named <= r.limits.Ports
			})
		}
	}
	f.rules = 1 + always
	for _, l := range r.spans {
		if len(l) > 0 {
			f.addEntries(l, always)
		}
	}
}

// portRange is ports of one protocol.
type portRange struct{ first, last uint16 }

// boundaries counts how many spans begin and end at each port.
type boundaries struct {
	change [1<<16 + 1]int32  // of how many spans hold a port, and not the one before it
	marks  [1<<10 + 1]uint64 // a bit for each port where spans begin or end
}

func (b *boundaries) add(port, n int) {
	b.change[port] += int32(n)
	b.marks[port/64] |= 1 << (port % 64)
}

// boundariesPool holds zero ones.
var boundariesPool = sync.Pool{New: func() any { return new(boundaries) }}

// addEntries counts the port entries of the spans of one protocol, where so many rules more are for all ports.
func (f *figures) addEntries(spans []portRange, always int) {
	b := boundariesPool.Get().(*boundaries)
	defer boundariesPool.Put(b)
	for _, s := range spans {
		b.add(int(s.first), 1)
		b.add(int(s.last)+1, -1)
	}
	active, from := 0, 0
	for i := range b.marks {
		for ; b.marks[i] != 0; b.marks[i] &= b.marks[i] - 1 {
			at := 64*i + bits.TrailingZeros64(b.marks[i])
			if active > 0 {
				f.entries++
				f.pieces += prefixes(from, at)
				f.rules += 1 + always + active
			}
			active += int(b.change[at])
			b.change[at], from = 0, at
		}
	}
}

// prefixes returns how many prefixes hold the numbers from first to before end.
func prefixes(first, end int) (n int) {
	for ; first < end; n++ {
		size := 1 << 16
		if first > 0 {
			size = first & -first
		}
		for size > end-first {
			size >>= 1
		}
		first += size
	}
	return n
}
