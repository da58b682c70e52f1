package reachability

import (
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Span is ports of a protocol that policies between two ends don't tell apart.
type Span struct {
	Protocol    model.Protocol // other: those without ports
	First, Last uint16
	Family      string // IPv4 or IPv6
	Policy      verdict.PolicyOutcome
}

// other stands for the protocols without ports, such as ICMP: policies match them by rules without ports alone.
const other model.Protocol = 1

// String returns "80/tcp", "1024-65535/udp", "sctp" or "other protocols".
func (s Span) String() string {
	switch {
	case s.Protocol == other:
		return "other protocols"
	case s.First <= 1 && s.Last == 65535:
		return s.Protocol.String()
	case s.First == s.Last:
		return fmt.Sprintf("%d/%s", s.First, s.Protocol)
	}
	return fmt.Sprintf("%d-%d/%s", s.First, s.Last, s.Protocol)
}

// allowed reports whether the connections pass.
func (s Span) allowed() bool { return s.Policy.Verdict == model.VerdictAccept }

// spans returns what policies decide about connections between two addresses, without Services: every port of each
// protocol, in order.
func (c *Cluster) spans(src, dst netip.Addr) (out []Span) {
	var sets []*model.Ruleset
	if s := c.policies.Subjects[src]; s != nil {
		sets = append(sets, s.Out[:]...)
	}
	if s := c.policies.Subjects[dst]; s != nil {
		sets = append(sets, s.In[:]...)
	}
	for _, protocol := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		begins := []int{1}
		for _, rs := range sets {
			if rs == nil {
				continue
			}
			for _, e := range rs.Ports {
				if e.Protocol == protocol {
					begins = append(begins, max(1, int(e.First)), int(e.Last)+1)
				}
			}
		}
		slices.Sort(begins)
		begins = slices.DeleteFunc(slices.Compact(begins), func(n int) bool { return n > 65535 })
		for i, first := range begins {
			last := 65535
			if i+1 < len(begins) {
				last = begins[i+1] - 1
			}
			out = append(out, c.span(src, dst, protocol, uint16(first), uint16(last)))
		}
	}
	return append(out, c.span(src, dst, other, 0, 0))
}

func (c *Cluster) span(src, dst netip.Addr, protocol model.Protocol, first, last uint16) Span {
	p := verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, first), Protocol: protocol}
	at := verdict.Egress(c.view(c.NodeOf(src)), p)
	return Span{protocol, first, last, family(dst), verdict.Ingress(c.view(c.NodeOf(dst)), p, at)}
}

// family returns "IPv4" or "IPv6".
func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}
