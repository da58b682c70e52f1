package nftables

import (
	"context"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	table "fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/dataplane/service"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.ServicePart, Key, string],
// dataplane.Checker, dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	conn      *nft.Conn
	sysctls   map[string]*sysctl.File
	selectors selectors
}

var (
	_ dataplane.Plane[model.ServicePart, Key, string] = (*Plane)(nil)
	_ dataplane.Checker[Key, string]                  = (*Plane)(nil)
	_ dataplane.Watcher                               = (*Plane)(nil)
	_ dataplane.Cleaner                               = (*Plane)(nil)
)

// routeLocalnet is the sysctl that lets packets with IPv4 loopback addresses leave the host, for node ports on
// localhost.
const routeLocalnet = "net/ipv4/conf/all/route_localnet"

// setHere is a chain without rules that stands where the sysctl was changed by us, so that clean knows to change it
// back.
const setHere = "route_localnet-set"

// tableEntries is how many entries of Maglev's table the plane wants for each backend: each is an element of a map
// here.
const tableEntries = 100

// Capabilities is what the plane supports.
var Capabilities = model.Capabilities{
	Name: "nftables", Tracked: true,
	Unsupported: model.Unsupported{NoIPVLAN: service.PodsBypass, NoDirect: service.RepliesReturn},
	Capacity:    model.Capacity{TableEntriesPerBackend: tableEntries},
	Schedulers: model.SchedulersOf(model.Random, model.RoundRobin, model.WeightedRoundRobin, model.SourceHash,
		model.DestinationHash, model.Maglev),
	Remarks: []model.Remark{service.RemarkForward, service.RemarkInvalid,
		{ID: "maglev-elements", Text: "A Service with scheduler maglev takes 100 map elements for each endpoint " +
			"instead of one.",
			About: service.Scheduled(model.Maglev)},
	},
}

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := nft.Open()
	if err != nil {
		return nil, err
	}
	s := sysctl.OpenOptional(routeLocalnet) // it is needed only where localhost takes node ports
	return &Plane{conn: conn, sysctls: map[string]*sysctl.File{routeLocalnet: s}}, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	for _, s := range p.sysctls {
		s.Close()
	}
	return p.conn.Close()
}

// Read implements dataplane.Plane. The sysctl is read if a chain says that it is ours.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.conn.Mark(); err != nil {
		return nil, err
	}
	facts, err := declared.Read(p.conn, nil)
	if !slices.ContainsFunc(facts, func(f Fact) bool { return f.Key.Kind == KindChain && f.Key.Name == "localhost" }) {
		return facts, err
	}
	if v, err := p.sysctls[routeLocalnet].Get(); err == nil {
		facts = append(facts, sysctlFact(routeLocalnet, v))
	}
	return facts, err
}

// Write implements dataplane.Plane: one transaction, also where the table is made anew, and the sysctl after (or, when
// it goes, before) it.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	w := table.Sort(put, del)
	there, err := declared.Exists(p.conn)
	if err != nil {
		return err
	}
	if there && len(w.Put(KindSysctl)) == 0 && (w.Anew() || len(w.Del(KindSysctl)) > 0) {
		if err := p.restoreSysctl(); err != nil {
			return err
		}
	}
	tx, err := p.transaction(w, there)
	if err != nil {
		return err
	}
	if err := p.conn.Commit(tx); err != nil {
		return err
	}
	return p.set(w.Put(KindSysctl))
}

// Check implements dataplane.Checker.
func (p *Plane) Check(_ context.Context, put, del []Fact) error {
	there, err := declared.Exists(p.conn)
	if err != nil {
		return err
	}
	tx, err := p.transaction(table.Sort(put, del), there)
	if err != nil {
		return err
	}
	return p.conn.Check(tx)
}

// transaction returns what makes facts of the table so. One that is there and made anew goes in it, but for the mark of
// the sysctl.
func (p *Plane) transaction(w *table.Writes[Key], there bool) (*nft.Tx, error) {
	var tx nft.Tx
	marked := false
	if w.Anew() {
		if there {
			chains, err := p.conn.Chains(Table)
			if err != nil {
				return nil, err
			}
			marked = slices.Contains(chains, setHere)
			tx.DelTable(Table)
		}
		w.DropDeletions(KindSysctl)
	}
	declared.Compose(&tx, w)
	if marked && len(w.Put(KindTable)) > 0 {
		tx.AddChain(Table, nft.Chain{Name: setHere})
	}
	return &tx, nil
}

// writeSysctl sets a sysctl of the plane's namespace.
func (p *Plane) writeSysctl(name, value string) error {
	if err := p.sysctls[name].Set(value); err != nil {
		return fmt.Errorf("nftables: node ports on localhost: %w", err)
	}
	return nil
}

// set makes wanted sysctls true, and first leaves a mark where that changes something.
func (p *Plane) set(sysctls []Fact) error {
	for _, s := range sysctls {
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
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return declared.Watch(ctx, p.conn)
}

// Affinity returns how many clients are remembered, by family. It may be called at any time.
func (p *Plane) Affinity() (uses []service.AffinityUse, err error) {
	for _, f := range protos {
		n, err := p.conn.Count(Table, "affinity"+f.Name)
		if err != nil {
			return nil, err
		}
		uses = append(uses, service.AffinityUse{Family: "IPv" + f.Name, Entries: n, Limit: affinitySize})
	}
	return uses, nil
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	if there, err := declared.Exists(p.conn); err != nil || !there {
		return err
	}
	if err := p.restoreSysctl(); err != nil {
		return err
	}
	return declared.Clean(p.conn)
}
