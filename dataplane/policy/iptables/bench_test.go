package iptables

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// policies returns the parts of a node on which n policies select web: each allows one client of its own at a port of
// its own. The last one allows the client at port 80.
func policies(n int) (parts []model.PolicyPart) {
	r := &model.Ruleset{ID: 1}
	table := func(id int) *model.PeerTable {
		return &model.PeerTable{ID: uint64(id), Default: model.VerdictDrop,
			Otherwise: model.Decision{Verdict: model.VerdictDrop},
			Rules:     []model.Rule{{Peers: []*model.Peers{{}}, Verdict: model.VerdictAccept}}}
	}
	r.Default = model.PortEntry{PeerTable: table(0)}
	for i := range n {
		port, addr := uint16(10000+i), netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})
		if i == n-1 {
			port, addr = 80, policytest.Behind[2][0]
		}
		t, id := table(i+1), &model.Identity{ID: uint64(i + 1)}
		r.Ports = append(r.Ports, model.PortEntry{Protocol: model.TCP, First: port, Last: port, PeerTable: t})
		parts = append(parts, &model.PeerVerdict{PeerTable: t, Identity: id},
			&model.Peer{Range: model.Range{First: addr, Last: addr}, Identity: id})
	}
	slices.SortFunc(r.Ports, func(a, b model.PortEntry) int { return int(a.First) - int(b.First) })
	parts = append(parts, &model.PolicyNode{}, r)
	for i := range 128 { // of which web is one
		s := &model.Subject{Addr: netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}), In: [2]*model.Ruleset{nil, r}}
		parts = append(parts, s)
	}
	return parts
}

// rulesTested returns how many rules of the filter a packet from client to web at port 80 is tested against from a
// chain on, and whether one of them ends its way.
func rulesTested(facts map[Key]Fact, trees map[string][]string, name string) (n int) {
	rules := trees[name]
	if f, ok := facts[Key{Kind: KindChain, Family: 4, Name: name}]; ok {
		rules = f.Body.([]string)
	}
	for _, rule := range rules {
		n++
		words := strings.Fields(rule)
		matches := true
		for i, w := range words[:len(words)-1] {
			arg := words[i+1]
			switch {
			case w == "-d" || w == "-s":
				p := netip.MustParsePrefix(arg)
				matches = matches && p.Contains(policytest.Behind[map[string]int{"-d": 0, "-s": 2}[w]][0])
			case w == "-p":
				matches = matches && arg == "tcp"
			case w == "--dport":
				var from, to int
				if k, _ := fmt.Sscanf(arg, "%d:%d", &from, &to); k == 1 {
					to = from
				}
				matches = matches && from <= 80 && 80 <= to
			case w == "--ctstate" || w == "--tcp-flags":
				matches = false
			case w == "--match-set":
				in := false
				for k := range facts {
					in = in || k.Kind == KindElement && k.Name == arg && k.Prefix.Contains(policytest.Behind[2][0])
				}
				matches = matches && in
			}
		}
		switch target := words[len(words)-1]; {
		case !matches:
		case strings.HasPrefix(target, Prefix):
			n += rulesTested(facts, trees, target)
			if words[len(words)-2] == "-g" {
				return n
			}
		default:
			return n
		}
	}
	return n
}

func TestRulesOfANewConnection(t *testing.T) {
	for _, c := range []struct{ policies, most int }{{1, 26}, {10, 28}, {1000, 34}, {10000, 38}} {
		facts := policytest.Facts(t, &Plane{}, joined(policies(c.policies)))
		trees := trees{family: iptables.IPv4, unknown: passes, subjects: map[netip.Addr]subject{}}
		for _, f := range facts {
			if s, ok := f.Body.(subject); ok {
				trees.subjects[s.addr] = s
			}
		}
		n := rulesTested(facts, trees.build(), Prefix+"FORWARD")
		t.Logf("%d policies, 128 pods: %d rules", c.policies, n)
		if n > c.most {
			t.Errorf("%d policies: %d rules, at most %d", c.policies, n, c.most)
		}
	}
}

// BenchmarkNewConnections opens and resets connections in turn at nodes with 10 and with 10,000 policies, and reports
// what the second takes in units of the first: medians of blocks.
func BenchmarkNewConnections(b *testing.B) {
	for _, v := range variants {
		b.Run(string(v), func(b *testing.B) {
			var arms [2]*policytest.Network
			for i, n := range []int{10, 10000} {
				arms[i] = policytest.NewNetwork(b)
				p := open(arms[i], v)
				var put []Fact
				for _, f := range policytest.Facts(b, p, joined(policies(n))) {
					put = append(put, f)
				}
				begin := time.Now()
				arms[i].Must(p.Write(b.Context(), put, nil))
				b.ReportMetric(time.Since(begin).Seconds(), fmt.Sprintf("write%d-s", n))
			}
			var took [2][]time.Duration
			for b.Loop() {
				for i, n := range arms {
					begin := time.Now()
					n.Must(n.Of[policytest.Behind[2][0]].Do(func() error { return connect(60) }))
					took[i] = append(took[i], time.Since(begin))
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			middle := len(took[0]) / 2
			b.ReportMetric(float64(took[1][middle])/float64(took[0][middle]), "of-10")
			b.ReportMetric(float64(took[0][middle].Microseconds())/60, "µs/connection")
		})
	}
}

// connect opens and resets connections to web.
func connect(n int) error {
	for range n {
		c, err := net.Dial("tcp", netip.AddrPortFrom(policytest.Behind[0][0], 80).String())
		if err != nil {
			return err
		}
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	return nil
}
