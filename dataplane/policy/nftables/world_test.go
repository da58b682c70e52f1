package nftables

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// worldFile has the objects that every world has, of which node n1 is the one under test.
const worldFile = "../../../resolve/policy/testdata/world.yaml"

// load reads YAML texts as one directory of manifests.
func load(t *testing.T, texts ...string) (objects []source.Object) {
	t.Helper()
	dir := t.TempDir()
	for i, text := range texts {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	objects, faults, err := manifest.Load(dir)
	if err != nil || len(faults) > 0 {
		t.Fatal(err, faults)
	}
	return objects
}

// decided is what the policies of a world come to on node n1.
type decided struct {
	*policy.Resolver
	now *model.Policies
}

// decide resolves objects.
func decide(objects []source.Object) *decided {
	c := policy.Config{Node: "n1", PreDNAT: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"),
		netip.MustParsePrefix("fd96::/112")}}
	d := &decided{policy.New(c), model.NewPolicies()}
	d.apply(objects...)
	return d
}

func (d *decided) apply(objects ...source.Object) model.Change[model.PolicyPart] {
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	c := d.Resolver.Apply(changes)
	d.now.Apply(c)
	return c
}

// parts returns all parts.
func (d *decided) parts() []model.PolicyPart {
	l := []model.PolicyPart{d.now.Node}
	for _, v := range d.now.Subjects {
		l = append(l, v)
	}
	for _, v := range d.now.Singles {
		l = append(l, v)
	}
	for _, v := range d.now.Ranges {
		l = append(l, v)
	}
	for _, v := range d.now.Rulesets {
		l = append(l, v)
	}
	for _, v := range d.now.Tables {
		l = append(l, v)
	}
	for _, v := range d.now.Verdicts {
		l = append(l, v)
	}
	return l
}

// facts renders parts, each fact once.
func facts(t *testing.T, p *Plane, parts []model.PolicyPart) map[Key]Fact {
	t.Helper()
	all := map[Key]Fact{}
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

// difference returns the facts of a that b doesn't have.
func difference(a, b map[Key]Fact) (l []Fact) {
	for k, f := range a {
		if o, ok := b[k]; !ok || !o.Equal(f) {
			l = append(l, f)
		}
	}
	return l
}

// move writes what makes held the facts wanted, and compares with what the kernel holds then.
func move(t *testing.T, p *Plane, held, wanted map[Key]Fact) {
	t.Helper()
	if err := p.Write(t.Context(), difference(wanted, held), difference(held, wanted)); err != nil {
		t.Fatal(err)
	}
	if missing, extra := read(t, p, wanted); len(missing)+len(extra) > 0 {
		t.Fatalf("missing %v, extra %v", missing, extra)
	}
}

// read compares with what the kernel holds.
func read(t *testing.T, p *Plane, wanted map[Key]Fact) (missing, extra []Fact) {
	t.Helper()
	l, err := p.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	now := map[Key]Fact{}
	for _, f := range l {
		now[f.Key] = f
	}
	return difference(wanted, now), difference(now, wanted)
}

// worlds returns the objects of each file of testdata/worlds.txtar, by name, and the names.
func worlds(t *testing.T) (names []string, objects map[string][]source.Object) {
	t.Helper()
	ar, err := txtar.ParseFile("testdata/worlds.txtar")
	if err != nil {
		t.Fatal(err)
	}
	base, err := os.ReadFile(worldFile)
	if err != nil {
		t.Fatal(err)
	}
	objects = map[string][]source.Object{}
	for _, f := range ar.Files {
		names = append(names, f.Name)
		objects[f.Name] = load(t, string(base), string(f.Data))
	}
	return names, objects
}

func addresses(texts ...string) (l []netip.Addr) {
	for _, s := range texts {
		l = append(l, netip.MustParseAddr(s))
	}
	return slices.Clip(l)
}
