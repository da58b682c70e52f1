package iptables

import (
	"flag"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

var update = flag.Bool("update", false, "write the golden files anew")

// nothing is what a family without any rule of ours holds.
func nothing(f iptables.Family) *held {
	return understand(f, Mark, nil)
}

// read returns what save would print once a change is true, by tables.
func read(c *change) map[string]*iptables.Table {
	c.input()
	all := map[string]*iptables.Table{}
	for name, content := range c.tables {
		rules := maps.Clone(content.leads)
		maps.Copy(rules, content.chains)
		if name == "nat" {
			for _, l := range c.bodies {
				for _, b := range l {
					rules[b.name] = b.rules
				}
			}
		}
		all[name] = &iptables.Table{Chains: sortedKeys(rules), Rules: rules}
	}
	return all
}

// of returns a family's facts, without the sysctl, which no table holds.
func of(f iptables.Family, all []Fact) []Fact {
	return slices.DeleteFunc(slices.Clone(all), func(x Fact) bool { return x.Key.Family != f || x.Key.Kind == KindSysctl })
}

// TestWhatIsAlteredIsSeen takes away, doubles and moves each rule of each chain: the facts that are read must change.
func TestWhatIsAlteredIsSeen(t *testing.T) {
	all := servicetest.Facts(t, &Plane{}, everyPart())
	for _, family := range iptables.Families {
		want := of(family, all)
		c := nothing(family).change(want, nil)
		tables := read(c)
		same := func() bool {
			is := understand(family, Mark, tables).facts()
			return len(servicetest.Difference(want, is))+len(servicetest.Difference(is, want)) == 0
		}
		if !same() {
			is := understand(family, Mark, tables).facts()
			t.Fatalf("family %d: missing %q, extra %q", family, servicetest.Difference(want, is),
				servicetest.Difference(is, want))
		}
		random := rand.New(rand.NewPCG(1, 1))
		tried := 0
		for name, table := range tables {
			for chain, rules := range table.Rules {
				if random.IntN(8) > 0 && len(rules) > 2 {
					continue
				}
				i := random.IntN(len(rules) + 1)
				for what, change := range map[string][]string{
					"gone":     slices.Delete(slices.Clone(rules), min(i, len(rules)-min(1, len(rules))), min(i+1, len(rules))),
					"one more": slices.Insert(slices.Clone(rules), i, "-d 192.0.2.1/32 -j "+Prefix+"LEAVE"),
					"moved":    append(slices.Clone(rules[min(1, len(rules)):]), rules[:min(1, len(rules))]...),
				} {
					if slices.Equal(change, rules) {
						continue
					}
					tried++
					if table.Rules[chain] = change; same() {
						t.Errorf("family %d: a rule of chain %s of table %s is %s, and no read finds it:\n%s", family, chain, name, what,
							strings.Join(change, "\n"))
					}
				}
				table.Rules[chain] = rules
			}
		}
		nat := tables["nat"]
		for _, chain := range []string{Prefix + "FFF", Prefix + "0123456789abcdef", Prefix + "0123456789abcdef001"} {
			nat.Chains = append(nat.Chains, chain)
			if nat.Rules[chain] = nil; same() {
				t.Errorf("family %d: a chain %s more, and no read finds it", family, chain)
			}
			nat.Chains = nat.Chains[:len(nat.Chains)-1]
			delete(nat.Rules, chain)
		}
		t.Logf("family %d: %d alterations", family, tried)
	}
}

// TestAlteredIsRepaired holds that the difference to what is wanted mends what is altered.
func TestAlteredIsRepaired(t *testing.T) {
	want := of(iptables.IPv4, servicetest.Facts(t, &Plane{}, everyPart()))
	c := nothing(iptables.IPv4).change(want, nil)
	tables := read(c)
	delete(tables["nat"].Rules, chainPorts)
	tables["nat"].Chains = sortedKeys(tables["nat"].Rules)
	h := understand(iptables.IPv4, Mark, tables)
	is := h.facts()
	put, del := servicetest.Difference(want, is), servicetest.Difference(is, want)
	c = h.change(put, del)
	if input := string(c.input()); !strings.Contains(input, ":"+chainPorts+" - [0:0]") {
		t.Errorf("the chain that went is not made again:\n%s", input)
	}
}

// shop returns a small world: a Service, a pool of it, its node port, and one without backends.
func shop(backends ...string) (web *model.Frontend, parts []model.ServicePart) {
	a := netip.MustParseAddr
	node := &model.ServiceNode{Node: &model.Node{Name: "a", Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
		Localhost: true, NodePorts: []model.Range{{First: a("0.0.0.0"), Last: a("255.255.255.255")}}}
	pool := &model.Pool{ID: 0xabc, Name: "shop/web", Protocol: model.TCP, Affinity: time.Hour}
	for _, b := range backends {
		pool.Backends = append(pool.Backends, model.Backend{Addr: netip.MustParseAddrPort(b)})
	}
	none := &model.Pool{ID: 0xdef, Name: "shop/none", Protocol: model.UDP}
	front := func(addr string, port uint16, p *model.Pool, masqueradeFrom model.Origins) *model.Frontend {
		t := model.Target{Pool: p}
		return &model.Frontend{Entry: model.Entry{Addr: a(addr), Port: port, Protocol: p.Protocol}, Internal: t, External: t,
			Masquerade: masqueradeFrom}
	}
	most := model.OriginsOf(model.FromNode, model.FromExternal)
	web = front("10.96.0.10", 80, pool, most)
	public := front("203.0.113.5", 80, pool, model.AllOrigins)
	public.External = model.Target{Pool: none, Empty: model.Drop}
	public.Sources = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	return web, []model.ServicePart{node, pool, web, public, front("10.96.0.11", 53, none, 0),
		front("0.0.0.0", 30080, pool, model.AllOrigins)}
}

// TestGolden holds what restore is told, word for word.
func TestGolden(t *testing.T) {
	web, parts := shop("10.244.1.1:8080", "10.244.2.1:8080", "10.244.2.2:8080")
	_, later := shop("10.244.1.1:8080", "10.244.2.2:8080")
	now, then := of(iptables.IPv4, servicetest.Facts(t, &Plane{}, parts)),
		of(iptables.IPv4, servicetest.Facts(t, &Plane{}, later))
	slices.SortFunc(now, func(a, b Fact) int { return a.Key.Rank() - b.Key.Rank() })
	h := nothing(iptables.IPv4)
	for _, step := range []struct {
		file     string
		put, del []Fact
	}{
		{"cold", now, nil},
		{"endpoint", servicetest.Difference(then, now), servicetest.Difference(now, then)},
		{"frontend", nil, (&Plane{}).Render(web)},
		{"gone", nil, slices.DeleteFunc(slices.Clone(then), func(f Fact) bool { return f.Key.Entry == web.Entry })},
	} {
		c := h.change(step.put, step.del)
		is := string(c.input())
		h.become(c)
		file := filepath.Join("testdata", step.file+".txt")
		if *update {
			if err := os.WriteFile(file, []byte(is), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if is != string(want) {
			t.Errorf("%s: restore is told:\n%s\nnot:\n%s", step.file, is, want)
		}
	}
	if rest := h.facts(); len(rest) > 0 {
		t.Errorf("left: %v", rest)
	}
}

// FuzzUnderstand reads any rules: it must not fail on them, and say that they are altered where it would not write them
// so.
func FuzzUnderstand(f *testing.F) {
	_, parts := shop("10.244.1.1:8080", "10.244.2.1:8080")
	c := nothing(iptables.IPv4).change(of(iptables.IPv4, servicetest.Facts(f, &Plane{}, parts)), nil)
	f.Add(strings.ReplaceAll(string(c.input()), "-I ", "-A "))
	f.Fuzz(func(t *testing.T, text string) {
		tables, err := iptables.Parse(text)
		if err != nil {
			return
		}
		h := understand(iptables.IPv4, Mark, tables)
		if h.wrong == "" {
			if again := differs(h.tables, h.build()); again != "" {
				t.Errorf("understood, but %s", again)
			}
		}
	})
}
