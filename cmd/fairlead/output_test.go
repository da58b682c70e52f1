package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/source"
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
	x := &tracer{out: &b, looked: time.Now()}
	x.print(ebpf.Event{Command: evil, Process: 7})
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
		"explain": func(b *bytes.Buffer) error { return explained{From: evil, To: evil}.tree(&page{Writer: b}) },
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
