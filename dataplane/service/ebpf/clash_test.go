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

// TestPortOfAHiddenNodeClient: a socket of the node asks a backend directly, from the port behind which another
// client of the node is hidden there. Each gets its own answers.
func TestPortOfAHiddenNodeClient(t *testing.T) {
	withPods(t, func(w *twoPods) {
		parts := []model.ServicePart{theNode}
		for six, entry := range attacked {
			p := &model.Pool{ID: 7, Name: "b", Protocol: model.UDP, Backends: []model.Backend{
				{Addr: netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 8080), Local: true}}}
			if six {
				p.ID = 8
			}
			f := frontendOf(entry.String(), p)
			f.Masquerade = model.AllOrigins
			parts = append(parts, p, f)
		}
		w.run(`ip addr add 192.168.9.1/32 dev lo && ip addr add fd99::1/128 dev lo nodad
			ip route replace 10.244.1.2 dev b src 192.168.9.1 && ip -6 route replace fd00:244::b dev b src fd99::1
			ip route add 10.96.0.1 dev b src 192.168.9.1 && ip -6 route add fd00:96::1 dev b src fd99::1
			ip neigh add 10.96.0.1 lladdr 02:00:00:00:02:02 dev b
			ip -6 neigh add fd00:96::1 lladdr 02:00:00:00:02:02 dev b`)
		change(t, w.plane, []model.ServicePart{theNode}, parts)
		root, err := cgroup.Root() // where no hook sees sockets: packets are translated
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		for _, entry := range attacked {
			err := cgroup.Do(root, func() error {
				hidden, err := echo.Open(ctx, model.UDP, entry, echo.Options{})
				if err != nil {
					return err
				}
				defer hidden.Close()
				before, err := hidden.Request(ctx)
				if err != nil {
					return fmt.Errorf("hidden: %w", err)
				}
				if before.Client.Port() == hidden.Local().Port() {
					t.Errorf("%s: %s is not hidden", entry, before.Client)
				}
				direct, err := echo.Request(ctx, model.UDP, before.Server, echo.Options{From: before.Client})
				if err != nil {
					return fmt.Errorf("from %s to %s: %w", before.Client, before.Server, err)
				}
				if direct.Client == before.Client {
					t.Errorf("%s: both clients are %s", entry, direct.Client)
				}
				again, err := hidden.Request(ctx)
				if again.Client != before.Client {
					t.Errorf("%s: %s has become %s", entry, before.Client, again.Client)
				}
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", entry, err)
			}
		}
	})
}
