package ipvs

import (
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/netlink"
)

func FuzzReplies(f *testing.F) {
	var b Batch
	s := Service{ServiceID: ServiceID{Mark: 7}, Scheduler: "rr"}
	b.SetService(s)
	b.SetDestination(s.ServiceID, Destination{Addr: netip.MustParseAddrPort("[fd00::1]:80"), Weight: 1})
	f.Add(append(netlink.Marker(16, b.b.Body(0)...), netlink.Marker(16, b.b.Body(1)...)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for m := range netlink.Messages(b) {
			_ = m.Err()
			for _, v := range m.Attributes(header) {
				for _, v := range netlink.Attributes(v) {
					netlink.Uint(v)
					netlink.Text(v)
				}
				addrPort(netlink.Find(v, destAddr), netlink.Find(v, destPort), true)
				addrPort(netlink.Find(v, destAddr), netlink.Find(v, destPort), false)
			}
		}
	})
}

// A request that is made again as a change keeps everything but its command.
func TestRepeat(t *testing.T) {
	var b, again Batch
	id := ServiceID{Six: true, Mark: 0x1234}
	b.DelService(id)
	b.SetDestination(id, Destination{Addr: netip.MustParseAddrPort("[fd00::1]:80"), Weight: 3})
	b.SetService(Service{ServiceID: id, Scheduler: "wrr"})
	again.repeat(&b, 1)
	again.repeat(&b, 2)
	var commands []byte
	for i := range again.b.Len() {
		body := again.b.Body(i)
		commands = append(commands, body[0])
		s := netlink.Find(body[header:], attrService)
		if netlink.Uint(netlink.Find(s, svcMark)) != id.Mark ||
			netlink.Uint(netlink.Find(s, svcFamily)) != uint32(id.family()) {
			t.Errorf("%x names another service", body)
		}
		if before := b.b.Body(i + 1); string(body[1:]) != string(before[1:]) {
			t.Errorf("%x is repeated as %x", before, body)
		}
	}
	if string(commands) != string([]byte{cmdSetDest, cmdSetService}) {
		t.Errorf("commands %v", commands)
	}
}
