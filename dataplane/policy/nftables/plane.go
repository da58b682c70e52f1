package nftables

import (
	"context"

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
	return &Plane{conn, &t}, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return p.conn.Close() }

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	if err := p.conn.Mark(); err != nil {
		return nil, err
	}
	return p.table.Read(p.conn, nil)
}

// Write implements dataplane.Plane: one transaction.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	return p.table.Write(p.conn, put, del)
}

// Check implements dataplane.Checker.
func (p *Plane) Check(_ context.Context, put, del []Fact) error {
	return p.table.Check(p.conn, put, del)
}

// Packets returns how many packets were denied, and how many audited policies would deny, logged or not, since the
// chains were written. It may be called at any time.
func (p *Plane) Packets() (denied, audited uint64, err error) {
	counters, err := p.conn.Counters(Table)
	return counters[chainDeny] + counters[chainForged], counters[chainReportAccept] + counters[chainReportNext], err
}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return p.table.Watch(ctx, p.conn)
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error { return p.table.Clean(p.conn) }
