package rules

import (
	"errors"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Path is a packet's way through the node.
type Path uint8

// The paths.
const (
	Sent      Path = iota // by a process here, to elsewhere: OUTPUT, POSTROUTING
	Forwarded             // from elsewhere to elsewhere: PREROUTING, FORWARD, POSTROUTING
	Received              // from elsewhere, by a process here: PREROUTING, INPUT
	// by a process here, and sent on by IPVS (ip_vs_nat_send_or_cont): OUTPUT until there, OUTPUT, POSTROUTING
	Redirected
)

// String returns "sent", "forwarded", "received" or "redirected".
func (p Path) String() string { return [...]string{"sent", "forwarded", "received", "redirected"}[p] }

// hooks returns the path's hooks (NF_INET_*).
func (p Path) hooks() []int {
	return [...][]int{{output, postrouting}, {prerouting, forward, postrouting}, {prerouting, input},
		{output, output, postrouting}}[p]
}

// The hooks as the kernel numbers them.
const (
	prerouting = iota
	input
	forward
	output
	postrouting
)

// Packet is one packet of a connection's original direction, as it comes to its first hook.
type Packet struct {
	Src, Dst    netip.AddrPort // as the client wrote them, before any translation here
	Protocol    model.Protocol // TCP or UDP
	Path        Path           // after translation, if there is one
	In, Out     string         // devices; each empty where the path has none
	Established bool           // an answer has been seen; else it is the connection's first packet
	// of an established connection, or one that IPVS redirects: what its destination is translated to, zero if it isn't
	To   netip.AddrPort
	Mark uint32
	Node []netip.Addr // the node's own addresses, besides loopback ones
}

// local reports whether an address is the node's own.
func (p *Packet) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(p.Node, a)
}

// Outcome is one way that a packet may take, of those that random draws leave open.
type Outcome struct {
	Probability  float64
	Rules        int // tested
	Jumps        int // to other chains, jump and goto alike
	Returns      int // from other chains, at their end or by a rule
	Instructions int // of nf_tables, executed; 0 for iptables
	Verdict      string
	Dst          netip.AddrPort // after translation
	Masqueraded  bool
}

// Spread is a number over all outcomes.
type Spread struct {
	Mean     float64
	Min, Max int
}

// Count is what a packet meets.
type Count struct {
	Rules, Instructions Spread
	Outcomes            []Outcome
}

// Ruleset is all rules of one interface of a kernel.
type Ruleset interface {
	// walk takes p on one way; the kernel's random draws are c's.
	walk(p *Packet, c *chance) (Outcome, error)
}

// mostOutcomes bounds the ways that are tried.
const mostOutcomes = 1 << 16

// Static counts the rules that p is tested against on every way that it may take.
func Static(r Ruleset, p Packet) (Count, error) {
	var l []Outcome
	for c := newChance(); ; {
		o, err := r.walk(&p, c)
		if err != nil {
			return Count{}, err
		}
		o.Probability = c.probability
		if l = append(l, o); !c.again() {
			return summary(l), nil
		}
		if len(l) == mostOutcomes {
			return Count{}, errors.New("count rules: random draws leave more than 65,536 ways")
		}
	}
}

func summary(l []Outcome) Count {
	spread := func(of func(Outcome) int) (s Spread) {
		s.Min = of(l[0])
		for _, o := range l {
			n := of(o)
			s.Mean += o.Probability * float64(n)
			s.Min, s.Max = min(s.Min, n), max(s.Max, n)
		}
		if s.Min == s.Max {
			s.Mean = float64(s.Min) // not what adding up made of it
		}
		return s
	}
	return Count{
		Rules:        spread(func(o Outcome) int { return o.Rules }),
		Instructions: spread(func(o Outcome) int { return o.Instructions }),
		Outcomes:     l,
	}
}

// chance returns the draws of one walk, and in the next walk others, until every combination was there once.
type chance struct {
	draws       []draw
	next        int // of the walk at hand
	probability float64
}

// draw is one of equally or otherwise likely possibilities.
type draw struct{ index, of int }

func newChance() *chance { return &chance{probability: 1} }

// pick draws one of n, each with the probability that weight gives.
func (c *chance) pick(n int, weight func(i int) float64) int {
	if c.next == len(c.draws) {
		c.draws = append(c.draws, draw{0, n})
	}
	i := c.draws[c.next].index
	c.next++
	c.probability *= weight(i)
	return i
}

// even draws one of n equally likely.
func (c *chance) even(n int) int {
	return c.pick(n, func(int) float64 { return 1 / float64(n) })
}

// happens draws something of probability p.
func (c *chance) happens(p float64) bool {
	if p <= 0 || p >= 1 {
		return p >= 1
	}
	return c.pick(2, func(i int) float64 { return [...]float64{p, 1 - p}[i] }) == 0
}

// again readies c for the next walk, or says that there is none.
func (c *chance) again() bool {
	c.next, c.probability = 0, 1
	for n := len(c.draws); n > 0; n = len(c.draws) {
		last := &c.draws[n-1]
		if last.index++; last.index < last.of {
			return true
		}
		c.draws = c.draws[:n-1]
	}
	return false
}
