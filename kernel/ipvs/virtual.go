package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/nlattr"
)

// Attributes of a service that is known by its address.
const svcProtocol, svcAddr, svcPort = 2, 3, 4

// Virtual names a virtual service by its address, as others than this package make them.
type Virtual struct {
	Protocol uint8
	At       netip.AddrPort
}

// Virtuals gives the namespace's services that are known by an address.
func (c *Conn) Virtuals() (list []Virtual, err error) {
	err = c.dump(cmdGetService, nil, func() { list = nil }, func(attrs []byte) {
		s := nlattr.Find(attrs, attrService)
		if nlattr.Find(s, svcMark) != nil {
			return
		}
		six := number(nlattr.Find(s, svcFamily)) == uint32(ServiceID{Six: true}.family())
		list = append(list, Virtual{uint8(number(nlattr.Find(s, svcProtocol))), addrPort(nlattr.Find(s, svcAddr), nlattr.Find(s, svcPort), six)})
	})
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	return list, nil
}

// DelVirtual removes a service with its destinations.
func (b *Batch) DelVirtual(v Virtual) {
	b.request(cmdDelService, fmt.Sprintf("delete service %s protocol %d", v.At, v.Protocol), func() {
		at := b.b.open(attrService | nested)
		b.b.u16(svcFamily, ServiceID{Six: v.At.Addr().Is6()}.family())
		b.b.u16(svcProtocol, uint16(v.Protocol))
		addr := make([]byte, 16)
		copy(addr, v.At.Addr().AsSlice())
		b.b.bytes(svcAddr, addr)
		b.b.bytes(svcPort, binary.BigEndian.AppendUint16(nil, v.At.Port()))
		b.b.close(at)
	})
}
