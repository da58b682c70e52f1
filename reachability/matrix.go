package reachability

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
)

// The bounds of a matrix.
const (
	maxCells = 250_000
	maxPorts = 32 // of one group
)

// Matrix is which groups may open connections to which, and on which ports.
type Matrix struct {
	Groups []*Group
	Ports  [][]ListedPort // of each group as a destination
	Cells  [][]*Cell      // by source, then destination; nil where there is no connection to evaluate
	More   int            // ports that are left out of Ports
}

// ListedPort is a port that a container, a Service or a policy names.
type ListedPort struct {
	Name        string // "" if it has none
	Protocol    model.Protocol
	First, Last uint16
}

// String returns "http 8080/tcp" or "8000-8080/udp".
func (p ListedPort) String() string {
	s := Span{Protocol: p.Protocol, First: p.First, Last: p.Last}.String()
	return strings.TrimSpace(p.Name + " " + s)
}

// Cell is what may pass between two groups.
type Cell struct {
	All, None bool      // every port of every protocol, or no one
	Ports     []Decided // of each listed port of the destination
	Rest      Decided   // of all other ports and protocols
}

// Decided is a fate, and why.
type Decided struct {
	Fate   Fate
	Reason string
}

// NewMatrix evaluates all groups of c against each other; with namespaces, those of which one is in one of these.
func NewMatrix(c *Cluster, namespaces []string) (*Matrix, error) {
	m := &Matrix{Groups: groups(c)}
	focus := func(g *Group) bool { return len(namespaces) == 0 || slices.Contains(namespaces, g.Namespace) }
	for _, n := range namespaces {
		if !slices.ContainsFunc(m.Groups, func(g *Group) bool { return g.Namespace == n }) {
			return nil, fmt.Errorf("no running pod in namespace %q%s", n, c.nearNamespace(n))
		}
	}
	cells := 0
	for _, a := range m.Groups {
		for _, b := range m.Groups {
			if focus(a) || focus(b) {
				cells++
			}
		}
	}
	if cells > maxCells {
		return nil, fmt.Errorf("%d workloads, nodes and CIDRs come to %d pairs, %d are the limit: choose namespaces",
			len(m.Groups), cells, maxCells)
	}
	listed := c.listedPorts()
	for _, g := range m.Groups {
		ports := listed(g)
		if n := len(ports) - maxPorts; n > 0 {
			ports, m.More = ports[:maxPorts], m.More+n
		}
		m.Ports = append(m.Ports, ports)
	}
	for _, a := range m.Groups {
		row := make([]*Cell, len(m.Groups))
		for j, b := range m.Groups {
			if focus(a) || focus(b) {
				row[j] = c.cell(a, b, m.Ports[j])
			}
		}
		m.Cells = append(m.Cells, row)
	}
	return m, nil
}

// listedPorts returns what lists the ports of a group.
func (c *Cluster) listedPorts() func(*Group) []ListedPort {
	served := map[netip.Addr][]ListedPort{}
	for _, o := range c.Names {
		v, ok := o.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		for _, e := range v.Endpoints {
			for _, text := range e.Addresses {
				a, err := netip.ParseAddr(text)
				for _, p := range v.Ports {
					if err == nil && c.pods[a] != nil && p.Port != nil && p.Protocol != nil {
						served[a] = append(served[a], ListedPort{"", protocols[strings.ToLower(string(*p.Protocol))],
							uint16(*p.Port), uint16(*p.Port)})
					}
				}
			}
		}
	}
	var leaving []ListedPort
	for _, rs := range c.policies.Rulesets {
		if slices.ContainsFunc(rs.Default.Sources, egress) {
			leaving = append(leaving, entries(rs)...)
		}
	}
	return func(g *Group) (out []ListedPort) {
		if g.Kind != Pods {
			return compactPorts(leaving)
		}
		for _, p := range containerPorts(g.samples[0][0].pod) {
			out = append(out, ListedPort{p.Name, protocolOf(p.Protocol),
				uint16(p.ContainerPort), uint16(p.ContainerPort)})
		}
		for _, a := range g.samples[0][0].addrs {
			out = append(out, served[a]...)
			if s := c.policies.Subjects[a]; s != nil {
				for _, rs := range s.In {
					out = append(out, entries(rs)...)
				}
			}
		}
		return compactPorts(out)
	}
}

func egress(l []model.RuleRef) bool { return len(l) > 0 && l[0].Direction == model.Egress }

// entries returns the ports that a ruleset names.
func entries(rs *model.Ruleset) (out []ListedPort) {
	if rs == nil {
		return nil
	}
	for _, e := range rs.Ports {
		if e.First > 1 || e.Last < 65535 {
			out = append(out, ListedPort{"", e.Protocol, e.First, e.Last})
		}
	}
	return out
}

// compactPorts sorts ports, and leaves out those without a name that another one is.
func compactPorts(l []ListedPort) (out []ListedPort) {
	l = slices.Clone(l)
	slices.SortFunc(l, func(a, b ListedPort) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last),
			cmp.Compare(b.Name, a.Name))
	})
	for _, p := range l {
		if n := len(out); n == 0 || out[n-1].Protocol != p.Protocol || out[n-1].First != p.First || out[n-1].Last != p.Last {
			out = append(out, p)
		}
	}
	return out
}

// cell evaluates connections between two groups.
func (c *Cluster) cell(from, to *Group, ports []ListedPort) *Cell {
	src, dst, ok := between(from, to, 0)
	if !ok {
		return nil
	}
	spans := slices.Concat(c.families(src, dst)...)
	if len(spans) == 0 {
		return nil
	}
	names := strings.NewReplacer(" "+src.name+":", " "+from.Name+":", " "+dst.name+":", " "+to.Name+":")
	cell := &Cell{All: true, None: true}
	for _, s := range spans {
		cell.All, cell.None = cell.All && s.allowed(), cell.None && !s.allowed()
		if !slices.ContainsFunc(ports, func(p ListedPort) bool { return p.covers(s) }) {
			cell.Rest.add(s, names)
		}
	}
	for _, p := range ports {
		var d Decided
		for _, s := range spans {
			if s.Protocol == p.Protocol && s.First <= p.Last && p.First <= s.Last {
				d.add(s, names)
			}
		}
		cell.Ports = append(cell.Ports, d)
	}
	return cell
}

// covers reports whether all of s is in p.
func (p ListedPort) covers(s Span) bool {
	return s.Protocol == p.Protocol && p.First <= s.First && s.Last <= p.Last
}

// add adds what is decided about a span.
func (d *Decided) add(s Span, names *strings.Replacer) {
	f := Denied
	if s.allowed() {
		f = Allowed
	}
	reason := names.Replace(s.Policy.Reason)
	switch {
	case d.Fate == "":
		d.Fate, d.Reason = f, reason
	case d.Fate != f && d.Fate != Mixed:
		d.Reason = fmt.Sprintf("%s: %s; %s for %s over %s: %s", d.Fate, d.Reason, f, s, s.Family, reason)
		d.Fate = Mixed
	}
}

// families returns the spans over IPv4 and over IPv6, none over a family that one of the ends lacks.
func (c *Cluster) families(src, dst end) [][]Span {
	out := make([][]Span, 2)
	for n, v4 := range []bool{true, false} {
		is := func(a netip.Addr) bool { return a.Is4() == v4 }
		i, j := slices.IndexFunc(src.addrs, is), slices.IndexFunc(dst.addrs, is)
		if i >= 0 && j >= 0 {
			out[n] = c.spans(src.addrs[i], dst.addrs[j])
		}
	}
	return out
}
