package model

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// ServicePart is one piece of a decided node that a service data plane serves: *ServiceNode, *Pool, *Frontend or
// *ClusterIP; and *HealthCheck, for a plane that accepts packets to them.
type ServicePart interface{ servicePart() }

func (*ServiceNode) servicePart() {}
func (*Pool) servicePart()        {}
func (*Frontend) servicePart()    {}
func (*ClusterIP) servicePart()   {}
func (*HealthCheck) servicePart() {}

// ServiceNode is what holds for all Services of a node.
type ServiceNode struct {
	*Node             // never nil
	NodePorts []Range // own addresses within these accept NodePort traffic; sorted, disjoint
	// RemoteNodePorts are addresses of other nodes that accept NodePort traffic: what this node and its pods send there
	// is translated here (Frontend.Remote). Sorted.
	RemoteNodePorts []netip.Addr
	// ServiceRanges are addresses that only Services have: packets to one that is no ClusterIP and match no frontend are
	// dropped. Sorted, disjoint.
	ServiceRanges []Range
	Localhost     bool // frontends may be at IPv4 loopback addresses: the kernel must let such packets leave
	// nodes tell each other what clients asked, so that a backend's node can answer (Frontend.DSR)
	DSR   bool
	Nodes []netip.Addr // with Direct: addresses by which the cluster's nodes know each other, this one's too; sorted
	// PodCIDRs is with Direct where this node's pods are, whether or not they count as such. What another node answers
	// them by an address of this one's would not be let in here.
	PodCIDRs []netip.Prefix
}

// Action is what becomes of a packet that has no backend to go to.
type Action uint8

// The actions.
const (
	Reject Action = iota // answer: TCP reset, or ICMP port unreachable
	Drop                 // silence
)

// String returns "reject" or "drop".
func (a Action) String() string { return [...]string{"reject", "drop"}[a] }

// Pool is a set of backends that frontends share, and how a client is given one.
type Pool struct {
	ID       uint64 // stands for Name: stable over restarts and nodes, different for different names
	Name     string // for people, such as "shop/web:http tcp ipv4 cluster"
	Owner    Owner
	Service  string        // for people: the Frontend.Service of those that lead to it
	Backends []Backend     // sorted by address and port, no duplicates, one family
	Affinity time.Duration // how long after its last connection a client address returns to its backend; 0: not at all

	// Unselected holds the other serving endpoints of the port, which get no new flow: traffic policy, topology or
	// their termination forbids it. A flow of UDP or SCTP that one of them has stays there. Sorted, without weights,
	// none of Backends; nil for TCP.
	Unselected []Backend

	Protocol  Protocol
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
	Addr   netip.AddrPort
	Local  bool // runs on this node: its own packets to a frontend may come back to it
	Remote bool // runs on another node of the cluster, which may answer clients itself (Frontend.DSR)
	// Weight is how many connections the backend is to get against the others of its pool. 0 is as 1: where all weigh the
	// same, all are 0. Weights of a pool have no common divisor. At most MaxWeight.
	Weight uint16
}

// MaxWeight is the largest weight.
const MaxWeight = 256

// Share returns the backend's weight as a number to reckon with: from 1 to MaxWeight.
func (b Backend) Share() int { return max(int(b.Weight), 1) }

// Entry is where traffic enters. An unspecified Addr (0.0.0.0 or ::) stands for every address in Node.NodePorts.
type Entry struct {
	Addr     netip.Addr
	Port     uint16
	Protocol Protocol
}

// AnyAddr reports whether the entry is a node port.
func (e Entry) AnyAddr() bool { return e.Addr.IsUnspecified() }

// String returns "10.96.0.1:80/tcp", or "*4:30080/tcp" and "*6:30080/tcp" for node ports.
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

// ViaHostPort is the Via of a frontend that is a pod's host port: its one backend is a pod of this node.
const ViaHostPort = "HostPort"

// Frontend is one entry and what becomes of the packets that come to it.
type Frontend struct {
	Owner      Owner
	Service    string // for people, "namespace/name:port name"
	Via        string // which of the addresses it is: ViaClusterIP, ViaHostPort, NodePort, ExternalIP or LoadBalancer
	Entry      Entry
	Internal   Target  // for FromNode and FromPod
	External   Target  // for FromExternal; the same pool as Inside unless clients there see other backends
	Masquerade Origins // whose source address becomes this node's; a packet back to its own pod is always hidden
	// DSR is which of those in Hide keep their source address before backends on this node, and before backends on others,
	// whose nodes then answer them past this one. Not clients that are nodes or the backend itself, and of a node port not
	// those that ask an address that isn't in Node.Nodes.
	DSR Origins
	// Onward reports that a backend is at another frontend's entry. It must be translated where its packets pass, and
	// once: packets that a socket sends to such a backend would be taken for that entry's.
	Onward bool
	// Remote reports that a node port also stands for ServiceNode.RemoteNodePorts, for FromNode and FromPod. There a pod's
	// source isn't masqueraded, whatever Masquerade says, but on the way back to itself.
	Remote bool
	// Shared reports that it is a ClusterIP which this node has at a device of its own, as NodeLocal DNSCache does: a
	// process of the node that is bound to the entry goes before the Service.
	Shared  bool
	Sources []netip.Prefix // the only sources let in; nil lets all in. Sorted, none inside another, Entry's family
}

// ClusterIP is an address that is a Service's alone: packets to it that match no frontend are rejected, whatever their
// port and protocol, unless it is also an address of the node itself.
type ClusterIP struct {
	Owner Owner
	Addr  netip.Addr
}

// Target returns the side that serves packets of origin o.
func (f *Frontend) Target(o Origin) Target {
	if o == FromExternal {
		return f.External
	}
	return f.Internal
}

// HealthCheck is a port on which this node tells load balancers whether it has backends of a Service.
type HealthCheck struct {
	Owner Owner
	Port  uint16
	Local int // ready backends on this node
	// Addresses are where it is served, sorted; nil: at all of the node.
	Addresses []netip.Addr
}
