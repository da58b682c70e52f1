// Package model holds the nouns of a decided node: what a data plane is to do, with every question of meaning answered.
//
// Values are immutable once built: the same pointer means no change. There is no I/O here, no Kubernetes and no
// behaviour beyond printing and comparing.
package model

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Protocol is a transport protocol by its IP protocol number.
type Protocol uint8

// The protocols of Services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String gives "tcp", "udp", "sctp", or the number.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprint(uint8(p))
}

// Origin tells where a packet comes from, seen from this node.
type Origin uint8

// The origins. An address of this node wins over a pod's range that holds it.
const (
	FromNode    Origin = iota // the source is one of this node's own addresses
	FromPod                   // the source is a pod's, by Node.Pods or Node.PodInterfaces
	FromOutside               // anything else
)

// String gives "node", "pod" or "outside".
func (o Origin) String() string { return [...]string{"node", "pod", "outside"}[o] }

// Origins is a set of origins, a bit each (1 << Origin).
type Origins uint8

// OriginsOf makes a set.
func OriginsOf(os ...Origin) (s Origins) {
	for _, o := range os {
		s |= 1 << o
	}
	return s
}

// AllOrigins holds every origin.
const AllOrigins = Origins(1<<FromNode | 1<<FromPod | 1<<FromOutside)

// Has says whether o is in the set.
func (s Origins) Has(o Origin) bool { return s&(1<<o) != 0 }

// String gives the members, comma-separated, or "none".
func (s Origins) String() string {
	var l []string
	for _, o := range []Origin{FromNode, FromPod, FromOutside} {
		if s.Has(o) {
			l = append(l, o.String())
		}
	}
	if l == nil {
		return "none"
	}
	return strings.Join(l, ",")
}

// Action is what becomes of a packet that has no backend to go to.
type Action uint8

// The actions.
const (
	Reject Action = iota // answer: TCP reset, or ICMP port unreachable
	Drop                 // silence
)

// String gives "reject" or "drop".
func (a Action) String() string { return [...]string{"reject", "drop"}[a] }

// Part is one piece of a decided node that a service data plane serves: *Node, *Pool, *Frontend or *ClusterIP; and
// *HealthCheck, for a plane that accepts packets to them.
type Part interface{ part() }

func (*Node) part()      {}
func (*Pool) part()      {}
func (*Frontend) part()  {}
func (*ClusterIP) part() {}

func (*HealthCheck) part() {}

// Range is the addresses from First to Last, both included, of one family.
type Range struct{ First, Last netip.Addr }

// Contains says whether a is in the range.
func (r Range) Contains(a netip.Addr) bool {
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// String gives "first-last".
func (r Range) String() string { return r.First.String() + "-" + r.Last.String() }

// Interfaces names network interfaces of the node: one, or with Prefix all whose names begin with Name. The zero value
// names none.
type Interfaces struct {
	Name   string
	Prefix bool
}

// Has reports whether i names the interface of that name.
func (i Interfaces) Has(name string) bool {
	if i.Name == "" {
		return false
	}
	return name == i.Name || i.Prefix && strings.HasPrefix(name, i.Name)
}

// String returns "cni0", "veth*", or "" for none.
func (i Interfaces) String() string {
	if i.Prefix {
		return i.Name + "*"
	}
	return i.Name
}

// Node is what holds for this node whatever the Service.
type Node struct {
	Name      string
	Addresses []netip.Addr   // the node's own, as far as known; sorted. For verdict: a kernel knows its addresses itself
	Pods      []netip.Prefix // sources that count as pods; sorted, none inside another
	// PodInterfaces are interfaces of this node: what comes in by them counts as pods', whatever its source. Pods is
	// empty then.
	PodInterfaces Interfaces
	NodePorts     []Range // own addresses within these take NodePort traffic; sorted, disjoint
	// ServiceRanges are addresses that only Services have: packets to one that is no ClusterIP and match no frontend are
	// dropped. Sorted, disjoint.
	ServiceRanges []Range
	Localhost     bool           // NodePorts include IPv4 loopback addresses: the kernel must let such packets leave
	Direct        bool           // nodes tell each other what clients asked, so that a backend's node can answer (Frontend.Direct)
	Nodes         []netip.Addr   // with Direct: addresses by which the cluster's nodes know each other, this one's too; sorted
	Behind        []netip.Prefix // with Direct: where this node's pods are, whether or not they count as such. What another node answers them by an address of this one's would not be let in here
}

// Pool is a set of backends that frontends share, and how a client is given one.
type Pool struct {
	ID       uint64 // stands for Name: stable over restarts and nodes, different for different names
	Name     string // for people, such as "shop/web:http tcp ipv4 cluster"
	Protocol Protocol
	Backends []Backend     // sorted by address and port, no duplicates, one family
	Affinity time.Duration // how long after its last connection a client address returns to its backend; 0: not at all

	// Unselected holds the other serving endpoints of the port, which get no new flow: traffic policy, topology or
	// their termination forbids it. A flow of UDP or SCTP that one of them has stays there. Sorted, without weights,
	// none of Backends; nil for TCP.
	Unselected []Backend

	Scheduler Scheduler // how a client that has no affinity is given a backend
	Ports     bool      // a Scheduler that hashes the client's address hashes its port too
	Entries   int       // of Maglev's table, a prime; 0: as many as the plane sees fit
}

// Serves reports whether a flow that has the endpoint at a stays there.
func (p *Pool) Serves(a netip.AddrPort) bool {
	has := func(l []Backend) bool {
		_, found := slices.BinarySearchFunc(l, a, func(b Backend, a netip.AddrPort) int { return b.Addr.Compare(a) })
		return found
	}
	return has(p.Backends) || has(p.Unselected)
}

// Backend is one place that answers.
type Backend struct {
	Addr  netip.AddrPort
	Local bool // runs on this node: its own packets to a frontend may come back to it
	Away  bool // runs on another node of the cluster, which may answer clients itself (Frontend.Direct)
	// Weight is how many connections the backend is to get against the others of its pool. 0 is as 1: where all weigh the
	// same, all are 0. Weights of a pool have no common divisor. At most MaxWeight.
	Weight uint16
}

// MaxWeight is the largest weight.
const MaxWeight = 256

// Share gives the backend's weight as a number to reckon with: from 1 to MaxWeight.
func (b Backend) Share() int { return max(int(b.Weight), 1) }

// Entry is where traffic enters. An unspecified Addr (0.0.0.0 or ::) stands for every address in Node.NodePorts.
type Entry struct {
	Addr     netip.Addr
	Port     uint16
	Protocol Protocol
}

// AnyAddr says whether the entry is a node port.
func (e Entry) AnyAddr() bool { return e.Addr.IsUnspecified() }

// String gives "10.96.0.1:80/tcp", or "*4:30080/tcp" and "*6:30080/tcp" for node ports.
func (e Entry) String() string {
	if e.AnyAddr() {
		f := 6
		if e.Addr.Is4() {
			f = 4
		}
		return fmt.Sprintf("*%d:%d/%s", f, e.Port, e.Protocol)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(e.Addr, e.Port), e.Protocol)
}

// Compare orders entries by address, port and protocol.
func (e Entry) Compare(o Entry) int {
	if c := e.Addr.Compare(o.Addr); c != 0 {
		return c
	}
	if c := int(e.Port) - int(o.Port); c != 0 {
		return c
	}
	return int(e.Protocol) - int(o.Protocol)
}

// Target is where one side's packets go.
type Target struct {
	Pool  *Pool  // never nil
	Empty Action // when the pool has no backend
}

// ViaClusterIP is the Via of a frontend whose address is the Service's alone: no host has it.
const ViaClusterIP = "ClusterIP"

// Frontend is one entry and what becomes of the packets that come to it.
type Frontend struct {
	Service string // for people, "namespace/name:port name"
	Via     string // which of the Service's addresses it is: ViaClusterIP, NodePort, ExternalIP or LoadBalancer
	Entry   Entry
	Inside  Target  // for FromNode and FromPod
	Outside Target  // for FromOutside; the same pool as Inside unless clients there see other backends
	Hide    Origins // whose source address becomes this node's; a packet back to its own pod is always hidden
	// Direct is which of those in Hide keep their source address before backends on this node, and before backends on others,
	// whose nodes then answer them past this one. Not clients that are nodes or the backend itself, and of a node port not those that
	// ask an address that isn't in Node.Nodes.
	Direct Origins
	// Onward says that a backend is at another frontend's entry. It must be translated where its packets pass, and
	// once: packets that a socket sends to such a backend would be taken for that entry's.
	Onward  bool
	Sources []netip.Prefix // the only sources let in; nil lets all in. Sorted, none inside another, Entry's family
}

// ClusterIP is an address that is a Service's alone: packets to it that match no frontend are rejected, whatever their port
// and protocol, unless it is also an address of the node itself.
type ClusterIP struct {
	Service string // for people, "namespace/name"
	Addr    netip.Addr
}

// Target gives the side that serves packets of origin o.
func (f *Frontend) Target(o Origin) Target {
	if o == FromOutside {
		return f.Outside
	}
	return f.Inside
}

// HealthCheck is a port on which this node tells load balancers whether it has backends of a Service.
type HealthCheck struct {
	Service string // "namespace/name"
	Port    uint16
	Local   int // ready backends on this node
	// Addresses are where it is served, sorted; nil: at all of the node.
	Addresses []netip.Addr
}

// Delta is a change of a decided node: parts that are now, and parts that are no more. A changed part has its old value
// in Del and its new one in Put.
type Delta struct {
	Put, Del             []Part
	PutHealth, DelHealth []*HealthCheck
	Triggered            []time.Time // when what the change tells of happened, by the cluster's clock, as far as it is known
}

// Empty says that nothing changed.
func (d Delta) Empty() bool {
	return len(d.Put)+len(d.Del)+len(d.PutHealth)+len(d.DelHealth) == 0
}

// Services is a whole decided node.
type Services struct {
	Node         *Node
	Frontends    map[Entry]*Frontend
	ClusterIPs   map[netip.Addr]*ClusterIP
	HealthChecks []*HealthCheck
}

// Sorted gives the frontends in the order of their entries.
func (s *Services) Sorted() []*Frontend {
	l := make([]*Frontend, 0, len(s.Frontends))
	for _, f := range s.Frontends {
		l = append(l, f)
	}
	slices.SortFunc(l, func(a, b *Frontend) int { return a.Entry.Compare(b.Entry) })
	return l
}

// Pools gives the pools of all frontends, each once, by name.
func (s *Services) Pools() []*Pool {
	seen := map[*Pool]bool{}
	for _, f := range s.Frontends {
		seen[f.Inside.Pool], seen[f.Outside.Pool] = true, true
	}
	l := make([]*Pool, 0, len(seen))
	for p := range seen {
		l = append(l, p)
	}
	slices.SortFunc(l, func(a, b *Pool) int { return strings.Compare(a.Name, b.Name) })
	return l
}

// Parts gives everything a service data plane serves: the node, then pools, then frontends, then ClusterIPs.
func (s *Services) Parts() []Part {
	l := []Part{s.Node}
	for _, p := range s.Pools() {
		l = append(l, p)
	}
	for _, f := range s.Sorted() {
		l = append(l, f)
	}
	for _, a := range slices.SortedFunc(maps.Keys(s.ClusterIPs), netip.Addr.Compare) {
		l = append(l, s.ClusterIPs[a])
	}
	return l
}
