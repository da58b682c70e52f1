package policytest

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Engine is a policy plane that can be cleaned.
type Engine[K dataplane.Key] interface {
	dataplane.Plane[model.PolicyPart, K, string]
	dataplane.Cleaner
}

// Facts renders parts and returns each fact once.
func Facts[K dataplane.Key](t testing.TB, p Engine[K], parts []model.PolicyPart) map[K]dataplane.Fact[K, string] {
	t.Helper()
	all := map[K]dataplane.Fact[K, string]{}
	for _, part := range parts {
		for _, f := range p.Render(part) {
			if o, ok := all[f.Key]; ok && !o.Equal(f) {
				t.Errorf("%v is %q and %q", f.Key, o.Value, f.Value)
			}
			all[f.Key] = f
		}
	}
	return all
}

// Difference returns the facts of a that b doesn't have.
func Difference[K dataplane.Key](a, b map[K]dataplane.Fact[K, string]) (l []dataplane.Fact[K, string]) {
	for k, f := range a {
		if o, ok := b[k]; !ok || !o.Equal(f) {
			l = append(l, f)
		}
	}
	return l
}

// Move writes what makes held the facts wanted, and compares with what the kernel holds then.
func Move[K dataplane.Key](t testing.TB, p Engine[K], held, wanted map[K]dataplane.Fact[K, string]) {
	t.Helper()
	if err := p.Write(t.Context(), Difference(wanted, held), Difference(held, wanted)); err != nil {
		t.Fatal(err)
	}
	if missing, extra := Read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Fatalf("missing %v, extra %v", missing, extra)
	}
}

// Read returns what the kernel lacks of the facts wanted, and what it holds beside them.
func Read[K dataplane.Key](t testing.TB, p Engine[K], wanted map[K]dataplane.Fact[K, string]) (missing,
	extra []dataplane.Fact[K, string]) {
	t.Helper()
	l, err := p.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	now := map[K]dataplane.Fact[K, string]{}
	for _, f := range l {
		now[f.Key] = f
	}
	return Difference(wanted, now), Difference(now, wanted)
}
