package service

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// A connection that the agent proxies is evaluated at both ends, by what changed last, and endpoints whose policies see
// nodes in place of clients are named.
func TestProxiedConnections(t *testing.T) {
	client, other, web := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:40000"),
		netip.MustParseAddrPort("10.0.0.3:80")
	deny := &model.PeerTable{ID: 1, Default: model.VerdictDrop, Otherwise: model.Decision{Verdict: model.VerdictDrop}}
	isolated := &model.Ruleset{ID: 1, Default: model.PortEntry{Last: 65535, PeerTable: deny}}
	bound := [model.PolicyStages]*model.Ruleset{model.StageLast: isolated}
	var p Planes
	if p.restrict() != nil {
		t.Error("there is something to evaluate without planes that connect themselves")
	}
	c := &proxied{now: model.NewPolicies(), local: map[*model.Pool]struct{}{}}
	services := func(put ...model.ServicePart) (c model.Change[model.ServicePart]) { c.Put = put; return c }
	policies := func(put ...model.PolicyPart) (c model.Change[model.PolicyPart]) { c.Put = put; return c }
	check := func(what string, fromClient, fromOther bool) {
		t.Helper()
		for _, x := range []struct {
			from netip.AddrPort
			want bool
		}{{client, fromClient}, {other, fromOther}} {
			if got := c.allows(model.TCP, x.from, web); got != x.want {
				t.Errorf("%s: from %s: %t", what, x.from, got)
			}
		}
	}
	pool := &model.Pool{Owner: model.Owner{Kind: model.KindService, Namespace: "shop", Name: "web"},
		Backends: []model.Backend{{Addr: web, Local: true}}}
	c.change(services(pool), policies(&model.PolicyNode{}))
	check("no policy", true, true)
	egress := &model.Subject{Pod: "shop/client", Addr: client.Addr(), Out: bound}
	c.change(services(), policies(egress, isolated, deny))
	check("egress", false, true)
	if l := c.problems("a"); l != nil {
		t.Errorf("problems %v without an isolated endpoint", l)
	}
	ingress := &model.Subject{Pod: "shop/web", Addr: web.Addr(), In: bound}
	c.change(services(), policies(ingress))
	check("egress and ingress", false, false)
	if l := c.problems("a"); len(l) != 1 || !strings.Contains(l[0].Message, "shop/web") {
		t.Errorf("problems %v, want one that names shop/web", l)
	}
	c.change(model.Change[model.ServicePart]{Del: []model.ServicePart{pool}}, policies())
	if l := c.problems("a"); l != nil {
		t.Errorf("problems %v without a Service", l)
	}
	c.change(services(), model.Change[model.PolicyPart]{Del: []model.PolicyPart{egress, ingress}})
	check("policies are gone", true, true)
}

// Open connections that the agent proxies are cut when policies no longer allow them, TCP's and UDP's, and no others;
// and none without the setting.
func TestProxiedConnectionsAreCut(t *testing.T) {
	n := policytest.NewNetwork(t)
	m, err := mode.Of("userspace")
	n.Must(err)
	var services *Planes
	n.Must(n.Node.Do(func() (err error) {
		services, err = OpenPlanes(m, slog.New(slog.DiscardHandler))
		return err
	}))
	t.Cleanup(func() { n.Must(services.Close()) })
	c := services.restrict()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go c.run(ctx)
	client, other, web := policytest.Behind[1][0], policytest.Behind[2][0], policytest.Behind[0][0]
	parts := []model.ServicePart{&model.ServiceNode{Node: &model.Node{Addresses: policytest.Own}}}
	entry := func(vip string, protocol model.Protocol, backend netip.Addr, port uint16) netip.AddrPort {
		at := netip.AddrPortFrom(netip.MustParseAddr(vip), port)
		pool := &model.Pool{ID: uint64(len(parts)), Protocol: protocol,
			Backends: []model.Backend{{Addr: netip.AddrPortFrom(backend, port), Local: true}}}
		to := model.Target{Pool: pool}
		parts = append(parts, pool, &model.Frontend{Service: "s", Via: model.ViaClusterIP,
			Entry:    model.Entry{Addr: at.Addr(), Port: port, Protocol: protocol},
			Internal: to, External: to})
		return at
	}
	for _, x := range []struct {
		protocol model.Protocol
		port     uint16
	}{{model.TCP, 80}, {model.UDP, 53}} {
		entry("10.96.0.10", x.protocol, web, x.port)
		entry("10.96.0.11", x.protocol, other, x.port)
	}
	services.Change(parts, nil)
	n.Must(services.Sync(t.Context()))
	seen := map[*echo.Flow]netip.AddrPort{} // the agent's own ends, which a flow that is cut loses
	request := func(f *echo.Flow, wait time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		r, err := f.Request(ctx)
		if was, known := seen[f]; err == nil && known && was != r.Client {
			t.Errorf("%s: proxied from %s, and before from %s", f.Local(), r.Client, was)
		} else if err == nil {
			seen[f] = r.Client
		}
		return err
	}
	open := func(to string, protocol model.Protocol) (f *echo.Flow) {
		n.Must(n.Of[client].Do(func() (err error) {
			f, err = echo.Open(t.Context(), protocol, netip.MustParseAddrPort(to), echo.Options{})
			return err
		}))
		t.Cleanup(func() { f.Close() })
		n.Must(request(f, 5*time.Second))
		return f
	}
	denied := []*echo.Flow{open("10.96.0.10:80", model.TCP), open("10.96.0.10:53", model.UDP)}
	others := []*echo.Flow{open("10.96.0.11:80", model.TCP), open("10.96.0.11:53", model.UDP)}
	_, objects := policytest.Worlds(t)
	world := policytest.Decide(objects["selector-on-port.yaml"])
	c.change(model.Change[model.ServicePart]{}, model.Change[model.PolicyPart]{Put: world.Parts()})
	for _, f := range append(denied, others...) {
		n.Must(request(f, 5*time.Second)) // without the setting
	}
	node := *world.Now.Node
	node.CutMark = 1
	c.change(model.Change[model.ServicePart]{}, model.Change[model.PolicyPart]{Put: []model.PolicyPart{&node}})
	for i, want := range []error{echo.Refused, echo.Timeout} {
		for end := time.Now().Add(5 * time.Second); !errors.Is(err, want) && time.Now().Before(end); {
			err = request(denied[i], 300*time.Millisecond)
		}
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", denied[i].Local(), err, want)
		}
	}
	for _, f := range others {
		n.Must(request(f, 5*time.Second))
	}
}
