package ipvs

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	table "fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/ipvs"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// writes is what one Write is to do.
type writes = table.Writes[Key]

// Write implements dataplane.Plane: what packets will need, then, at once, where they are led, then what none needs any
// more.
func (p *Plane) Write(ctx context.Context, put, del []Fact) error {
	if err := p.known(); err != nil {
		return err
	}
	w := table.Sort(put, del)
	for _, step := range []func(*writes) error{p.anew, p.frame, p.set, p.serve, p.deliver, p.elements, p.drain, p.strip} {
		if err := step(w); err != nil {
			return err
		}
	}
	return p.sweep(sweepAtOnce)
}

// sweepAtOnce is how many services that are leaving a Write looks after, drawn at random, so that its cost is its
// change's.
const sweepAtOnce = 64

// anew removes a table of another layout. IPVS goes on with what it has; which pool that is is remembered beyond the
// table.
func (p *Plane) anew(w *writes) error {
	if !w.Replaced(key(KindTable, Table, "")) {
		return nil
	}
	if err := p.removeTable(); err != nil {
		return err
	}
	w.DropDeletions(KindSysctl, KindTimeout)
	var tx nft.Tx
	tx.AddTable(Table)
	tx.AddSet(Table, numbers)
	for pool, mark := range p.numbers.mark {
		tx.AddElements(Table, numbers.Name, []nft.Element{poolElement(pool, mark)})
	}
	w.DropPut(key(KindSet, numbers.Name, ""))
	return p.nft.Commit(&tx)
}

// frame makes table, sets and chains, and numbers new pools.
func (p *Plane) frame(w *writes) error {
	var tx nft.Tx
	declared.Build(&tx, w)
	var es []nft.Element
	for _, s := range w.Put(KindService) {
		if mark, isNew := p.numbers.acquire(s.Key.pool(), s.Body.(scheduler).tcp); isNew {
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
	facts := slices.Concat(w.Put(KindSysctl), w.Put(KindTimeout))
	for _, f := range facts {
		name := f.Key.Name
		now, err := p.setting(name)
		if err == nil && now != f.Value {
			if err = p.remember(name, now); err == nil {
				err = p.writeSetting(name, f.Value)
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
	for _, f := range w.Put(KindService) {
		id, s := p.id(f.Key), f.Body.(scheduler)
		b.SetService(ipvs.Service{ServiceID: id, Scheduler: s.name, Flags: s.flags})
		p.present[id] = true
		if l := p.leaving[id]; l != nil {
			l.service = false
		}
	}
	for _, f := range w.Put(KindDestination) {
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
	for _, d := range w.Put(KindDelivery) {
		f := protoNamed(d.Key.Name)
		if w.Replaced(d.Key) {
			if err := deliveryOf(f).remove(p.routes); err != nil {
				return err
			}
		}
		if err := deliveryOf(f).put(p.routes); err != nil {
			return err
		}
	}
	return nil
}

// elements changes the elements of maps, all at once.
func (p *Plane) elements(w *writes) error {
	es, wanted := table.Elements{}, map[Key]bool{}
	for _, f := range w.Put(KindElement) {
		wanted[f.Key] = true
		es.Put(f.Key.Name, p.element(f))
		if _, is := p.lingers[f.Key]; is {
			es.Del(f.Key.Name, nft.Element{Key: f.Key.Element})
			delete(p.lingers, f.Key)
		}
	}
	external := map[Key]string{} // of frontends that go, by their entry
	for _, f := range w.Del(KindElement) {
		if base(f.Key.Name) == "service" && unword(f.Key.Element) == stageExternal {
			external[key(KindElement, f.Key.Name, string(nft.Word(nil, stageEntry))+f.Key.Element[4:])] = f.Value
		}
	}
	for _, f := range w.Del(KindElement) {
		es.Del(f.Key.Name, p.element(f))
		if wanted[f.Key] {
			continue
		}
		if l, is := p.leftover(f, external[f.Key]); is {
			es.Put(f.Key.Name, l.element(f.Key.Element))
			p.lingers[f.Key] = l
		}
	}
	var tx nft.Tx
	es.Write(&tx, Table)
	return p.nft.Commit(&tx)
}

// leftover returns what may be left of a frontend's connections once its element goes. outside is the value of its
// element for clients outside, if it has one.
func (p *Plane) leftover(f Fact, external string) (l lingering, is bool) {
	key := f.Key.Element
	if base(f.Key.Name) != "service" || unword(key) != stageEntry || model.Protocol(key[len(key)-8]) != model.TCP {
		return l, false
	}
	l.internal = p.numbers.of(id(f.Value))
	if external != "" {
		l.external = p.numbers.of(id(external))
	}
	return l, true
}

// there reports whether a service that has connections of a frontend is there.
func (p *Plane) there(k Key, l lingering) bool {
	for _, mark := range []uint32{l.internal, l.external} {
		if isTCP(mark) && p.present[ipvs.ServiceID{Six: k.Name == "service6", Mark: mark}] {
			return true
		}
	}
	return false
}

// element returns a fact's element as the kernel has it.
func (p *Plane) element(f Fact) nft.Element {
	key, value := p.numbers.inKernel(f.Key.Name, f.Key.Element, f.Value)
	return allSets[f.Key.Name].Element(key, value)
}

// drain returns destinations and services no new connections. Those that have any yet, and of TCP, wait for these to
// end.
func (p *Plane) drain(w *writes) error {
	var b ipvs.Batch
	for _, f := range w.Del(KindDestination) {
		id := p.id(f.Key)
		if !isTCP(id.Mark) {
			b.DelDestination(id, f.Key.backend())
			continue
		}
		b.Weigh(id, ipvs.Destination{Addr: f.Key.backend()})
		p.leaves(id).destinations[f.Key.Element] = true
	}
	for _, f := range w.Del(KindService) {
		p.leaves(p.id(f.Key)).service = true
	}
	return p.ipvs.Run(&b)
}

// strip removes chains, sets and the table, gives settings back, and lets packets go.
func (p *Plane) strip(w *writes) error {
	for _, d := range w.Del(KindDelivery) {
		if err := deliveryOf(protoNamed(d.Key.Name)).remove(p.routes); err != nil {
			return err
		}
	}
	if len(w.Del(KindTable)) > 0 {
		return p.Clean(context.Background())
	}
	if settings := slices.Concat(w.Del(KindSysctl), w.Del(KindTimeout)); len(settings) > 0 {
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
	declared.Strip(&tx, w)
	return p.nft.Commit(&tx)
}

// removeTable returns all settings back and removes the table.
func (p *Plane) removeTable() error {
	if there, err := declared.Exists(p.nft); err != nil || !there {
		return err
	}
	chains, err := p.nft.Chains(Table)
	if err != nil {
		return err
	}
	if err := p.setBack(chains, func(string) bool { return true }); err != nil {
		return err
	}
	return declared.Clean(p.nft)
}

// leaving is what of a service waits for its connections to end: the service itself, and destinations by their keys.
type leaving struct {
	service      bool
	destinations map[string]bool
}

// leaves returns what is leaving of a service.
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
