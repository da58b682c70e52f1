package test_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// step is a command of a document and the lines that it says the command prints.
type step struct{ command, prints string }

// manuals are the documents whose console blocks are typed: all of them, or those of one section.
var manuals = []struct{ file, section string }{
	{"README.md", "## Try it"}, {"docs/tutorials/quick-start.md", ""}, {"docs/tutorials/network-policies.md", ""},
}

// untyped are commands that aren't typed, and why.
var untyped = map[string]string{
	"git clone URL fairlead && cd fairlead": "URL is for the reader to fill in; the test has a checkout",
	"make build":                            "has been done",
	"make lab":                              "takes four minutes",
}

// steps returns the commands of a document's console blocks, the lines that begin with "# ", and what they print.
// Lines of these blocks have at most 100 columns.
func steps(t *testing.T, file, section string) (l []step) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", file))
	if err != nil {
		t.Fatal(err)
	}
	fenced, within := false, section == ""
	for line := range strings.Lines(string(text)) {
		command, is := strings.CutPrefix(line, "# ")
		switch {
		case strings.HasPrefix(line, "```"):
			fenced = within && line == "```console\n"
		case !fenced && section != "" && strings.HasPrefix(line, "## "):
			within = line == section+"\n"
		case fenced && is:
			l = append(l, step{command: strings.TrimSpace(command)})
		case fenced && len(l) > 0:
			l[len(l)-1].prints += line
		}
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); fenced && n > 100 {
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

// ownRun returns a command that runs others where /run is the test's own, so that no other sandbox has their names.
func ownRun(t *testing.T) []string {
	t.Helper()
	c := exec.Command("unshare", "--mount", "sh", "-c", "mount -t tmpfs none /run && echo mounted && exec cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		c.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("mount /run: %q %v", line, err)
	}
	return []string{"nsenter", "--mount", "--target", strconv.Itoa(c.Process.Pid)}
}

// checkout returns a folder with what a checkout of ours has after make build, as far as the documents use it.
func checkout(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, err := range []error{os.MkdirAll(filepath.Join(dir, "bin"), 0o755),
		os.Symlink(fairlead, filepath.Join(dir, "bin/fairlead")),
		os.CopyFS(filepath.Join(dir, "examples"), os.DirFS("../examples"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The commands of documents, typed word for word, print what they say, on a screen of 100 columns. One that is shown
// without an output succeeds.
func TestQuickStart(t *testing.T) {
	found := map[string]bool{}
	for _, d := range manuals {
		t.Run(d.file, func(t *testing.T) {
			enter, dir := ownRun(t), checkout(t)
			run := func(command string) (string, error) {
				c := exec.Command(enter[0], append(enter[1:], "sh", "-c", "cd "+dir+" && "+command)...)
				c.Env = append(os.Environ(), "COLUMNS=100")
				out, err := c.CombinedOutput()
				return string(out), err
			}
			t.Cleanup(func() { run("bin/fairlead sandbox down --name shop") }) // where a step failed
			l := steps(t, d.file, d.section)
			if len(l) == 0 {
				t.Errorf("%s has no commands", d.file)
			}
			for _, s := range l {
				if untyped[s.command] != "" {
					found[s.command] = true
					continue
				}
				checkStep(t, s, run)
			}
		})
	}
	for command := range untyped {
		if !found[command] {
			t.Errorf("no document has the command %q any more", command)
		}
	}
}

// checkStep runs a step until it prints what it says: a change of the folder takes a moment.
func checkStep(t *testing.T, s step, run func(string) (string, error)) {
	t.Helper()
	if s.prints == "" {
		if out, err := run(s.command); err != nil {
			t.Errorf("%s: %v\n%s", s.command, err, out)
		}
		return
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		printed, _ := run(s.command)
		switch {
		case matches(printed, s.prints):
			return
		case time.Now().After(deadline):
			t.Errorf("%s prints\n%s\nwant\n%s", s.command, printed, s.prints)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}
