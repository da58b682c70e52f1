package policy

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// A set finds what is in it and nothing else, whatever came and went, and where hashes agree.
func TestSet(t *testing.T) {
	type item struct{ key, hash uint64 }
	rapid.Check(t, func(t *rapid.T) {
		s := set[item]{hash: func(x *item) uint64 { return x.hash }}
		in := map[uint64]*item{}
		hashes := rapid.SampledFrom([]uint64{0, 1, 1 << 62, 1 << 63, 3 << 62, 1<<64 - 1, 1<<64 - 2})
		removes := rapid.IntRange(0, 9).Draw(t, "removes of ten")
		for range rapid.IntRange(0, 300).Draw(t, "steps") {
			key := rapid.Uint64Range(0, 200).Draw(t, "key")
			if x := in[key]; x == nil {
				in[key] = &item{key, hashes.Draw(t, "hash")}
				s.add(in[key])
			} else if rapid.IntRange(0, 9).Draw(t, "die") < removes {
				s.remove(x)
				delete(in, key)
			}
			if s.len() != len(in) || 5*s.count > 4*len(s.slots) || len(s.slots) > 8*len(in)+200 {
				t.Fatalf("%d of %d in %d slots", s.len(), len(in), len(s.slots))
			}
		}
		var all []uint64
		for x := range s.all() {
			if all = append(all, x.key); in[x.key] != x {
				t.Fatalf("%v is in it", x)
			}
		}
		if slices.Sort(all); len(slices.Compact(all)) != len(in) {
			t.Fatalf("%v, want %v", all, in)
		}
		for key := range uint64(202) {
			for _, hash := range []uint64{0, 1, 1 << 62, 1 << 63, 3 << 62, 1<<64 - 1, 1<<64 - 2} {
				want := in[key]
				if want != nil && want.hash != hash {
					continue
				}
				if got := s.find(hash, func(x *item) bool { return x.key == key }); got != want {
					t.Fatalf("%d: %v, want %v", key, got, want)
				}
			}
		}
	})
}
