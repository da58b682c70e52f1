package ebpf

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// TestLookups: packets of all worlds have as many lookups as on paper, and nothing is left of counting.
func TestLookups(t *testing.T) {
	n := newNode(t)
	r := rand.New(rand.NewPCG(7, 8))
	for i, name := range slices.Sorted(maps.Keys(n.objects)) {
		d := n.hold(name)
		if i%2 == 0 {
			d.Own(netip.MustParsePrefix("203.0.113.0/24"))
			n.holdAll(d)
		}
		if len(n.held) == 0 {
			continue
		}
		n.Must(n.CountLookups(t.Context(), func(counted func() (policy.Lookups, error)) error {
			for range 6 {
				src, dst := policytest.Behind[r.IntN(len(policytest.Behind))], policytest.Behind[r.IntN(len(policytest.Behind))]
				if i := r.IntN(min(len(src), len(dst))); n.Of[src[i]] != n.Of[dst[i]] && src[i].Is4() == dst[i].Is4() {
					n.compareLookups(d.Now, n.Packet(src[i], dst[i], policytest.Served[3]), counted)
				}
			}
			return nil
		}))
	}
	before, err := n.maps.Lookups()
	n.Must(err)
	if before.Lookups == 0 {
		t.Error("nothing was counted")
	}
	n.Passes(n.Packet(client[0], web[0], policytest.Served[3]), false)
	if after, err := n.maps.Lookups(); err != nil || after != before {
		t.Errorf("counting goes on: %v, %v", after, err)
	}
	if missing, extra := policytest.Read(t, n.Plane, n.held); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
}

// compareLookups sends a datagram, and compares what is counted with what is on paper. The node's own multicast packets
// count, too: then it sends another one.
func (n *node) compareLookups(s *model.Policies, p verdict.Packet, counted func() (policy.Lookups, error)) {
	n.T.Helper()
	want := policy.Lookups{Packets: 1, Lookups: uint64(Lookups(s, p.Src.Addr(), p.Dst, p.Protocol))}
	passes := verdict.Policy(s, p).Verdict == model.VerdictAccept
	if passes {
		want.Packets++ // the answer
		if s.Subjects[p.Src.Addr()] != nil || s.Subjects[p.Dst.Addr()] != nil {
			want.Lookups++ // its flow
			if of := deviceLookups(s, p.Dst.Addr()); of > 0 {
				want.Lookups += uint64(of) + 1 // its device, and the pod that has its address
			}
		} else { // which no pod of the node has
			want.Lookups += uint64(Lookups(s, p.Dst.Addr(), p.Src, p.Protocol))
		}
	}
	var got policy.Lookups
	for range 50 {
		before, err := counted()
		n.Must(err)
		n.Passes(p, passes)
		got, err = counted()
		n.Must(err)
		got.Packets, got.Lookups = got.Packets-before.Packets, got.Lookups-before.Lookups
		if got.Packets <= want.Packets {
			break
		}
		p = n.Packet(p.Src.Addr(), p.Dst.Addr(), policytest.Served[3])
	}
	if got != want {
		n.T.Errorf("%v: %+v, want %+v", p, got, want)
	}
}
