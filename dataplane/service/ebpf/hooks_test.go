package ebpf_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"

	serviceplane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

var ruleSets = flag.Int("rule-sets", 40, "how many random sets of rules are tried beside the fast path")

// ruleSet is a random set of rules beside the fast path. Each rule counts by a counter of its own.
type ruleSet struct {
	*rand.Rand
	script   strings.Builder // for nft
	counters int
	acts     bool // packets between pods pass a rule
}

// chain adds a base chain, with or without rules.
func (s *ruleSet) chain(name string) {
	family := []string{"ip", "ip6", "inet"}[s.IntN(3)]
	hook := []string{"prerouting", "forward", "postrouting", "input", "output"}[s.IntN(5)]
	fmt.Fprintf(&s.script, "add table %s r; add chain %s r %s { type filter hook %s priority %d; }\n", family, family,
		name, hook, s.IntN(600)-300)
	for range s.IntN(3) {
		s.rule(family, name)
		s.acts = s.acts || hook != "input" && hook != "output"
	}
}

// rule adds a rule to a chain, maybe by a chain of its own.
func (s *ruleSet) rule(family, chain string) {
	counter := fmt.Sprintf("n%d", s.counters)
	s.counters++
	fmt.Fprintf(&s.script, "add counter %s r %s\n", family, counter)
	match := "meta l4proto udp " + []string{"", "ct state new", "ct state established,related", "iifname a", "oifname b",
		"fib daddr type unicast", "th dport 8080"}[s.IntN(7)] // nodes ask for their neighbours when they like
	if s.IntN(3) == 0 {
		to := "to-" + counter
		fmt.Fprintf(&s.script, "add chain %s r %s; add rule %s r %s counter name %s\n", family, to, family, to, counter)
		fmt.Fprintf(&s.script, "add rule %s r %s %s jump %s\n", family, chain, match, to)
		return
	}
	fmt.Fprintf(&s.script, "add rule %s r %s %s counter name %s %s\n", family, chain, match, counter,
		[]string{"", "accept"}[s.IntN(2)])
}

// ruleCounts returns how many packets each counter has counted.
func (w *twoPods) ruleCounts() map[string]int {
	w.Helper()
	out, err := exec.Command("nft", "-j", "list", "counters").Output()
	if err != nil {
		w.Fatal(err)
	}
	var all struct {
		Nftables []struct {
			Counter struct {
				Family, Table, Name string
				Packets             int
			}
		}
	}
	if err := json.Unmarshal(out, &all); err != nil {
		w.Fatal(err)
	}
	by := map[string]int{}
	for _, c := range all.Nftables {
		if c.Counter.Table == "r" {
			by[c.Counter.Family+" "+c.Counter.Name] = c.Counter.Packets
		}
	}
	return by
}

// exchange has a datagram and its answer sent by each family; it returns how many packets were redirected.
func (w *twoPods) exchange(when string) (redirected uint64) {
	w.Helper()
	for _, six := range []bool{false, true} {
		who, n, err := w.request(model.UDP, six, patience, echo.Options{})
		if err != nil || who != "b" {
			w.Errorf("%s, IPv6 %t: %q answers: %v", when, six, who, err)
		}
		redirected += n
	}
	return redirected
}

// Whatever rules are there, each sees the packets that it would see if none were redirected; and packets are redirected
// if no rule is on their way.
func TestRulesSeeTheirPackets(t *testing.T) {
	withPods(t, func(w *twoPods) {
		for _, idle := range idleHooks {
			w.run(idle.put)
		}
		w.watched(func() { w.redirects("beside idle hooks") })
		for seed := range uint64(*ruleSets) {
			s := &ruleSet{Rand: rand.New(rand.NewPCG(seed, 0))}
			for i := range 1 + s.IntN(3) {
				s.chain(fmt.Sprint("c", i))
			}
			when := fmt.Sprintf("set of rules %d:\n%s", seed, &s.script)
			w.run("nft -f - <<'END'\n" + s.script.String() + "END")
			n := w.exchange(when)
			if off := w.anySlow(); s.acts != off || s.acts && n == 4 || !s.acts && n != 4 {
				t.Errorf("%s%d packets were redirected, reported off: %t, want %t", when, n, off, s.acts)
			}
			first := w.ruleCounts()
			w.run("nft 'add table inet stop; add chain inet stop c { type filter hook forward priority 500; }; " +
				"add rule inet stop c counter'")
			if n := w.exchange(when); n != 0 {
				t.Errorf("%s%d packets were redirected past a rule", when, n)
			}
			for c, twice := range w.ruleCounts() {
				if twice != 2*first[c] {
					t.Errorf("%scounter %s: %d packets, of %d", when, c, first[c], twice-first[c])
				}
			}
			w.run("nft delete table inet stop; for f in ip ip6 inet; do nft delete table $f r 2>/dev/null || true; done")
			if t.Failed() {
				return
			}
		}
	})
}

// anySlow reports whether a family's packets are reported to take the host stack.
func (w *twoPods) anySlow() bool {
	w.Helper()
	f, err := w.plane.FastPath()
	if err != nil {
		w.Fatal(err)
	}
	return !f.IPv4.Enabled || !f.IPv6.Enabled
}

// owners are rules that keep packets on the host stack, as their owners write them, and how they are named.
var owners = []struct{ name, put, hook, owner, command string }{
	{"Docker", "iptables-nft -N DOCKER-USER; iptables-nft -A FORWARD -j DOCKER-USER; iptables-nft -P FORWARD DROP; " +
		"iptables-nft -I FORWARD -d 10.244.0.0/16 -j ACCEPT", "table ip filter chain FORWARD", "iptables-nft",
		"iptables-nft -t filter -S FORWARD"},
	{"Docker, by iptables' legacy form", "iptables-legacy -N DOCKER-USER; iptables-legacy -A FORWARD -j DOCKER-USER; " +
		"iptables-legacy -P FORWARD DROP; iptables-legacy -I FORWARD -d 10.244.0.0/16 -j ACCEPT", "iptables' table filter",
		"iptables-legacy", "iptables-legacy -t filter -S"},
	{"firewalld", "nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward " +
		"priority filter + 10; policy accept; }; " +
		"add rule inet firewalld filter_FORWARD ct state established,related accept; " +
		"add rule inet firewalld filter_FORWARD iifname a accept'", "table inet firewalld chain filter_FORWARD", "firewalld",
		"nft list chain inet firewalld filter_FORWARD"},
	{"a masquerade by iptables' legacy form", "iptables-legacy -t nat " +
		"-A POSTROUTING -s 10.244.0.0/16 -d 192.0.2.0/24 -j MASQUERADE",
		"nf_nat_ipv4_out", "NAT", "nft list ruleset; iptables-legacy -t nat -S"},
}

// What keeps packets on the host stack is named, with its owner and the command that lists it.
func TestHooksAreNamed(t *testing.T) {
	for _, c := range owners {
		withPods(t, func(w *twoPods) {
			w.run(kubeFirewall("iptables-nft") + "; iptables-nft -L >/dev/null")
			w.watched(func() { w.redirects("before " + c.name) })
			w.run(c.put)
			if _, n, err := w.request(model.TCP, false, patience, echo.Options{}); n != 0 || err != nil {
				t.Errorf("%s: %d packets were redirected, %v", c.name, n, err)
			}
			f, err := w.plane.FastPath()
			if err != nil {
				t.Fatal(err)
			}
			named := func(h serviceplane.Hook) bool {
				h.Name = strings.TrimSuffix(h.Name, " [nf_nat]")
				return h == serviceplane.Hook{Name: c.hook, Owner: c.owner, Command: c.command}
			}
			if !slices.ContainsFunc(f.IPv4.Hooks, named) {
				t.Errorf("%s: %s", c.name, f.IPv4)
			}
			for _, h := range f.IPv4.Hooks {
				if strings.Contains(h.Name, "conntrack") || strings.Contains(h.Name, "INPUT") {
					t.Errorf("%s: %s is named, too", c.name, h)
				}
			}
		})
	}
}
