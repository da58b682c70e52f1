package policy

import (
	"cmp"
	"encoding/binary"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
)

// labelSet is a set of labels in one text, since a cluster has many: how many bytes a number has here, for each label,
// sorted by key, where it begins, then of each the key and the value. A key is a number from keys, or 0, its length and
// its text.
type labelSet string

// labelKeys numbers keys of labels, from 1, as they come: of a cluster there are few, and many pods have each. There
// are only so many, since what made them may be gone.
type labelKeys struct {
	mu      sync.Mutex
	numbers map[string]int
	texts   [1 << 10]string // by number; one is set before any labelSet has it
}

var keys = &labelKeys{numbers: map[string]int{}}

// number returns the number of a key, 0 if it has none.
func (k *labelKeys) number(key string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, known := k.numbers[key]
	if known || len(k.numbers)+1 == len(k.texts) {
		return n
	}
	n = len(k.numbers) + 1
	key = strings.Clone(key) // which is of a larger text
	k.numbers[key], k.texts[n] = n, key
	return n
}

func newLabels(m map[string]string) labelSet {
	if len(m) == 0 {
		return ""
	}
	starts := make([]int, 0, 16)
	b := make([]byte, 0, 256)
	for _, k := range slices.Sorted(maps.Keys(m)) {
		starts = append(starts, len(b))
		n := keys.number(k)
		if b = binary.AppendUvarint(b, uint64(n)); n == 0 {
			b = append(binary.AppendUvarint(b, uint64(len(k))), k...)
		}
		b = append(b, m[k]...)
	}
	width := 4
	if n := len(b) + 1 + 2*len(m); n <= math.MaxUint8 {
		width = 1
	} else if n <= math.MaxUint16 {
		width = 2
	}
	out := append(make([]byte, 0, 1+width*len(m)+len(b)), byte(width))
	for _, at := range starts {
		at += 1 + width*len(m)
		for i := range width {
			out = append(out, byte(at>>(8*i)))
		}
	}
	return labelSet(append(out, b...))
}

// begin returns where label i begins.
func (l labelSet) begin(i int) (at int) {
	width := int(l[0])
	for j, b := range []byte(l[1+width*i : 1+width*i+width]) {
		at |= int(b) << (8 * j)
	}
	return at
}

func (l labelSet) len() int {
	if l == "" {
		return 0
	}
	return (l.begin(0) - 1) / int(l[0])
}

// at returns label i.
func (l labelSet) at(i int) (key, value string) {
	end := len(l)
	if i+1 < l.len() {
		end = l.begin(i + 1)
	}
	n, text := cutNumber(string(l[l.begin(i):end]))
	if n > 0 {
		return keys.texts[n], text
	}
	n, text = cutNumber(text)
	return text[:n], text[n:]
}

// cutNumber returns the number at the beginning of a text, and what follows.
func cutNumber(text string) (n int, rest string) {
	for shift := 0; ; shift += 7 {
		b := text[0]
		text, n = text[1:], n|int(b&0x7f)<<shift
		if b < 0x80 {
			return n, text
		}
	}
}

// get returns the value that a key has, and whether it has one.
func (l labelSet) get(key string) (value string, there bool) {
	for low, high := 0, l.len(); low < high; {
		middle := (low + high) / 2
		k, v := l.at(middle)
		switch c := cmp.Compare(key, k); {
		case c == 0:
			return v, true
		case c < 0:
			high = middle
		default:
			low = middle + 1
		}
	}
	return "", false
}

// all returns the labels, sorted by key.
func (l labelSet) all() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for i := range l.len() {
			if !yield(l.at(i)) {
				return
			}
		}
	}
}
