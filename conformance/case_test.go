package conformance

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestCasesParse(t *testing.T) {
	cases, err := Cases("service")
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) < 75 {
		t.Errorf("%d cases: some are missing", len(cases))
	}
	if _, err := Cases("policy"); err != nil {
		t.Error(err)
	}
}

// TestReadme wants the format's page to tell the cast as it is, and every section.
func TestReadme(t *testing.T) {
	b, err := os.ReadFile("cases/README.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(b), "\n")
	for _, m := range topology {
		i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "| "+m.Name+" |") })
		if i < 0 {
			t.Errorf("%s is not in the table of the cast", m.Name)
			continue
		}
		for _, a := range m.Addrs {
			if !m.Host && !strings.Contains(strings.NewReplacer(",", " ", ";", " ").Replace(lines[i])+" ", " "+a.String()+" ") {
				t.Errorf("%s: its address %s is not in %q", m.Name, a, lines[i])
			}
		}
	}
	for s := range sections {
		if !strings.Contains(string(b), "`"+s+"`") {
			t.Errorf("no word of the section %s", s)
		}
		if !strings.Contains(sectionNames, s) {
			t.Errorf("errors don't name the section %s", s)
		}
	}
}

func TestParseNamesTheLine(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "x.txt:1: no comment says what must hold, and why"},
		{"Nothing.\n", "x.txt:1: nothing is expected after the last change"},
		{"A.\n-- packet --\n", `x.txt:2: no section is called "packet"`},
		{"A.\n-- packets --\n\nclient-a -> 10.0.0.1:80/tcp\n", `x.txt:4: "client-a -> 10.0.0.1:80/tcp" has no " = "`},
		{"A.\nB.\n-- packets --\n# fine\nclient-x -> 10.0.0.1:80/tcp = pass\n", `x.txt:5: "client-x" is no name of the cast`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1/tcp = pass\n",
			`x.txt:3: "10.0.0.1/tcp" is not of the form: ADDRESS:PORT/PROTOCOL`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/gre = pass\n", `x.txt:3: "gre" is no protocol`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:99999/tcp = pass\n", `is not of the form: ADDRESS:PORT/PROTOCOL`},
		{"A.\n-- packets --\nclient-a -> nowhere:80/tcp = pass\n",
			`x.txt:3: "nowhere" is neither an address nor a name of the cast`},
		{"A.\n-- packets --\nclient-a(::1) -> 10.0.0.1:80/tcp = pass\n", "x.txt:3: client-a can't send from ::1"},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/tcp = web-9\n", `x.txt:3: "web-9" is neither an option nor an endpoint`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/tcp = source=node\n", "x.txt:3: no endpoint is named"},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/tcp = drop web-1\n", `x.txt:3: "web-1" does not go with drop`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/udp = web-1 size=0\n",
			"x.txt:3: size=0: a size is a number of bytes up to 60000"},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/sctp = web-1 size=9\n", "x.txt:3: size= goes with tcp and udp alone"},
		{"A.\n-- packets --\nclient-a(:5000) -> 10.0.0.1:80/udp = web-1\n",
			"x.txt:3: only a client that holds a flow can choose its port"},
		{"A.\n-- packets --\nhold F: client-a(:x) -> 10.0.0.1:80/udp = web-1\n",
			`x.txt:3: "client-a(:x)" is not of the form: NAME(ADDRESS), NAME(:PORT)`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/tcp = pass lost\n", `x.txt:3: "lost" does not go with pass`},
		{"A.\n-- mtu --\nweb-1\n", `x.txt:3: "web-1" is not of the form: NAME BYTES`},
		{"A.\n-- unless --\nipvs\n", `x.txt:3: "ipvs" is not of the form: MODE REASON`},
		{"A.\n-- mtu --\nhost-b 1280\n", `x.txt:3: "host-b 1280" is not of the form: NAME BYTES`},
		{"A.\n-- packets --\nclient-a -> 10.0.0.1:80/tcp = $A\n", "x.txt:3: no place is remembered as $A"},
		{"A.\n-- packets --\nclient-a -> web-1/icmp = drop quotes=F\n",
			`x.txt:3: no flow of this family is held under the name "F"`},
		{"A.\n-- packets --\nhold F: client-a -> web-1:80/tcp = pass\nclient-a -> web-1.6/icmp = drop quotes=F\n",
			`x.txt:4: no flow of this family is held under the name "F"`},
		{"A.\n-- packets --\nclient-a -> web-1:80/tcp = drop quotes=F\n", `x.txt:3: "quotes=F" does not go with drop`},
		{"A.\n-- packets --\nheld F = web-1\n", `x.txt:3: no flow is held under the name "F"`},
		{"A.\n-- packets --\nhold F: client-a,client-b -> 10.0.0.1:80/tcp = web-1\n",
			"x.txt:3: only one client can hold a flow"},
		{"A.\n-- slices --\nweb http=8080 web-1\n-- packets --\n",
			`x.txt:3: "web http=8080 web-1" is not of the form: SERVICE PORT…: ENDPOINT…`},
		{"A.\n-- slices --\nweb http=x: web-1\n-- packets --\n", `x.txt:3: "http=x" is no port`},
		{"A.\n-- slices --\nweb 80: web-1(tired)\n-- packets --\n", `x.txt:3: "tired" is no condition`},
		{"A.\n-- slices --\nweb 80: 10.0.0.1@c\n-- packets --\n",
			`x.txt:3: "10.0.0.1@c" is neither a name of the cast nor ADDRESS@NODE`},
		{"A.\n-- slices --\nweb 80: -$A\n-- packets --\n", "x.txt:3: no place is remembered as $A"},
		{"A.\n-- config --\nmasquerade: true\n-- packets --\n", `x.txt:2: `},
		{"A.\n-- remove --\nService\n-- packets --\n", `x.txt:3: "Service" is not of the form: KIND NAMESPACE/NAME`},
		{"A.\n-- restart --\nc\n-- packets --\n", `x.txt:3: "c" is no node of the cast`},
		{"A.\n-- health --\na web local=1\n", `x.txt:3: "a web local=1" is not of the form`},
		{"A.\n-- problems --\nWrongFamily Service\n", `x.txt:3: "WrongFamily Service" is not of the form`},
		{"A.\n-- packets --\n-- remove --\nService web\n", "x.txt:4: nothing is expected after the last change"},
	} {
		_, err := Parse("x.txt", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got error %v, want one with %q", c.text, err, c.want)
		}
	}
}

func TestParseSteps(t *testing.T) {
	c, err := Parse("x.txt", []byte(`What holds.
-- a.yaml --
kind: Service
-- slices --
shop/web#2/4 http=8080-8081 dns=53/udp: web-1 web-2(terminating,zone=z1) 10.9.9.9@b
-- mtu --
web-3 1280
-- packets --
client-a, node-a(127.0.0.1) -> 10.0.0.1:80/tcp = web-1:8080-8081 web-2(source=node) # why
hold F: client-b([fd00:10:244:2::10]:5000) -> [fd00::1]:53/udp = web-3 source=node sticks=F size=4000
-- remove --
Service web
-- slices --
web 80: web-1 web-2 -$F
-- packets --
held F = web-1 $F
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Steps) != 2 {
		t.Fatalf("%d steps, want 2", len(c.Steps))
	}
	first, held := c.Steps[0], c.Steps[1].Packets[0]
	if l := first.Packets[0]; len(l.Clients) != 2 || len(l.Candidates) != 3 || l.Candidates[0].Masqueraded ||
		!l.Candidates[2].Masqueraded || l.Line != 9 {
		t.Errorf("first line read as %+v", l)
	}
	if l := first.Packets[1]; !l.Candidates[0].Masqueraded || !l.Sticks ||
		l.Candidates[0].Addr != memberNamed("web-3").addr(true) {
		t.Errorf("second line read as %+v", l)
	}
	if l := first.Packets[1]; l.Size != 4000 || l.Clients[0] != (client{"client-b", memberNamed("client-b").addr(true),
		5000}) || first.MTU[0] != (mtuLine{memberNamed("web-3"), 1280}) {
		t.Errorf("second line read as %+v, mtu as %+v", l, first.MTU)
	}
	if held.Size != 4000 || held.To != first.Packets[1].To || held.Candidates[0].Addr != memberNamed("web-1").addr(true) {
		t.Errorf("held line read as %+v", held)
	}
	s := first.Slices[0].slices()
	if len(s) != 2 || s[0].Namespace != "shop" || len(s[0].Ports) != 2 || len(s[1].Ports) != 1 ||
		len(s[0].Endpoints) != 3 || s[0].Name == s[1].Name {
		t.Errorf("slices are %+v", s)
	}
}

var place4Line = regexp.MustCompile(`^x\.txt:\d+: `)

func FuzzParse(f *testing.F) {
	for _, folder := range []string{"cases/service/", "cases/policy/", "cases/network/"} {
		cases, err := caseFiles.ReadDir(strings.TrimSuffix(folder, "/"))
		if err != nil {
			f.Fatal(err)
		}
		for _, e := range cases {
			b, _ := caseFiles.ReadFile(folder + e.Name())
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := Parse("x.txt", text)
		if err != nil {
			for _, l := range err.(interface{ Unwrap() []error }).Unwrap() {
				if !place4Line.MatchString(l.Error()) {
					t.Errorf("error names no line: %v", l)
				}
			}
			return
		}
		for _, s := range c.Steps {
			for _, l := range s.Slices {
				l.settle(nil).slices()
			}
		}
	})
}
