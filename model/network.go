package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// NetworkPart is one piece of a decided node that a data plane of the pod network serves: *Network, *Route or
// *Attachment.
type NetworkPart interface{ networkPart() }

func (*Network) networkPart()    {}
func (*Route) networkPart()      {}
func (*Attachment) networkPart() {}

// Network is what holds for this node's pod network whatever the pod.
type Network struct {
	Node       string
	Ranges     []netip.Prefix // addresses for pods here, sorted; those that no pod has are unreachable
	Device     DeviceKind     // of new pods
	Child      *Child         // nil: Device is no IPVLAN
	MTU        int            // of pods' devices, bytes
	Tunnel     *Tunnel        // nil: this node neither sends nor receives through one
	Masquerade *Masquerade    // nil: what pods send keeps its source
}

// Masquerade is that what pods of this node send out of the cluster gets the node's address.
type Masquerade struct {
	Except []netip.Prefix // destinations outside that see the pod's own address; sorted and disjoint
}

// DeviceKind is how a pod is connected to its node.
type DeviceKind uint8

// The kinds of devices.
const (
	Veth     DeviceKind = iota // a veth pair
	Netkit                     // a netkit pair
	IPVLANL2                   // a child of the uplink; what is for no other pod arrives at the uplink
	IPVLANL3                   // a child of the uplink; what is for no other pod is sent by the uplink
)

var deviceKinds = [...]string{"veth", "netkit", "ipvlan-l2", "ipvlan-l3"}

// DeviceKinds returns the names of all kinds.
func DeviceKinds() []string { return deviceKinds[:] }

// DeviceKindOf returns the kind of a name, Veth for "" and others than DeviceKinds.
func DeviceKindOf(name string) DeviceKind {
	return DeviceKind(max(0, slices.Index(deviceKinds[:], name)))
}

// String returns the kind's name, such as "veth".
func (k DeviceKind) String() string { return deviceKinds[k] }

// IPVLAN reports whether pods share the uplink's link-layer address, so that no device on the node is theirs alone, and
// packets between them bypass the node's network stack.
func (k DeviceKind) IPVLAN() bool { return k == IPVLANL2 || k == IPVLANL3 }

// ChildDevice is the node's own child of the uplink, by which it reaches pods that are connected by IPVLAN.
const ChildDevice = "fl-node"

// Child is what ChildDevice is like.
type Child struct {
	Uplink string       // the device that it and pods' devices are children of
	Own    []netip.Addr // this node's addresses inside Network.Ranges, sorted: the sources of what it sends to pods
}

func (c *Child) equal(o *Child) bool {
	if c == nil || o == nil {
		return c == o
	}
	return c.Uplink == o.Uplink && slices.Equal(c.Own, o.Own)
}

// TunnelKind is how an overlay encapsulates packets.
type TunnelKind uint8

// The kinds of tunnels.
const (
	VXLAN TunnelKind = iota // RFC 7348
	IPIP                    // RFC 2003: IPv4 inside IPv4
)

// String returns "VXLAN" or "IPIP".
func (k TunnelKind) String() string { return [...]string{"VXLAN", "IPIP"}[k] }

// Tunnel is this node's end of the overlay.
type Tunnel struct {
	Kind      TunnelKind
	VNI       uint32         // VXLAN
	Port      uint16         // VXLAN: UDP, of every node
	Local     netip.Addr     // outer source
	MAC       [6]byte        // VXLAN: of the end itself
	Uplink    string         // the device by which packets to other nodes leave
	MTU       int            // of packets inside, bytes
	Own       []netip.Addr   // this node's addresses inside Network.Ranges, sorted: of clients that it masquerades
	Pods      []netip.Prefix // those of Network.Ranges whose packets take Routes that are PodsOnly; sorted
	AnySource bool           // direct server return: packets of external clients come through it too, with their source
}

// Equal reports whether n and o say the same.
func (n *Network) Equal(o *Network) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Node == o.Node && slices.Equal(n.Ranges, o.Ranges) && n.Device == o.Device && n.Child.equal(o.Child) &&
		n.MTU == o.MTU && n.Tunnel.equal(o.Tunnel) && n.Masquerade.equal(o.Masquerade)
}

func (m *Masquerade) equal(o *Masquerade) bool {
	if m == nil || o == nil {
		return m == o
	}
	return slices.Equal(m.Except, o.Except)
}

func (t *Tunnel) equal(o *Tunnel) bool {
	if t == nil || o == nil {
		return t == o
	}
	return t.Kind == o.Kind && t.VNI == o.VNI && t.Port == o.Port && t.Local == o.Local && t.MAC == o.MAC &&
		t.Uplink == o.Uplink && t.MTU == o.MTU && t.AnySource == o.AnySource && slices.Equal(t.Own, o.Own) &&
		slices.Equal(t.Pods, o.Pods)
}

// Hop is how packets get to another node.
type Hop uint8

// The kinds of hops.
const (
	Direct      Hop = iota // the node is on a link of this one: by its address there
	Tunneled               // inside the tunnel
	External               // by routers: this node's other routes decide, none is written
	Unreachable            // there is no way that may be taken: they are rejected
)

// String returns "direct", "tunneled", "external" or "unreachable".
func (h Hop) String() string { return [...]string{"direct", "tunneled", "external", "unreachable"}[h] }

// Route is how packets for another node get there: one for each range of its pods and, where those are Tunneled, for
// each of its own addresses. Routes are comparable.
type Route struct {
	Node   string
	To     netip.Prefix
	Via    netip.Addr // the node's address: next hop, or outer destination; zero where it isn't needed
	Device string     // Direct: the device that Via is behind
	Source netip.Addr // of what this node sends there itself; zero: the kernel's choice
	// End is the node's end of the tunnel, by whatever hop its pods are reached: the outer source of what it sends through
	// the tunnel; zero: this node has no tunnel, or that node no address for it
	End netip.Addr
	// Internal is the node's own address of To's family, where it has an End and that is another: the source of its
	// replies to pods; zero: it has none
	Internal netip.Addr

	// Tunneled: the node is on a link of this one, and may send directly while the overlay is being changed
	OnLink bool

	Gateway netip.Addr // Tunneled, VXLAN: the next hop inside the tunnel
	MAC     [6]byte    // Tunneled, VXLAN: of the far end
	Hop     Hop
	Tunnel  TunnelKind // Tunneled: of which kind
	// Tunneled: To is an address of the node itself, which packets of this node's pods (Tunnel.Pods) reach through the
	// tunnel, and all others by the underlay
	PodsOnly bool
}

// String returns text such as "10.244.2.0/24 of node b: tunneled via 192.168.0.2".
func (r *Route) String() string {
	s := fmt.Sprintf("%s of node %s: %s", r.To, r.Node, r.Hop)
	if r.Via.IsValid() {
		s += fmt.Sprintf(" via %s", r.Via)
	}
	return s
}

// Attachment is a pod's interface on this node.
type Attachment struct {
	ID        string       // container and interface, as the runtime names them
	Pod       string       // "namespace/name", for people
	UID       string       // of the Pod; "": not known
	Addresses []netip.Addr // at most one a family
	Kind      DeviceKind
	Interface string         // the pod's end of the device, in its network namespace
	Device    string         // the node's end; of IPVLAN a name that no device of the node has
	NetNS     string         // path of the pod's network namespace
	MACs      Ends           // not of IPVLAN: those of the uplink
	MTU       int            // of both ends, bytes
	Sources   []netip.Prefix // of what it may send beside Addresses, sorted and disjoint
	Limits    Limits
}

// Limits are how many bits a second a pod may receive and send, link-layer headers among them; 0: as many as it can.
type Limits struct{ Ingress, Egress uint64 }

// Ends are the link-layer addresses of the node's and the pod's end of a device.
type Ends struct{ Node, Pod [6]byte }

// Gateways are the next hops of pods, IPv4's and IPv6's: link-local addresses that the node has on no device, since
// pods know their link-layer address.
var Gateways = [2]netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}

// NetworkOwner returns the Node or attachment that a part is made for.
func NetworkOwner(p NetworkPart) Owner {
	switch v := p.(type) {
	case *Network:
		return Owner{Kind: KindNode, Name: v.Node}
	case *Route:
		return Owner{Kind: KindNode, Name: v.Node}
	case *Attachment:
		return Owner{Kind: KindAttachment, Name: v.ID}
	}
	return Owner{}
}

// NetworkLabel returns the name of what a part is for, for people.
func NetworkLabel(p NetworkPart) string {
	if a, is := p.(*Attachment); is && a.Pod != "" {
		return "pod " + a.Pod
	}
	return NetworkOwner(p).String()
}

// PodNetwork is the network parts of a whole decided node.
type PodNetwork struct {
	Network *Network // nil: not decided yet
	Routes  []*Route // sorted by To; disjoint
}

// Parts returns all parts, the network first.
func (n *PodNetwork) Parts() (l []NetworkPart) {
	if n.Network != nil {
		l = append(l, n.Network)
	}
	for _, r := range n.Routes {
		l = append(l, r)
	}
	return l
}

// Route returns the route to another node's pod, or of pods to another node, nil where there is none.
func (n *PodNetwork) Route(a netip.Addr) *Route {
	i, found := slices.BinarySearchFunc(n.Routes, a, func(r *Route, a netip.Addr) int {
		return cmp.Compare(r.To.Addr().BitLen(), a.BitLen())*2 + r.To.Addr().Compare(a)
	})
	if !found {
		i--
	}
	if i >= 0 && n.Routes[i].To.Contains(a) {
		return n.Routes[i]
	}
	return nil
}
