package ipvs

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/ipvs"
	nft "fairlead.dev/fairlead/kernel/nftables"
)

// Read implements dataplane.Plane. A table of another layout is read as that one fact, so that it is made anew. What
// only waits for its last connections is no fact; it goes if they have.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.nft.Mark(); err != nil {
		return nil, err
	}
	p.forget()
	facts, err := p.readTable()
	if err != nil || len(facts) == 1 && facts[0].Value != layout {
		return facts, err
	}
	facts, err = p.readServices(facts)
	if err != nil {
		return nil, err
	}
	for _, f := range protos {
		d, err := deliveryOf(f).read(p.routes)
		if err != nil {
			return nil, err
		}
		if d != "" {
			facts = append(facts, fact(KindDelivery, f.Name, "", d))
		}
	}
	return facts, p.sweep(len(p.leaving))
}

// readTable reads what nf_tables holds, and which mark stands for which pool.
func (p *Plane) readTable() ([]Fact, error) {
	if err := p.readNumbers(); err != nil {
		return nil, err
	}
	facts, err := declared.Read(p.nft, func(set string, e nft.Element) (f Fact, ok bool) {
		k, data := e.Text()
		if l, is := lingeringIn(set, data); is {
			p.lingers[key(KindElement, set, e.Key)] = l
			return f, false
		}
		return p.numbers.inFact(set, k, data), true
	})
	if err != nil || len(facts) == 0 || facts[0].Value != layout {
		return facts, err
	}
	return p.readSettings(facts)
}

// readNumbers reads which mark stands for which pool.
func (p *Plane) readNumbers() error {
	n := newNumbering()
	sets, err := p.nft.Sets(Table)
	if errors.Is(err, unix.ENOENT) {
		err = nil // there is no table
	}
	if err != nil {
		return err
	}
	if slices.Contains(sets, nft.SetInfo{Name: numbers.Name, Schema: numbers.Schema()}) {
		es, err := p.nft.Elements(Table, numbers.Name)
		if err != nil {
			return err
		}
		for _, e := range es {
			n.add(id(e.Key), unword(e.Data))
		}
	}
	p.numbers = n
	return nil
}

// known reads which mark stands for which pool, unless that is known.
func (p *Plane) known() error {
	if p.numbers != nil {
		return nil
	}
	_, err := p.readTable()
	return err
}

// readSettings adds the settings that come with the table.
func (p *Plane) readSettings(facts []Fact) ([]Fact, error) {
	chains, err := p.nft.Chains(Table)
	if err != nil {
		return nil, err
	}
	changed := map[string]bool{}
	for _, n := range chains {
		if setting, is := strings.CutPrefix(n, was); is {
			changed[setting[:max(0, strings.LastIndexByte(setting, '-'))]] = true
		}
	}
	for name := range sysctls {
		v, err := p.setting(name)
		if err != nil {
			return nil, err
		}
		facts = append(facts, fact(KindSysctl, name, "", v))
	}
	for name, of := range timeouts {
		if *of(&p.Timeouts) == 0 && !changed[name] {
			continue // the kernel's own
		}
		v, err := p.setting(name)
		if err != nil {
			return nil, err
		}
		facts = append(facts, fact(KindTimeout, name, "", v))
	}
	return facts, nil
}

// readServices adds IPVS's services of ours with their destinations. Those without one that takes connections are not
// facts but leaving.
func (p *Plane) readServices(facts []Fact) ([]Fact, error) {
	services, err := p.ipvs.Services()
	if err != nil {
		return nil, err
	}
	for _, s := range services {
		if !ours(s.ServiceID) {
			continue
		}
		ds, err := p.ipvs.Destinations(s.ServiceID)
		if err != nil {
			return nil, err
		}
		facts = p.readService(s, ds, facts)
	}
	return facts, nil
}

func (p *Plane) readService(s ipvs.Service, ds []ipvs.Destination, facts []Fact) []Fact {
	family := protos[0]
	if s.Six {
		family = protos[1]
	}
	pool := p.numbers.id(s.Mark)
	live := false
	for _, d := range ds {
		key := string(destinationKey(pool, d.Addr))
		if d.Weight == 0 && isTCP(s.Mark) {
			p.leaves(s.ServiceID).destinations[key] = true
			continue
		}
		live = true
		facts = append(facts, fact(KindDestination, family.Name, key, strconv.Itoa(int(d.Weight))))
	}
	how := scheduler{name: s.Scheduler, flags: s.Flags, tcp: isTCP(s.Mark)}
	p.present[s.ServiceID] = true
	if !live && len(ds) > 0 {
		p.leaves(s.ServiceID).service = true
		return facts
	}
	return append(facts, fact(KindService, family.Name, string(ofPool(pool)), how.String()))
}
