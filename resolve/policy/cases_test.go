package policy

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
	"fairlead.dev/fairlead/verdict"
)

// ends are the addresses that cases name; "6" behind a name is the IPv6 address.
var ends = map[string]string{
	"web": "10.0.1.2", "web6": "fd00:1::2", "web2": "10.0.2.2", "db": "10.0.1.3", "db6": "fd00:1::3", "client": "10.0.1.4",
	"client6": "fd00:1::4", "far": "10.0.2.4", "far6": "fd00:2::4", "n1": "192.168.0.1", "n16": "fd99::1",
	"n2": "192.168.0.2", "n26": "fd99::2", "outside": "198.51.100.7", "outside6": "2001:db8::7", "vip": "10.96.0.1",
	"unknown": "10.0.1.77", "stray": "10.0.2.77", "done": "10.0.1.9",
}

// TestCases reads testdata/cases/*.txtar. Each holds one case or several: the files world.yaml of all cases and
// NAME.yaml, and a file NAME.want, of lines such as "client > web:80/tcp drop NetworkPolicy shop/deny". A packet passes
// if the nodes of both its ends let it pass. A line that begins with "problem" is a text of one of the problems. One
// that begins with "name" is a change: the addresses of a domain name from there on.
func TestCases(t *testing.T) {
	files, err := filepath.Glob("testdata/cases/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal("no cases", err)
	}
	for _, file := range files {
		ar, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		byName := map[string]string{}
		for _, f := range ar.Files {
			byName[f.Name] = string(f.Data)
		}
		world, err := os.ReadFile("testdata/world.yaml")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range ar.Files {
			if name, ok := strings.CutSuffix(f.Name, ".want"); ok {
				t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar")+"/"+name, func(t *testing.T) {
					runCase(t, string(world), byName[name+".yaml"], string(f.Data))
				})
			}
		}
	}
}

func runCase(t *testing.T, world, yaml, want string) {
	dir := t.TempDir()
	for name, text := range map[string]string{"b.yaml": world, "a.yaml": yaml} { // the first file wins
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	objects, faults, err := manifest.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	problems := texts(faults)
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	nodes := map[string]*model.Policies{}
	resolved := map[string]func(source.Change){}
	for _, n := range []string{"n1", "n2"} {
		s, r := newSum(), New(Config{Node: n})
		s.apply(seedDice{T: t}, r.Apply(changes))
		nodes[n] = s.now
		resolved[n] = func(c source.Change) { s.apply(seedDice{T: t}, r.Apply([]source.Change{c})) }
		problems = append(problems, texts(r.Problems())...)
	}
	for line := range strings.Lines(want) {
		line = strings.TrimSpace(line)
		if text, ok := strings.CutPrefix(line, "problem "); ok {
			if !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, text) }) {
				t.Errorf("no problem has %q: %q", text, problems)
			}
		} else if text, ok := strings.CutPrefix(line, "name "); ok {
			name, addresses, _ := strings.Cut(text, " ")
			var l []netip.Addr
			for _, a := range strings.Fields(addresses) {
				l = append(l, netip.MustParseAddr(a))
			}
			for _, apply := range resolved {
				apply(source.Resolved(name, l))
			}
		} else if line != "" {
			runLine(t, nodes, line)
		}
	}
}

func texts(problems []source.Problem) (out []string) {
	for _, p := range problems {
		if p.Reason != manifest.Duplicate {
			out = append(out, p.String())
		}
	}
	return out
}

// runLine sends a packet.
func runLine(t *testing.T, nodes map[string]*model.Policies, line string) {
	f := strings.Fields(line)
	if len(f) < 4 || f[1] != ">" {
		t.Fatalf("%q is not of the form: from > to:port/protocol fate [by]", line)
	}
	to, rest, _ := strings.Cut(f[2], ":")
	port, protocol, _ := strings.Cut(rest, "/")
	n, err := strconv.ParseUint(port, 10, 16)
	src, dst := end1(f[0]), end1(to)
	if err != nil || !src.IsValid() || !dst.IsValid() {
		t.Fatalf("%q names an end or a port that is not known", line)
	}
	p := verdict.Packet{Src: netip.AddrPortFrom(src, 40000), Dst: netip.AddrPortFrom(dst, uint16(n)),
		Protocol: map[string]model.Protocol{"": model.TCP, "tcp": model.TCP, "udp": model.UDP, "sctp": model.SCTP,
			"icmp": 1}[protocol]}
	got, by := "accept", ""
	for _, name := range []string{"n1", "n2"} {
		o := verdict.Policy(nodes[name], p)
		switch {
		case o.Verdict == model.VerdictDrop:
			got, by = "drop", o.Reason
		case len(o.Reported()) > 0 && got == "accept":
			got, by = "report", fmt.Sprint(o.Reported())
		}
	}
	if want := strings.Join(f[4:], " "); got != f[3] || !strings.Contains(by, want) {
		t.Errorf("%s: got %s %s", line, got, by)
	}
}

// end1 returns the address of an end, by name or as it is.
func end1(name string) netip.Addr {
	if a, ok := ends[name]; ok {
		return netip.MustParseAddr(a)
	}
	a, _ := netip.ParseAddr(strings.Trim(name, "[]"))
	return a
}
