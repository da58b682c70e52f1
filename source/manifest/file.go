package manifest

import (
	"hash/maphash"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// A doc is what one document of a file said when it was last read.
type doc struct {
	hash  uint64 // of its text
	line  int    // of its first line
	items []item
}

// content is what a file said when it was last read. It is not changed once built.
type content struct {
	docs  []doc
	spare []source.Object // gone from the text, but kept: a document is unreadable
}

// A diff tells what objects come and go from one content to the next.
type diff struct{ add, remove []source.Object }

var seed = maphash.MakeSeed()

// digest returns a number for a text, never 0.
func digest(text []byte) uint64 { return maphash.Bytes(seed, text) | 1 }

// read returns what text says, decoding only what old does not hold already. Objects that say the same as before keep
// their pointers.
func (old content) read(text []byte, words *strip.Words) (content, diff) {
	chunks := split(text)
	next := content{docs: make([]doc, len(chunks))}
	reused := make([]bool, len(old.docs))
	var where map[uint64]int // documents of old, by hash: made when one is not where it was
	var fresh []int
	for i, c := range chunks {
		next.docs[i] = doc{hash: digest(c.text), line: c.line}
		j, ok := i, i < len(old.docs) && !reused[i] && old.docs[i].hash == next.docs[i].hash
		if !ok {
			if where == nil {
				where = old.index()
			}
			j, ok = where[next.docs[i].hash]
			ok = ok && !reused[j]
		}
		if ok {
			reused[j], next.docs[i].items = true, old.docs[j].items
		} else {
			fresh = append(fresh, i)
		}
	}
	m := newMerge(old, reused)
	for i := range next.docs {
		next.docs[i].items = m.release(next.docs[i].items)
	}
	parallel(len(fresh), func(i int) {
		next.docs[fresh[i]].items = decode(chunks[fresh[i]], &m.cache, words)
	})
	m.settle(&next, fresh)
	return next, m.diff
}

func (old content) index() map[uint64]int {
	where := make(map[uint64]int, len(old.docs))
	for i := range old.docs {
		where[old.docs[i].hash] = i
	}
	return where
}

// all returns the objects of a file, with those that it no longer says but keeps.
func (old content) all() (out []source.Object) {
	for _, d := range old.docs {
		for _, it := range d.items {
			if it.obj != nil {
				out = append(out, it.obj)
			}
		}
	}
	return append(out, old.spare...)
}

// A merge settles which of the objects that a file held before stay.
type merge struct {
	gone  map[source.Key]source.Object // held before, and not yet found in what the file says now
	cache cache
	diff  diff
}

// newMerge gathers what old held in documents that are not taken over as they are.
func newMerge(old content, reused []bool) *merge {
	m := &merge{gone: map[source.Key]source.Object{}}
	for i, d := range old.docs {
		if reused[i] {
			continue
		}
		for _, it := range m.release(d.items) {
			if it.hash != 0 && it.bad == nil && m.cache.put(it) {
				continue
			}
			m.lose(it.obj)
		}
	}
	for _, o := range old.spare {
		m.lose(o)
	}
	return m
}

// lose records an object that the file held.
func (m *merge) lose(o source.Object) {
	if o == nil {
		return
	}
	if _, ok := m.gone[source.KeyOf(o)]; ok {
		m.diff.remove = append(m.diff.remove, o)
		return
	}
	m.gone[source.KeyOf(o)] = o
}

// find takes an object that the file held, nil if it held none.
func (m *merge) find(key source.Key) source.Object {
	o := m.gone[key]
	delete(m.gone, key)
	return o
}

// release returns items without the last good content that refused ones keep, which is lost until settle finds it
// again.
func (m *merge) release(items []item) []item {
	retains := func(it item) bool { return it.bad != nil && it.obj != nil }
	if !slices.ContainsFunc(items, retains) {
		return items
	}
	items = slices.Clone(items)
	for i := range items {
		if retains(items[i]) {
			m.lose(items[i].obj)
			items[i].obj = nil
		}
	}
	return items
}

// settle compares the documents of next that were decoded anew with what was lost, and keeps what must not go.
func (m *merge) settle(next *content, fresh []int) {
	for _, it := range m.cache.items {
		m.lose(it.obj)
	}
	for _, i := range fresh {
		for n := range next.docs[i].items {
			m.compare(&next.docs[i].items[n])
		}
	}
	broken := false
	for i := range next.docs {
		for n := range next.docs[i].items {
			if it := &next.docs[i].items[n]; it.bad != nil && it.bad.fate == refused {
				it.obj = m.find(it.bad.key)
			} else if it.bad != nil && it.bad.fate == unreadable {
				broken = true
			}
		}
	}
	if broken {
		next.spare = slices.SortedFunc(maps.Values(m.gone), byName)
	} else {
		m.diff.remove = slices.AppendSeq(m.diff.remove, maps.Values(m.gone))
	}
}

func byName(a, b source.Object) int { return compareKeys(source.KeyOf(a), source.KeyOf(b)) }

// compare inspects whether the file held the item's object before.
func (m *merge) compare(it *item) {
	if it.bad != nil || m.cache.used[it.obj] {
		return
	}
	switch o := m.find(source.KeyOf(it.obj)); {
	case o != nil && reflect.DeepEqual(o, it.obj):
		it.obj = o
	case o != nil:
		m.diff.remove = append(m.diff.remove, o)
		fallthrough
	default:
		m.diff.add = append(m.diff.add, it.obj)
	}
}

// A cache holds items of Lists by their text, each to be used once.
type cache struct {
	mu    sync.Mutex
	items map[uint64]item
	used  map[source.Object]bool
}

func (c *cache) put(it item) bool {
	if c.items == nil {
		c.items, c.used = map[uint64]item{}, map[source.Object]bool{}
	}
	if _, ok := c.items[it.hash]; ok {
		return false
	}
	c.items[it.hash] = it
	return true
}

func (c *cache) consume(hash uint64) (item, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	it, ok := c.items[hash]
	if ok {
		delete(c.items, hash)
		c.used[it.obj] = true
	}
	return it, ok
}

// parallel calls f with 0 to n-1 on all processors.
func parallel(n int, f func(i int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			f(i)
		}
	}
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
