package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"fairlead.dev/fairlead/kernel/link"
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
	if err := p.look(); err != nil {
		return err
	}
	for _, step := range []func(*writes) error{p.putRoom, p.putNode, p.putServed, p.putWays, p.delWays, p.delServed} {
		if err := step(&w); err != nil {
			return err
		}
	}
	return nil
}

// look learns the node's own addresses and where pods are. Where that has changed, sockets follow; what can't is for
// Read to find.
func (p *Plane) look() error {
	own, err := p.policy.Addresses()
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	pods, err := podsOf(&p.told, p.policy.Reached)
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
	p.wayOfNode()
	return nil
}

// putRoom makes the room, and the way into it.
func (p *Plane) putRoom(w *writes) (err error) {
	if len(w.put[KindRoom]) == 0 || p.entrance() != 0 {
		return nil
	}
	if p.room == nil {
		if p.room, err = newRoom(); err != nil {
			return err
		}
		p.room.ns.Do(func() error { p.voices = openVoices(); return nil })
	}
	l, err := p.strays()
	if err != nil {
		return err
	}
	if err := p.room.open(p.node); err != nil {
		return fmt.Errorf("userspace: make the room: %w", err)
	}
	for _, every := range everywhere() {
		l = append(l, link.Change{Way: &link.Way{Owner: ownerKept, Table: tableKept, To: every, Via: gateway(every.Addr().Is6()), Dev: p.room.dev}})
	}
	return p.policy.Apply(l)
}

// strays gives the rules of connections that ended with a process that was killed, to go.
func (p *Plane) strays() (l []link.Change, err error) {
	rules, err := p.policy.Rules(ownerKept)
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	carried := map[link.Rule]bool{}
	p.inLoops(len(rules) > 0, func(o *loop) {
		for c := range o.conns {
			if c.kept != nil {
				carried[*c.rule()] = true
			}
		}
	})
	for i, r := range rules {
		if !carried[r] {
			l = append(l, link.Change{Rule: &rules[i], Gone: true})
		}
	}
	return l, nil
}

// putNode learns which sources are pods and which addresses take node ports.
func (p *Plane) putNode(w *writes) error {
	for _, f := range w.put[KindNode] {
		n, err := parseNode(f.Value)
		if err != nil {
			return fmt.Errorf("userspace: node: %w", err)
		}
		p.told, p.text = n, f.Value
		p.routed.Store(n.PodInterfaces.Name != "")
		pods, err := podsOf(&n, p.policy.Reached)
		if err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
		p.view.Store(&view{p.view.Load().own, pods})
		if err := errors.Join(p.settle(slices.Collect(maps.Values(p.fronts))), p.wayOfNode()); err != nil {
			return err
		}
	}
	return nil
}

// putServed tells pools and fronts, opens and closes sockets, and ends UDP flows that go elsewhere now.
func (p *Plane) putServed(w *writes) error {
	touched := map[*front]bool{}
	for _, f := range w.put[KindPool] {
		m, err := parsePool(f.Value)
		if err != nil {
			return err
		}
		p.pool(f.Key.Pool).set(m)
		p.texts[f.Key.Pool] = f.Value
		for u := range p.users[f.Key.Pool] {
			touched[u] = true
		}
	}
	var errs []error
	for _, f := range w.put[KindFrontend] {
		if err := p.putFront(f, touched); err != nil {
			return err
		}
		if p.fronts[f.Key.Entry].hungry.Load() != 0 {
			errs = append(errs, fmt.Errorf("userspace: clients of %s wait, since this process may have no more than %d file descriptors: raise its limit (ulimit -n, LimitNOFILE)", f.Key.Entry, p.limit+reserve))
		}
	}
	return errors.Join(append(errs, p.follow(touched))...)
}

// pool gives the pool of an ID. One that was not told of yet has no backends.
func (p *Plane) pool(id uint64) *pool {
	if p.pools[id] == nil {
		p.pools[id] = &pool{}
	}
	return p.pools[id]
}

func (p *Plane) putFront(fact Fact, touched map[*front]bool) error {
	s, err := parseFrontend(fact.Value)
	if err != nil {
		return err
	}
	f := p.fronts[fact.Key.Entry]
	if f == nil {
		f = &front{plane: p, entry: fact.Key.Entry}
		p.fronts[f.entry] = f
	}
	p.unuse(f)
	f.text, f.pools = fact.Value, [2]uint64{s.inside.pool, s.outside.pool}
	for _, id := range f.pools {
		if p.users[id] == nil {
			p.users[id] = map[*front]bool{}
		}
		p.users[id][f] = true
	}
	f.now.Store(&sides{s.sources, [2]*pool{p.pool(s.inside.pool), p.pool(s.outside.pool)}, [2]model.Action{s.inside.empty, s.outside.empty}})
	touched[f] = true
	p.touchAny(f.entry, touched)
	return nil
}

// touchAny touches the node port that has the same port as an entry: at an address of the node, the entry comes first.
func (p *Plane) touchAny(e model.Entry, touched map[*front]bool) {
	e.Addr = anyOf(e.Addr)
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

// delServed takes fronts and pools, the node and the room away.
func (p *Plane) delServed(w *writes) error {
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
		p.text, p.told = "", model.Node{}
		err = errors.Join(err, p.wayOfNode())
	}
	if len(w.del[KindRoom]) > 0 {
		err = errors.Join(err, p.leaveRoom())
	}
	return err
}
