package ipvs

import (
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/nlattr"
)

func FuzzAnswers(f *testing.F) {
	var b Batch
	s := Service{ServiceID: ServiceID{Mark: 7}, Scheduler: "rr"}
	b.SetService(s)
	b.SetDestination(s.ServiceID, Destination{Addr: netip.MustParseAddrPort("[fd00::1]:80"), Weight: 1})
	f.Add([]byte(b.b))
	f.Fuzz(func(t *testing.T, b []byte) {
		eachMessage(b, func(_, _ uint16, _ uint32, body []byte) {
			errno(body)
			if len(body) < 4 {
				return
			}
			nlattr.Each(body[4:], func(_ uint16, v []byte) {
				nlattr.Each(v, func(_ uint16, v []byte) { number(v); nlattr.Text(v) })
				addrPort(nlattr.Find(v, destAddr), nlattr.Find(v, destPort), true)
				addrPort(nlattr.Find(v, destAddr), nlattr.Find(v, destPort), false)
			})
		})
	})
}

// A request that is made again as a change keeps everything but its command and its number.
func TestRepeat(t *testing.T) {
	var b, again Batch
	id := ServiceID{Six: true, Mark: 0x1234}
	b.DelService(id)
	b.SetDestination(id, Destination{Addr: netip.MustParseAddrPort("[fd00::1]:80"), Weight: 3})
	b.SetService(Service{ServiceID: id, Scheduler: "wrr"})
	again.repeat(&b, 1)
	again.repeat(&b, 2)
	var commands []byte
	var seqs []uint32
	eachMessage(again.b, func(_, _ uint16, seq uint32, body []byte) {
		commands, seqs = append(commands, body[0]), append(seqs, seq)
		if s := nlattr.Find(body[4:], attrService); number(nlattr.Find(s, svcMark)) != id.Mark || number(nlattr.Find(s, svcFamily)) != uint32(id.family()) {
			t.Errorf("%x names another service", body)
		}
	})
	if string(commands) != string([]byte{cmdSetDest, cmdSetService}) || len(seqs) != 2 || seqs[0] != 1 || seqs[1] != 2 {
		t.Errorf("commands %v, numbers %v", commands, seqs)
	}
}
