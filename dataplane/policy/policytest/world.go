package policytest

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// load reads YAML texts as one directory of manifests.
func load(t testing.TB, texts ...string) (objects []source.Object) {
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

// Decided is what the policies of a world come to on node n1.
type Decided struct {
	*policy.Resolver
	Now *model.Policies
}

// Decide resolves objects.
func Decide(objects []source.Object) *Decided {
	c := policy.Config{Node: "n1", PreDNAT: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"),
		netip.MustParsePrefix("fd96::/112")}}
	d := &Decided{policy.New(c), model.NewPolicies()}
	d.Apply(objects...)
	return d
}

// Apply takes in objects that are new or changed.
func (d *Decided) Apply(objects ...source.Object) model.Change[model.PolicyPart] {
	c := d.Resolver.Apply(source.Put(objects...))
	d.Now.Apply(c)
	return c
}

// Parts returns all parts.
func (d *Decided) Parts() []model.PolicyPart { return d.Now.Parts() }

// Worlds returns the objects of each file of testdata/worlds.txtar, by name, and the names. Node n1 is the
// one under test.
func Worlds(t testing.TB) (names []string, objects map[string][]source.Object) {
	t.Helper()
	root := moduleRoot(t)
	ar, err := txtar.ParseFile(filepath.Join(root, "dataplane/policy/policytest/testdata/worlds.txtar"))
	if err != nil {
		t.Fatal(err)
	}
	base, err := os.ReadFile(filepath.Join(root, "resolve/policy/testdata/world.yaml"))
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

// moduleRoot returns the folder of go.mod above the test's own. The caller's file name would not do: -trimpath
// leaves no path in it.
func moduleRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above the test's folder")
		}
	}
	t.Fatal(err)
	return ""
}

// Addresses returns addresses of texts.
func Addresses(texts ...string) (l []netip.Addr) {
	for _, s := range texts {
		l = append(l, netip.MustParseAddr(s))
	}
	return slices.Clip(l)
}

// Everything returns parts of every shape, in both families.
func Everything() (l []model.PolicyPart) {
	a, pre := netip.MustParseAddr, netip.MustParsePrefix
	l = append(l, &model.PolicyNode{Addresses: Addresses("192.168.0.1", "fd99::1"), Unknown: model.VerdictDrop,
		Devices: true, Pods: []netip.Prefix{pre("10.0.0.0/9"), pre("10.0.1.0/24"), pre("fd00:1::/64"), pre("fd00:1::/65")},
		PreDNAT: []netip.Prefix{pre("10.96.0.0/12"), pre("0.0.0.0/32"), pre("255.255.255.255/32"), pre("fd96::/112")}})
	id := uint64(1 << 60)
	next := func() uint64 { id++; return id }
	table := func(v model.Verdict, report bool) *model.PeerTable {
		p := &model.PeerTable{ID: next(), Default: v, Otherwise: model.Decision{Verdict: v, Report: report},
			Rules: []model.Rule{{Verdict: model.VerdictDrop, Audit: true}}}
		for _, v := range []model.Verdict{model.VerdictAccept, model.VerdictDrop, model.VerdictNext} {
			p.Rules = append(p.Rules, model.Rule{Peers: []*model.Peers{}, Verdict: v})
		}
		l = append(l, p)
		return p
	}
	accept, drop := table(model.VerdictAccept, true), table(model.VerdictDrop, false)
	pass := table(model.VerdictNext, true)
	ports := &model.Ruleset{ID: next(), Default: model.PortEntry{PeerTable: drop}}
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		for _, span := range [][2]uint16{{0, 0}, {1, 79}, {80, 80}, {81, 65534}, {65535, 65535}} {
			ports.Ports = append(ports.Ports, model.PortEntry{Protocol: p, First: span[0], Last: span[1], PeerTable: accept})
		}
	}
	whole := &model.Ruleset{ID: ^uint64(0), Default: model.PortEntry{PeerTable: pass}, Ports: []model.PortEntry{
		{Protocol: model.TCP, Last: 65535, PeerTable: drop}, {Protocol: 255, First: 1, Last: 65535, PeerTable: drop}}}
	l = append(l, ports, whole,
		&model.Subject{Addr: a("10.0.1.2"), Out: [2]*model.Ruleset{ports, whole}, In: [2]*model.Ruleset{whole, nil}},
		&model.Subject{Addr: a("fd00:1::2"), In: [2]*model.Ruleset{nil, ports}},
		&model.Subject{Addr: a("fd00:1::3"), Device: "pod3"},
		&model.Subject{Addr: a("10.0.1.3"), Device: "a-name-of-15-ch"},
		&model.Device{Name: "pod3", Sources: []netip.Prefix{pre("fd00:1::3/128")}},
		&model.Device{Name: "pod4", Pod: "shop/client", Sources: []netip.Prefix{pre("0.0.0.0/0"), pre("::/0")}},
		&model.Device{Name: "a-name-of-15-ch", Pod: "shop/db", Sources: []netip.Prefix{pre("10.0.1.3/32"),
			pre("203.0.113.0/25"), pre("203.0.113.129/32"), pre("203.0.113.130/31"), pre("2001:db8:9::/64")}})
	for _, r := range []string{"0.0.0.0-9.255.255.255", "10.0.0.0-10.0.1.0", "10.0.1.1-10.0.1.7", "10.0.1.2-10.0.1.2",
		"128.0.0.0-255.255.255.255", "::-fcff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fd00:1::2-fd00:1::2",
		"fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		first, last, _ := strings.Cut(r, "-")
		peer := &model.Peer{Range: model.Range{First: a(first), Last: a(last)}, Identity: &model.Identity{ID: next()}}
		l = append(l, peer, &model.PeerVerdict{PeerTable: drop, Identity: peer.Identity}, &model.PeerVerdict{PeerTable: pass,
			Identity: peer.Identity, Decision: model.Decision{Verdict: model.VerdictNext}})
	}
	return l
}
