package nftables

import (
	"context"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.PolicyPart, Key, string],
// dataplane.Checker, dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	conn  *nft.Conn
	table *table.Table[Key] // declared, owned where the kernel supports that
	// the chains there that accept what is of the current state
	allows []string
}

var (
	_ dataplane.Plane[model.PolicyPart, Key, string] = (*Plane)(nil)
	_ dataplane.Checker[Key, string]                 = (*Plane)(nil)
	_ dataplane.Watcher                              = (*Plane)(nil)
	_ dataplane.Cleaner                              = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := nft.Open()
	if err != nil {
		return nil, err
	}
	const flags = nft.Owned | nft.Persistent
	supported, err := conn.Supports(flags)
	if err != nil {
		conn.Close()
		return nil, err
	}
	t := *declared
	if supported {
		t.Flags = flags
	}
	return &Plane{conn: conn, table: &t}, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return p.conn.Close() }

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.conn.Mark(); err != nil {
		return nil, err
	}
	facts, err := p.table.Read(p.conn, nil)
	if p.allows = allowing(nil, facts); err != nil || len(p.allows) == 0 {
		return facts, err
	}
	states, err := p.conn.ElementsOf(Table, allSets[setCurrent])
	if len(states) != 1 { // a Write was ended halfway: another one completes it
		facts = slices.DeleteFunc(facts, func(f Fact) bool { return f.Key.allows() })
	}
	return facts, err
}

// allowing adds the chains among facts that accept what is of the current state.
func allowing(l []string, facts []Fact) []string {
	for _, f := range facts {
		if f.Key.allows() && !slices.Contains(l, f.Key.Name) {
			l = append(l, f.Key.Name)
		}
	}
	return l
}

// Write implements dataplane.Plane: one transaction, and where it changes ranges that lead to something another one.
// The kernel has packets find those only once all else is in force (nft_set_commit_update() in nf_tables_commit()):
// until the second, which begins then, no new connection is accepted by an evaluation.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	chains := p.allows
	if slices.ContainsFunc(del, func(f Fact) bool { return f.Key.Kind == table.KindTable }) {
		chains = nil
	}
	chains = allowing(slices.Clip(chains), put)
	t := *p.table
	if len(chains) > 0 {
		t.Besides = func(tx *nft.Tx) { renumber(tx, chains) }
	}
	last := t
	lags := func(f Fact) bool { return f.Key.lags() }
	twice := len(chains) > 0 && (slices.ContainsFunc(put, lags) || slices.ContainsFunc(del, lags))
	if twice {
		t.Besides = suspend
	}
	err := t.Write(p.conn, put, del)
	if err == nil && twice {
		err = last.Write(p.conn, nil, nil)
	}
	if err == nil {
		p.allows = chains
	}
	return err
}

// Check implements dataplane.Checker.
func (p *Plane) Check(_ context.Context, put, del []Fact) error {
	return p.table.Check(p.conn, put, del)
}

// Packets returns how many packets were denied, and how many audited policies would deny, logged or not, since the
// chains were written. It may be called at any time.
func (p *Plane) Packets() (denied, audited uint64, err error) {
	counters, err := p.conn.Counters(Table)
	return counters[chainDeny] + counters[chainForged], counters[chainReport], err
}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return p.table.Watch(ctx, p.conn)
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error { return p.table.Clean(p.conn) }
