package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// walk counts the rules of a table that are tested for the first packet of a connection, from a built-in chain on:
// those up to the one that decides, with those of every chain on the way. Draws of backends are not made: the chance of
// each end comes with it.
type walk struct {
	chains map[string][]string
	packet packet
	mark   bool
	ends   []end
}

// packet is what rules look at.
type packet struct {
	src, dst         netip.Addr
	protocol         model.Protocol
	port             uint16
	srcLocal, toNode bool
}

// end is where a packet may end: after how many rules, with which chance, at which target.
type end struct {
	rules  int
	chance float64
	target string
}

// from walks a chain; then is what comes after it, with the rules tested so far.
func (w *walk) from(t *testing.T, chain string, rules int, chance float64, then func(int, float64)) {
	list := w.chains[chain]
	for i, text := range list {
		rules++
		words := strings.Fields(text)
		yes, p, target, jump := true, 1.0, "", false
		for i := 0; i < len(words); i++ {
			not := i > 0 && words[i-1] == "!"
			value := ""
			if i+1 < len(words) {
				value = words[i+1]
			}
			is := func(b bool) { yes = yes && b != not }
			switch words[i] {
			case "-d":
				is(netip.MustParsePrefix(value).Contains(w.packet.dst))
			case "-s":
				is(netip.MustParsePrefix(value).Contains(w.packet.src))
			case "-p":
				is(value == w.packet.protocol.String())
			case "--dport":
				first, last, ok := strings.Cut(value, ":")
				if !ok {
					last = first
				}
				var a, b uint16
				fmt.Sscan(first, &a)
				fmt.Sscan(last, &b)
				is(a <= w.packet.port && w.packet.port <= b)
			case "--dst-type":
				is(w.packet.toNode)
			case "--src-type":
				is(w.packet.srcLocal)
			case "--probability":
				fmt.Sscan(value, &p)
			case "--bytecode":
				is(w.packet.src == w.packet.dst)
			case "-j", "-g":
				target, jump = value, words[i] == "-j"
			}
		}
		if !yes {
			continue
		}
		switch _, ours := w.chains[target]; {
		case target == "MARK":
			w.mark = !strings.Contains(text, " 0x0/")
			continue
		case ours:
			rest := then
			if jump {
				rest = func(n int, c float64) { w.after(t, list[i+1:], n, c, then) }
			}
			w.from(t, target, rules, chance*p, rest)
			if p == 1 {
				return
			}
		default:
			w.ends = append(w.ends, end{rules, chance * p, target})
			if p == 1 {
				return
			}
		}
		chance *= 1 - p
	}
	then(rules, chance)
}

// after goes on behind a jump.
func (w *walk) after(t *testing.T, rules []string, n int, chance float64, then func(int, float64)) {
	w.chains["behind"] = rules
	w.from(t, "behind", n, chance, then)
}

// tables4 builds what IPv4's table nat holds for parts, pools included.
func tables4(t testing.TB, parts []model.ServicePart) map[string][]string {
	h := &held{ruleset: ruleset{family: iptables.IPv4, mark: Mark, frontends: map[model.Entry]*frontend{}}}
	var four []Fact
	for _, f := range servicetest.Facts(t, &Plane{}, parts) {
		if f.Key.Family == iptables.IPv4 {
			four = append(four, f)
		}
	}
	c := h.change(four, nil)
	nat := c.build()["nat"]
	for _, l := range c.bodies {
		for _, b := range l {
			nat.chains[b.name] = b.rules
		}
	}
	maps.Copy(nat.chains, nat.leads)
	return nat.chains
}

// count returns the ends of a packet in PREROUTING and the number of rules after it, in POSTROUTING.
func count(t *testing.T, chains map[string][]string, p packet) (ends []end, after int) {
	w := &walk{chains: chains, packet: p}
	w.from(t, "PREROUTING", 0, 1, func(n int, c float64) { w.ends = append(w.ends, end{n, c, ""}) })
	switch {
	case w.ends[0].target == "" && w.mark:
		t.Fatalf("a packet to no Service, %s, keeps the mark", p.dst)
	case w.ends[0].target == "":
		return w.ends, 1 // the rule that lets translated packets in
	case w.mark:
		return w.ends, 1 + 1 + 2 // it, the mark's, and the chain MASQUERADE
	}
	return w.ends, 1 + 2 // it, the mark's and the hairpin's
}

// TestRulesTested holds aim G3: how many rules of the table nat a new connection tests, POSTROUTING included.
func TestRulesTested(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	scattered := map[uint32]bool{}
	for len(scattered) < 10000 {
		scattered[random.Uint32N(1<<20)] = true // all over a /12
	}
	var somewhere []uint32
	for a := range scattered {
		somewhere = append(somewhere, a)
	}
	slices.Sort(somewhere)
	for _, c := range []struct {
		name          string
		parts         []model.ServicePart
		average, most float64
	}{
		{"10 in a row", servicetest.Services(10), 15, 20},
		{"10,000 in a row", servicetest.Services(10000), 26, 32},
		{"10,000 scattered", servicetest.ServicesAt(somewhere), 26, 32},
	} {
		chains := tables4(t, c.parts)
		pod := packet{src: servicetest.Address(10<<24|200<<16, 7), protocol: model.TCP, port: 80}
		own := packet{src: servicetest.Address(192<<24, 1), srcLocal: true, protocol: model.TCP, port: 80}
		for who, p := range map[string]packet{"a pod": pod, "the node": own} {
			mean, worst := tested(t, chains, c.parts, p)
			p.dst = servicetest.Address(10<<24|200<<16, 9)
			ends, after := count(t, chains, p)
			t.Logf("%s, from %s: %.2f rules on average, %d at most; no Service: %d; %d chains", c.name, who, mean, worst,
				ends[0].rules+after, len(chains))
			if mean > c.average || float64(worst) > c.most {
				t.Errorf("%s: a new connection from %s tests %.2f rules, %d at most; the aims are %.0f and %.0f", c.name, who, mean,
					worst, c.average, c.most)
			}
			if len(ends) != 1 || ends[0].target != "" || ends[0].rules+after > 3 {
				t.Errorf("%s: traffic from %s to no Service: %+v, then %d rules more", c.name, who, ends, after)
			}
		}
		external := packet{src: servicetest.Address(192<<24, 7), dst: c.parts[len(c.parts)-1].(*model.Frontend).Entry.Addr,
			protocol: model.TCP, port: 81}
		if ends, _ := count(t, chains, external); len(ends) != 1 || ends[0].target != "" {
			t.Errorf("%s: a packet to another port ends at %+v", c.name, ends)
		}
		external.port = 80
		if _, after := count(t, chains, external); after != 4 {
			t.Errorf("%s: a packet from outside is not hidden", c.name)
		}
	}
}

// TestRulesTestedForRemoteNodes holds what other nodes' node ports cost: a step in the tree of 5,000 nodes is a rule.
func TestRulesTestedForRemoteNodes(t *testing.T) {
	parts := servicetest.Services(1000)
	node := parts[0].(*model.ServiceNode)
	for i := range 5000 {
		node.RemoteNodePorts = append(node.RemoteNodePorts, servicetest.Address(172<<24|16<<16, i))
	}
	pool := servicetest.Pool(0, 0)
	for i := range 100 {
		to := model.Target{Pool: pool}
		parts = append(parts, &model.Frontend{Internal: to, External: to, Remote: true, Masquerade: model.AllOrigins,
			Entry: model.Entry{Addr: netip.IPv4Unspecified(), Port: uint16(30000 + i), Protocol: model.TCP}})
	}
	chains := tables4(t, parts)
	pod := packet{src: servicetest.Address(10<<24|200<<16, 7), protocol: model.TCP, port: 30050}
	for _, c := range []struct {
		what   string
		to     netip.Addr
		from   netip.Addr
		target string
		most   int
	}{
		{"a node port of another node", servicetest.Address(172<<24|16<<16, 3456), pod.src, "DNAT", 40},
		{"the same from outside", servicetest.Address(172<<24|16<<16, 3456), servicetest.Address(192<<24, 7), "", 32},
		{"no Service", servicetest.Address(10<<24|200<<16, 9), pod.src, "", 4},
	} {
		pod.src, pod.dst = c.from, c.to
		ends, after := count(t, chains, pod)
		t.Logf("%s: at most %d rules", c.what, ends[len(ends)-1].rules+after)
		for _, e := range ends {
			if e.target != c.target || e.rules+after > c.most {
				t.Errorf("%s: %d rules to %q, want at most %d to %q", c.what, e.rules+after, e.target, c.most, c.target)
			}
		}
		if after == 4 {
			t.Errorf("%s: a pod is masqueraded", c.what)
		}
	}
}

// tested returns how many rules a packet to each of the parts' frontends tests, on average and at most. Each of their
// ten backends must have its share.
func tested(t *testing.T, chains map[string][]string, parts []model.ServicePart, p packet) (mean float64, worst int) {
	n := 0
	for _, part := range parts {
		f, ok := part.(*model.Frontend)
		if !ok {
			continue
		}
		p.dst = f.Entry.Addr
		ends, after := count(t, chains, p)
		total := 0.0
		for _, e := range ends {
			if e.target != "DNAT" {
				t.Fatalf("a packet to %s ends at %q", f.Entry, e.target)
			}
			total += e.chance
			mean += e.chance * float64(e.rules+after)
			worst = max(worst, e.rules+after)
			if d := e.chance - 0.1; d > 1e-9 || d < -1e-9 {
				t.Fatalf("%s gives a backend a share of %.12f", f.Entry, e.chance)
			}
		}
		if len(ends) != 10 || total < 1-1e-9 {
			t.Fatalf("a packet to %s goes to %d backends, with chance %f", f.Entry, len(ends), total)
		}
		n++
	}
	return mean / float64(n), worst
}

// TestShares holds that each backend gets its share, as exactly as 31 bits allow.
func TestShares(t *testing.T) {
	for _, c := range []struct {
		n       int
		weights []int
	}{{1, []int{1}}, {2, []int{1}}, {3, []int{1}}, {11, []int{1}}, {250, []int{1}}, {7, []int{1, 2, 256}},
		{100, []int{3, 1}}} {
		p, all := pool{protocol: model.TCP}, 0
		for i := range c.n {
			share := c.weights[i%len(c.weights)]
			all += share
			p.backends = append(p.backends, backend{netip.AddrPortFrom(servicetest.Address(10<<24, i), 80), share})
		}
		w := &walk{chains: map[string][]string{}, packet: packet{protocol: model.TCP}}
		for _, b := range p.chains(Prefix + "0123456789abcdef") {
			w.chains[b.name] = b.rules
		}
		w.from(t, Prefix+"0123456789abcdef", 0, 1, func(int, float64) {})
		if len(w.ends) != c.n {
			t.Fatalf("%d backends: %d ends", c.n, len(w.ends))
		}
		worst := 0
		for i, e := range w.ends {
			worst = max(worst, e.rules)
			// Each draw on the way is off by half of 2^-31 at most.
			if want := float64(p.backends[i].share) / float64(all); e.chance-want > 1e-8 || want-e.chance > 1e-8 {
				t.Errorf("%d backends: number %d gets %.12f, not %.12f", c.n, i, e.chance, want)
			}
		}
		if is := readPool(Prefix+"0123456789abcdef", w.chains); is.String() != p.String() {
			t.Errorf("%s reads back as %s", p, is)
		}
		t.Logf("%d backends: at most %d rules", c.n, worst)
	}
}
