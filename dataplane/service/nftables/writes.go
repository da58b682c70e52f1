package nftables

import (
	"slices"

	nft "fairlead.dev/fairlead/kernel/nftables"
)

// writes is what one Write is to do, by kinds of facts.
type writes struct {
	table                 struct{ put, del bool }
	sets, chains, sysctls struct{ put, del []Fact }
	elements              map[string]*elements
	replaced              map[Key]bool // keys that stand in both put and del
}

// elements is what is to be done to one set.
type elements struct{ put, del []nft.Element }

// sorted sorts facts by kind.
func sorted(put, del []Fact) *writes {
	w := &writes{elements: map[string]*elements{}, replaced: map[Key]bool{}}
	gone := make(map[Key]bool, len(del))
	for _, f := range del {
		w.take(f, false)
		if f.Key.Kind != KindElement {
			gone[f.Key] = true
		}
	}
	for _, f := range put {
		w.take(f, true)
		if f.Key.Kind != KindElement && gone[f.Key] {
			w.replaced[f.Key] = true
		}
	}
	return w
}

// take files one fact.
func (w *writes) take(f Fact, put bool) {
	add := func(to *struct{ put, del []Fact }) {
		if put {
			to.put = append(to.put, f)
		} else {
			to.del = append(to.del, f)
		}
	}
	switch f.Key.Kind {
	case KindTable:
		w.table.put, w.table.del = w.table.put || put, w.table.del || !put
	case KindSet:
		add(&w.sets)
	case KindChain:
		add(&w.chains)
	case KindSysctl:
		add(&w.sysctls)
	case KindElement:
		w.element(f, put)
	}
}

// element files an element with its set.
func (w *writes) element(f Fact, put bool) {
	es := w.elements[f.Key.Name]
	if es == nil {
		es = &elements{}
		w.elements[f.Key.Name] = es
	}
	e := allSets[f.Key.Name].Element(f.Key.Element, f.Value)
	if put {
		es.put = append(es.put, e)
	} else {
		es.del = append(es.del, e)
	}
}

// removeNothing forgets what is to be removed.
func (w *writes) removeNothing() {
	w.sets.del, w.chains.del, w.sysctls.del = nil, nil, nil
	for _, es := range w.elements {
		es.del = nil
	}
}

// eachSet calls f with each set that has elements to be written, by name.
func (w *writes) eachSet(f func(set string, es *elements)) {
	names := make([]string, 0, len(w.elements))
	for n := range w.elements {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		f(n, w.elements[n])
	}
}
