package attachment

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/model"
)

// Protocol marks routes to this node's pods (rtm_protocol).
const Protocol = network.PodRoutes

// alias is how the aliases of this package's devices begin.
const alias = "fairlead:"

// Fact is one thing that this plane writes.
type Fact = dataplane.Fact[Key, Value]

// Kind is a kind of fact.
type Kind uint8

// The kinds, by rank.
const (
	KindDevice Kind = iota
	KindSetting
	KindLimit
	KindNeighbour
	KindRoute
)

var kindNames = [...]string{"device", "setting", "limit", "neighbour", "route"}

// Key names a fact.
type Key struct {
	Kind   Kind
	Device string     // not KindRoute
	Addr   netip.Addr // KindNeighbour, KindRoute
}

// Rank implements dataplane.Key.
func (k Key) Rank() int { return int(k.Kind) }

// Group implements dataplane.Grouped.
func (k Key) Group() string { return kindNames[k.Kind] }

// String returns text such as "route 10.244.1.5".
func (k Key) String() string {
	s := kindNames[k.Kind]
	if k.Device != "" {
		s += " " + k.Device
	}
	if k.Addr.IsValid() {
		s += " " + k.Addr.String()
	}
	return s
}

// Value is what a fact says. Fields that its kind doesn't use are zero.
type Value struct {
	Alias  string  // KindDevice
	MAC    [6]byte // KindDevice, KindNeighbour
	MTU    int     // KindDevice
	Device string  // KindRoute
	Rate   uint64  // KindLimit: bytes a second that the node sends to the pod
	Other  string  // what is held instead and never wanted; KindSetting: the values
}

// aliasOf returns the alias of an attachment's device. The kernel's limit is 255 bytes.
func aliasOf(a *model.Attachment) string { return alias + a.ID[:min(len(a.ID), 255-len(alias))] }

// Render implements dataplane.Plane.
func (*Plane) Render(p model.NetworkPart) []Fact {
	a, is := p.(*model.Attachment)
	if !is {
		return nil
	}
	if a.Kind.IPVLAN() {
		return renderIPVLAN(a)
	}
	l := []Fact{
		{Key: Key{Kind: KindDevice, Device: a.Device}, Value: Value{Alias: aliasOf(a), MAC: a.MACs.Node, MTU: a.MTU},
			Body: a},
		{Key: Key{Kind: KindSetting, Device: a.Device}},
	}
	if rate := a.Limits.Ingress / 8; rate > 0 {
		l = append(l, Fact{Key: Key{Kind: KindLimit, Device: a.Device}, Value: Value{Rate: rate}})
	}
	for _, x := range a.Addresses {
		l = append(l, Fact{Key: Key{Kind: KindNeighbour, Device: a.Device, Addr: x}, Value: Value{MAC: a.MACs.Pod}},
			Fact{Key: Key{Kind: KindRoute, Addr: x}, Value: Value{Device: a.Device}})
	}
	return l
}

// Join implements dataplane.Joiner: other parts than attachments, of which there are some for each node, have no facts
// here.
func (*Plane) Join() func(put, del []model.NetworkPart) (puts, dels []model.NetworkPart) {
	attachments := func(parts []model.NetworkPart) []model.NetworkPart {
		return slices.DeleteFunc(slices.Clone(parts), func(p model.NetworkPart) bool {
			_, is := p.(*model.Attachment)
			return !is
		})
	}
	return func(put, del []model.NetworkPart) (puts, dels []model.NetworkPart) {
		return attachments(put), attachments(del)
	}
}

// renderIPVLAN returns the facts of a pod without a device on the node.
func renderIPVLAN(a *model.Attachment) (l []Fact) {
	for i, x := range a.Addresses {
		f := Fact{Key: Key{Kind: KindRoute, Addr: x}, Value: Value{Device: model.ChildDevice}}
		if i == 0 {
			f.Body = a
		}
		l = append(l, f)
	}
	return l
}
