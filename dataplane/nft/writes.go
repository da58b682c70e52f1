package nft

import (
	"maps"
	"slices"

	"fairlead.dev/fairlead/kernel/nftables"
)

// Writes is what one Write is to do, by kinds of facts. What is replaced stands in Put alone, but for elements, of
// which the kernel wants the old gone first.
type Writes[K PlaneKey] struct {
	put, del [][]Fact[K] // by kind
	replaced map[K]bool
	anew     bool
}

// Sort sorts the facts of one Write.
func Sort[K PlaneKey](put, del []Fact[K]) *Writes[K] {
	w := &Writes[K]{replaced: map[K]bool{}}
	wanted := make(map[K]bool, len(put))
	for _, f := range put {
		kind := f.Key.Base().Kind
		if kind != KindElement { // of those, which are most, both are needed anyway
			wanted[f.Key] = true
		}
		add(&w.put, kind, f)
	}
	for _, f := range del {
		kind := f.Key.Base().Kind
		if w.anew = w.anew || kind == KindTable; wanted[f.Key] {
			w.replaced[f.Key] = true
		} else {
			add(&w.del, kind, f)
		}
	}
	return w
}

func add[K PlaneKey](kinds *[][]Fact[K], kind Kind, f Fact[K]) {
	for len(*kinds) <= int(kind) {
		*kinds = append(*kinds, nil)
	}
	(*kinds)[kind] = append((*kinds)[kind], f)
}

func of[K PlaneKey](kinds [][]Fact[K], kind Kind) []Fact[K] {
	if int(kind) < len(kinds) {
		return kinds[kind]
	}
	return nil
}

// Put returns the facts of a kind that are to be true.
func (w *Writes[K]) Put(k Kind) []Fact[K] { return of(w.put, k) }

// Del returns the facts of a kind that are to be untrue, and of elements also those that are replaced.
func (w *Writes[K]) Del(k Kind) []Fact[K] { return of(w.del, k) }

// Replaced reports whether a fact of that key, which is no element, gets another value.
func (w *Writes[K]) Replaced(k K) bool { return w.replaced[k] }

// Anew reports whether the table is to be removed, and what is put made again.
func (w *Writes[K]) Anew() bool { return w.anew }

// DropDeletions forgets what is to be removed from the table, which is gone, and that something is replaced there; also
// of further kinds.
func (w *Writes[K]) DropDeletions(further ...Kind) {
	for _, k := range append(further, KindTable, KindSet, KindChain, KindElement) {
		if int(k) < len(w.del) {
			w.del[k] = nil
		}
		for key := range w.replaced {
			if key.Base().Kind == k {
				delete(w.replaced, key)
			}
		}
	}
}

// DropPut forgets that a fact is to be true, which it is already.
func (w *Writes[K]) DropPut(k K) {
	kind := k.Base().Kind
	if int(kind) < len(w.put) {
		w.put[kind] = slices.DeleteFunc(w.put[kind], func(f Fact[K]) bool { return f.Key == k })
	}
}

// Compose writes all that is to be done into a transaction: what others refer to is made first and removed last.
func (t *Table[K]) Compose(tx *nftables.Tx, w *Writes[K]) {
	t.Build(tx, w)
	es := Elements{}
	for _, f := range w.Del(KindElement) {
		k := f.Key.Base()
		es.Del(k.Name, t.Sets[k.Name].Element(k.Element, f.Value))
	}
	for _, f := range w.Put(KindElement) {
		k := f.Key.Base()
		es.Put(k.Name, t.Sets[k.Name].Element(k.Element, f.Value))
	}
	es.Write(tx, t.Name)
	t.Strip(tx, w)
}

// Build makes table, sets and chains.
func (t *Table[K]) Build(tx *nftables.Tx, w *Writes[K]) {
	if len(w.Put(KindTable)) > 0 {
		tx.AddTableAs(t.Name, t.Flags, t.Comment)
	}
	for _, s := range w.Put(KindSet) {
		name := s.Key.Base().Name
		tx.AddSet(t.Name, t.Sets[name])
		tx.AddElements(t.Name, name, t.Initial[name])
	}
	chains := w.Put(KindChain)
	for _, c := range chains {
		name := c.Key.Base().Name
		tx.AddChain(t.Name, nftables.Chain{Name: name, Hook: t.Hooks[name]})
		if w.Replaced(c.Key) {
			tx.Flush(t.Name, name)
		}
	}
	for _, c := range chains {
		tx.AddRules(t.Name, c.Key.Base().Name, c.Value, c.Body.([][]nftables.Expr))
	}
}

// Strip removes chains and sets.
func (t *Table[K]) Strip(tx *nftables.Tx, w *Writes[K]) {
	for _, c := range w.Del(KindChain) {
		tx.Flush(t.Name, c.Key.Base().Name)
	}
	for _, c := range w.Del(KindChain) {
		tx.DelChain(t.Name, c.Key.Base().Name)
	}
	for _, s := range w.Del(KindSet) {
		tx.DelSet(t.Name, s.Key.Base().Name)
	}
}

// Elements is what is to be done to elements, by their sets' names.
type Elements map[string]*struct{ put, del []nftables.Element }

func (es Elements) of(set string) *struct{ put, del []nftables.Element } {
	e := es[set]
	if e == nil {
		e = &struct{ put, del []nftables.Element }{}
		es[set] = e
	}
	return e
}

// Put adds an element that is to be there.
func (es Elements) Put(set string, e nftables.Element) {
	s := es.of(set)
	s.put = append(s.put, e)
}

// Del adds an element that is to go.
func (es Elements) Del(set string, e nftables.Element) {
	s := es.of(set)
	s.del = append(s.del, e)
}

// Write writes it into a transaction: what goes first, as a replaced element stands in both.
func (es Elements) Write(tx *nftables.Tx, table string) {
	names := slices.Sorted(maps.Keys(es))
	for _, n := range names {
		tx.DelElements(table, n, es[n].del)
	}
	for _, n := range names {
		tx.AddElements(table, n, es[n].put)
	}
}
