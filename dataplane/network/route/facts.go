package route

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/model"
)

// The names of the tunnels' devices.
const (
	Device     = "fl-vxlan"
	IPIPDevice = "fl-ipip"
)

var tunnelDevices = [...]string{model.VXLAN: Device, model.IPIP: IPIPDevice}

// ownedDevices are all that this plane may make.
var ownedDevices = []string{Device, IPIPDevice, model.ChildDevice}

// DeviceOf returns the name of a tunnel's device.
func DeviceOf(k model.TunnelKind) string { return tunnelDevices[k] }

// Protocol marks routes as this package's (rtm_protocol).
const Protocol = network.NodeRoutes

// Fact is one thing that this plane writes.
type Fact = dataplane.Fact[Key, Value]

// Kind is a kind of fact.
type Kind uint8

// The kinds.
const (
	KindSetting Kind = iota
	KindDevice
	KindAddress
	KindForwarding
	KindNeighbour
	KindForward
	KindRoute
	KindPodRoute
	KindRule // of packets from To
	KindReversePath
)

var kindNames = [...]string{"setting", "device", "address", "forwarding", "neighbour", "forward", "route",
	"route for pods", "rule", "reverse path"}

// Key names a fact. Neighbours and forwards are those of Device.
type Key struct {
	Kind Kind
	Name Name         // KindSetting, KindDevice; KindAddress, KindForwarding: the device; 0: the uplink
	MAC  [6]byte      // KindForward
	To   netip.Prefix // KindAddress, KindNeighbour, KindRoute, KindPodRoute; KindRule: source of the packets
}

// Name is the name of a setting, or of a device that this plane makes, as an index of keyNames: there is a key for each
// node and more, so it is small.
type Name uint8

var keyNames = [...]string{"", settings[0], settings[1], Device, IPIPDevice, model.ChildDevice}

// nameOf returns the Name that is this text.
func nameOf(text string) Name { return Name(max(0, slices.Index(keyNames[:], text))) }

// String returns the name.
func (n Name) String() string { return keyNames[n] }

var ranks = [...]int{KindSetting: 0, KindDevice: 1, KindAddress: 2, KindForwarding: 2, KindNeighbour: 3, KindForward: 3,
	KindRoute: 4, KindPodRoute: 4, KindRule: 5, KindReversePath: 4}

// Rank implements dataplane.Key.
func (k Key) Rank() int { return ranks[k.Kind] }

// Group implements dataplane.Grouped.
func (k Key) Group() string { return kindNames[k.Kind] }

// String returns text such as "route 10.244.2.0/24".
func (k Key) String() string {
	switch k.Kind {
	case KindSetting, KindDevice:
		return kindNames[k.Kind] + " " + k.Name.String()
	case KindForwarding, KindReversePath:
		return kindNames[k.Kind] + " of " + cmp.Or(k.Name.String(), "the uplink")
	case KindForward:
		return fmt.Sprintf("forward %s", net.HardwareAddr(k.MAC[:]))
	}
	return fmt.Sprintf("%s %s", kindNames[k.Kind], k.To)
}

// Value is what a fact says. Fields that its kind doesn't use are zero.
type Value struct {
	Device      string     // KindRoute, KindPodRoute: by which packets leave; KindDevice: the uplink
	Via         netip.Addr // KindRoute, KindPodRoute: next hop; KindForward: outer destination; KindDevice: outer source
	Source      netip.Addr // KindRoute: preferred
	MAC         [6]byte    // KindNeighbour, KindDevice
	Port        uint16     // KindDevice
	Number      uint32     // KindSetting: the setting; KindDevice: the VNI, or the mode of ipvlan
	MTU         uint16     // KindDevice: the kernel has at most 65,535 there
	Unreachable bool       // KindRoute
	Altered     bool       // what is held is not as this plane makes it
}

// settings of the node without which it forwards nothing, by family.
var settings = [2]string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}

// family returns the index of a's family in settings.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Render implements dataplane.Plane.
func (*Plane) Render(p model.NetworkPart) []Fact {
	switch v := p.(type) {
	case *model.Network:
		return renderNetwork(v)
	case *model.Route:
		return renderRoute(v)
	}
	return nil
}

func renderNetwork(n *model.Network) (l []Fact) {
	var forwards [2]bool
	for _, p := range n.Ranges {
		if i := family(p.Addr()); !forwards[i] {
			forwards[i] = true
			l = append(l, Fact{Key: Key{Kind: KindSetting, Name: nameOf(settings[i])}, Value: Value{Number: 1}})
		}
		l = append(l, Fact{Key: Key{Kind: KindRoute, To: p}, Value: Value{Unreachable: true}})
	}
	if c := n.Child; c != nil {
		l = append(l, Fact{Key: Key{Kind: KindDevice, Name: nameOf(model.ChildDevice)},
			Value: Value{Device: c.Uplink, Number: uint32(network.IPVLANMode(n.Device)), MTU: uint16(n.MTU)}})
		for _, a := range c.Own {
			l = append(l, Fact{Key: Key{Kind: KindAddress, Name: nameOf(model.ChildDevice), To: host(a)}})
		}
	}
	if t := n.Tunnel; t != nil {
		name := DeviceOf(t.Kind)
		l = append(l, Fact{Key: Key{Kind: KindDevice, Name: nameOf(name)}, Value: Value{Device: t.Uplink, Via: t.Local,
			MAC: t.MAC, Number: t.VNI, Port: t.Port, MTU: uint16(t.MTU)}}, forwarding(name))
		if t.Local.Is4() {
			l = append(l, forwarding(t.Uplink))
		}
		for _, a := range t.Own {
			l = append(l, Fact{Key: Key{Kind: KindAddress, Name: nameOf(name), To: host(a)}})
		}
		for _, p := range t.Pods {
			l = append(l, Fact{Key: Key{Kind: KindRule, To: p}})
		}
		if slices.ContainsFunc(t.Pods, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
			l = append(l, Fact{Key: Key{Kind: KindReversePath}, Value: Value{Device: t.Uplink}})
		}
	}
	return l
}

// forwarding returns the fact that a device forwards what it receives: one of this plane's, or the uplink of IPv4.
func forwarding(device string) Fact {
	return Fact{Key: Key{Kind: KindForwarding, Name: nameOf(device)}, Value: Value{Device: device}}
}

func renderRoute(r *model.Route) []Fact {
	to := Key{Kind: KindRoute, To: r.To}
	switch r.Hop {
	case model.Direct:
		l := []Fact{{Key: to, Value: Value{Device: r.Device, Via: r.Via, Source: r.Source}}}
		if r.To.Addr().Is4() {
			l = append(l, forwarding(r.Device))
		}
		return l
	case model.Unreachable:
		return []Fact{{Key: to, Value: Value{Unreachable: true}}}
	case model.Tunneled:
		if r.PodsOnly {
			to.Kind = KindPodRoute
		}
		if r.Tunnel == model.IPIP { // its outer destination is the next hop
			return []Fact{{Key: to, Value: Value{Device: IPIPDevice, Via: r.Via, Source: r.Source}}}
		}
		return []Fact{
			{Key: Key{Kind: KindNeighbour, To: host(r.Gateway)}, Value: Value{MAC: r.MAC}},
			{Key: Key{Kind: KindForward, MAC: r.MAC}, Value: Value{Via: r.Via}},
			{Key: to, Value: Value{Device: Device, Via: r.Gateway, Source: r.Source}},
		}
	}
	return nil
}
