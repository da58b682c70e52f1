package ipvs

import (
	"context"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/kernel/ipvs"
)

// Read implements dataplane.Plane. A table of another layout is read as that one fact, so that it is made anew. What only
// waits for its last connections is no fact; it goes if they have.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.nft.Mark(); err != nil {
		return nil, err
	}
	p.forget()
	numbers, other, facts, err := p.readTable()
	p.numbers = numbers
	if err != nil || other {
		return facts, err
	}
	facts, err = p.readServices(facts)
	if err != nil {
		return nil, err
	}
	for _, f := range protos {
		d, err := p.links.Deliveries(owner, delivery(f).Six, owner)
		if err != nil {
			return nil, err
		}
		if d != "" {
			facts = append(facts, fact(Key{Kind: KindDelivery, Name: f.name}, d))
		}
	}
	return facts, p.sweep(len(p.leaving))
}

// readTable reads what nf_tables holds; other says that it is of another layout.
func (p *Plane) readTable() (n *numbering, other bool, facts []Fact, err error) {
	n = newNumbering()
	tables, err := p.nft.Tables()
	if err != nil || !slices.Contains(tables, Table) {
		return n, false, nil, err
	}
	sets, err := p.nft.Sets(Table)
	if err != nil {
		return n, false, nil, err
	}
	facts = []Fact{fact(Key{Kind: KindTable, Name: Table}, layout)}
	for _, s := range sets {
		ours, ok := allSets[s.Name]
		switch {
		case !ok:
			continue // a stranger's: it goes with the table
		case ours.Schema() != s.Schema:
			return n, true, []Fact{fact(Key{Kind: KindTable, Name: Table}, "set "+s.Name+" is "+s.Schema)}, nil
		case s.Name == numbers.Name:
			if err := p.readNumbers(n); err != nil {
				return n, false, nil, err
			}
		}
		facts = append(facts, fact(Key{Kind: KindSet, Name: s.Name}, s.Schema))
	}
	if facts, err = p.readChains(facts); err != nil {
		return n, false, nil, err
	}
	for _, s := range sets {
		if ours, ok := allSets[s.Name]; ok && written(ours) {
			if facts, err = p.readElements(n, s.Name, facts); err != nil {
				return n, false, nil, err
			}
		}
	}
	return n, false, facts, nil
}

// readNumbers reads which mark stands for which pool.
func (p *Plane) readNumbers(n *numbering) error {
	es, err := p.nft.Elements(Table, numbers.Name)
	for _, e := range es {
		n.add(binary.BigEndian.Uint64([]byte(e.Key)), unword(e.Data))
	}
	return err
}

// known reads which mark stands for which pool, unless that is known.
func (p *Plane) known() error {
	if p.numbers != nil {
		return nil
	}
	n, _, _, err := p.readTable()
	if err == nil {
		p.numbers = n
	}
	return err
}

// readChains adds the chains, and the settings that come with the table.
func (p *Plane) readChains(facts []Fact) ([]Fact, error) {
	digests, err := p.nft.Digests(Table)
	if err != nil {
		return nil, err
	}
	changed := map[string]bool{} // settings
	for n, digest := range digests {
		if setting, is := strings.CutPrefix(n, was); is {
			changed[setting[:max(0, strings.LastIndexByte(setting, '-'))]] = true
			continue
		}
		facts = append(facts, fact(Key{Kind: KindChain, Name: n}, digest))
	}
	for name := range sysctls {
		v, err := p.setting(name)
		if err != nil {
			return nil, err
		}
		facts = append(facts, fact(Key{Kind: KindSysctl, Name: name}, v))
	}
	for name, of := range timeouts {
		if *of(&p.Timeouts) == 0 && !changed[name] {
			continue // the kernel's own
		}
		v, err := p.setting(name)
		if err != nil {
			return nil, err
		}
		facts = append(facts, fact(Key{Kind: KindTimeout, Name: name}, v))
	}
	return facts, nil
}

// readElements adds the elements of a set.
func (p *Plane) readElements(n *numbering, set string, facts []Fact) ([]Fact, error) {
	es, err := p.nft.Elements(Table, set)
	for _, e := range es {
		key, data := e.Text()
		if l, is := lingeringIn(set, data); is {
			p.lingers[Key{KindElement, set, e.Key}] = l
			continue
		}
		facts = append(facts, n.inFact(set, key, data))
	}
	return facts, err
}

// readServices adds IPVS's services of ours with their destinations. Those without one that takes connections are not facts
// but leaving.
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
		facts = append(facts, fact(Key{KindDestination, family.name, key}, strconv.Itoa(int(d.Weight))))
	}
	how := scheduler{name: s.Scheduler, flags: s.Flags, tcp: isTCP(s.Mark)}
	p.present[s.ServiceID] = true
	if !live && len(ds) > 0 {
		p.leaves(s.ServiceID).service = true
		return facts
	}
	return append(facts, fact(Key{KindService, family.name, string(ofPool(pool))}, how.String()))
}
