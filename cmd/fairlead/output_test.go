package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// evil is a name that clears the screen, colours what follows, turns the direction of writing and makes a line of its
// own.
const evil = "\x1b[2J\u009b31m\u202eX\xff\nproblem: none\t"

// lines fails where text has other than n lines or controls a terminal.
func lines(t *testing.T, text string, n int) {
	t.Helper()
	if strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && !unicode.IsGraphic(r) }) {
		t.Errorf("it controls the terminal: %q", text)
	}
	if got := strings.Count(text, "\n"); got != n {
		t.Errorf("%d lines, want %d: %q", got, n, text)
	}
}

func TestTraceEscapesProcessNames(t *testing.T) {
	var b bytes.Buffer
	x := &tracer{out: &b, listed: time.Now()}
	x.print(mode.TraceEvent{Command: evil, Process: 7})
	lines(t, b.String(), 1)
	if !strings.Contains(b.String(), `\u001b[2J\u009b31m\u202eX\xff\nproblem: none\t[7]`) {
		t.Errorf("the name is %q", b.String())
	}
}

func TestOutputEscapesForeignText(t *testing.T) {
	for name, print := range map[string]func(*bytes.Buffer) error{
		"table": func(b *bytes.Buffer) error {
			return (&cli.Page{Writer: b}).Table([][]string{{"NAME", "NODE"}, {evil, evil}})
		},
		"problems": func(b *bytes.Buffer) error {
			return text.Problems(&cli.Page{Writer: b}, []source.Problem{{Object: source.Key{Kind: source.Service, Name: evil},
				Message: "odd"}, {File: evil, Message: evil}})
		},
		"explain": func(b *bytes.Buffer) error {
			e := &inspect.Explanation{From: evil, To: evil, Stages: []verdict.Step{{}}}
			return text.Explanation{Explanation: e}.Tree(&cli.Page{Writer: b})
		},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := print(&b); err != nil {
				t.Fatal(err)
			}
			lines(t, b.String(), map[string]int{"table": 2, "problems": 2, "explain": 5}[name])
		})
	}
	var b bytes.Buffer
	c := rootCommand()
	c.SetOut(&b)
	cli.Out(c).Write([]byte(evil))
	lines(t, strings.ReplaceAll(b.String(), "\t", ""), 1)
	b.Reset()
	if err := cli.Output("json").Print(cli.Out(c), source.Problem{Message: evil}, nil); err != nil {
		t.Fatal(err)
	}
	lines(t, b.String(), strings.Count(b.String(), "\n"))
}

func TestTablesFitThePage(t *testing.T) {
	rows := [][]string{{"NAME", "WHAT IT IS"}, {"one", strings.Repeat("some words ", 20)},
		{"two", strings.Repeat("x", 200)}}
	for _, columns := range []int{40, 80, 120} {
		var b bytes.Buffer
		if err := (&cli.Page{Writer: &b, Columns: columns}).Table(rows); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := len(line) - 1; n > columns {
				t.Errorf("%d columns on a page of %d: %q", n, columns, line)
			}
		}
		if got := strings.Join(strings.Fields(b.String()), ""); strings.Count(got, "x") != 200 ||
			strings.Count(got, "words") != 20 {
			t.Errorf("at %d columns something is lost:\n%s", columns, &b)
		}
	}
	var b bytes.Buffer
	if err := (&cli.Page{Writer: &b}).Table(rows); err != nil {
		t.Fatal(err)
	}
	lines(t, b.String(), 3)
}

// The log names no error that there isn't, and durations with their unit, also as JSON.
func TestLogAttributes(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var b bytes.Buffer
		c := &config.Config{}
		c.Proxy.Logging.Format = format
		var none error
		logger(&b, c).Info("done", "error", none, "took", 1500*time.Millisecond)
		if got := b.String(); strings.Contains(got, "error") || !strings.Contains(got, "1.5s") {
			t.Errorf("%s: %s", format, got)
		}
	}
}

func TestVersionOfTheLinker(t *testing.T) {
	defer func(r, c string) { release, commit = r, c }(release, commit)
	for _, c := range []struct{ release, commit, short, whole string }{
		{"", "0123456789abcdef", "0123456789ab", "devel (commit 0123456789ab, go"},
		{"", "0123456789abcdef-dirty", "0123456789ab-dirty", "devel (commit 0123456789ab, modified, go"},
		{"v0.1.0", "0123456789abcdef", "v0.1.0", "v0.1.0 (commit 0123456789ab, go"},
	} {
		release, commit = c.release, c.commit
		if b := thisBuild(); b.short() != c.short || !strings.HasPrefix(b.String(), c.whole) {
			t.Errorf("%s, %s: %s, %s", c.release, c.commit, b.short(), b)
		}
	}
}

func TestTreeBranches(t *testing.T) {
	var b bytes.Buffer
	e := text.Explanation{Explanation: &inspect.Explanation{From: "a", To: "b", Node: "n", Origin: "pod", Outcome: "drop",
		Reason: "why", Kernel: "k",
		Served: inspect.Served{Service: "s", Via: "ClusterIP", Policy: "p", Sources: []string{"r"}},
		Stages: []verdict.Step{{Stage: verdict.StageFrontend}, {Stage: verdict.StageSources, Action: verdict.Drop}}}}
	if err := e.Tree(&cli.Page{Writer: &b}); err != nil {
		t.Fatal(err)
	}
	const want = `a → b
├─ source, seen from node n: a pod of this node's network
├─ frontend: ClusterIP of Service s
│  ├─ allowed source ranges: r
│  └─ p
├─ dropped: why
└─ kernel: k
`
	if b.String() != want {
		t.Errorf("the tree is\n%s", &b)
	}
}

// TestRuntimeIsShown has a node's page say what attaches new pods, also behind another plugin.
func TestRuntimeIsShown(t *testing.T) {
	for _, mtu := range []int{0, 1450} {
		var b bytes.Buffer
		s := text.Network{Network: &inspect.Network{Node: "a", MTU: mtu,
			Runtime: "00-multus.conf calls multus, then fairlead-cni"}}
		if err := s.Tables(&cli.Page{Writer: &b}); err != nil || !strings.Contains(b.String(), "new pods: "+s.Runtime) {
			t.Errorf("%s, %v", b.String(), err)
		}
	}
}
