package ipvs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/kernel/ipvs"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// change is what one Write is to do with facts of a kind.
type change struct{ put, del []Fact }

// writes is what one Write is to do, by kinds of facts.
type writes struct {
	kinds    [KindElement + 1]change
	replaced map[Key]bool // keys that stand in both put and del
}

// sorted sorts facts by kind. What is replaced stands in put alone, but for elements, of which the kernel wants the old gone first.
func sorted(put, del []Fact) *writes {
	w := &writes{replaced: map[Key]bool{}}
	wanted := make(map[Key]bool, len(put))
	for _, f := range put {
		wanted[f.Key] = true
		c := &w.kinds[f.Key.Kind]
		c.put = append(c.put, f)
	}
	for _, f := range del {
		if wanted[f.Key] {
			w.replaced[f.Key] = true
		}
		if c := &w.kinds[f.Key.Kind]; !wanted[f.Key] || f.Key.Kind == KindElement {
			c.del = append(c.del, f)
		}
	}
	return w
}

// Write implements dataplane.Plane: what packets will need, then, at once, where they are led, then what none needs any more.
func (p *Plane) Write(ctx context.Context, put, del []Fact) error {
	if err := p.known(); err != nil {
		return err
	}
	w := sorted(put, del)
	for _, step := range []func(*writes) error{p.anew, p.frame, p.set, p.serve, p.deliver, p.elements, p.retire, p.strip} {
		if err := step(w); err != nil {
			return err
		}
	}
	return p.sweep(sweepAtOnce)
}

// sweepAtOnce is how many services that are leaving a Write looks after, drawn at random, so that its cost is its change's.
const sweepAtOnce = 64

// anew removes a table of another layout. IPVS goes on with what it has; which pool that is is remembered beyond the table.
func (p *Plane) anew(w *writes) error {
	table := Key{Kind: KindTable, Name: Table}
	if !w.replaced[table] {
		return nil
	}
	for _, k := range []Kind{KindSet, KindChain, KindElement, KindSysctl, KindTimeout} {
		w.kinds[k].del = nil // it goes with the table
	}
	if err := p.removeTable(); err != nil {
		return err
	}
	var tx nft.Tx
	tx.AddTable(Table)
	tx.AddSet(Table, numbers)
	for pool, mark := range p.numbers.mark {
		tx.AddElements(Table, numbers.Name, []nft.Element{poolElement(pool, mark)})
	}
	w.kinds[KindSet].put = slices.DeleteFunc(w.kinds[KindSet].put, func(f Fact) bool { return f.Key.Name == numbers.Name })
	return p.nft.Commit(&tx)
}

// frame makes table, sets and chains, and numbers new pools.
func (p *Plane) frame(w *writes) error {
	var tx nft.Tx
	if len(w.kinds[KindTable].put) > 0 {
		tx.AddTable(Table)
	}
	for _, s := range w.kinds[KindSet].put {
		set, ok := allSets[s.Key.Name]
		if !ok {
			return fmt.Errorf("ipvs: no set %q in this layout", s.Key.Name)
		}
		tx.AddSet(Table, set)
	}
	chains := w.kinds[KindChain].put
	for _, c := range chains {
		tx.AddChain(Table, nft.Chain{Name: c.Key.Name, Hook: hooks[c.Key.Name]})
		if w.replaced[c.Key] {
			tx.Flush(Table, c.Key.Name)
		}
	}
	for _, c := range chains {
		rules, ok := p.bodies.Load(c)
		if !ok {
			return fmt.Errorf("ipvs: chain %s %q was not rendered by this plane", c.Key.Name, c.Value)
		}
		tx.AddRules(Table, c.Key.Name, c.Value, rules.([][]nft.Expr))
	}
	var es []nft.Element
	for _, s := range w.kinds[KindService].put {
		if mark, isNew := p.numbers.take(s.Key.pool(), schedulerIn(s.Value).tcp); isNew {
			es = append(es, poolElement(s.Key.pool(), mark))
		}
	}
	tx.AddElements(Table, numbers.Name, es)
	err := p.nft.Commit(&tx)
	if err != nil {
		p.numbers = nil // which pools the kernel has numbered, is to be read again
	}
	return err
}

// set makes settings as wanted, and first remembers what they were, or gives them back.
func (p *Plane) set(w *writes) error {
	facts := slices.Concat(w.kinds[KindSysctl].put, w.kinds[KindTimeout].put)
	for _, f := range facts {
		name := f.Key.Name
		now, err := p.setting(name)
		if err == nil && now != f.Value {
			if err = p.remember(name, now); err == nil {
				err = p.give(name, f.Value)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// id names the virtual service that a fact is about.
func (p *Plane) id(k Key) ipvs.ServiceID {
	return ipvs.ServiceID{Six: k.Name == "6", Mark: p.numbers.of(k.pool())}
}

// serve makes virtual services and destinations.
func (p *Plane) serve(w *writes) error {
	var b ipvs.Batch
	for _, f := range w.kinds[KindService].put {
		id, s := p.id(f.Key), schedulerIn(f.Value)
		b.SetService(ipvs.Service{ServiceID: id, Scheduler: s.name, Flags: s.flags})
		p.present[id] = true
		if l := p.leaving[id]; l != nil {
			l.service = false
		}
	}
	for _, f := range w.kinds[KindDestination].put {
		weight, err := strconv.ParseUint(f.Value, 10, 16)
		if err != nil {
			return fmt.Errorf("ipvs: weight of %v: %w", f.Key, err)
		}
		id := p.id(f.Key)
		b.SetDestination(id, ipvs.Destination{Addr: f.Key.backend(), Weight: uint32(weight)})
		if l := p.leaving[id]; l != nil {
			delete(l.destinations, f.Key.Element)
		}
	}
	return p.ipvs.Run(&b)
}

// deliver leads packets that a frontend takes to this host.
func (p *Plane) deliver(w *writes) error {
	for _, d := range w.kinds[KindDelivery].put {
		f := protos[0]
		if d.Key.Name == "6" {
			f = protos[1]
		}
		if w.replaced[d.Key] {
			if err := p.links.DeleteDeliveries(owner, delivery(f).Six, owner); err != nil {
				return err
			}
		}
		if err := p.links.PutDelivery(delivery(f)); err != nil {
			return err
		}
	}
	return nil
}

// elements changes the elements of maps, all at once.
func (p *Plane) elements(w *writes) error {
	sets := map[string]*struct{ put, del []nft.Element }{}
	set := func(name string) *struct{ put, del []nft.Element } {
		if sets[name] == nil {
			sets[name] = &struct{ put, del []nft.Element }{}
		}
		return sets[name]
	}
	for _, f := range w.kinds[KindElement].put {
		s := set(f.Key.Name)
		s.put = append(s.put, p.element(f))
		if _, is := p.lingers[f.Key]; is {
			s.del = append(s.del, nft.Element{Key: f.Key.Element})
			delete(p.lingers, f.Key)
		}
	}
	outside := map[Key]string{} // of frontends that go, by their entry
	for _, f := range w.kinds[KindElement].del {
		if base(f.Key.Name) == "service" && unword(f.Key.Element) == stageOutside {
			outside[Key{KindElement, f.Key.Name, string(nft.Word(nil, stageEntry)) + f.Key.Element[4:]}] = f.Value
		}
	}
	for _, f := range w.kinds[KindElement].del {
		s := set(f.Key.Name)
		s.del = append(s.del, p.element(f))
		if w.replaced[f.Key] {
			continue
		}
		if l, is := p.leftover(f, outside[f.Key]); is {
			s.put = append(s.put, l.element(f.Key.Element))
			p.lingers[f.Key] = l
		}
	}
	var tx nft.Tx
	names := slices.Sorted(maps.Keys(sets))
	for _, n := range names {
		tx.DelElements(Table, n, sets[n].del)
	}
	for _, n := range names {
		tx.AddElements(Table, n, sets[n].put)
	}
	return p.nft.Commit(&tx)
}

// leftover gives what may be left of a frontend's connections once its element goes. outside is the value of its element for
// clients outside, if it has one.
func (p *Plane) leftover(f Fact, outside string) (l lingering, is bool) {
	key := f.Key.Element
	if base(f.Key.Name) != "service" || unword(key) != stageEntry || model.Protocol(key[len(key)-8]) != model.TCP {
		return l, false
	}
	l.inside = p.numbers.of(id(f.Value))
	if outside != "" {
		l.outside = p.numbers.of(id(outside))
	}
	return l, true
}

// there says whether a service that has connections of a frontend is there.
func (p *Plane) there(k Key, l lingering) bool {
	for _, mark := range []uint32{l.inside, l.outside} {
		if isTCP(mark) && p.present[ipvs.ServiceID{Six: k.Name == "service6", Mark: mark}] {
			return true
		}
	}
	return false
}

// element gives a fact's element as the kernel has it.
func (p *Plane) element(f Fact) nft.Element {
	key, value := p.numbers.inKernel(f.Key.Name, f.Key.Element, f.Value)
	return allSets[f.Key.Name].Element(key, value)
}

// retire gives destinations and services no new connections. Those that have any yet, and of TCP, wait for these to end.
func (p *Plane) retire(w *writes) error {
	var b ipvs.Batch
	for _, f := range w.kinds[KindDestination].del {
		id := p.id(f.Key)
		if !isTCP(id.Mark) {
			b.DelDestination(id, f.Key.backend())
			continue
		}
		b.Weigh(id, ipvs.Destination{Addr: f.Key.backend()})
		p.leaves(id).destinations[f.Key.Element] = true
	}
	for _, f := range w.kinds[KindService].del {
		p.leaves(p.id(f.Key)).service = true
	}
	return p.ipvs.Run(&b)
}

// strip removes chains, sets and the table, gives settings back, and lets packets go.
func (p *Plane) strip(w *writes) error {
	for _, d := range w.kinds[KindDelivery].del {
		if err := p.links.DeleteDeliveries(owner, d.Key.Name == "6", owner); err != nil {
			return err
		}
	}
	if table := w.kinds[KindTable]; len(table.del) > 0 && len(table.put) == 0 {
		return p.Clean(context.Background())
	}
	if settings := slices.Concat(w.kinds[KindSysctl].del, w.kinds[KindTimeout].del); len(settings) > 0 {
		chains, err := p.nft.Chains(Table)
		if err != nil {
			return err
		}
		is := func(name string) bool {
			return slices.ContainsFunc(settings, func(f Fact) bool { return f.Key.Name == name })
		}
		if err := p.setBack(chains, is); err != nil {
			return err
		}
	}
	var tx nft.Tx
	for _, c := range w.kinds[KindChain].del {
		tx.Flush(Table, c.Key.Name)
	}
	for _, c := range w.kinds[KindChain].del {
		tx.DelChain(Table, c.Key.Name)
	}
	for _, s := range w.kinds[KindSet].del {
		tx.DelSet(Table, s.Key.Name)
	}
	return p.nft.Commit(&tx)
}

// removeTable gives all settings back and removes the table.
func (p *Plane) removeTable() error {
	tables, err := p.nft.Tables()
	if err != nil || !slices.Contains(tables, Table) {
		return err
	}
	chains, err := p.nft.Chains(Table)
	if err != nil {
		return err
	}
	if err := p.setBack(chains, func(string) bool { return true }); err != nil {
		return err
	}
	var tx nft.Tx
	tx.DelTable(Table)
	return p.nft.Commit(&tx)
}

// leaving is what of a service waits for its connections to end: the service itself, and destinations by their keys.
type leaving struct {
	service      bool
	destinations map[string]bool
}

// leaves gives what is leaving of a service.
func (p *Plane) leaves(id ipvs.ServiceID) *leaving {
	l := p.leaving[id]
	if l == nil {
		l = &leaving{destinations: map[string]bool{}}
		p.leaving[id] = l
	}
	return l
}

// sweep removes what waited and has no connection any more, of so many services.
func (p *Plane) sweep(services int) error {
	var b ipvs.Batch
	var free []nft.Element
	for id, l := range p.leaving {
		if services--; services < 0 {
			break
		}
		ds, err := p.ipvs.Destinations(id)
		if err != nil {
			return err
		}
		pool := p.numbers.id(id.Mark)
		left := map[string]bool{}
		for _, d := range ds {
			switch key := string(destinationKey(pool, d.Addr)); {
			case !l.destinations[key] || d.Weight > 0:
			case d.Active+d.Idle > 0:
				left[key] = true
			default:
				b.DelDestination(id, d.Addr)
			}
		}
		if l.destinations = left; len(left) > 0 {
			continue
		}
		delete(p.leaving, id)
		if !l.service {
			continue
		}
		b.DelService(id)
		delete(p.present, id)
		if mark, ok := p.numbers.mark[pool]; ok {
			free = append(free, poolElement(pool, mark))
			p.numbers.drop(pool)
		}
	}
	if err := p.ipvs.Run(&b); err != nil {
		return err
	}
	var tx nft.Tx
	tx.DelElements(Table, numbers.Name, free)
	// A service that is leaving may have connections of any frontend that is no more: it may have served another before.
	for k, l := range p.lingers {
		if len(p.leaving) == 0 && !p.there(k, l) {
			tx.DelElements(Table, k.Name, []nft.Element{{Key: k.Element}})
			delete(p.lingers, k)
		}
	}
	return p.nft.Commit(&tx)
}

// schedulerIn reads the value of a service's fact.
func schedulerIn(value string) (s scheduler) {
	for i, w := range strings.Fields(value) {
		if i == 0 {
			s.name = w
		}
		s.tcp = s.tcp || w == "tcp"
		for _, f := range words {
			if w == f.name {
				s.flags |= f.flag
			}
		}
	}
	return s
}
