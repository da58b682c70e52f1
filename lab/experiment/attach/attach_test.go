package attach

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/labtest"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// build builds the agent and the plugin.
func build(t *testing.T) (agent, plugin string) {
	t.Helper()
	dir := t.TempDir()
	c := exec.Command("go", "build", "-o", dir, "fairlead.dev/fairlead/cmd/fairlead",
		"fairlead.dev/fairlead/cmd/fairlead-cni")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return filepath.Join(dir, "fairlead"), filepath.Join(dir, "fairlead-cni")
}

func prepare(p profile) labtest.Prepare {
	return func(_ context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		return newTrial(b, o, p)
	}
}

// TestAttach measures a few pods by agents.
func TestAttach(t *testing.T) {
	agent, plugin := build(t)
	o := labtest.Options(t, io.Discard)
	o.Agent, o.Subjects = []string{agent}, []string{"fairlead-cni=" + plugin}
	dir, err := labtest.Perform(t.Context(), o, prepare(profile{"tiny", 2, 2, 2}))
	if err != nil {
		t.Fatal(err)
	}
	labtest.NothingLeft(t)
	labtest.ReportsFromRawFilesAlone(t, dir)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"add", "del"} {
		for _, n := range []string{"one", "two"} {
			c, ok := s.Cell(m, armFairlead, result.Params{families: n})
			if !ok || c.Ops != 4 {
				t.Errorf("%s of %s: %+v", m, n, c)
			}
		}
	}
	if v := labtest.Number(t, s, "burst", armFairlead, both); v <= 0 {
		t.Errorf("all at once took %v", v)
	}
	if text := strings.Join(r.Manifest.Design.Missing, " "); !strings.Contains(text, "The plugin ptp: none was given") {
		t.Errorf("not measured: %s", text)
	}
}

// An exact design has the measures of an exact run, each of which is a count of processor time, and no bound in time.
func TestExactDesign(t *testing.T) {
	timed := (&trial{profile: quick}).Design()
	d := (&trial{profile: quick, exact: true}).Design().Counted()
	for _, m := range append(timed.Measures, result.Measure{ID: "add-agent"}, result.Measure{ID: "add-later"},
		result.Measure{ID: "del-agent"}, result.Measure{ID: "del-later"}) {
		c, ok := d.Measure(m.ID)
		if !ok || c.Unit != result.Instructions || m.Unit != "" && m.Text == c.Text && m.ID != "del" {
			t.Errorf("%s: %+v", m.ID, c)
		}
	}
	if len(d.Measures) != len(timed.Measures)+4 || len(d.Aims) > 0 {
		t.Errorf("measures %+v, aims %+v", d.Measures, d.Aims)
	}
	if text := strings.Join(d.Missing, " "); !strings.Contains(text, "How long a call waits") {
		t.Errorf("not measured: %s", text)
	}
	if _, ok := timed.Measure("add-agent"); ok || len(timed.Aims) == 0 {
		t.Error("where time is measured, the design is another")
	}
}

// TestPluginIsMissing has no plugin beside the program.
func TestPluginIsMissing(t *testing.T) {
	_, err := labtest.Perform(t.Context(), labtest.Options(t, io.Discard), prepare(profile{"tiny", 1, 1, 1}))
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("error %v", err)
	}
	labtest.NothingLeft(t)
}

// TestOthersAreCalledAsTheySay has a program in another plugin's place refuse a pod.
func TestOthersAreCalledAsTheySay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bridge")
	text := "#!/bin/sh\ncat >&2\necho $CNI_COMMAND $CNI_IFNAME >&2\nexit 1\n"
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	config, err := configOf("bridge", ranges["two"], "/data")
	if err != nil {
		t.Fatal(err)
	}
	b, err := testbed.Open(testbed.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	p, err := b.AddPair(t.Context(), "x", 0)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{program: path, config: config, ns: p.Near}
	_, err = n.call(t.Context(), "ADD", p.Far, "c1")
	for _, want := range []string{`"isGateway":true`, `"dataDir":"/data"`, "fd00:10::/64", "::/0", "ADD eth0", "exit status 1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}
