package verdict

import (
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
)

// policyWorld is a node with the pods 10.0.1.2 and 10.0.1.3. The first is isolated for ingress: 10.0.1.3 may come to
// TCP port 80, and 198.51.100.0/24 but 198.51.100.7 to any. Its egress meets an Admin policy that passes 10.0.1.3 on,
// and a Baseline policy that denies everything.
func policyWorld() *model.Policies {
	ip, s := netip.MustParseAddr, model.NewPolicies()
	friend, net := &model.Peers{Text: "friend"}, &model.Peers{Text: "net"}
	one, both := &model.Identity{ID: 1, Match: []*model.Peers{friend}}, &model.Identity{ID: 2, Match: []*model.Peers{net}}
	nothing := &model.Identity{ID: 3}
	np := model.PolicyRef{Tier: model.TierNetworkPolicy, Namespace: "shop", Name: "p"}
	admin, base := model.PolicyRef{Name: "pass"}, model.PolicyRef{Tier: model.TierBaseline, Name: "deny", Audit: false}
	at80 := &model.PeerTable{ID: 1, Default: model.VerdictDrop, Otherwise: model.Decision{Verdict: model.VerdictDrop},
		Rules: []model.Rule{{Peers: []*model.Peers{friend}}, {Peers: []*model.Peers{net}}}}
	rest := &model.PeerTable{ID: 2, Default: model.VerdictDrop, Otherwise: model.Decision{Verdict: model.VerdictDrop},
		Rules: []model.Rule{{Peers: []*model.Peers{net}}}}
	pass := &model.PeerTable{ID: 3, Default: model.VerdictAccept,
		Rules: []model.Rule{{Peers: []*model.Peers{friend}, Verdict: model.VerdictNext}}}
	deny := &model.PeerTable{ID: 4, Default: model.VerdictDrop, Otherwise: model.Decision{Verdict: model.VerdictDrop}}
	ref := func(p model.PolicyRef, d model.Direction, i int) []model.RuleRef {
		return []model.RuleRef{{PolicyRef: p, Direction: d, Index: i}}
	}
	in := &model.Ruleset{ID: 1, Policies: []model.PolicyRef{np}, Ports: []model.PortEntry{{Protocol: model.TCP, First: 80,
		Last: 80, PeerTable: at80, Sources: [][]model.RuleRef{ref(np, model.Ingress, 0), ref(np, model.Ingress, 1)}}},
		Default: model.PortEntry{Last: 65535, PeerTable: rest, Sources: [][]model.RuleRef{ref(np, model.Ingress, 1)}}}
	first := &model.Ruleset{ID: 2, Policies: []model.PolicyRef{admin},
		Default: model.PortEntry{Last: 65535, PeerTable: pass,
			Sources: [][]model.RuleRef{ref(admin, model.Egress, 0), ref(admin, model.Egress, 1)}}}
	last := &model.Ruleset{ID: 3, Policies: []model.PolicyRef{base}, Default: model.PortEntry{Last: 65535, PeerTable: deny,
		Sources: [][]model.RuleRef{ref(base, model.Egress, 0)}}}
	accept, next := model.Decision{Verdict: model.VerdictAccept}, model.Decision{Verdict: model.VerdictNext}
	s.Apply(model.Change[model.PolicyPart]{Put: []model.PolicyPart{
		&model.PolicyNode{Addresses: []netip.Addr{ip("10.0.1.1")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")},
			Unknown: model.VerdictDrop, PreDNAT: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}},
		&model.Subject{Pod: "shop/web", Addr: ip("10.0.1.2"), In: [model.PolicyStages]*model.Ruleset{nil, in},
			Out: [model.PolicyStages]*model.Ruleset{first, last}},
		&model.Subject{Pod: "shop/friend", Addr: ip("10.0.1.3")}, in, first, last, at80, rest, pass, deny,
		&model.Peer{Range: model.Range{First: ip("10.0.1.3"), Last: ip("10.0.1.3")}, Identity: one},
		&model.Peer{Range: model.Range{First: ip("198.51.100.0"), Last: ip("198.51.100.255")}, Identity: both},
		&model.Peer{Range: model.Range{First: ip("198.51.100.7"), Last: ip("198.51.100.7")}, Identity: nothing},
		&model.PeerVerdict{PeerTable: at80, Identity: one, Decision: accept},
		&model.PeerVerdict{PeerTable: at80, Identity: both, Decision: accept},
		&model.PeerVerdict{PeerTable: rest, Identity: both, Decision: accept},
		&model.PeerVerdict{PeerTable: pass, Identity: one, Decision: next},
	}})
	return s
}

func TestPolicy(t *testing.T) {
	s := policyWorld()
	for _, c := range []struct {
		src, dst string
		protocol model.Protocol
		want     model.Verdict
		reason   string
	}{
		{"10.0.1.3:1", "10.0.1.2:80", model.TCP, model.VerdictAccept, "allowed by NetworkPolicy shop/p ingress[0]"},
		{"10.0.1.3:1", "10.0.1.2:80", model.UDP, model.VerdictDrop, "isolated by NetworkPolicy shop/p ingress"},
		{"10.0.1.3:1", "10.0.1.2:81", model.TCP, model.VerdictDrop, "isolated by"},
		{"198.51.100.1:1", "10.0.1.2:80", model.TCP, model.VerdictAccept, "ingress[1]"},
		{"198.51.100.1:1", "10.0.1.2:0", 1, model.VerdictAccept, "ingress[1]"},
		{"198.51.100.7:1", "10.0.1.2:80", model.TCP, model.VerdictDrop, "isolated by"}, // one address before the range
		{"198.51.101.0:1", "10.0.1.2:80", model.TCP, model.VerdictDrop, "isolated by"},
		{"10.0.1.1:1", "10.0.1.2:81", model.TCP, model.VerdictAccept, "is this node"},
		{"10.0.1.2:1", "10.96.0.1:80", model.TCP, model.VerdictAccept, "allowed by Admin pass egress[1]"},
		{"10.0.1.2:1", "10.0.1.3:80", model.TCP, model.VerdictDrop, "denied by Baseline deny egress[0]"},
		{"10.0.1.2:1", "10.0.1.1:80", model.TCP, model.VerdictAccept, "allowed by Admin pass egress[1]"},
		{"10.0.1.9:1", "10.0.1.3:80", model.TCP, model.VerdictDrop, "no pod that is known"},
		{"10.0.1.3:1", "10.0.1.9:80", model.TCP, model.VerdictDrop, "no pod that is known"},
		{"10.0.1.3:1", "10.0.1.1:80", model.TCP, model.VerdictAccept, "no policy applies"},
	} {
		p := Packet{Src: netip.MustParseAddrPort(c.src), Dst: netip.MustParseAddrPort(c.dst), Protocol: c.protocol}
		o := Policy(s, p)
		if o.Verdict != c.want || !strings.Contains(o.Reason, c.reason) {
			t.Errorf("%s > %s/%s: %s, %s; want %s, %s", c.src, c.dst, c.protocol, o.Verdict, o.Reason, c.want, c.reason)
		}
		denied := o.Verdict == model.VerdictDrop && len(o.Steps) > 0 && !within(s.Node.PreDNAT, p.Dst.Addr())
		if Denied(s, p) != denied {
			t.Errorf("%s > %s/%s: Denied is not %v, but %s", c.src, c.dst, c.protocol, denied, o.Reason)
		}
	}
}

// A packet that comes in by a device is neither the node's, nor a pod's with another device.
func TestForgedSources(t *testing.T) {
	s := policyWorld()
	s.Subjects[netip.MustParseAddr("10.0.1.3")].Device = "pod3"
	for _, c := range []struct {
		src, in string
		want    model.Verdict
		reason  string
	}{
		{"10.0.1.3:1", "pod3", model.VerdictAccept, "allowed by"},
		{"10.0.1.3:1", "", model.VerdictAccept, "allowed by"},
		{"10.0.1.3:1", "pod2", model.VerdictDrop, "forged source: 10.0.1.3 is pod shop/friend"},
		{"10.0.1.2:1", "pod3", model.VerdictDrop, "ingress of shop/web"}, // which device is its own isn't known
		{"10.0.1.1:1", "", model.VerdictAccept, "is this node"},
		{"10.0.1.1:1", "pod3", model.VerdictDrop, "no pod that is known"},
		{"198.51.100.1:1", "pod3", model.VerdictAccept, "allowed by"},
	} {
		o := Policy(s, Packet{Src: netip.MustParseAddrPort(c.src), Dst: netip.MustParseAddrPort("10.0.1.2:80"),
			Protocol: model.TCP, In: c.in})
		if o.Verdict != c.want || !strings.Contains(o.Reason, c.reason) {
			t.Errorf("%s by %q: %s, %s; want %s, %s", c.src, c.in, o.Verdict, o.Reason, c.want, c.reason)
		}
	}
}

func TestPolicyReportsWhatAuditWouldDrop(t *testing.T) {
	s := policyWorld()
	rs := s.Subjects[netip.MustParseAddr("10.0.1.2")].Out[model.StageAdmin]
	table := rs.Default.PeerTable
	table.Rules = append(table.Rules, model.Rule{Audit: true, Verdict: model.VerdictDrop})
	table.Otherwise.Report = true
	o := Policy(s, Packet{Src: netip.MustParseAddrPort("10.0.1.2:1"), Dst: netip.MustParseAddrPort("10.0.1.1:80"),
		Protocol: model.TCP})
	if l := o.Reported(); o.Verdict != model.VerdictAccept || len(l) != 1 || l[0].Index != 1 {
		t.Errorf("%v, reported %v", o, l)
	}
}

// joined is the node of policyWorld with two Services: "own" has the pod 10.0.1.2 alone, "two" both pods.
func joined() *model.Snapshot {
	ap, a := netip.MustParseAddrPort, netip.MustParseAddr
	policies := policyWorld()
	node := &model.Node{Name: "a", Addresses: policies.Node.Addresses, Pods: policies.Node.Pods}
	s := &model.Snapshot{Node: node, ServiceNode: &model.ServiceNode{Node: node}, Policies: policies,
		Frontends: map[model.Entry]*model.Frontend{}}
	for addr, backends := range map[string][]model.Backend{
		"10.96.0.1": {{Addr: ap("10.0.1.2:80"), Local: true}},
		"10.96.0.2": {{Addr: ap("10.0.1.2:80"), Local: true}, {Addr: ap("10.0.1.3:80"), Local: true}},
		"10.96.0.3": nil,
	} {
		to := model.Target{Pool: &model.Pool{Name: "pool", Protocol: model.TCP, Backends: backends}, Empty: model.Reject}
		e := model.Entry{Addr: a(addr), Port: 80, Protocol: model.TCP}
		s.Frontends[e] = &model.Frontend{Entry: e, Internal: to, External: to}
	}
	return s
}

func TestOfJoinsServicesAndPolicies(t *testing.T) {
	s := joined()
	for _, c := range []struct {
		src, dst string
		protocol model.Protocol
		action   Action
		last     Stage
		reason   string
	}{
		{"10.0.1.3:1", "10.96.0.1:80", model.TCP, Forward, StagePolicies, "allowed by NetworkPolicy shop/p ingress[0]"},
		{"198.51.100.7:1", "10.96.0.1:80", model.TCP, Drop, StagePolicies, "isolated by"},
		{"198.51.100.7:1", "10.96.0.2:80", model.TCP, Forward, StagePolicies,
			"dropped for 1 of 2 backends: ingress of shop/web"},
		{"10.0.1.3:1", "10.96.0.3:80", model.TCP, Reject, StageEndpoints, "no endpoint"},
		// a pod that is its own backend is evaluated; what it sends to its own address is not
		{"10.0.1.2:1", "10.96.0.1:80", model.TCP, Drop, StagePolicies, "ingress of shop/web: isolated by"},
		{"10.0.1.2:1", "10.0.1.2:80", model.TCP, Pass, StagePolicies, "never leaves the pod"},
		{"198.51.100.7:1", "10.0.1.2:80", model.TCP, Drop, StagePolicies, "isolated by"},
		// the node itself
		{"10.0.1.1:1", "10.0.1.2:81", model.TCP, Pass, StagePolicies, "is this node"},
		{"127.0.0.1:1", "10.96.0.1:80", model.TCP, Forward, StagePolicies, "is this node"},
		{"10.0.1.2:1", "10.0.1.3:0", icmpv6, Drop, StagePolicies, "denied by"},
	} {
		v := Of(s, packet(c.src, c.dst, c.protocol))
		if last := v.Steps[len(v.Steps)-1]; v.Action != c.action || last.Stage != c.last || last.Action != v.Action ||
			last.Reason != v.Reason || !strings.Contains(v.Reason, c.reason) {
			t.Errorf("%s > %s/%s: %s at %s, %s; want %s at %s, %s", c.src, c.dst, c.protocol, v.Action, last.Stage, v.Reason,
				c.action, c.last, c.reason)
		}
	}
	v := Of(s, packet("198.51.100.7:1", "10.96.0.2:80", model.TCP))
	if len(v.Candidates) != 2 || v.Candidates[0].Policy.Verdict != model.VerdictDrop ||
		v.Candidates[1].Policy.Verdict != model.VerdictAccept {
		t.Errorf("candidates %v: want the first dropped alone", v.Candidates)
	}
	if s.Policies = nil; Of(s, packet("198.51.100.7:1", "10.0.1.2:80", model.TCP)).Action != Pass {
		t.Error("policies that are off drop")
	}
}

func TestNeighbourDiscoveryIsNotEvaluated(t *testing.T) {
	p := packet("10.0.1.2:0", "10.0.1.3:0", icmpv6)
	for typ, want := range map[uint8]model.Verdict{132: model.VerdictDrop, 133: model.VerdictAccept,
		135: model.VerdictAccept, 137: model.VerdictAccept, 138: model.VerdictDrop} {
		if p.Type = typ; Policy(policyWorld(), p).Verdict != want {
			t.Errorf("type %d: want %s", typ, want)
		}
	}
}
