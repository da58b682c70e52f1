package network

import (
	"context"
	"strings"

	table "fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/nftables"
)

// TableKey names a fact of a plane's nf_tables table. What a hook leads to comes before the hook.
type TableKey struct{ table.Key }

// TableFact is a fact of a plane's nf_tables table.
type TableFact = table.Fact[TableKey]

// Rank implements dataplane.Key: table, sets, elements, chains; chains that see packets by themselves last.
func (k TableKey) Rank() int {
	switch k.Kind {
	case table.KindElement:
		return 3
	case table.KindChain:
		if strings.HasPrefix(k.Name, Hooked) {
			return 4
		}
		return 2
	}
	return int(k.Kind)
}

// Foundation implements dataplane.Foundation: with a table of another layout goes all that it holds.
func (k TableKey) Foundation() bool { return k.Kind == table.KindTable }

// Hooked is the name of the chain of a table that sees packets by itself, or with which the names of such chains begin.
const Hooked = "hook"

// Table is a plane on one nf_tables table in one network namespace, but for its Render. It is owned where the kernel
// supports that. It implements dataplane.Checker, dataplane.Watcher and dataplane.Cleaner.
type Table struct {
	declared table.Table[TableKey]
	conn     *nftables.Conn
}

// Declare returns the declaration of a table whose chains have these hooks by name, each of which begins with Hooked.
func Declare(name, layout string, hooks map[string]*nftables.Hook, sets ...nftables.Set) *table.Table[TableKey] {
	return &table.Table[TableKey]{Name: name, Layout: layout, Sets: table.ByName(sets), Hooks: hooks,
		Of: func(k table.Key) TableKey { return TableKey{k} }}
}

// OpenTable opens a declared table in the calling thread's network namespace.
func OpenTable(declared *table.Table[TableKey]) (*Table, error) {
	conn, err := nftables.Open()
	if err != nil {
		return nil, err
	}
	return &Table{*declared, conn}, nil
}

// Close closes the handle. The kernel keeps what was written.
func (t *Table) Close() error { return t.conn.Close() }

// Read implements dataplane.Plane.
func (t *Table) Read(context.Context) ([]TableFact, error) {
	if err := t.conn.Mark(); err != nil {
		return nil, err
	}
	return t.declared.Read(t.conn, nil)
}

// Write implements dataplane.Plane: one transaction.
func (t *Table) Write(_ context.Context, put, del []TableFact) error {
	return t.declared.Write(t.conn, put, del)
}

// Check implements dataplane.Checker.
func (t *Table) Check(_ context.Context, put, del []TableFact) error {
	return t.declared.Check(t.conn, put, del)
}

// Counters returns how many packets have come to the counter of each chain since that was written. It may be called at
// any time.
func (t *Table) Counters() (map[string]uint64, error) { return t.conn.Counters(t.declared.Name) }

// Watch implements dataplane.Watcher.
func (t *Table) Watch(ctx context.Context) (<-chan struct{}, error) {
	return t.declared.Watch(ctx, t.conn)
}

// Clean implements dataplane.Cleaner.
func (t *Table) Clean(context.Context) error { return t.declared.Clean(t.conn) }
