package reachability

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
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
	"fairlead.dev/fairlead/verdict"
)

// find returns the index of a group.
func find(t *testing.T, m *Matrix, name string) int {
	t.Helper()
	i := slices.IndexFunc(m.Groups, func(g *Group) bool { return g.Name == name })
	if i < 0 {
		t.Fatalf("no group %q in %v", name, groupNames(m))
	}
	return i
}

// text returns what a matrix says of two groups.
func (m *Matrix) text(from, to int) string {
	c := m.Cells[from][to]
	switch {
	case c == nil:
		return "nothing to evaluate"
	case c.All:
		return "all"
	case c.None:
		return "none"
	}
	var l []string
	for i, p := range c.Ports {
		l = append(l, fmt.Sprint(m.Ports[to][i], " ", p.Fate))
	}
	return fmt.Sprint(strings.Join(l, ", "), ", rest ", c.Rest.Fate)
}

func TestMatrix(t *testing.T) {
	m, err := NewMatrix(load(t, world), nil)
	if err != nil {
		t.Fatal(err)
	}
	for pair, want := range map[[2]string]string{
		{"bank/client", "shop/web"}:    "http 8080/tcp allowed, admin 9000/tcp denied, rest denied",
		{"bank/client", "shop/db"}:     "none",
		{"bank/client", "outside"}:     "53/udp allowed, rest denied",
		{"shop/web", "shop/web"}:       "none",
		{"shop/db", "shop/db"}:         "nothing to evaluate", // one pod
		{"shop/web", "bank/client"}:    "all",
		{"outside", "bank/client"}:     "all",
		{"outside", "outside"}:         "nothing to evaluate",
		{"node/a", "shop/web"}:         "http 8080/tcp mixed, admin 9000/tcp denied, rest denied", // the CIDR is IPv4
		{"node/b", "shop/web"}:         "none",
		{"shop/web", "node/b"}:         "all",
		{"bank/client", "node/a"}:      "53/udp allowed, rest denied",
		{"bank/client", "bank/client"}: "nothing to evaluate",
	} {
		if got := m.text(find(t, m, pair[0]), find(t, m, pair[1])); got != want {
			t.Errorf("%v: %s; want %s", pair, got, want)
		}
	}
	c := m.Cells[find(t, m, "bank/client")][find(t, m, "shop/web")]
	if want := "ingress of shop/web: allowed by NetworkPolicy shop/web ingress[0]"; c.Ports[0].Reason != want {
		t.Errorf("reason %q, want %q", c.Ports[0].Reason, want)
	}
	m, err = NewMatrix(load(t, world), []string{"bank"})
	if err != nil || m.Cells[find(t, m, "shop/web")][find(t, m, "shop/db")] != nil ||
		m.Cells[find(t, m, "bank/client")][find(t, m, "shop/db")] == nil {
		t.Errorf("%v: want pairs with namespace bank alone", err)
	}
	if _, err := NewMatrix(load(t, world), []string{"bnak"}); err == nil || !strings.Contains(err.Error(), `"bank"?`) {
		t.Errorf("an unknown namespace: %v", err)
	}
}

// pods returns so many pods as YAML; every tenth is another workload.
func pods(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p-%d, namespace: n%d, labels: {app: w%d, "+
			"pod-template-hash: h%[1]d}}\nspec: {nodeName: a, containers: [{name: c, ports: [{containerPort: 80}]}]}\n"+
			"status: {phase: Running, podIPs: [{ip: 10.9.%[4]d.%[5]d}]}\n", i, i%4, i%20, i/250, i%250+1)
	}
	return b.String()
}

// A thousand pods are a matrix of their workloads, in which a policy that tells one pod apart makes it a group of its
// own.
func TestMatrixOfManyPods(t *testing.T) {
	own := `
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: one, namespace: n0}
spec: {podSelector: {matchLabels: {pod-template-hash: h4}}, ingress: []}
`
	m, err := NewMatrix(load(t, pods(1000)+own), nil)
	if err != nil || len(m.Groups) != 20+1+1 || !strings.HasPrefix(m.Summary(), "1000 pods of 21 workloads") {
		t.Fatalf("%d groups, %v, %s: want 20 workloads, one pod apart, and outside", len(m.Groups), err, m.Summary())
	}
	if i, j := find(t, m, "n0/w4 (p-4)"), find(t, m, "n0/w4 (p-104 + 48 more)"); m.text(j, i) != "none" ||
		m.text(i, j) != "all" {
		t.Errorf("to the pod that is apart: %s, from it: %s", m.text(j, i), m.text(i, j))
	}
	var b bytes.Buffer
	if err := m.WritePage(&b); err != nil || b.Len() > 1<<20 {
		t.Errorf("the page has %d bytes: %v", b.Len(), err)
	}
}

func TestMatrixIsBounded(t *testing.T) {
	text := strings.ReplaceAll(pods(600), "pod-template-hash", "other")
	if _, err := NewMatrix(load(t, text), nil); err == nil || !strings.Contains(err.Error(), "choose namespaces") {
		t.Errorf("600 workloads: %v", err)
	}
	if m, err := NewMatrix(load(t, text), []string{"n1"}); err != nil || m.Cells[0][0] != nil {
		t.Errorf("one namespace of 600 workloads: %v", err)
	}
}

// The page holds its data as JSON that no name can leave, and loads nothing.
func TestPageIsSelfContained(t *testing.T) {
	m, err := NewMatrix(load(t, world), nil)
	if err != nil {
		t.Fatal(err)
	}
	m.Groups[0].Name = "</script><img src=https://example.com onerror=alert(1)>"
	var b bytes.Buffer
	if err := m.WritePage(&b); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, bad := range []string{"<img", "src=\"", "<link", "@import", "innerHTML", "fetch("} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %s", bad)
		}
	}
	_, rest, _ := strings.Cut(page, `id="data">`)
	data, _, _ := strings.Cut(rest, "</script>")
	var d pageData
	if err := json.Unmarshal([]byte(data), &d); err != nil || len(d.Groups) != len(m.Groups) ||
		d.Groups[0].Name != m.Groups[0].Name {
		t.Errorf("the page's data: %v", err)
	}
	for i := range d.Cells {
		for j, c := range d.Cells[i] {
			if c != nil && (len(c.Fates) != len(d.Groups[j].Ports)+1 || len(c.Reasons) != len(c.Fates)) {
				t.Errorf("cell %d, %d: %+v", i, j, c)
			}
		}
	}
}

func TestCompare(t *testing.T) {
	before := load(t, world)
	after := load(t, strings.NewReplacer("port: http}]", "port: admin}]", "name: db, namespace: shop, labels",
		"name: other, namespace: shop, labels").Replace(world))
	c, err := Compare(before, after)
	if err != nil || c.Apart != 2 {
		t.Fatalf("%v: %+v", err, c)
	}
	line := func(l []Difference) (out []string) {
		for _, d := range l {
			out = append(out, fmt.Sprintf("%s → %s: %s", d.From, d.To, d.Summary))
		}
		return out
	}
	want := []string{"bank/client → shop/web: 9000/tcp", "node/a → shop/web: 9000/tcp over IPv4"}
	if got := line(c.Allowed); !slices.Equal(got, want) {
		t.Errorf("newly allowed %q, want %q", got, want)
	}
	for i := range want {
		want[i] = strings.ReplaceAll(want[i], "9000", "8080")
	}
	if got := line(c.Denied); !slices.Equal(got, want) {
		t.Errorf("newly denied %q, want %q", got, want)
	}
	if same, err := Compare(before, load(t, world)); err != nil || len(same.Allowed)+len(same.Denied)+same.Apart > 0 {
		t.Errorf("the same objects: %+v, %v", same, err)
	}
	none := load(t, strings.Split(world, "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy")[0])
	c, err = Compare(before, none)
	i := slices.IndexFunc(c.Allowed, func(d Difference) bool { return d.From == "bank/client" && d.To == "outside" })
	if err != nil || i < 0 || c.Allowed[i].Summary != "everything but 53/udp" || len(c.Denied) > 0 {
		t.Errorf("without policies: %+v, %v", c, err)
	}
}

func TestJUnit(t *testing.T) {
	l, err := ReadExpectations("f.yaml", []byte(head+`
- {name: "a <b> & c", from: bank/client, to: shop/web, port: http, expect: allowed}
- {from: bank/client, to: shop/web, port: http, expect: denied}
- {from: bank/nobody, to: shop/web, port: http, expect: denied}
`))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := WriteJUnit(&b, load(t, world).Check(l)); err != nil {
		t.Fatal(err)
	}
	var got junitSuites
	if err := xml.Unmarshal(b.Bytes(), &got); err != nil || got.Tests != 3 || got.Failures != 1 || got.Errors != 1 ||
		len(got.Suites) != 1 || got.Suites[0].Cases[0].Name != "a <b> & c" || got.Suites[0].Cases[0].Failure != nil ||
		got.Suites[0].Cases[1].Failure == nil || got.Suites[0].Cases[2].Error == nil || got.Suites[0].Cases[2].Line != 7 {
		t.Errorf("%v: %s", err, &b)
	}
}

// One resolver that has the pods of all nodes decides as those of the single nodes do.
func TestAllNodesDecideAsEachNode(t *testing.T) {
	const of = "../resolve/policy/testdata/"
	world, err := os.ReadFile(of + "world.yaml")
	if err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(of + "cases/*.txtar")
	evaluated, dropped := 0, 0
	for _, file := range files {
		ar, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range ar.Files {
			if strings.HasSuffix(f.Name, ".yaml") {
				n, d := sameOnEachNode(t, f.Name, string(world), string(f.Data))
				evaluated, dropped = evaluated+n, dropped+d
			}
		}
	}
	if evaluated < 1000 || dropped < 100 {
		t.Errorf("%d packets, %d dropped: too few", evaluated, dropped)
	}
}

func sameOnEachNode(t *testing.T, name, world, yaml string) (evaluated, dropped int) {
	objects := objectsOf(t, yaml, world)
	c := New(objects, Options{})
	changes := source.Put(objects...)
	nodes := map[string]*model.Policies{}
	for _, n := range c.names {
		r := policy.New(policy.Config{Node: n})
		r.Apply(changes)
		nodes[n] = r.Policies()
	}
	ends := append([]netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("10.0.1.77")}, outside[:]...)
	for a := range c.pods {
		ends = append(ends, a)
	}
	for a := range c.nodes {
		ends = append(ends, a)
	}
	for _, src := range ends {
		for _, dst := range ends {
			for _, port := range []uint16{53, 80, 8080, 5432} {
				if src == dst || src.Is4() != dst.Is4() {
					continue
				}
				p := verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, port), Protocol: model.TCP}
				got, why, _ := c.Decide(p).Fate()
				want := Allowed
				for _, n := range c.names {
					if verdict.Policy(nodes[n], p).Verdict == model.VerdictDrop {
						want = Denied
					}
				}
				if evaluated++; want == Denied {
					dropped++
				}
				if got != want {
					t.Errorf("%s: %s > %s: %s (%s), on single nodes %s", name, src, p.Dst, got, why, want)
				}
			}
		}
	}
	return evaluated, dropped
}

func groupNames(m *Matrix) (out []string) {
	for _, g := range m.Groups {
		out = append(out, g.Name)
	}
	return out
}
