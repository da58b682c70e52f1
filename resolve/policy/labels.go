package policy

import (
	"cmp"
	"encoding/binary"
	"iter"
	"maps"
	"slices"
)

// labelSet is a set of labels in one text, since a cluster has many: for each label, sorted by key, where it begins, in
// four bytes; then of each the length of its key, the key and the value.
type labelSet string

func newLabels(m map[string]string) labelSet {
	if len(m) == 0 {
		return ""
	}
	b := make([]byte, 4*len(m), 32*len(m))
	for i, k := range slices.Sorted(maps.Keys(m)) {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(len(b)))
		b = append(append(binary.AppendUvarint(b, uint64(len(k))), k...), m[k]...)
	}
	return labelSet(b)
}

// begin returns where label i begins.
func (l labelSet) begin(i int) int {
	at := l[4*i : 4*i+4]
	return int(at[0]) | int(at[1])<<8 | int(at[2])<<16 | int(at[3])<<24
}

func (l labelSet) len() int {
	if l == "" {
		return 0
	}
	return l.begin(0) / 4
}

// at returns label i.
func (l labelSet) at(i int) (key, value string) {
	end := len(l)
	if i+1 < l.len() {
		end = l.begin(i + 1)
	}
	text, size := string(l[l.begin(i):end]), 0
	for shift := 0; ; shift += 7 {
		b := text[0]
		text, size = text[1:], size|int(b&0x7f)<<shift
		if b < 0x80 {
			return text[:size], text[size:]
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
