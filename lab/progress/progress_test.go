package progress

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bar has a clock of its own that the test moves.
func bar(steps int, work time.Duration) (*Bar, *strings.Builder, *time.Time) {
	var out strings.Builder
	b := New(&out, steps, work)
	at := time.Unix(1000, 0)
	b.now = func() time.Time { return at }
	b.begun = at
	return b, &out, &at
}

func TestPlainLines(t *testing.T) {
	b, out, at := bar(100, 100*time.Second)
	for i := range 100 {
		b.Step("block", time.Second)
		if i == 4 {
			b.Print("cold sync took %d ms\n", 12)
		}
		*at = at.Add(2 * time.Second) // everything takes twice as long as planned
	}
	b.Finish()
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{"0 %  0/100  1:40 left  block", "cold sync took 12 ms", " 10 %  10/100  3:00 left  block",
		" 20 %  20/100  2:40 left  block"}
	if d := cmp.Diff(want, lines[:4]); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if len(lines) != 12 || lines[11] != "100 of 100 steps in 3:20" {
		t.Errorf("%d lines, the last is %q", len(lines), lines[len(lines)-1])
	}
	if strings.Contains(out.String(), "\x1b") || strings.Contains(out.String(), "\r") {
		t.Error("escape codes in plain text")
	}
}

func TestSlowStepsReportedEachMinute(t *testing.T) {
	b, out, at := bar(1000, 0)
	for range 5 {
		b.Step("slow", 0)
		*at = at.Add(61 * time.Second)
	}
	if n := strings.Count(out.String(), "\n"); n != 5 {
		t.Errorf("%d lines for 5 steps of a minute each:\n%s", n, out)
	}
}

func TestTerminal(t *testing.T) {
	b, out, at := bar(4, 4*time.Second)
	b.tty, b.width = true, 40
	b.Step("one", time.Second)
	*at = at.Add(time.Second)
	b.Step("two, whose name is much too long for the line", 3*time.Second)
	b.Print("hello")
	b.Finish()
	draws := strings.Split(out.String(), "\r\x1b[K")[1:]
	want := []string{"[····················]   0 %  0/4  0:0…", "[#####···············]  25 %  1/4  0:0…", "hello\n",
		"[#####···············]  25 %  1/4  0:0…", "2 of 4 steps in 0:01\n"}
	if d := cmp.Diff(want, draws); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	for _, s := range draws {
		if n := len([]rune(strings.TrimSpace(s))); n > 39 {
			t.Errorf("%q is %d columns wide", s, n)
		}
	}
}

func TestFilesAreNoTerminals(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if New(f, 1, 0).tty {
		t.Error("a file is taken for a terminal")
	}
}

func TestClock(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0:00", 7 * time.Second: "0:07", 750 * time.Second: "12:30",
		3723 * time.Second: "1:02:03"} {
		if got := clock(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}
