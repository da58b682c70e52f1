package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab"
	"fairlead.dev/fairlead/lab/cluster"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// evil is a name that clears the screen, colours what follows, turns the direction of writing and makes a line of its
// own.
const evil = "\x1b[2J\u009b31m\u202eX\xff\nproblem: none\t"

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

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
			return (&page{Writer: b}).table([][]string{{"NAME", "NODE"}, {evil, evil}})
		},
		"problems": func(b *bytes.Buffer) error {
			return printProblems(&page{Writer: b}, []source.Problem{{Object: source.Key{Kind: source.Service, Name: evil},
				Message: "odd"}, {File: evil, Message: evil}})
		},
		"explain": func(b *bytes.Buffer) error {
			return explained{From: evil, To: evil, steps: []verdict.Step{{}}}.tree(&page{Writer: b})
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
	out(c).Write([]byte(evil))
	lines(t, strings.ReplaceAll(b.String(), "\t", ""), 1)
	b.Reset()
	if err := output("json").print(out(c), source.Problem{Message: evil}, nil); err != nil {
		t.Fatal(err)
	}
	lines(t, b.String(), strings.Count(b.String(), "\n"))
}

func TestTablesFitThePage(t *testing.T) {
	rows := [][]string{{"NAME", "WHAT IT IS"}, {"one", strings.Repeat("some words ", 20)},
		{"two", strings.Repeat("x", 200)}}
	for _, columns := range []int{40, 80, 120} {
		var b bytes.Buffer
		if err := (&page{Writer: &b, columns: columns}).table(rows); err != nil {
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
	if err := (&page{Writer: &b}).table(rows); err != nil {
		t.Fatal(err)
	}
	lines(t, b.String(), 3)
}

// Experiments fit a page of any width.
func TestExperimentsFitThePage(t *testing.T) {
	l := []lab.Entry{{Name: "services", Question: strings.Repeat("what it costs ", 6), Quick: 3 * time.Minute,
		Full: time.Hour, Repeats: strings.Repeat("an article ", 6)},
		{Name: "balance", Question: "how evenly", Quick: time.Minute, Full: 50 * time.Minute},
		{Name: "cluster", Question: "how fast", Full: 2 * time.Minute, Needs: "a cluster"}}
	for _, width := range []int{30, 50, 80, 120} {
		var b bytes.Buffer
		if err := listExperiments(&page{Writer: &b, columns: width}, l); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("%d columns of %d: %q", n, width, line)
			}
		}
		text := strings.Join(strings.Fields(b.String()), " ")
		for _, want := range []string{"services", "balance", "cluster needs a cluster", "all, 4 min with --quick",
			"and 1.8 h in full"} {
			if !strings.Contains(text, want) && width > 30 {
				t.Errorf("%d columns: %q is missing:\n%s", width, want, b.String())
			}
		}
	}
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

// show leaves the Services that are named, with what is said of them and of no Service at all.
func TestShowFilters(t *testing.T) {
	w := &snapshot{objects: []source.Object{&corev1.Service{ObjectMeta: meta("shop", "web")},
		&corev1.Service{ObjectMeta: meta("shop", "db")}}}
	problem := func(name string) source.Problem {
		return source.Problem{Object: source.Key{Kind: source.Service, Namespace: "shop", Name: name}}
	}
	owner := func(name string) model.Owner {
		return model.Owner{Kind: model.KindService, Namespace: "shop", Name: name}
	}
	s := shown{Frontends: []shownFrontend{{Service: "shop/web:http", owner: owner("web")},
		{Service: "shop/db", owner: owner("db")}, {Service: "shop/web2", owner: owner("web2")}},
		Problems: []source.Problem{problem("web"), problem("db"), {Object: source.Key{Kind: source.Node, Name: "a"}}}}
	if err := s.filter(w, []string{"web"}); err != nil {
		t.Fatal(err)
	}
	if len(s.Frontends) != 1 || s.Frontends[0].Service != "shop/web:http" || len(s.Problems) != 2 ||
		s.Problems[0] != problem("web") {
		t.Errorf("left are %+v", s)
	}
	if err := s.filter(w, []string{"wbe"}); err == nil || !strings.Contains(err.Error(), `did you mean "web"`) {
		t.Errorf("an unknown name: %v", err)
	}
}

func TestTreeBranches(t *testing.T) {
	var b bytes.Buffer
	e := explained{From: "a", To: "b", Node: "n", Origin: "pod", Service: "s", Via: "ClusterIP", Policy: "p",
		Sources: []string{"r"},
		Outcome: "drop", Reason: "why", Kernel: "k",
		steps: []verdict.Step{{Stage: verdict.StageFrontend}, {Stage: verdict.StageSources, Action: verdict.Drop}}}
	if err := e.tree(&page{Writer: &b}); err != nil {
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

// An interrupted run says what is left of it, if anything is.
func TestInterrupted(t *testing.T) {
	left := &cluster.LeftError{Namespace: "lab", Run: "1", Why: errors.New("delete pods/a: forbidden")}
	for want, err := range map[string]error{
		"no such node": errors.New("no such node"),
		"interrupted: nothing was measured; everything was removed": context.Canceled,
		"interrupted: nothing was measured; not all that the run made is removed: delete": errors.Join(context.Canceled,
			left),
	} {
		if got := interrupted(err, "nothing was measured").Error(); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if err := interrupted(nil, ""); err != nil {
		t.Error(err)
	}
}
