package nftables

import (
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// everything returns a node with every shape of frontend, in both families.
func everything() *model.Snapshot {
	a, pre := netip.MustParseAddr, netip.MustParsePrefix
	s := &model.Snapshot{Frontends: map[model.Entry]*model.Frontend{},
		ServiceNode: &model.ServiceNode{Node: &model.Node{Name: "a",
			Pods: []netip.Prefix{pre("10.244.0.0/16"), pre("10.9.9.9/32"), pre("fd00:244::/48")}}, Localhost: true,
			NodePorts: []model.Range{{First: a("0.0.0.0"), Last: a("255.255.255.255")}, {First: a("::2"), Last: a("fd00::1")}}}}
	id := uint64(1 << 60)
	pool := func(n int, affinity time.Duration, base netip.Addr) *model.Pool {
		id++
		p := &model.Pool{ID: id, Name: "p", Affinity: affinity}
		for i := range n {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(base, uint16(i+1)), Local: i%2 == 0})
		}
		return p
	}
	for _, f := range []struct{ vip, any, backend string }{{"10.96.0.1", "0.0.0.0", "10.244.0.1"},
		{"fd00:96::1", "::", "fd00:244::1"}} {
		port := uint16(0)
		for _, n := range []int{0, 1, 10, 300} {
			for _, affinity := range []time.Duration{0, time.Hour} {
				for _, sources := range [][]netip.Prefix{nil, {},
					{netip.PrefixFrom(a(f.vip), len(f.vip)/8*8+16).Masked(), netip.PrefixFrom(a(f.backend), a(f.backend).BitLen())}} {
					for _, addr := range []string{f.vip, f.any} {
						port++
						in := model.Target{Pool: pool(n, affinity, a(f.backend))}
						out := in
						if port%3 == 0 {
							out = model.Target{Pool: pool(n/2, affinity, a(f.backend)), Empty: model.Drop}
						}
						e := model.Entry{Addr: a(addr), Port: port, Protocol: []model.Protocol{model.TCP, model.UDP, model.SCTP}[port%3]}
						s.Frontends[e] = &model.Frontend{Entry: e, Internal: in, External: out, Masquerade: model.Origins(port % 8),
							Sources: sources}
					}
				}
			}
		}
	}
	return s
}

func TestKernelReturnsWhatIsWritten(t *testing.T) {
	netnstest.With(t, New, func(p *Plane) {
		want := servicetest.Facts(t, p, everything().Parts())
		steps := []struct {
			name           string
			put, del, want []Fact
		}{
			{"write", want, nil, want},
			{"replace", want, want, want},
			{"remove", nil, want, nil},
			{"write again", want, nil, want},
		}
		for _, s := range steps {
			if err := p.Write(t.Context(), s.put, s.del); err != nil {
				t.Errorf("%s: %v", s.name, err)
				return
			}
			held, err := p.Read(t.Context())
			if err != nil {
				t.Errorf("%s: read: %v", s.name, err)
				return
			}
			if missing, extra := servicetest.Difference(s.want, held),
				servicetest.Difference(held, s.want); len(missing)+len(extra) > 0 {
				t.Errorf("%s: missing %v, extra %v", s.name, missing, extra)
				return
			}
		}
		if uses, err := p.Affinity(); err != nil || len(uses) != 2 || uses[0].Entries != 0 || uses[0].Limit != affinitySize {
			t.Errorf("affinity: %v, %v", uses, err)
		}
		element := "{ 192.0.2.1 . 1 . 2 timeout 1h : 3, 192.0.2.2 . 1 . 2 timeout 1h : 3 }"
		if out, err := exec.Command("nft", "add", "element", "inet", Table, "affinity4",
			element).CombinedOutput(); err != nil {
			t.Errorf("nft add element: %v: %s", err, out)
		}
		if uses, err := p.Affinity(); err != nil || uses[0].Entries != 2 || uses[1].Entries != 0 {
			t.Errorf("affinity of two clients: %v, %v", uses, err)
		}
		if out, err := exec.Command("nft", "list", "table", "inet", Table).CombinedOutput(); err != nil {
			t.Errorf("nft list: %v: %s", err, out)
		}
		if err := p.Clean(t.Context()); err != nil {
			t.Error(err)
		}
		if held, err := p.Read(t.Context()); len(held) > 0 || err != nil {
			t.Errorf("after clean: %v, %v", held, err)
		}
		if uses, err := p.Affinity(); err != nil || uses[0].Entries != 0 {
			t.Errorf("affinity after clean: %v, %v", uses, err)
		}
		if v, err := p.sysctls[routeLocalnet].Get(); v != "0" || err != nil {
			t.Errorf("after clean: %s is %q, %v", routeLocalnet, v, err)
		}
	})
}
