package iptables

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// row is how many backends stand one after the other in a chain. The chance of a longer list is split by halves first,
// of which one has a chain of its own: of ten backends the mean one is the fourth rule, not the 5.5th. A chain is
// dearer than a rule (the nft variant's restore takes longer than linearly in the number of chains), so shorter lists,
// where less is won, have none.
const row = 7

// chain is a chain's name and rules, as iptables-save prints them.
type chain struct {
	name  string
	rules []string
}

// chains returns a pool's chains, the first named name.
func (p pool) chains(name string) []chain {
	d := poolChains{pool: p, name: name, match: "-p " + p.protocol.String(), mask: mask4}
	if p.backends[0].addr.Addr().Is6() {
		d.mask = mask6
	}
	c := d.open(name)
	for _, b := range p.backends {
		if p.seconds > 0 {
			d.add(c, fmt.Sprintf("%s -m recent --update --seconds %d%s%s", d.match, p.seconds, d.list(b), send(b)))
		}
	}
	d.pick(c, p.backends)
	return d.made
}

// poolChains makes a pool's chains.
type poolChains struct {
	pool
	name, match, mask string
	made              []chain
}

const mask4, mask6 = "255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"

// open begins a chain and returns its number.
func (d *poolChains) open(name string) int {
	d.made = append(d.made, chain{name: name})
	return len(d.made) - 1
}

func (d *poolChains) add(c int, rule string) { d.made[c].rules = append(d.made[c].rules, rule) }

// pick adds to chain c what selects each backend for its share.
func (d *poolChains) pick(c int, of []backend) {
	for len(of) > row && !d.roundRobin {
		half := of[:len(of)/2]
		name := fmt.Sprintf("%s%03x", d.name, len(d.made))
		d.add(c, strings.TrimPrefix(chance(shares(half), shares(of)), " ")+" -g "+name)
		d.pick(d.open(name), half)
		of = of[len(half):]
	}
	for i, b := range of {
		rule := d.match
		switch rest := of[i:]; {
		case len(rest) == 1:
		case d.roundRobin: // of the packets that come here, every such one is this backend's turn
			rule += fmt.Sprintf(" -m statistic --mode nth --every %d --packet 0", len(rest))
		default:
			rule += chance(b.share, shares(rest))
		}
		if d.seconds > 0 {
			rule += " -m recent --set" + d.list(b)
		}
		if b.share > 1 {
			rule += fmt.Sprintf(" -m comment --comment w%d", b.share) // no one can tell it from probabilities
		}
		d.add(c, rule+send(b))
	}
}

func shares(of []backend) (sum int) {
	for _, b := range of {
		sum += b.share
	}
	return sum
}

// chance is a match that is true for part of all. The kernel compares 31 random bits with a whole number, which is how
// it is printed, too.
func chance(part, all int) string {
	n := math.Round(float64(part) / float64(all) * (1 << 31))
	return " -m statistic --mode random --probability " + strconv.FormatFloat(n/(1<<31), 'f', 11, 64)
}

// list is the kernel's list of clients that last went to a backend of this pool: it is kept while any rule names it, so
// it outlives the change of other backends, and goes with its own.
func (d *poolChains) list(b backend) string {
	return fmt.Sprintf(" --name %s-%s-%d --mask %s --rsource", d.name, b.addr.Addr(), b.addr.Port(), d.mask)
}

func send(b backend) string { return " -j DNAT --to-destination " + b.addr.String() }

// readPool finds out what a pool's chains do: loosely, since whoever calls writes them again and compares.
func readPool(name string, rules map[string][]string) (p pool) {
	var follow func(name string, depth int)
	follow = func(name string, depth int) {
		for _, rule := range rules[name] {
			b, update := backend{share: 1}, false
			words := strings.Fields(rule)
			for i := 0; i+1 < len(words); i++ {
				switch value := words[i+1]; words[i] {
				case "-p":
					p.protocol, _ = parseProtocol(value)
				case "--update":
					update = true
				case "--seconds":
					p.seconds, _ = strconv.Atoi(value)
				case "--mode":
					p.roundRobin = p.roundRobin || value == "nth"
				case "--comment":
					b.share, _ = strconv.Atoi(strings.TrimPrefix(value, "w"))
				case "-g":
					if _, ours := isPool(value); ours && depth > 0 {
						follow(value, depth-1)
					}
				case "--to-destination":
					b.addr = parseAddrPort(value)
				}
			}
			if b.addr.IsValid() && !update {
				p.backends = append(p.backends, b)
			}
		}
	}
	follow(name, 32)
	return p
}
