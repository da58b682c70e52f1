package ebpf_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Packets of a Service pass a bridge and its port, which both have programs: a masqueraded client behind one, or the
// endpoint behind one, keeps its connection and its UDP flow.
func TestServedAcrossABridge(t *testing.T) {
	root, err := cgroup.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, bridged := range []string{"a", "b"} {
		withPods(t, func(w *twoPods) {
			w.run(fmt.Sprintf(`ip addr add 192.0.2.77/32 dev lo; ip addr add fd00:77::77/128 dev lo nodad
				ip link add br0 address 02:00:00:00:0%[2]d:01 type bridge && ip link set dev br0 up
				ip addr add fe80::1/64 dev br0 nodad
				ip addr flush dev %[1]s; ip link set dev %[1]s master br0
				ip route replace %[3]s dev br0 && ip -6 route replace %[4]s dev br0
				ip -6 route del %[4]s dev %[1]s || true`, bridged, 1+int(bridged[0]-'a'), podAddrs[bridged][false],
				podAddrs[bridged][true]))
			attach(t, w.plane)
			await(t, "a bridge", func(l map[string]bool) bool { return len(l) == 2*4+1 })
			parts := []model.ServicePart{theNode}
			for i, proto := range []model.Protocol{model.TCP, model.UDP} {
				for j, six := range []bool{false, true} {
					p := &model.Pool{ID: uint64(20 + 2*i + j), Name: "b", Protocol: proto, Backends: []model.Backend{
						{Addr: netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 8080), Local: true}}}
					f := frontendOf(attacked[six].String(), p)
					f.Entry.Protocol, f.Masquerade = proto, model.OriginsOf(model.FromPod, model.FromExternal)
					parts = append(parts, p, f)
				}
			}
			change(t, w.plane, []model.ServicePart{theNode}, parts)
			for _, proto := range []model.Protocol{model.TCP, model.UDP} {
				for _, six := range []bool{false, true} {
					name := fmt.Sprintf("%s behind a bridge, %s, IPv6 %t", bridged, proto, six)
					if err := cgroup.Do(root, func() error { return w.talk(proto, attacked[six]) }); err != nil {
						t.Errorf("%s: %v, %+v", name, err, w.counts())
					}
				}
			}
		})
	}
}

// talk opens a connection or flow from pod a and asks over it again and again: the node's address is seen each time,
// and the same port.
func (w *twoPods) talk(proto model.Protocol, to netip.AddrPort) (err error) {
	ctx, cancel := context.WithTimeout(w.Context(), 5*patience)
	defer cancel()
	var c *echo.Flow
	w.in("a", func() { c, err = echo.Open(ctx, proto, to, echo.Options{}) })
	if err != nil {
		return err
	}
	defer c.Close()
	var first netip.AddrPort
	for i := range 5 {
		a, err := c.Request(ctx)
		if err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		if first = orFirst(first, a.Client); a.Client != first || podAddrs["a"][to.Addr().Is6()] == a.Client.Addr().String() {
			return fmt.Errorf("request %d comes from %s, the first from %s", i, a.Client, first)
		}
	}
	return nil
}

func orFirst(first, now netip.AddrPort) netip.AddrPort {
	if first.IsValid() {
		return first
	}
	return now
}
