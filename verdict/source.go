package verdict

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Arrival is a packet as it enters a node, ahead of everything that trusts its source.
type Arrival struct {
	Pod      []netip.Prefix // it comes in by a pod's device, which may send from these; nil: by another device
	Src, Dst netip.Addr
	Overlay  bool       // it has the protocol, port and identifier of the overlay
	Inner    netip.Addr // the source of what such a packet carries; zero: nothing that a node sends
}

// Sources is who may send what by which device, on a node.
type Sources struct {
	Network *model.PodNetwork // nil: the pod network is another's
	Own     []netip.Addr      // the node's addresses
	Pods    []netip.Addr      // those of its pods whose devices are known
}

// The reasons for which a packet isn't admitted, as metrics have them.
const (
	ForgedSource = "forged_source" // by a pod's device, of another source
	InsideSource = "inside_source" // of a pod, or of what is behind the tunnel, by another device
	PodOverlay   = "pod_overlay"   // from a pod to a tunnel's end
	TunnelPeer   = "tunnel_peer"   // for a tunnel, not from another node's end to this one's
	TunnelSource = "tunnel_source" // of what such a packet carries: of nothing behind that end
)

// Admit returns why a node drops a packet for where it comes from, "": it doesn't. What an overlay packet carries is
// admitted with it.
func (s Sources) Admit(a Arrival) string {
	holds := func(r netip.Prefix) bool { return r.Contains(a.Src) }
	local := slices.Contains(s.Own, a.Dst)
	switch {
	case a.Pod != nil && a.Overlay && !local && s.isEnd(a.Dst):
		return PodOverlay
	case a.Pod != nil && !slices.ContainsFunc(a.Pod, holds):
		return ForgedSource
	case a.Pod == nil && s.isInside(a.Src):
		return InsideSource
	case s.Network == nil || !a.Overlay || !local:
		return ""
	case s.Network.Network.Tunnel == nil:
		return ""
	case a.Dst != s.Network.Network.Tunnel.Local || !s.isEnd(a.Src):
		return TunnelPeer
	case !s.isBehind(a.Inner, a.Src):
		return TunnelSource
	}
	return ""
}

// isEnd reports whether an address is another node's end of the tunnel.
func (s Sources) isEnd(a netip.Addr) bool {
	return s.Network != nil && slices.ContainsFunc(s.Network.Routes, func(r *model.Route) bool { return r.End == a })
}

// isInside reports whether a source comes in by pods' devices or the tunnel alone.
func (s Sources) isInside(a netip.Addr) bool {
	if s.Network == nil {
		return slices.Contains(s.Pods, a)
	}
	if slices.ContainsFunc(s.Network.Network.Ranges, func(r netip.Prefix) bool { return r.Contains(a) }) {
		return true
	}
	r := s.Network.Route(a)
	return r != nil && r.Hop == model.Tunneled && !r.OnLink && !r.PodsOnly
}

// isBehind reports whether what an end sends may have a source.
func (s Sources) isBehind(a, end netip.Addr) bool {
	known := a.IsValid() && s.isInside(a)
	for _, r := range s.Network.Routes {
		if r.End.IsValid() && (r.To.Contains(a) || r.End == a || r.Internal == a) {
			if r.End == end {
				return true
			}
			known = true
		}
	}
	return a.IsValid() && !known && s.Network.Network.Tunnel.AnySource
}
