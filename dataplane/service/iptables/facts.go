package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds.
const (
	// what holds whatever the Service; altered if anything that is built of all facts is not as it should be
	KindNode     Kind = iota
	KindPool          // a pool's chain
	KindFrontend      // an entry's place in the tree; of a ClusterIP, an entry without port and protocol
	KindSysctl
	KindHealth // that packets to a health check are accepted
	KindRemote // that node ports are served at another node's address
)

// Key names a fact: a pool by its chain, a frontend by its entry, a sysctl by its name, a health check by its port,
// another node by its address.
type Key struct {
	Kind   Kind
	Family iptables.Family
	Name   string
	Entry  model.Entry
}

// Fact is a fact of this plane. Its value is text as it can be read from the rules; its body is what the rules are made
// of: a node, a *model.Pool or a *frontend.
type Fact = dataplane.Fact[Key, string]

func fact(k Key, value string) Fact { return Fact{Key: k, Value: value} }

// String returns "node 4", "chain FAIRLEAD-…" or "frontend 10.96.0.1:80/tcp".
func (k Key) String() string {
	switch k.Kind {
	case KindNode:
		return fmt.Sprintf("node %d", k.Family)
	case KindPool:
		return "chain " + k.Name
	case KindFrontend:
		if k.Entry.Port == 0 {
			return "ClusterIP " + k.Entry.Addr.String()
		}
		return "frontend " + k.Entry.String()
	case KindHealth:
		return "health check " + k.Entry.String()
	case KindRemote:
		return "remote node " + k.Entry.Addr.String()
	}
	return "sysctl " + k.Name
}

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	if k.Kind == KindFrontend && k.Entry.Port == 0 {
		return "ClusterIP"
	}
	return [...]string{KindNode: "node", KindPool: "chain", KindFrontend: "frontend", KindSysctl: "sysctl",
		KindHealth: "health", KindRemote: "remote node"}[k.Kind]
}

// Rank implements dataplane.Key: pools come before the frontends that lead to them, and the sysctl that lets packets
// with loopback addresses out after the guard, which is the node's.
func (k Key) Rank() int { return int(k.Kind) }

// altered is the beginning of the value of what is not as this plane writes it.
const altered = "altered: "

// Render implements dataplane.Plane. A family whose commands are not installed has no facts of the node and of health
// checks: frontends that need them are refused before they come here (Capabilities.Unserved).
func (p *Plane) Render(part model.ServicePart) []Fact {
	switch v := part.(type) {
	case *model.ServiceNode:
		return p.possible(append(p.renderNode(v), renderRemotes(v)...))
	case *model.Pool:
		return renderPool(v)
	case *model.Frontend:
		return []Fact{renderFrontend(v)}
	case *model.HealthCheck:
		return p.possible([]Fact{healthFact(iptables.IPv4, v.Port), healthFact(iptables.IPv6, v.Port)})
	case *model.ClusterIP:
		return p.possible([]Fact{renderClusterIP(v)})
	}
	panic(fmt.Sprintf("iptables: no facts for a %T", part))
}

// possible returns those of facts whose family has its commands.
func (p *Plane) possible(facts []Fact) []Fact {
	if p.conn == nil {
		return facts
	}
	return slices.DeleteFunc(facts, func(f Fact) bool { return !slices.Contains(p.conn.Families, f.Key.Family) })
}

// healthFact returns the fact that packets to a health check's port are accepted.
func healthFact(f iptables.Family, port uint16) Fact {
	any := netip.IPv4Unspecified()
	if f == iptables.IPv6 {
		any = netip.IPv6Unspecified()
	}
	return fact(Key{Kind: KindHealth, Family: f, Entry: model.Entry{Addr: any, Port: port, Protocol: model.TCP}}, "accept")
}

// renderRemotes returns the addresses of other nodes at which node ports are served.
func renderRemotes(v *model.ServiceNode) (facts []Fact) {
	for _, a := range v.RemoteNodePorts {
		facts = append(facts, remoteFact(a))
	}
	return facts
}

func remoteFact(a netip.Addr) Fact {
	return fact(Key{Kind: KindRemote, Family: iptables.FamilyOf(a), Entry: model.Entry{Addr: a}}, "serves node ports")
}

// renderNode returns what holds for this node, once for each family.
func (p *Plane) renderNode(v *model.ServiceNode) (facts []Fact) {
	for _, f := range iptables.Families {
		n := node{interfaces: interfaces(v.PodInterfaces), localhost: v.Localhost && f == iptables.IPv4,
			liberal: p.liberal != nil && p.liberal(), counted: p.counted}
		for _, r := range v.Pods {
			if iptables.FamilyOf(r.Addr()) == f {
				n.pods = append(n.pods, r)
			}
		}
		for _, r := range v.NodePorts {
			if iptables.FamilyOf(r.First) == f {
				n.ports = append(n.ports, r)
			}
		}
		for _, r := range v.ServiceRanges {
			if iptables.FamilyOf(r.First) == f {
				n.services = append(n.services, r)
			}
		}
		facts = append(facts, Fact{Key: Key{Kind: KindNode, Family: f}, Value: n.String(), Body: n})
	}
	if v.Localhost {
		facts = append(facts, fact(Key{Kind: KindSysctl, Family: iptables.IPv4, Name: routeLocalnet}, "1"))
	}
	return facts
}

// node is what the rules need to know of the node, of one family.
type node struct {
	pods       []netip.Prefix
	interfaces string // of pods, as iptables matches them: "cni0", "veth+" for a prefix, "" for none
	ports      []model.Range
	services   []model.Range // addresses to which packets are dropped that match no frontend
	localhost  bool
	liberal    bool // no packet is dropped for being invalid: connection tracking was told to be liberal
	counted    bool // the kernel has counters for what rules match
}

// interfaces returns how iptables matches interfaces. A prefix as long as a name can be is a name.
func interfaces(i model.Interfaces) string {
	if i.Prefix && len(i.Name) < unix.IFNAMSIZ-1 {
		return i.Name + "+"
	}
	return i.Name
}

// fromPods returns what matches packets of pods, each beginning a rule.
func (n *node) fromPods() (matches []string) {
	if n == nil {
		return nil
	}
	if n.interfaces != "" {
		matches = append(matches, "-i "+n.interfaces+" ")
	}
	for _, p := range n.pods {
		matches = append(matches, from(p))
	}
	return matches
}

// String returns the node fact's value, such as "node; pods 10.244.0.0/16; ports 0.0.0.0-126.255.255.255; services
// 10.96.0.0-10.96.255.255; localhost".
func (n node) String() string { return strings.Join(n.items(), "; ") }

// items returns it in pieces that fit into comments.
func (n node) items() []string {
	l := []string{"node"}
	for _, p := range n.pods {
		l = append(l, "pods "+p.String())
	}
	if n.interfaces != "" {
		l = append(l, "interfaces "+n.interfaces)
	}
	for _, r := range n.ports {
		l = append(l, "ports "+r.String())
	}
	for _, r := range n.services {
		l = append(l, "services "+r.String())
	}
	if n.localhost {
		l = append(l, "localhost")
	}
	if n.liberal {
		l = append(l, "liberal")
	}
	if n.counted {
		l = append(l, "counted")
	}
	return l
}

// parseNode reads what items gives.
func parseNode(items []string) (n node, err error) {
	for _, item := range items {
		what, of, _ := strings.Cut(item, " ")
		switch what {
		case "node":
		case "localhost":
			n.localhost = true
		case "liberal":
			n.liberal = true
		case "counted":
			n.counted = true
		case "pods":
			r, e := netip.ParsePrefix(of)
			n.pods, err = append(n.pods, r), firstOf(err, e)
		case "interfaces":
			n.interfaces = of
		case "ports":
			r, e := parseRange(of)
			n.ports, err = append(n.ports, r), firstOf(err, e)
		case "services":
			r, e := parseRange(of)
			n.services, err = append(n.services, r), firstOf(err, e)
		default:
			err = firstOf(err, fmt.Errorf("unknown word %q", what))
		}
	}
	return n, err
}

// parseRange reads "first-last".
func parseRange(text string) (model.Range, error) {
	first, last, _ := strings.Cut(text, "-")
	a, e1 := netip.ParseAddr(first)
	b, e2 := netip.ParseAddr(last)
	return model.Range{First: a, Last: b}, firstOf(e1, e2)
}

func firstOf(errs ...error) error {
	for _, e := range errs {
		if e != nil {
			return e
		}
	}
	return nil
}

// renderPool returns the pool's chain; one without backends has none.
func renderPool(v *model.Pool) []Fact {
	if len(v.Backends) == 0 {
		return nil
	}
	k := Key{Kind: KindPool, Family: iptables.FamilyOf(v.Backends[0].Addr.Addr()), Name: poolChain(v)}
	return []Fact{{Key: k, Value: poolOf(v).String(), Body: v}}
}

// poolOf returns what the chain of a pool does.
func poolOf(v *model.Pool) pool {
	p := pool{protocol: v.Protocol, seconds: int(v.Affinity.Seconds()),
		roundRobin: v.Scheduler == model.RoundRobin && len(v.Backends) > 1}
	for _, b := range v.Backends {
		share := b.Share()
		if p.roundRobin {
			share = 1
		}
		p.backends = append(p.backends, backend{b.Addr, share})
	}
	return p
}

// poolChain names a pool's chain.
func poolChain(v *model.Pool) string { return fmt.Sprintf("%s%016x", Prefix, v.ID) }

// isPool reports whether a chain is a pool's first one, and with more behind it one of its others.
func isPool(chain string) (first, other bool) {
	hex, ok := strings.CutPrefix(chain, Prefix)
	if !ok || len(hex) < 16 || strings.Trim(hex, "0123456789abcdef") != "" {
		return false, false
	}
	return len(hex) == 16, len(hex) == 19
}

// pool is what a pool's chain does.
type pool struct {
	protocol   model.Protocol
	seconds    int  // of affinity
	roundRobin bool // one after the other
	backends   []backend
}

// backend is where a connection may go, and how many shares of them.
type backend struct {
	addr  netip.AddrPort
	share int
}

// String returns the pool fact's value, such as "tcp affinity=10800 10.244.1.1:8080 10.244.2.1:8080*3".
func (p pool) String() string {
	b := []byte(p.protocol.String())
	if p.seconds > 0 {
		b = fmt.Appendf(b, " affinity=%d", p.seconds)
	}
	if p.roundRobin {
		b = append(b, " round-robin"...)
	}
	for _, e := range p.backends {
		b = e.addr.AppendTo(append(b, ' '))
		if e.share > 1 {
			b = strconv.AppendInt(append(b, '*'), int64(e.share), 10)
		}
	}
	return string(b)
}

func parseProtocol(name string) (model.Protocol, error) {
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if p.String() == name {
			return p, nil
		}
	}
	return 0, fmt.Errorf("%q is no protocol", name)
}

// renderFrontend returns an entry's place in the tree.
func renderFrontend(v *model.Frontend) Fact {
	f := &frontend{entry: v.Entry, internal: goal(v.Internal), external: goal(v.External), masqueradeFrom: v.Masquerade,
		restricted: v.Sources != nil, sources: v.Sources, remote: v.Remote}
	f.normalize()
	return f.fact()
}

// renderClusterIP returns what rejects packets to an address that match no frontend.
func renderClusterIP(v *model.ClusterIP) Fact {
	f := &frontend{entry: model.Entry{Addr: v.Addr}, internal: chainReject, external: chainReject}
	return f.fact()
}

// fact returns the fact of an entry's place in the tree.
func (f *frontend) fact() Fact {
	k := Key{Kind: KindFrontend, Family: iptables.FamilyOf(f.entry.Addr), Entry: f.entry}
	return Fact{Key: k, Value: f.String(), Body: f}
}

// goal returns the chain that serves a target.
func goal(t model.Target) string {
	switch {
	case len(t.Pool.Backends) > 0:
		return poolChain(t.Pool)
	case t.Empty == model.Drop:
		return chainDrop
	}
	return chainReject
}

// rejects reports whether a goal is a rejection.
func rejects(goal string) bool { return goal == chainDrop || goal == chainReject }

// frontend is what becomes of an entry's packets.
type frontend struct {
	entry              model.Entry
	internal, external string // the chains that clients there go to
	masqueradeFrom     model.Origins
	restricted         bool
	sources            []netip.Prefix // the only ones let in, if restricted
	remote             bool           // it is at other nodes' addresses, too
}

// normalize states in one way only that nothing is let in, and forgets whose source is hidden where no packet goes
// anywhere.
func (f *frontend) normalize() {
	if f.restricted && len(f.sources) == 0 {
		f.internal, f.external, f.restricted = chainDrop, chainDrop, false
	}
	if rejects(f.internal) && rejects(f.external) {
		f.masqueradeFrom = 0
	}
}

// everyPort reports whether f is a ClusterIP: it matches whatever other frontends don't.
func (f *frontend) everyPort() bool { return f.entry.Port == 0 }

// closed reports whether some packet may be refused, which the table filter does.
func (f *frontend) closed() bool { return f.restricted || rejects(f.internal) || rejects(f.external) }

// String returns the frontend fact's value, such as "to=FAIRLEAD-0123456789abcdef masquerade=5 from=10.0.0.0/8".
func (f *frontend) String() string {
	text := "to=" + f.internal
	if f.external != f.internal {
		text = "internal=" + f.internal + " external=" + f.external
	}
	if f.masqueradeFrom != 0 {
		text += " masquerade=" + strconv.Itoa(int(f.masqueradeFrom))
	}
	if f.remote {
		text += " remote"
	}
	if !f.restricted {
		return text
	}
	var from []string
	for _, s := range f.sources {
		from = append(from, s.String())
	}
	return text + " from=" + strings.Join(from, ",")
}
