package manifest

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// A mirror is what one knows who listens to a store's batches.
type mirror map[source.Key]source.Object

func (m mirror) consume(t rapid.TB, b source.Batch) {
	for _, c := range b.Changes {
		if c.Object == nil {
			if m[c.Key] == nil {
				t.Fatalf("%v goes, but was not there", c.Key)
			}
			delete(m, c.Key)
			continue
		}
		if m[c.Key] != nil && reflect.DeepEqual(m[c.Key], c.Object) {
			t.Fatalf("%v comes again as it was", c.Key)
		}
		m[c.Key] = c.Object
	}
}

// wants finds out slowly what must count, and which claims lose.
func wants(s *store) (winners mirror, losers int) {
	winners = mirror{}
	for _, spare := range []bool{false, true} {
		for _, path := range slices.Sorted(maps.Keys(s.files)) {
			c := s.files[path].content
			os := c.spare
			if !spare {
				c.spare = nil
				os = c.all()
			}
			for _, o := range os {
				if winners[source.KeyOf(o)] == nil {
					winners[source.KeyOf(o)] = o
				} else if !spare {
					losers++
				}
			}
		}
	}
	return winners, losers
}

// Whatever files say one after the other, the right documents count, and batches tell the whole story.
func TestStoreRandom(t *testing.T) {
	names := rapid.SampledFrom([]string{"s1", "s2", "s3", "s4"})
	paths := rapid.SampledFrom([]string{"a", "b", "c", "d/a", "d/b"})
	doc := rapid.Custom(func(r *rapid.T) string {
		name, port := names.Draw(r, "name"), rapid.IntRange(1, 2).Draw(r, "port")
		switch rapid.IntRange(0, 9).Draw(r, "kind of document") {
		case 0:
			return svc(name, 0)
		case 1:
			return "kind: ["
		case 2:
			return "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}"
		case 3:
			other := names.Draw(r, "other")
			return fmt.Sprintf(
				`{"apiVersion":"v1","kind":"ServiceList","items":[{"metadata":{"name":%q},"spec":{"ports":[{"port":%d}]}},`+
					`{"metadata":{"name":%q},"spec":{"ports":[{"port":%d}]}}]}`,
				name, port, other, rapid.IntRange(0, 2).Draw(r, "other's port"))
		}
		return svc(name, port)
	})
	rapid.Check(t, func(r *rapid.T) {
		s, m := newStore(), mirror{}
		for range rapid.IntRange(1, 12).Draw(r, "steps") {
			for range rapid.IntRange(1, 2).Draw(r, "at once") {
				path := paths.Draw(r, "path")
				switch rapid.IntRange(0, 5).Draw(r, "what") {
				case 0:
					s.remove(path)
				case 1:
					s.rename(rapid.SampledFrom([]string{"a", "b", "d"}).Draw(r, "from"),
						rapid.SampledFrom([]string{"a", "c", "d", "e"}).Draw(r, "to"))
				default:
					text := strings.Join(rapid.SliceOfN(doc, 0, 4).Draw(r, "docs"), "\n---\n")
					before := s.content(path)
					c, d := before.read([]byte(text), s.words)
					s.update(path, c, d)
					retained(r, before, c)
				}
			}
			b, changed := s.batch()
			if m.consume(r, b); !changed && len(b.Changes) > 0 {
				r.Fatal("changes, but not changed")
			}
			winners, losers := wants(s)
			if !reflect.DeepEqual(winners, m) {
				r.Fatalf("counts %v, want %v", m, winners)
			}
			duplicates := 0
			for _, p := range b.Problems {
				if p.Reason == Duplicate {
					duplicates++
				}
			}
			if duplicates != losers {
				r.Fatalf("%d duplicates named, %d there: %v", duplicates, losers, b.Problems)
			}
		}
	})
}

// retained checks that nothing went away that must not.
func retained(t rapid.TB, before, after content) {
	now := map[source.Key]bool{}
	for _, o := range after.all() {
		now[source.KeyOf(o)] = true
	}
	sure := true
	for _, d := range after.docs {
		for _, it := range d.items {
			if it.bad != nil && it.bad.fate == unreadable {
				sure = false
			}
			if it.bad != nil && it.bad.fate == refused {
				for _, o := range before.all() {
					if source.KeyOf(o) == it.bad.key && !now[it.bad.key] {
						t.Fatalf("%v went away, but is only refused", it.bad.key)
					}
				}
			}
		}
	}
	for _, o := range before.all() {
		if !sure && !now[source.KeyOf(o)] {
			t.Fatalf("%v went away, but the file can't be read whole", source.KeyOf(o))
		}
	}
	if sure && len(after.spare) > 0 {
		t.Fatalf("%v stays without a reason", after.spare)
	}
}

// Of a large file only what changed is decoded.
func TestOnlyChangedDocumentsAreDecoded(t *testing.T) {
	const n = 500
	var docs, items []string
	for i := range n {
		docs = append(docs, svc(fmt.Sprintf("s%d", i), 1))
		items = append(items, toJSONText(t, docs[i]))
	}
	for name, text := range map[string]string{
		"documents": strings.Join(docs, "---\n"),
		"a List":    `{"apiVersion":"v1","kind":"List","items":[` + strings.Join(items, ",") + `]}`,
	} {
		t.Run(name, func(t *testing.T) {
			w := strip.New()
			c, _ := content{}.read([]byte(text), w)
			for change, other := range map[string]string{
				"one":       strings.Replace(text, "s77", "other", 1),
				"the first": strings.Replace(text, "s0", "other", 1),
				"one moves": strings.Replace(strings.Replace(text, "s77", "other", 1), "s78", "s77", 1),
			} {
				got, d := c.read([]byte(other), w)
				if len(got.all()) != n || len(d.add) != 1 || len(d.remove) != 1 {
					t.Errorf("%s: %d objects, added %v, removed %v", change, len(got.all()), d.add, d.remove)
				}
				if allocs := testing.AllocsPerRun(3, func() { c.read([]byte(other), w) }); allocs > 6*n {
					t.Errorf("%s: %.0f allocations: all documents were decoded", change, allocs)
				}
			}
		})
	}
}

// What is kept of an object must not hold on to the text that it came from, nor to what nothing reads.
func TestMemory(t *testing.T) {
	const n = 2000
	dir := cluster(t, n, "one YAML file")
	before := heap()
	f := newFollower(dir, nil)
	must(t, f.round())
	f.store.batch()
	if retained := (heap() - before) / n; retained > 6000 { // 4.0 kB when this was written
		t.Errorf("keeps %d bytes of a Service with ten endpoints", retained)
	}
	if got := f.store.listing(); len(got) != 2*n {
		t.Errorf("%d objects", len(got))
	}
}

// Equal texts, labels and containers stand in memory once.
func TestSharing(t *testing.T) {
	pod := func(name string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, labels: {app: web}}\nspec: {nodeName: node-1, "+
			"containers: [{name: c, ports: [{containerPort: 80}]}]}\n", name)
	}
	c, _ := content{}.read([]byte(pod("a")+"---\n"+pod("b")), strip.New())
	a, b := c.all()[0].(*corev1.Pod), c.all()[1].(*corev1.Pod)
	if reflect.ValueOf(a.Labels).Pointer() != reflect.ValueOf(b.Labels).Pointer() {
		t.Error("labels stand twice")
	}
	if &a.Spec.Containers[0] != &b.Spec.Containers[0] {
		t.Error("containers stand twice")
	}
}
