package denial

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/policy/packet"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// parse reads the beginning of a packet from its network header on. Ports that aren't in it, such as those of a later
// fragment, are 0.
func parse(b []byte) (p verdict.Packet, ok bool) {
	h, ok := packet.Parse(b)
	if !ok {
		return p, false
	}
	if h.Protocol == unix.IPPROTO_ICMPV6 && len(h.Transport) > 0 {
		p.Type = h.Transport[0]
	}
	from, to := h.Ports()
	p.Src, p.Dst = netip.AddrPortFrom(h.Src, from), netip.AddrPortFrom(h.Dst, to)
	p.Protocol = model.Protocol(h.Protocol)
	return p, true
}
