package nftables

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.Part, Key, string],
// dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	conn    *nft.Conn
	sysctls map[string]*sysctl.Setting
	bodies  sync.Map // a chain's Fact → [][]nft.Expr: what it stands for
	drawers sync.Map // family and step → Fact of the chain that draws a backend
}

var (
	_ dataplane.Plane[model.Part, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                        = (*Plane)(nil)
	_ dataplane.Cleaner                        = (*Plane)(nil)
)

// routeLocalnet is the sysctl that lets packets with IPv4 loopback addresses leave the host, for node ports on localhost.
const routeLocalnet = "net/ipv4/conf/all/route_localnet"

// setHere is a chain without rules that stands where the sysctl was changed by us, so that clean knows to change it back.
const setHere = "route_localnet-set"

// Abilities is what the plane can do.
var Abilities = service.Abilities{
	Name: "nftables", Tracked: true, Table: 100,
	Schedulers: model.SchedulersOf(model.Random, model.RoundRobin, model.WeightedRoundRobin, model.SourceHash, model.DestinationHash, model.Maglev),
	Summary:    "one nf_tables table of maps and verdict maps, written by netlink",
	Needs:      "nf_tables (CONFIG_NF_TABLES, CONFIG_NFT_NAT)",
	Notes: []service.Note{
		{Text: service.NoteForward}, {Text: service.NoteInvalid},
		{Text: "A Service with scheduler maglev takes 100 map elements for each endpoint instead of one.",
			Concerns: service.Scheduled(model.SchedulersOf(model.Maglev))},
	},
}

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := nft.Open()
	if err != nil {
		return nil, err
	}
	s := sysctl.OpenOptional(routeLocalnet) // it is needed only where localhost takes node ports
	return &Plane{conn: conn, sysctls: map[string]*sysctl.Setting{routeLocalnet: s}}, nil
}

// Close gives up the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	for _, s := range p.sysctls {
		s.Close()
	}
	return p.conn.Close()
}

// chain makes the fact of a chain with rules and remembers what it stands for.
func (p *Plane) chain(name string, rules [][]nft.Expr) Fact {
	f := Fact{Key: Key{Kind: KindChain, Name: name}, Value: nft.Digest(hooks[name], rules)}
	p.bodies.LoadOrStore(f, rules)
	return f
}

// Read implements dataplane.Plane. A table of another layout is read as that one fact, so that it is made anew.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.conn.Mark(); err != nil {
		return nil, err
	}
	tables, err := p.conn.Tables()
	if err != nil || !slices.Contains(tables, Table) {
		return nil, err
	}
	sets, err := p.conn.Sets(Table)
	if err != nil {
		return nil, err
	}
	facts := []Fact{{Key: Key{Kind: KindTable, Name: Table}, Value: layout}}
	for _, s := range sets {
		if ours, ok := allSets[s.Name]; ok && ours.Schema() != s.Schema {
			return []Fact{{Key: Key{Kind: KindTable, Name: Table}, Value: "set " + s.Name + " is " + s.Schema}}, nil
		}
		facts = append(facts, Fact{Key: Key{Kind: KindSet, Name: s.Name}, Value: s.Schema})
	}
	chains, err := p.chains()
	if err != nil {
		return nil, err
	}
	facts = append(facts, chains...)
	for _, s := range sets {
		if ours, ok := allSets[s.Name]; ok && written(ours) {
			if facts, err = p.elements(s.Name, facts); err != nil {
				return nil, err
			}
		}
	}
	return facts, nil
}

// chains reads the chains, and the sysctl if a chain says that it is ours.
func (p *Plane) chains() ([]Fact, error) {
	digests, err := p.conn.Digests(Table)
	if err != nil {
		return nil, err
	}
	var facts []Fact
	for n, digest := range digests {
		if n == setHere {
			continue
		}
		facts = append(facts, Fact{Key: Key{Kind: KindChain, Name: n}, Value: digest})
		if n == "localhost" {
			if v, err := p.sysctls[routeLocalnet].Get(); err == nil {
				facts = append(facts, Fact{Key: Key{Kind: KindSysctl, Name: routeLocalnet}, Value: v})
			}
		}
	}
	return facts, nil
}

// elements adds the elements of a set to facts.
func (p *Plane) elements(set string, facts []Fact) ([]Fact, error) {
	es, err := p.conn.Elements(Table, set)
	for _, e := range es {
		key, value := e.Text()
		facts = append(facts, Fact{Key: Key{KindElement, set, key}, Value: value})
	}
	return facts, err
}

// Write implements dataplane.Plane: one transaction, and the sysctl after (or, when it goes, before) it.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	w := sorted(put, del)
	if w.table.del {
		return p.anew(w)
	}
	if err := p.setBack(w); err != nil {
		return err
	}
	var tx nft.Tx
	if err := p.compose(&tx, w); err != nil {
		return err
	}
	if err := p.conn.Commit(&tx); err != nil {
		return err
	}
	return p.set(w)
}

// anew removes the table, and makes it again if a table of our layout is wanted. The rest of its content is not
// removed piece by piece: it went with the table.
func (p *Plane) anew(w *writes) error {
	if err := p.Clean(context.Background()); err != nil {
		return err
	}
	var tx nft.Tx
	w.removeNothing()
	if err := p.compose(&tx, w); err != nil {
		return err
	}
	if err := p.conn.Commit(&tx); err != nil {
		return err
	}
	return p.set(w)
}

// compose writes w into a transaction: what others refer to is made first and removed last.
func (p *Plane) compose(tx *nft.Tx, w *writes) error {
	if w.table.put {
		tx.AddTable(Table)
	}
	for _, s := range w.sets.put {
		set, ok := allSets[s.Key.Name]
		if !ok {
			return fmt.Errorf("nftables: no set %q in this layout", s.Key.Name)
		}
		tx.AddSet(Table, set)
	}
	for _, c := range w.chains.put {
		tx.AddChain(Table, nft.Chain{Name: c.Key.Name, Hook: hooks[c.Key.Name]})
	}
	for _, c := range w.chains.del {
		tx.Flush(Table, c.Key.Name)
	}
	for _, c := range w.chains.put {
		if err := p.body(tx, c); err != nil {
			return err
		}
	}
	w.eachSet(func(set string, es *elements) { tx.DelElements(Table, set, es.del) })
	w.eachSet(func(set string, es *elements) { tx.AddElements(Table, set, es.put) })
	for _, c := range w.chains.del {
		if !w.replaced[c.Key] {
			tx.DelChain(Table, c.Key.Name)
		}
	}
	for _, s := range w.sets.del {
		tx.DelSet(Table, s.Key.Name)
	}
	return nil
}

// body writes a chain's rules.
func (p *Plane) body(tx *nft.Tx, c Fact) error {
	rules, ok := p.bodies.Load(c)
	if !ok {
		return fmt.Errorf("nftables: chain %s %q was not rendered by this plane", c.Key.Name, c.Value)
	}
	tx.AddRules(Table, c.Key.Name, c.Value, rules.([][]nft.Expr))
	return nil
}

// writeSysctl sets a sysctl of the plane's namespace.
func (p *Plane) writeSysctl(name, value string) error {
	if err := p.sysctls[name].Set(value); err != nil {
		return fmt.Errorf("nftables: node ports on localhost: %w", err)
	}
	return nil
}

// set makes wanted sysctls true, and first leaves a mark where that changes something.
func (p *Plane) set(w *writes) error {
	for _, s := range w.sysctls.put {
		now, err := p.sysctls[s.Key.Name].Get()
		if err != nil {
			return err
		}
		if now == s.Value {
			continue
		}
		var tx nft.Tx
		tx.AddChain(Table, nft.Chain{Name: setHere})
		if err := p.conn.Commit(&tx); err != nil {
			return err
		}
		if err := p.writeSysctl(s.Key.Name, s.Value); err != nil {
			return err
		}
	}
	return nil
}

// setBack undoes what set changed, if it did.
func (p *Plane) setBack(w *writes) error {
	gone := false
	for _, s := range w.sysctls.del {
		gone = gone || !w.replaced[s.Key]
	}
	if !gone {
		return nil
	}
	return p.restoreSysctl()
}

// restoreSysctl changes the sysctl back where the mark says that we changed it, and removes the mark.
func (p *Plane) restoreSysctl() error {
	chains, err := p.conn.Chains(Table)
	if err != nil || !slices.Contains(chains, setHere) {
		return err
	}
	if err := p.writeSysctl(routeLocalnet, "0"); err != nil {
		return err
	}
	var tx nft.Tx
	tx.DelChain(Table, setHere)
	return p.conn.Commit(&tx)
}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) { return p.conn.Watch(ctx, Table) }

// Affinity returns how many clients are remembered, by family. It may be called at any time.
func (p *Plane) Affinity() (uses []service.AffinityUse, err error) {
	for _, f := range protos {
		n, err := p.conn.Count(Table, "affinity"+f.name)
		if err != nil {
			return nil, err
		}
		uses = append(uses, service.AffinityUse{Family: "IPv" + f.name, Entries: n, Limit: affinitySize})
	}
	return uses, nil
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	tables, err := p.conn.Tables()
	if err != nil || !slices.Contains(tables, Table) {
		return err
	}
	if err := p.restoreSysctl(); err != nil {
		return err
	}
	var tx nft.Tx
	tx.DelTable(Table)
	return p.conn.Commit(&tx)
}
