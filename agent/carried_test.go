package agent

import (
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
)

// A connection that the agent carries is evaluated at both ends, by what changed last, and endpoints whose policies see
// nodes in place of clients are named.
func TestCarriedConnections(t *testing.T) {
	client, other, web := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:40000"),
		netip.MustParseAddrPort("10.0.0.3:80")
	deny := &model.PeerTable{ID: 1, Default: model.VerdictDrop, Otherwise: model.Decision{Verdict: model.VerdictDrop}}
	isolated := &model.Ruleset{ID: 1, Default: model.PortEntry{Last: 65535, PeerTable: deny}}
	bound := [model.PolicyStages]*model.Ruleset{model.StageLast: isolated}
	var s Services
	if s.restrict() != nil {
		t.Error("there is something to evaluate without planes that connect themselves")
	}
	c := &carried{now: model.NewPolicies(), local: map[*model.Pool]struct{}{}}
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
