package labcmd

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/lab"
	"fairlead.dev/fairlead/lab/cluster"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiments fit a page of any width.
func TestExperimentsFitThePage(t *testing.T) {
	l := []lab.Entry{{Name: "services", Question: strings.Repeat("what it costs ", 6), Quick: 3 * time.Minute,
		Full: time.Hour, Repeats: strings.Repeat("an article ", 6)},
		{Name: "balance", Question: "how evenly", Quick: time.Minute, Full: 50 * time.Minute},
		{Name: "cluster", Question: "how fast", Full: 2 * time.Minute, Needs: "a cluster"}}
	for _, width := range []int{30, 50, 80, 120} {
		var b bytes.Buffer
		if err := listExperiments(&cli.Page{Writer: &b, Columns: width}, l); err != nil {
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

// An interrupted run says what is left of it, if anything is.
func TestInterrupted(t *testing.T) {
	left := &cluster.LeftError{Namespace: "lab", Run: "1", Why: errors.New("delete pods/a: forbidden")}
	for want, err := range map[string]error{
		"no such node": errors.New("no such node"),
		"interrupted: nothing was measured; everything was removed": context.Canceled,
		"interrupted: nothing was measured; not all that the run made is removed: delete": errors.Join(context.Canceled,
			left),
		"interrupted: nothing was measured; not all that the run made is removed: busy": errors.Join(context.Canceled,
			&testbed.LeftError{Why: errors.New("busy")}),
	} {
		if got := Interrupted(err, "nothing was measured").Error(); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if err := Interrupted(nil, ""); err != nil {
		t.Error(err)
	}
}

// A kernel that isn't known is rejected before anything is booted, and the known ones are named.
func TestUnknownKernelIsRejected(t *testing.T) {
	for _, args := range [][]string{{"--kernel", "4.19"}, {"--kernel", "4.19", "--exact"}} {
		c := Command()
		c.SetArgs(append([]string{"run", "connect", "--out", t.TempDir()}, args...))
		c.SilenceErrors, c.SilenceUsage = true, true
		err := c.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), `invalid --kernel "4.19": use one of host, vm, 5.10, 6.1, 6.12, 6.18, 7.3`) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
