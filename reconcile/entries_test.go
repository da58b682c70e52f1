package reconcile

import (
	"maps"
	"testing"

	"pgregory.net/rapid"
)

// Entries are a map, wherever the ids fall.
func TestEntries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var e entries
		want := map[uint64]entry{}
		ids := rapid.OneOf(rapid.Uint64Range(1, 9), rapid.Uint64Range(1<<63, 1<<63+40), rapid.Uint64Range(1<<64-40, 1<<64-1),
			rapid.Uint64Min(1))
		removes := rapid.IntRange(0, 9).Draw(t, "removes of ten")
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			id := ids.Draw(t, "id")
			if rapid.IntRange(0, 9).Draw(t, "die") < removes {
				e.remove(id)
				delete(want, id)
			} else {
				x := entry{digest: rapid.Uint64().Draw(t, "digest"), refs: 1}
				e.set(id, x)
				want[id] = x
			}
			got, there := e.get(id)
			if x, is := want[id]; there != is || got != x {
				t.Fatalf("%d is %v, %t, want %v, %t", id, got, there, x, is)
			}
			if e.len() != len(want) || 5*e.count > 4*len(e.slots) || len(e.slots) > 4*len(want)+100 {
				t.Fatalf("%d entries, want %d, in %d slots", e.len(), len(want), len(e.slots))
			}
		}
		if got := maps.Collect(e.all()); !maps.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
		for id, x := range want {
			if got, there := e.get(id); !there || got != x {
				t.Fatalf("%d is %v, %t", id, got, there)
			}
		}
	})
}
