// Package nft declares one nf_tables table of a plane, of the inet family, and reads, writes, watches and removes what
// is declared: sets and maps, chains with their rules, and elements. Each is a fact; the table itself is one too.
//
// A plane says what its table is made of (Table), and in which order its facts are written (Key). A chain can't be read
// back word for word: it is known by a digest, and its rules are the fact's body. Sets that packets write are facts,
// their elements are not.
package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/nftables"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds. Those of a plane's own begin at Other.
const (
	KindTable   Kind = iota // value: the table's layout
	KindSet                 // value: the set's schema
	KindChain               // value: a digest of its hook and rules
	KindElement             // value: what a map's element leads to: a verdict's text, or the data's bytes
	Other
)

// Key names a fact: a table, set or chain by its name, an element by its set's name and its key's bytes, which are the
// first and the last key of a range. A plane's key embeds it, with a Rank of its own.
type Key struct {
	Kind    Kind
	Name    string
	Element string
}

// Base returns k.
func (k Key) Base() Key { return k }

// String returns "chain refuse", or "service4 0a…" for elements, in hexadecimal.
func (k Key) String() string {
	if k.Kind == KindElement {
		return fmt.Sprintf("%s %x", k.Name, k.Element)
	}
	return k.Group() + " " + k.Name
}

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	if k.Kind == KindElement {
		return k.Name
	}
	return [...]string{KindTable: "table", KindSet: "set", KindChain: "chain"}[k.Kind]
}

// Rank implements dataplane.Key for planes that write all of a table at once.
func (k Key) Rank() int { return int(k.Kind) }

// PlaneKey is a plane's key. Those of facts of its table embed a Key.
type PlaneKey interface {
	dataplane.Key
	Base() Key
}

// Table declares a table.
type Table[K PlaneKey] struct {
	Name    string
	Layout  string // of what can't be changed in place: a table of another is made anew
	Comment string // shown by the nft command; "" for none
	Flags   nftables.TableFlags
	Sets    map[string]nftables.Set
	Hooks   map[string]*nftables.Hook     // of the chains that see packets by themselves; one changes with Layout only
	Private func(name string) bool        // sets whose elements, and chains that, are no facts; nil: none
	Initial map[string][]nftables.Element // of private sets: what they hold when they are made
	Besides func(*nftables.Tx)            // what each transaction does at its end; nil: nothing
	Of      func(Key) K
}

// Fact is a fact of a table.
type Fact[K PlaneKey] = dataplane.Fact[K, string]

func (t *Table[K]) fact(kind Kind, name, value string) Fact[K] {
	return Fact[K]{Key: t.Of(Key{Kind: kind, Name: name}), Value: value}
}

// Frame returns the facts of the table and its sets.
func (t *Table[K]) Frame() []Fact[K] {
	facts := []Fact[K]{t.fact(KindTable, t.Name, t.Layout)}
	for _, s := range t.Sets {
		facts = append(facts, t.fact(KindSet, s.Name, s.Schema()))
	}
	return facts
}

// Chain returns the fact of a chain with rules, which are its body.
func (t *Table[K]) Chain(name string, rules [][]nftables.Expr) Fact[K] {
	f := t.fact(KindChain, name, nftables.Digest(t.Hooks[name], rules))
	f.Body = rules
	return f
}

// Element returns the fact of an element.
func (t *Table[K]) Element(set string, key []byte, value string) Fact[K] {
	return Fact[K]{Key: t.Of(Key{KindElement, set, string(key)}), Value: value}
}

// private reports whether a name is that of a chain that is no fact, or of a set whose elements are none.
func (t *Table[K]) private(name string) bool { return t.Private != nil && t.Private(name) }

// Exists reports whether there is a table of that name.
func (t *Table[K]) Exists(c *nftables.Conn) (bool, error) {
	tables, err := c.Tables()
	return slices.Contains(tables, t.Name), err
}

// Read returns every fact that the kernel holds. A table of another layout is read as that one fact, so that it is made
// anew. element reads the elements; nil reads them as Element made them. Call c.Mark first.
func (t *Table[K]) Read(c *nftables.Conn, element func(set string, e nftables.Element) (f Fact[K],
	ok bool)) ([]Fact[K], error) {
	flags, there, err := c.FlagsOf(t.Name)
	if err != nil || !there {
		return nil, err
	}
	if t.Flags&^flags&nftables.Persistent != 0 { // this kernel has no owners
		return []Fact[K]{t.fact(KindTable, t.Name, "not persistent")}, nil
	}
	sets, err := c.Sets(t.Name)
	if err != nil {
		return nil, err
	}
	facts := []Fact[K]{t.fact(KindTable, t.Name, t.Layout)}
	for _, s := range sets {
		if ours, ok := t.Sets[s.Name]; ok && ours.Schema() != s.Schema {
			return []Fact[K]{t.fact(KindTable, t.Name, "set "+s.Name+" is "+s.Schema)}, nil
		}
		facts = append(facts, t.fact(KindSet, s.Name, s.Schema))
	}
	digests, err := c.Digests(t.Name)
	if err != nil {
		return nil, err
	}
	for n, digest := range digests {
		if !t.private(n) {
			facts = append(facts, t.fact(KindChain, n, digest))
		}
	}
	for _, s := range sets {
		ours, ok := t.Sets[s.Name]
		if !ok || ours.Dynamic || t.private(s.Name) {
			continue
		}
		es, err := c.ElementsOf(t.Name, ours)
		if err != nil {
			return nil, err
		}
		facts = slices.Grow(facts, len(es))
		for _, e := range es {
			if element == nil {
				key, value := e.Text()
				facts = append(facts, Fact[K]{Key: t.Of(Key{KindElement, s.Name, key}), Value: value})
			} else if f, ok := element(s.Name, e); ok {
				facts = append(facts, f)
			}
		}
	}
	return facts, nil
}

// Write makes the facts of put true and those of del untrue in one transaction, also where the table is made anew. If
// the table is to be owned, c owns it then.
func (t *Table[K]) Write(c *nftables.Conn, put, del []Fact[K]) error {
	tx, err := t.transaction(c, put, del)
	if err != nil {
		return err
	}
	return t.explain(c.Commit(tx))
}

// Check returns the error that Write would return, and changes nothing.
func (t *Table[K]) Check(c *nftables.Conn, put, del []Fact[K]) error {
	tx, err := t.transaction(c, put, del)
	if err != nil {
		return err
	}
	return t.explain(c.Check(tx))
}

// transaction returns what makes the facts of put true and those of del untrue.
func (t *Table[K]) transaction(c *nftables.Conn, put, del []Fact[K]) (*nftables.Tx, error) {
	w := Sort(put, del)
	var tx nftables.Tx
	if w.Anew() {
		there, err := t.Exists(c)
		if err != nil {
			return nil, err
		}
		if there {
			tx.DelTable(t.Name)
		}
		w.DropDeletions()
	}
	if len(put) > 0 || !w.Anew() {
		t.own(&tx)
	}
	t.Compose(&tx, w)
	if t.Besides != nil {
		t.Besides(&tx)
	}
	return &tx, nil
}

// own makes the table that is there the transaction's sender's own, if it is to be owned.
func (t *Table[K]) own(tx *nftables.Tx) {
	if t.Flags&nftables.Owned != 0 {
		tx.AddTableAs(t.Name, t.Flags, t.Comment)
	}
}

// explain returns err, with what to do about it where another process owns the table.
func (t *Table[K]) explain(err error) error {
	if t.Flags&nftables.Owned != 0 && errors.Is(err, unix.EPERM) {
		return fmt.Errorf("nf_tables table %s belongs to another process, such as a running agent: stop that first: %w",
			t.Name, err)
	}
	return err
}

// Watch sends whenever others change the table: see nftables.Conn.Watch. A table that is to be owned, and is there, is
// c's own then.
func (t *Table[K]) Watch(ctx context.Context, c *nftables.Conn) (<-chan struct{}, error) {
	if t.Flags&nftables.Owned != 0 {
		flags, _, err := c.FlagsOf(t.Name)
		if err == nil && flags&nftables.Persistent != 0 {
			var tx nftables.Tx
			t.own(&tx)
			err = t.explain(c.Commit(&tx))
		}
		if err != nil {
			return nil, err
		}
	}
	return c.Watch(ctx, t.Name)
}

// Clean removes the table. That there is none is no error.
func (t *Table[K]) Clean(c *nftables.Conn) error {
	if there, err := t.Exists(c); err != nil || !there {
		return err
	}
	var tx nftables.Tx
	tx.DelTable(t.Name)
	return t.explain(c.Commit(&tx))
}
