package nftables

import (
	"bytes"
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/netlink"
)

// The kernel holds ranges in several fields whole. A range in one field is two elements: its first key, and the first
// key behind it, marked as an end. One that reaches the last key there is has no end.

// flat reports whether the set has ranges in one field.
func (s Set) flat() bool { return s.Interval && len(s.Key) == 1 }

// encodeEnd writes the end of a range in one field.
func (e Element) encodeEnd(b *netlink.Buffer) {
	behind, ok := step(e.End, 0xff, 1)
	if !ok {
		return
	}
	b.Nest(nftaListElem, func() {
		value(b, elemKey, behind)
		b.BE32(elemFlags, elemIntervalEnd)
	})
}

// step adds 1, or by 255 subtracts 1, from the last byte of a key on; carry is the byte that carries. It reports
// whether there is such a key.
func step(key string, carry, by byte) (string, bool) {
	b := []byte(key)
	for i := len(b) - 1; i >= 0; i-- {
		carries := b[i] == carry
		if b[i] += by; !carries {
			return string(b), true
		}
	}
	return key, false
}

// join returns the elements of the set that the kernel holds as es.
func (s Set) join(es []Element) []Element {
	if !s.flat() {
		return es
	}
	slices.SortFunc(es, func(a, b Element) int {
		if d := strings.Compare(a.Key, b.Key); d != 0 || a.closes == b.closes {
			return d
		}
		if a.closes {
			return -1 // the end of the range before
		}
		return 1
	})
	out := es[:0]
	for _, e := range es {
		if n := len(out); n > 0 && out[n-1].End == "" {
			out[n-1].End, _ = step(e.Key, 0, 0xff)
		}
		if !e.closes {
			e.flat = true
			out = append(out, e)
		}
	}
	if n := len(out); n > 0 && out[n-1].End == "" {
		out[n-1].End = string(bytes.Repeat([]byte{0xff}, len(out[n-1].Key)))
	}
	return out
}
