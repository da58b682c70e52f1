package ipvs

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Attributes of a service that is known by its address.
const svcProtocol, svcAddr, svcPort = 2, 3, 4

// Virtual names a virtual service by its address, as others than this package make them.
type Virtual struct {
	Protocol uint8
	At       netip.AddrPort
}

// Virtuals returns the namespace's services that are known by an address.
func (c *Conn) Virtuals() (list []Virtual, err error) {
	err = c.dump(cmdGetService, nil, func() { list = nil }, func(attrs []byte) {
		s := netlink.Find(attrs, attrService)
		if netlink.Find(s, svcMark) != nil {
			return
		}
		six := netlink.Uint(netlink.Find(s, svcFamily)) == uint32(ServiceID{Six: true}.family())
		list = append(list, Virtual{uint8(netlink.Uint(netlink.Find(s, svcProtocol))),
			addrPort(netlink.Find(s, svcAddr), netlink.Find(s, svcPort), six)})
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// DelVirtual removes a service with its destinations.
func (b *Batch) DelVirtual(v Virtual) {
	said := func() string { return fmt.Sprintf("delete service %s protocol %d", v.At, v.Protocol) }
	b.request(cmdDelService, said, func(m *netlink.Buffer) {
		m.Nest(attrService, func() {
			m.Uint16(svcFamily, ServiceID{Six: v.At.Addr().Is6()}.family())
			m.Uint16(svcProtocol, uint16(v.Protocol))
			addr := make([]byte, 16)
			copy(addr, v.At.Addr().AsSlice())
			m.Bytes(svcAddr, addr)
			m.BE16(svcPort, v.At.Port())
		})
	})
}
