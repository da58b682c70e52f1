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
// its own. The last one allows the client at port 8080, in the middle of all.
func policies(n int) (parts []model.PolicyPart) {
	r := &model.Ruleset{ID: 1}
	table := func(id int) *model.PeerTable {
		return &model.PeerTable{ID: uint64(id), Default: model.VerdictDrop,
			Otherwise: model.Decision{Verdict: model.VerdictDrop},
			Rules:     []model.Rule{{Peers: []*model.Peers{{}}, Verdict: model.VerdictAccept}}}
	}
	r.Default = model.PortEntry{PeerTable: table(0)}
	for i := range n {
		port, addr := uint16(1000+i), netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})
		if i >= n/2 {
			port += 8000
		}
		if i == n-1 {
			port, addr = 8080, policytest.Behind[2][0]
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

// rulesTested returns how many rules a packet from client to a pod's port is tested against from a chain on.
func rulesTested(facts map[Key]Fact, trees map[string][]string, name string, to netip.AddrPort) (n int) {
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
			case w == "-d":
				matches = matches && netip.MustParsePrefix(arg).Contains(to.Addr())
			case w == "-s":
				matches = matches && netip.MustParsePrefix(arg).Contains(policytest.Behind[2][0])
			case w == "-p":
				matches = matches && arg == "tcp"
			case w == "--dport":
				var first, last uint16
				if k, _ := fmt.Sscanf(arg, "%d:%d", &first, &last); k == 1 {
					last = first
				}
				matches = matches && first <= to.Port() && to.Port() <= last
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
			n += rulesTested(facts, trees, target, to)
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
	for _, c := range []struct{ policies, most int }{{1, 55}, {10, 60}, {1000, 85}, {10000, 120}} {
		parts := policies(c.policies)
		facts := policytest.Facts(t, &Plane{}, joined(parts))
		trees := trees{family: iptables.IPv4, unknown: passes, subjects: map[netip.Addr]subject{}}
		for _, f := range facts {
			if s, ok := f.Body.(subject); ok {
				trees.subjects[s.addr] = s
			}
		}
		chains := trees.build()
		sum, count, most := 0, 0, 0
		for _, part := range parts {
			r, ok := part.(*model.Ruleset)
			if !ok {
				continue
			}
			for i := 0; i < len(r.Ports); i += 1 + len(r.Ports)/40 {
				for a := 0; a < 128; a += 9 {
					to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 1, byte(a)}), r.Ports[i].First)
					n := rulesTested(facts, chains, Prefix+"FORWARD", to)
					sum, count, most = sum+n, count+1, max(most, n)
				}
			}
		}
		t.Logf("%d policies, 128 pods: %d rules, at most %d", c.policies, sum/count, most)
		if most > c.most {
			t.Errorf("%d policies: %d rules, at most %d", c.policies, most, c.most)
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
			var durations [2][]time.Duration
			for b.Loop() {
				for i, n := range arms {
					begin := time.Now()
					n.Must(n.Of[policytest.Behind[2][0]].Do(func() error { return connect(60) }))
					durations[i] = append(durations[i], time.Since(begin))
				}
			}
			for i := range durations {
				slices.Sort(durations[i])
			}
			middle := len(durations[0]) / 2
			b.ReportMetric(float64(durations[1][middle])/float64(durations[0][middle]), "of-10")
			b.ReportMetric(float64(durations[0][middle].Microseconds())/60, "µs/connection")
		})
	}
}

// connect opens and resets connections to web.
func connect(n int) error {
	for range n {
		c, err := net.Dial("tcp", netip.AddrPortFrom(policytest.Behind[0][0], 8080).String())
		if err != nil {
			return err
		}
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	return nil
}
