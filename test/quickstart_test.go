package test_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// step is a command of a document and the lines that it says the command prints.
type step struct{ command, prints string }

// steps returns the commands of a document's console blocks, the lines that begin with "# ", and what they print.
// Lines of the document have at most 100 columns.
func steps(t *testing.T, file string) (l []step) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	fenced := false
	for line := range strings.Lines(string(text)) {
		switch command, is := strings.CutPrefix(line, "# "); {
		case strings.HasPrefix(line, "```"):
			fenced = line == "```console\n"
		case fenced && is:
			l = append(l, step{command: strings.TrimSpace(command)})
		case fenced && len(l) > 0:
			l[len(l)-1].prints += line
		}
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 100 {
			t.Errorf("%s: %d columns: %s", file, n, line)
		}
	}
	return l
}

var (
	clientPort = regexp.MustCompile(`:(3[2-9]|[45]\d|6[0-5])\d{3}\b`)
	factCounts = regexp.MustCompile(`\d+ facts wanted, \d+ in`)
)

// matches reports whether what a command printed is what a document has: "…" stands for any lines.
func matches(printed, documented string) bool {
	printed = factCounts.ReplaceAllString(clientPort.ReplaceAllString(printed, ":PORT"), "N facts wanted, N in")
	for i, part := range strings.Split(documented, "…\n") {
		at := strings.Index(printed, part)
		if at < 0 || i == 0 && at > 0 {
			return false
		}
		printed = printed[at+len(part):]
	}
	return printed == "" || strings.HasSuffix(documented, "…\n")
}

// The quick start's commands print what it says, on a screen of 100 columns.
func TestQuickStart(t *testing.T) {
	dir, name := t.TempDir(), fmt.Sprintf("qs%x", time.Now().UnixNano()%(1<<28))
	shop := filepath.Join(dir, "examples", name)
	for _, err := range []error{os.MkdirAll(filepath.Join(dir, "bin"), 0o755),
		os.Symlink(fairlead, filepath.Join(dir, "bin/fairlead")),
		os.CopyFS(shop, os.DirFS("../examples/shop"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { try(fairlead, "sandbox", "down", name) })
	named := regexp.MustCompile(`sandbox (ask|exec|down)`)
	for _, s := range steps(t, "../docs/quick-start.md") {
		if regexp.MustCompile(`^(git|make) |version$`).MatchString(s.command) {
			continue // has been done; takes minutes; prints the commit
		}
		command := named.ReplaceAllString(strings.ReplaceAll(s.command, "examples/shop", "examples/"+name),
			"sandbox $1 --name "+name)
		printed := ""
		deadline := time.Now().Add(20 * time.Second)
		for { // a change of the folder takes a moment
			c := exec.Command("sh", "-c", command)
			c.Dir, c.Env = dir, append(os.Environ(), "COLUMNS=100")
			out, _ := c.CombinedOutput()
			printed = strings.ReplaceAll(string(out), name, "shop")
			if matches(printed, s.prints) || s.prints == "" || time.Now().After(deadline) {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if s.prints != "" && !matches(printed, s.prints) {
			t.Errorf("%s prints\n%s\nwant\n%s", command, printed, s.prints)
		}
	}
}
