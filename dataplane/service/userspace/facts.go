package userspace

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds. Those up to KindFrontend are held by the process, the others by the kernel.
const (
	KindNetns       Kind = iota // the way into the netns
	KindNode                    // which sources are pods; routes of the node's own addresses that take node ports
	KindPool                    // backends
	KindFrontend                // sockets, and the pools behind them
	KindRoute                   // an entry's address, in the table of its protocol and port
	KindReach                   // its address in the table for fragments
	KindRule                    // the way to the table of a protocol and port
	KindNodePort                // the way of a protocol and port to the table of the node's own addresses
	KindFragments               // the way to that table
	KindClusterIP               // an address's way, whatever the port: to the netns, where nothing listens
	KindUnallocated             // a prefix to which packets are dropped; its length stands as the port
	KindUnmatched               // the way to the table of those two
)

// Key names a fact: a pool by its ID, all else by an entry, of which parts may stand for any.
type Key struct {
	Kind  Kind
	Pool  uint64
	Entry model.Entry
}

// Fact is a fact of this plane. Its value is text that says all there is to say, its body the part of the model.
type Fact = dataplane.Fact[Key, string]

// String returns "frontend 10.96.0.1:80/tcp", "pool 1f", "rule 80/tcp of ipv4".
func (k Key) String() string {
	family := "ipv4"
	if k.Entry.Addr.Is6() {
		family = "ipv6"
	}
	switch k.Kind {
	case KindNetns:
		return "room"
	case KindNode:
		return "node"
	case KindPool:
		return fmt.Sprintf("pool %x", k.Pool)
	case KindFrontend:
		return "frontend " + k.Entry.String()
	case KindRoute:
		return "route to " + k.Entry.String()
	case KindReach:
		return "route of fragments to " + k.Entry.Addr.String()
	case KindNodePort:
		return "rule " + k.Entry.String()
	case KindClusterIP:
		return "route to " + k.Entry.Addr.String()
	case KindUnallocated:
		return "route to " + k.prefix().String()
	case KindUnmatched:
		return "rule of " + family + " for what no frontend matches"
	case KindRule:
		return fmt.Sprintf("rule %d/%s of %s", k.Entry.Port, k.Entry.Protocol, family)
	}
	return fmt.Sprintf("rules of %s for fragments", family)
}

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	switch k.Kind {
	case KindRoute, KindReach, KindClusterIP, KindUnallocated:
		return "route"
	case KindRule, KindNodePort, KindUnmatched:
		return "rule"
	}
	return [...]string{KindNetns: "room", KindNode: "node", KindPool: "pool", KindFrontend: "frontend",
		KindFragments: "rules"}[k.Kind]
}

// Rank implements dataplane.Key: a packet finds its way last.
func (k Key) Rank() int {
	return [...]int{KindNetns: 0, KindNode: 1, KindPool: 2, KindFrontend: 3, KindRoute: 4, KindReach: 4, KindRule: 5,
		KindNodePort: 5, KindFragments: 5,
		KindClusterIP: 6, KindUnallocated: 6, KindUnmatched: 6}[k.Kind]
}

// there is the value of facts that only are or are not.
const there = "there"

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.ServicePart) []Fact {
	switch v := part.(type) {
	case *model.ServiceNode:
		return node(v)
	case *model.Pool:
		return []Fact{{Key: Key{Kind: KindPool, Pool: v.ID}, Value: poolText(v), Body: v}}
	case *model.Frontend:
		return frontendFacts(v)
	case *model.ClusterIP:
		k := Key{Kind: KindClusterIP, Entry: model.Entry{Addr: v.Addr}}
		return []Fact{{Key: k, Value: there}, unmatchedRule(v.Addr)}
	}
	panic(fmt.Sprintf("userspace: no facts for a %T", part))
}

func node(v *model.ServiceNode) []Fact {
	facts := []Fact{
		{Key: Key{Kind: KindNetns}, Value: there},
		{Key: Key{Kind: KindNode}, Value: nodeText(v), Body: v},
	}
	ruled := map[netip.Addr]bool{}
	for _, r := range v.ServiceRanges {
		for _, p := range r.Prefixes() {
			k := Key{Kind: KindUnallocated, Entry: model.Entry{Addr: p.Addr(), Port: uint16(p.Bits())}}
			facts = append(facts, Fact{Key: k, Value: there})
		}
		if every := inet.Unspecified(r.First); !ruled[every] {
			ruled[every] = true
			facts = append(facts, unmatchedRule(every))
		}
	}
	return facts
}

// unmatchedRule returns the fact that a family's packets that no frontend matches are looked up in their table.
func unmatchedRule(a netip.Addr) Fact {
	return Fact{Key: Key{Kind: KindUnmatched, Entry: model.Entry{Addr: inet.Unspecified(a)}}, Value: there}
}

// prefix returns what a KindUnallocated is about.
func (k Key) prefix() netip.Prefix { return netip.PrefixFrom(k.Entry.Addr, int(k.Entry.Port)) }

func frontendFacts(v *model.Frontend) []Fact {
	e := v.Entry
	facts := []Fact{{Key: Key{Kind: KindFrontend, Entry: e}, Value: frontendText(v), Body: v}}
	if e.AnyAddr() {
		return append(facts, Fact{Key: Key{Kind: KindNodePort, Entry: e}, Value: there})
	}
	if acceptsFragments(v) {
		facts = append(facts, Fact{Key: Key{Kind: KindReach, Entry: model.Entry{Addr: e.Addr}}, Value: there},
			Fact{Key: Key{Kind: KindFragments, Entry: model.Entry{Addr: inet.Unspecified(e.Addr)}}, Value: there})
	}
	return append(facts,
		Fact{Key: Key{Kind: KindRoute, Entry: e}, Value: there},
		Fact{Key: Key{Kind: KindRule, Entry: model.Entry{Addr: inet.Unspecified(e.Addr), Port: e.Port, Protocol: e.Protocol}},
			Value: there})
}

// acceptsFragments reports whether a frontend receives the fragments of datagrams to its address, which show no port.
// Only a clusterIP is no host's address: at an external or load balancer IP a host would lose all its fragments.
func acceptsFragments(f *model.Frontend) bool {
	return f.Entry.Protocol == model.UDP && f.Via == model.ViaClusterIP
}

// list joins what prints itself.
func list[T fmt.Stringer](of []T) string {
	l := make([]string, len(of))
	for i, x := range of {
		l[i] = x.String()
	}
	return strings.Join(l, ",")
}

// nodeText returns "pods=10.244.0.0/16 nodeports=10.0.0.1-10.0.0.9,…", or "pods= interfaces=veth* nodeports=…".
func nodeText(v *model.ServiceNode) string {
	interfaces := ""
	if v.PodInterfaces.Name != "" {
		interfaces = " interfaces=" + v.PodInterfaces.String()
	}
	return "pods=" + list(v.Pods) + interfaces + " nodeports=" + list(v.NodePorts)
}

// poolText returns "tcp maglev ports=true affinity=3h0m0s 10.244.0.1:80=2 10.244.0.2:80=1": each backend with its
// share, and each endpoint that gets no new flow with 0.
func poolText(v *model.Pool) string {
	b := fmt.Appendf(nil, "%s %s ports=%t affinity=%s", v.Protocol, v.Scheduler, v.Ports, v.Affinity)
	for _, e := range v.Backends {
		b = e.Addr.AppendTo(append(b, ' '))
		b = strconv.AppendInt(append(b, '='), int64(e.Share()), 10)
	}
	for _, e := range v.Unselected {
		b = append(e.Addr.AppendTo(append(b, ' ')), "=0"...)
	}
	return string(b)
}

// frontendText returns "internal=1f,reject external=2e,drop from=10.0.0.0/8,…", the last only where sources are
// limited.
func frontendText(v *model.Frontend) string {
	side := func(t model.Target) string { return fmt.Sprintf("%x,%s", t.Pool.ID, t.Empty) }
	s := "internal=" + side(v.Internal) + " external=" + side(v.External)
	if v.Sources != nil {
		s += " from=" + list(v.Sources)
	}
	return s
}
