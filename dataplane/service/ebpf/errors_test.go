package ebpf_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// TestErrorIsTranslatedForItsSourceAlone: an ICMP error about a packet of a Service reaches the packet's source with
// the Service's address; one that quotes the packet and goes elsewhere is left as it is and forwarded as any other: by
// the loopback device it would pass for the node's own.
func TestErrorIsTranslatedForItsSourceAlone(t *testing.T) {
	withPods(t, func(w *twoPods) {
		w.run(`ip addr add 192.168.9.1/32 dev lo && ip addr add fd99::1/128 dev lo nodad
			ip route add 10.96.0.1 dev b src 192.168.9.1 && ip -6 route add fd00:96::1 dev b src fd99::1
			ip neigh add 10.96.0.1 lladdr 02:00:00:00:02:02 dev b
			ip -6 neigh add fd00:96::1 lladdr 02:00:00:00:02:02 dev b`)
		parts := []model.ServicePart{theNode}
		for six, entry := range attacked {
			p := &model.Pool{ID: 7, Name: "b", Protocol: model.UDP, Backends: []model.Backend{
				{Addr: netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 8080), Local: true}}}
			if six {
				p.ID = 8
			}
			parts = append(parts, p, frontendOf(entry.String(), p))
		}
		change(t, w.plane, []model.ServicePart{theNode}, parts)
		for six, entry := range attacked {
			for _, client := range []string{"node", "a"} {
				w.errorsAbout(client, six, entry)
			}
		}
	})
}

// errorsAbout has a client that no hook sees send to a Service, and its backend send errors to the client and to the
// other one.
func (w *twoPods) errorsAbout(client string, six bool, entry netip.AddrPort) {
	w.Helper()
	at := map[string]netip.Addr{"node": netip.MustParseAddr(nodeAddrs[six]), "a": netip.MustParseAddr(podAddrs["a"][six])}
	in := map[string]func(func()){"node": func(f func()) { f() }, "a": func(f func()) { w.in("a", f) }}
	ctx, stop := context.WithTimeout(w.Context(), patience)
	defer stop()
	root, err := cgroup.Root()
	if err != nil {
		w.Fatal(err)
	}
	var got echo.Reply
	err = cgroup.Do(root, func() (err error) {
		in[client](func() { got, err = echo.Request(ctx, model.UDP, entry, echo.Options{}) })
		return err
	})
	if err != nil || got.Client.Addr() != at[client] {
		w.Fatalf("%s > %s: %v, seen as %s", client, entry, err, got.Client)
	}
	for to, address := range at {
		want := got.Server.Addr()
		if to == client {
			want = entry.Addr()
		}
		if from, err := w.errorFrom(ctx, in[to], got, address); err != nil || from != want {
			w.Errorf("%s > %s: an error about it to %s comes from %s, want %s: %v", client, entry, to, from, want, err)
		}
	}
}

// errorFrom has b send an ICMP error about a packet that it received, and returns from which address it arrives.
func (w *twoPods) errorFrom(ctx context.Context, in func(func()), about echo.Reply,
	to netip.Addr) (from netip.Addr, err error) {
	w.Helper()
	var l *echo.Errors
	in(func() { l, err = echo.ListenErrors(to) })
	if err != nil {
		return from, err
	}
	defer l.Close()
	data := []byte(rand.Text())
	w.in("b", func() {
		q := echo.Quote{Protocol: model.UDP, Src: about.Client, Dst: about.Server}
		err = echo.SendError(about.Server.Addr(), to, q, data)
	})
	from, err2 := l.Await(ctx, data)
	return from, errors.Join(err, err2)
}
