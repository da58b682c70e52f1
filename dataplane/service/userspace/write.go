package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/model"
)

// kinds is the number of kinds of facts.
const kinds = KindUnmatched + 1

// writes is facts by kind. What is only replaced is not in del.
type writes struct{ put, del [kinds][]Fact }

func sorted(put, del []Fact) (w writes) {
	is := make(map[Key]bool, len(put))
	for _, f := range put {
		w.put[f.Key.Kind] = append(w.put[f.Key.Kind], f)
		is[f.Key] = true
	}
	for _, f := range del {
		if !is[f.Key] {
			w.del[f.Key.Kind] = append(w.del[f.Key.Kind], f)
		}
	}
	return w
}

// Write implements dataplane.Plane: sockets before the routes that lead to them, and routes away before sockets.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := sorted(put, del)
	if err := p.refresh(); err != nil {
		return err
	}
	for _, step := range []func(*writes) error{p.putNetns, p.putNode, p.putListeners, p.putRoutes, p.delRoutes,
		p.delListeners} {
		if err := step(&w); err != nil {
			return err
		}
	}
	return nil
}

// refresh learns the node's own addresses and where pods are. Where that has changed, sockets follow; what can't is for
// Read to find.
func (p *Plane) refresh() error {
	own, err := link.Own(p.netlink)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	pods, err := podsOf(p.nodeModel, p.reached)
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	old := p.view.Load()
	if maps.Equal(own, old.own) && slices.Equal(pods, old.pods) {
		return nil
	}
	p.view.Store(&view{own, pods})
	all := map[*front]bool{}
	for _, f := range p.fronts {
		all[f] = true
	}
	p.follow(all)
	p.nodeRoutes()
	return nil
}

// putNetns makes the netns, and the way into it.
func (p *Plane) putNetns(w *writes) (err error) {
	if len(w.put[KindNetns]) == 0 || p.entrance() != 0 {
		return nil
	}
	if p.privateNetns == nil {
		if p.privateNetns, err = newPrivateNetns(); err != nil {
			return err
		}
		p.privateNetns.ns.Do(func() error { p.voices = openVoices(); return nil })
	}
	strays, err := p.strays()
	if err != nil {
		return err
	}
	if err := p.privateNetns.open(p.node); err != nil {
		return fmt.Errorf("userspace: make the network namespace: %w", err)
	}
	b := route.NewBatch()
	rule.Delete(b, strays...)
	for _, every := range everywhere() {
		route.Put(b, route.Route{Owner: ownerDetained, Table: tableDetained, To: every, Via: gateway(every.Addr().Is6()),
			Dev: p.privateNetns.dev})
	}
	return p.netlink.Apply(b)
}

// reached returns by which interfaces packets leave.
func (p *Plane) reached() ([]route.Reach, error) { return route.Reached(p.netlink) }

// strays returns the rules of connections that ended with a process that was killed.
func (p *Plane) strays() ([]rule.Rule, error) {
	rules, err := rule.List(p.netlink, ownerDetained)
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	proxied := map[rule.Rule]bool{}
	p.inLoops(len(rules) > 0, func(o *loop) {
		for c := range o.conns {
			if c.undetain != nil {
				proxied[c.rule()] = true
			}
		}
	})
	return slices.DeleteFunc(rules, func(r rule.Rule) bool { return proxied[r] }), nil
}

// putNode learns which sources are pods and which addresses take node ports.
func (p *Plane) putNode(w *writes) error {
	for _, f := range w.put[KindNode] {
		n := f.Body.(*model.ServiceNode)
		p.nodeModel, p.text = n, f.Value
		p.routed.Store(n.PodInterfaces.Name != "")
		pods, err := podsOf(n, p.reached)
		if err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
		p.view.Store(&view{p.view.Load().own, pods})
		if err := errors.Join(p.settle(slices.Collect(maps.Values(p.fronts))), p.nodeRoutes()); err != nil {
			return err
		}
	}
	return nil
}

// putListeners notifies pools and fronts, opens and closes sockets, and ends UDP flows that go elsewhere now.
func (p *Plane) putListeners(w *writes) error {
	touched := map[*front]bool{}
	for _, f := range w.put[KindPool] {
		m := *f.Body.(*model.Pool)
		m.Entries = 0 // as many as the plane sees fit
		p.pool(f.Key.Pool).set(m)
		p.texts[f.Key.Pool] = f.Value
		for u := range p.users[f.Key.Pool] {
			touched[u] = true
		}
	}
	var errs []error
	for _, f := range w.put[KindFrontend] {
		p.putFront(f, touched)
		if p.fronts[f.Key.Entry].hungry.Load() != 0 {
			errs = append(errs, fmt.Errorf("userspace: clients of %s wait, since this process may have no more than %d file "+
				"descriptors: raise its limit (ulimit -n, LimitNOFILE)", f.Key.Entry, p.limit+reserve))
		}
	}
	return errors.Join(append(errs, p.follow(touched))...)
}

// pool returns the pool of an ID. One that was not told of yet has no backends.
func (p *Plane) pool(id uint64) *pool {
	if p.pools[id] == nil {
		p.pools[id] = &pool{}
	}
	return p.pools[id]
}

func (p *Plane) putFront(fact Fact, touched map[*front]bool) {
	v := fact.Body.(*model.Frontend)
	f := p.fronts[fact.Key.Entry]
	if f == nil {
		f = &front{plane: p, entry: fact.Key.Entry}
		p.fronts[f.entry] = f
	}
	p.unuse(f)
	f.text, f.pools = fact.Value, [2]uint64{v.Internal.Pool.ID, v.External.Pool.ID}
	for _, id := range f.pools {
		if p.users[id] == nil {
			p.users[id] = map[*front]bool{}
		}
		p.users[id][f] = true
	}
	f.now.Store(&sides{v.Sources, [2]*pool{p.pool(f.pools[0]), p.pool(f.pools[1])},
		[2]model.Action{v.Internal.Empty, v.External.Empty}})
	touched[f] = true
	p.touchAny(f.entry, touched)
}

// touchAny touches the node port that has the same port as an entry: at an address of the node, the entry comes first.
func (p *Plane) touchAny(e model.Entry, touched map[*front]bool) {
	e.Addr = inet.Unspecified(e.Addr)
	if f := p.fronts[e]; f != nil {
		touched[f] = true
	}
}

// unuse takes a front from its pools' users.
func (p *Plane) unuse(f *front) {
	for _, id := range f.pools {
		if delete(p.users[id], f); len(p.users[id]) == 0 {
			delete(p.users, id)
		}
	}
}

// follow has sockets and flows be as their fronts say.
func (p *Plane) follow(touched map[*front]bool) error {
	if len(touched) == 0 {
		return nil
	}
	err := p.settle(slices.Collect(maps.Keys(touched)))
	var udp []*front
	for f := range touched {
		if f.entry.Protocol == model.UDP {
			udp = append(udp, f)
		}
	}
	p.inLoops(len(udp) > 0, func(l *loop) {
		for _, f := range udp {
			for _, s := range f.sockets {
				for _, li := range s.listeners {
					if li.loop == l {
						li.cut()
					}
				}
			}
		}
	})
	return err
}

// delListeners takes fronts and pools, the node and the netns away.
func (p *Plane) delListeners(w *writes) error {
	touched := map[*front]bool{}
	for _, f := range w.del[KindFrontend] {
		if old := p.fronts[f.Key.Entry]; old != nil {
			p.unuse(old)
			delete(p.fronts, f.Key.Entry)
			touched[old] = true
			p.touchAny(f.Key.Entry, touched)
		}
	}
	err := p.follow(touched)
	for _, f := range w.del[KindPool] {
		delete(p.texts, f.Key.Pool)
		if p.users[f.Key.Pool] == nil {
			delete(p.pools, f.Key.Pool)
		} else {
			p.pool(f.Key.Pool).set(model.Pool{})
		}
	}
	if len(w.del[KindNode]) > 0 {
		p.text, p.nodeModel = "", noNode
		err = errors.Join(err, p.nodeRoutes())
	}
	if len(w.del[KindNetns]) > 0 {
		err = errors.Join(err, p.resetNetns())
	}
	return err
}
