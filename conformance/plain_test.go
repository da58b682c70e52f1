package conformance

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
)

// plain is the simplest Runner there can be: at each Sync it reads everything and writes the difference. It is there to
// try the suite itself; the planes' own tests judge the planes.
type plain struct {
	plane *nftables.Plane
	flows *conntrack.Conn
	parts map[model.ServicePart]bool
	gone  map[model.Entry]bool // entries that were there and may have left flows
	nodes map[netip.Addr]bool  // other nodes' addresses: whether node ports are served there, or only were

	uncut, cutAll bool // faults: leave stale flows, cut all
}

// noDirect is what the plane doesn't support.
var noDirect = model.Unsupported{NoDirect: service.RepliesReturn}

func startPlain() (Runner[model.ServicePart], error) {
	p, err := nftables.New()
	if err != nil {
		return nil, err
	}
	c, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	return &plain{plane: p, flows: c, parts: map[model.ServicePart]bool{}, gone: map[model.Entry]bool{},
		nodes: map[netip.Addr]bool{}}, nil
}

func (p *plain) Change(put, del []model.ServicePart) {
	for _, x := range del {
		if delete(p.parts, x); isFrontend(x) {
			p.gone[x.(*model.Frontend).Entry] = true
		}
	}
	for _, x := range put {
		p.parts[x] = true
	}
}

func isFrontend(x model.ServicePart) bool { _, ok := x.(*model.Frontend); return ok }

func (p *plain) Sync(ctx context.Context) error {
	wanted := map[nftables.Key]nftables.Fact{}
	for x := range p.parts {
		for _, f := range p.plane.Render(x) {
			wanted[f.Key] = f
		}
	}
	held, err := p.plane.Read(ctx)
	if err != nil {
		return err
	}
	var del []nftables.Fact
	for _, f := range held {
		if w, ok := wanted[f.Key]; ok && w.Equal(f) {
			delete(wanted, f.Key)
		} else {
			del = append(del, f)
		}
	}
	if err := p.plane.Write(ctx, slices.Collect(maps.Values(wanted)), del); err != nil {
		return err
	}
	if p.uncut {
		return nil
	}
	return p.cut()
}

// cut removes UDP flows to frontends that lead where they no longer may, and TCP connections that are still opening
// past one.
func (p *plain) cut() error {
	own, err := p.flows.Addresses()
	if err != nil {
		return err
	}
	entries := map[model.Entry]*model.Frontend{}
	for e := range p.gone {
		entries[e] = nil
	}
	for a := range p.nodes {
		p.nodes[a] = false
	}
	for x := range p.parts {
		switch v := x.(type) {
		case *model.Frontend:
			entries[v.Entry] = v
		case *model.ServiceNode:
			for _, a := range v.RemoteNodePorts {
				p.nodes[a] = true
			}
		}
	}
	stale := func(f conntrack.Flow) bool {
		tcp := f.Protocol == unix.IPPROTO_TCP
		if f.Protocol != unix.IPPROTO_UDP && !tcp || tcp && (!f.Opening || f.ReplySource != f.Destination) {
			return false
		}
		if p.cutAll {
			return true
		}
		e := model.Entry{Addr: f.Destination.Addr(), Port: f.Destination.Port(), Protocol: model.Protocol(f.Protocol)}
		front, known := entries[e]
		served, remote := p.nodes[e.Addr]
		if remote = remote && !known; !known && (own[e.Addr] || remote) {
			if e.Addr = netip.IPv6Unspecified(); f.Destination.Addr().Is4() {
				e.Addr = netip.IPv4Unspecified()
			}
			front, known = entries[e]
		}
		if front == nil {
			return known && !tcp
		}
		if remote && !(served && front.Remote) { // by that node
			return f.ReplySource != f.Destination
		}
		allowed := front.Sources == nil ||
			slices.ContainsFunc(front.Sources, func(r netip.Prefix) bool { return r.Contains(f.Source.Addr()) })
		return !allowed || !front.Internal.Pool.Serves(f.ReplySource) && !front.External.Pool.Serves(f.ReplySource)
	}
	_, err = p.flows.Cut(stale)
	return err
}

func (p *plain) Close() error { p.flows.Close(); return p.plane.Close() }

// InjectFault implements Disturber.
func (p *plain) InjectFault(context.Context) error {
	out, err := exec.Command("nft", "flush", "map", "inet", nftables.Table, "service4").CombinedOutput()
	if err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

func TestRun(t *testing.T) {
	Run(t, Implementation{Capabilities: model.Capabilities{Name: "plain", Unsupported: noDirect,
		Schedulers: model.SchedulersOf(model.Random)},
		Start: startPlain})
}

func TestNoProbesWhenPlaneRejectsCase(t *testing.T) {
	s := faulty{pool: func(p *model.Pool) { p.Affinity = 0 }}.implementation()
	s.Name, s.Unserved = "forgetful", []model.Remark{{Text: "no affinity", About: &model.Packets{Affinity: true}}}
	cases, err := Cases("service")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if !strings.HasPrefix(c.File, "cases/service/affinity") {
			continue
		}
		if wrong, refused := tryCase(t.Context(), s, c, enough); len(wrong) > 0 || len(refused) == 0 ||
			!strings.Contains(refused[0], "no affinity") {
			t.Errorf("%s: wrong %v, refused %v", c.File, wrong, refused)
		}
	}
}

func TestRandom(t *testing.T) {
	Random(t, Implementation{Capabilities: model.Capabilities{Name: "plain", Unsupported: noDirect},
		Start: startPlain}, 40)
}

func TestChurn(t *testing.T) {
	log, wrong := churned(t.Context(), Implementation{
		Capabilities: model.Capabilities{Name: "plain", Unsupported: noDirect}, Start: startPlain},
		80)
	t.Log(log)
	for _, w := range wrong {
		t.Error(w)
	}
}
