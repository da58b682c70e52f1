package iptables

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/xt"
	"fairlead.dev/fairlead/model"
)

// bucket is how many frontends stand one after the other at the tree's leaves.
const bucket = 3

// tree builds the chains that lead a packet to its frontend, in one table.
//
// Each inner node is one rule: if the packet's address is in a prefix that holds about half of the frontends, it goes
// to that half's chain, else it goes on in this one, which is the other half's. So a step costs one rule either way,
// and half of the nodes need no chain. Frontends of one address are told apart by protocol and port in the same way.
type tree struct {
	// the rules that note whose source is hidden, by origins' chains; nil in the table filter
	masquerading map[string]masquerading
	forget       string              // the rule that takes the note away
	remote       bool                // of other nodes' addresses, or their ports: its chains have names of their own
	chains       map[string][]string // what is built
}

// masquerading is how a packet's source is noted to be hidden, for a set of origins.
type masquerading struct {
	rules  []string // ends of rules, each for some packets
	inline bool     // they may stand in any chain; else only in one of their own
}

// order sorts as the tree needs it: by address, protocol, port; of an address, what matches every port comes last.
func order(a, b *frontend) int {
	return cmp.Or(a.entry.Addr.Compare(b.entry.Addr), cmp.Compare(a.entry.Protocol-1, b.entry.Protocol-1),
		cmp.Compare(a.entry.Port, b.entry.Port))
}

// root builds a tree that begins in a chain. A packet that belongs to none of the frontends comes to the chain's end,
// from wherever it was: the chain jumps to its branches, which then only ever go on. There it forgets what was noted.
func (t *tree) root(chain string, of []*frontend) {
	t.chains[chain] = nil
	t.grow(chain, " -j ", of, t.masquerading == nil)
	if t.masquerading != nil && slices.ContainsFunc(of, func(f *frontend) bool { return f.masqueradeFrom != 0 }) {
		t.add(chain, t.forget)
	}
}

// grow adds to a chain what leads to frontends, which are sorted. Hidden says that it was noted already whose source is
// hidden, or need not be.
func (t *tree) grow(chain, branch string, of []*frontend, masqueraded bool) {
	for {
		masqueraded = masqueraded || t.masqueradeAll(chain, of)
		if len(of) <= bucket {
			for _, f := range of {
				t.leaf(chain, f, masqueraded)
			}
			return
		}
		from, end, test, name := part(of, t.remote)
		if end-from == 1 {
			t.leaf(chain, of[from], masqueraded)
		} else {
			leads := branch
			if last := of[len(of)-1]; last.everyPort() && of[0].entry.Addr == last.entry.Addr {
				leads = " -j " // what matches no port comes back, to what matches every port
			}
			t.add(chain, test+leads+name)
			t.grow(name, " -g ", of[from:end], masqueraded)
		}
		of = slices.Concat(of[:from], of[end:])
	}
}

func (t *tree) add(chain, rule string) { t.chains[chain] = append(t.chains[chain], rule) }

// masqueradeAll records whose source is hidden for all frontends at once, if it is the same for all that have somewhere
// to go.
func (t *tree) masqueradeAll(chain string, of []*frontend) (same bool) {
	var masqueradeFrom model.Origins
	known := false
	for _, f := range of {
		if rejects(f.internal) && rejects(f.external) {
			continue
		}
		if known && f.masqueradeFrom != masqueradeFrom {
			return false
		}
		masqueradeFrom, known = f.masqueradeFrom, true
	}
	if masqueradeFrom == 0 {
		return true
	}
	if h := t.masquerading[masqueradeChain(masqueradeFrom)]; h.inline {
		for _, r := range h.rules {
			t.add(chain, r)
		}
	} else {
		t.add(chain, "-j "+masqueradeChain(masqueradeFrom))
	}
	return true
}

// leaf adds the rules of one frontend.
func (t *tree) leaf(chain string, f *frontend, masqueraded bool) {
	match := f.match()
	if !masqueraded && f.masqueradeFrom != 0 {
		t.add(chain, match+" -j "+masqueradeChain(f.masqueradeFrom))
	}
	t.add(chain, match+" -g "+f.first())
}

// match returns what a packet to the frontend looks like; that a node port's address is this node's is known before.
func (f *frontend) match() string {
	if f.everyPort() {
		return to(f.entry.Addr, f.entry.Addr.BitLen()) + strings.TrimSpace(notToNode)
	}
	return fmt.Sprintf("%s-p %[2]s -m %[2]s --dport %d", to(f.entry.Addr, f.entry.Addr.BitLen()), f.entry.Protocol,
		f.entry.Port)
}

// to matches a destination, save for the unspecified one, which stands for this node's addresses.
func to(a netip.Addr, bits int) string {
	if a.IsUnspecified() {
		return ""
	}
	return fmt.Sprintf("-d %s/%d ", a, bits)
}

// part returns those of frontends, from and end, that one test tells from all others and that are nearest to a half of
// them: a prefix's, or of one address a protocol's, or half of the ports. It returns the test, and the name of the
// part's chain.
func part(of []*frontend, remote bool) (from, end int, test, chain string) {
	first, last := of[0].entry, of[len(of)-1].entry
	if first.Addr != last.Addr {
		from, end = halves(of).Nearest()
		p := shared(of[from:end])
		return from, end, "-d " + p.String(), prefixChain(p, remote)
	}
	address := to(first.Addr, first.Addr.BitLen())
	if first.Protocol != last.Protocol {
		for end = 1; of[end].entry.Protocol == first.Protocol; {
			end++
		}
		return 0, end, fmt.Sprintf("%s-p %s", address, first.Protocol), portsChain(first, "", remote)
	}
	end = len(of) / 2
	ports := fmt.Sprintf("%d:%d", first.Port, of[end-1].entry.Port)
	return 0, end, fmt.Sprintf("%s-p %[2]s -m %[2]s --dport %[3]s", address, first.Protocol, ports),
		portsChain(first, ports, remote)
}

// halves returns frontends as xt halves them.
func halves(of []*frontend) xt.Halves[*frontend] {
	return xt.Halves[*frontend]{Items: of, Addr: func(f *frontend) netip.Addr { return f.entry.Addr }}
}

// shared returns the longest prefix that frontends, sorted, share.
func shared(of []*frontend) netip.Prefix { return halves(of).Shared() }

// longest is the length of a chain's name that the kernel takes.
const longest = 28

// kind returns what the names of a tree's chains begin with.
func kind(remote bool) string {
	if remote {
		return "R"
	}
	return ""
}

// prefixChain names the chain of a prefix: by itself, or where that is too long by a hash.
func prefixChain(p netip.Prefix, remote bool) string {
	name := Prefix + kind(remote) + strings.ReplaceAll(p.String(), ":", "_")
	if len(name) > longest {
		return hashed(kind(remote)+"NET", p.String())
	}
	return name
}

// portsChain names the chain of an address's protocol, or of some of its ports.
func portsChain(e model.Entry, ports string, remote bool) string {
	if e.AnyAddr() {
		name := fmt.Sprintf("%s%s%s-%s", Prefix, kind(remote), e.Protocol, strings.ReplaceAll(ports, ":", "-"))
		return strings.TrimSuffix(name, "-")
	}
	return hashed("ADR", fmt.Sprint(e.Addr, e.Protocol, ports))
}

// hashed names a chain by a hash of what it is for.
func hashed(kind, of string) string {
	h := fnv.New64a()
	h.Write([]byte(of))
	return fmt.Sprintf("%s%s%016x", Prefix, kind, h.Sum64())
}

// doors are at most three groups of frontends with addresses, each with the prefix that lets packets in. Each is a rule
// that every new connection tests, so a group is split only where that leaves at most a quarter of its addresses
// inside.
func doors(of []*frontend) (groups [][]*frontend) {
	if len(of) > 0 {
		groups = append(groups, of)
	}
	size := func(of []*frontend) float64 { return math.Exp2(-float64(shared(of).Bits())) }
	for len(groups) > 0 && len(groups) < 3 {
		best, at, cut := 0.25, 0, 0
		for i, g := range groups {
			if g[0].entry.Addr == g[len(g)-1].entry.Addr {
				continue
			}
			n := halves(g).Cut(0, len(g))
			if share := (size(g[:n]) + size(g[n:])) / size(g); share <= best {
				best, at, cut = share, i, n
			}
		}
		if cut == 0 {
			break
		}
		groups = slices.Replace(groups, at, at+1, groups[at][:cut], groups[at][cut:])
	}
	return groups
}
