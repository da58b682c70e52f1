package lab

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/config"
	agentnode "fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/source/manifest"
)

// TestMain is the agent when it is called as one, as the program itself would be.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		if err := runAgent(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func runAgent(args []string) error {
	f := flag.NewFlagSet("run", flag.ContinueOnError)
	dir, node, status := f.String("source", "", ""), f.String("node", "", ""), f.String("status-address", "", "")
	mode, entries, kubeconfig := f.String("mode", "", ""), f.Int("maglev-table-size", 0, ""), f.String("kubeconfig", "", "")
	shortcut := f.String("ebpf-fast-path", "", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	m, err := agent.ModeOf(*mode)
	if err != nil {
		return err
	}
	m = m.EBPF(ebpf.Options{NoShortcut: *shortcut == string(config.Never)})
	addresses, err := agentnode.OpenAddresses()
	if err != nil {
		return err
	}
	defer addresses.Close()
	var from source.Source = manifest.New(*dir)
	if *kubeconfig != "" {
		from = kube.New(kube.Options{Access: kube.Access{Kubeconfig: *kubeconfig}, Node: *node})
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	return agent.Run(ctx, agent.Options{Mode: m, Source: from, Resolve: resolve.Config{Node: *node, Entries: *entries}, Addresses: addresses,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Servers: agent.Servers{Metrics: *status}})
}

// tiny is a run of every part, too short for its numbers to mean anything.
func tiny() Profile {
	return Profile{
		Name: "tiny", Services: []int{1, 10, 20}, Rounds: 2, Block: 5 * time.Millisecond, Warm: time.Millisecond,
		Cold: 2, Batches: 2, Batch: 4, Files: 2, PerFiles: 4, Quiet: 100 * time.Millisecond,
		Rate: 200, Calm: 50 * time.Millisecond, Others: 10, Own: 20, Kills: 1,
	}
}

func options(t *testing.T, progress io.Writer) Options {
	return Options{Seed: 7, Out: t.TempDir(), Agent: []string{"/proc/self/exe"}, Output: progress,
		Command: []string{"fairlead", "lab", "run", "services", "--seed", "7"}}
}

// nothingLeft fails where a run of this process left a namespace, a folder or a process behind.
func nothingLeft(t *testing.T) {
	t.Helper()
	spaces, err := netns.List(spacePrefix + owner())
	if err != nil || len(spaces) > 0 {
		t.Errorf("network namespaces left over: %v %v", spaces, err)
	}
	groups, err := leftGroups()
	if mine := slices.DeleteFunc(groups, func(g string) bool { return !strings.Contains(g, spacePrefix+owner()) }); err != nil || len(mine) > 0 {
		t.Errorf("cgroups left over: %v %v", mine, err)
	}
	dir := filepath.Join(os.TempDir(), folderPrefix+owner())
	if left, err := filepath.Glob(dir + "*"); err != nil || len(left) > 0 {
		t.Errorf("folders left over: %v, %v", left, err)
	}
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if b, _ := os.ReadFile(l); bytes.Contains(b, []byte(dir)) {
			t.Errorf("process left over: %s: %q", l, b)
		}
	}
}

// tinyServices begins the experiment services with the tiny profile.
func tinyServices(ctx context.Context, r *run) (work, error) { return newServices(ctx, r, tiny()) }

func TestServices(t *testing.T) {
	dir, err := perform(t.Context(), options(t, io.Discard), tinyServices)
	if err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := result.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	p := tiny()
	for _, c := range promised(p) {
		got, ok := s.Cell(c.Measure, c.Arm, c.Params)
		if !ok || got.Value == nil || got.Ops == 0 {
			t.Errorf("no number for %s of %s, %v", c.Measure, c.Arm, c.Params)
		} else if got.Failed() > 0 {
			t.Errorf("%s of %s, %v: failed %v", c.Measure, c.Arm, c.Params, got.Errors)
		}
	}
	if len(s.Cells) != len(promised(p)) {
		t.Errorf("%d cells, promised were %d", len(s.Cells), len(promised(p)))
	}
	if s.Rounds != p.Rounds {
		t.Errorf("%d rounds, planned %d", s.Rounds, p.Rounds)
	}
	inEveryRoundTheBaselineStandsAtBothEnds(t, r)
	whatWasWrittenIsExact(t, s)
	reportsFromRawFilesAlone(t, dir)
}

// compared are the measures with a baseline.
var compared = []string{"connect", "crr", "rr", "connect-many"}

// promised are the cells that a run must have.
func promised(p Profile) (l []result.Cell) {
	add := func(measure, arm string, params map[string]string) {
		l = append(l, result.Cell{Measure: measure, Arm: arm, Params: params})
	}
	for _, o := range compared {
		many := o == "connect-many"
		add(o, armDirect, nil)
		add(o, armAgain, nil)
		if !many {
			add(o, armRule, nil)
		}
		for _, n := range p.Services {
			if !many || n > fewTargets {
				add(o, armNFT, params(n))
			}
		}
		if n := p.most(); bpf.Probe() == nil && (!many || n > fewTargets) {
			add(o, armEBPF, params(n))
		}
	}
	for _, n := range p.Services {
		for _, m := range []string{"cold", "cold-kernel", "restart", "file"} {
			add(m, armNFT, params(n))
		}
		for _, after := range []string{"the first sync", "the changes"} {
			add("memory", armNFT, with(n, also("after", after)))
		}
		for _, during := range []string{duringQuiet, duringTraffic} {
			add("idle", armNFT, with(n, also("during", during)))
		}
		add("ready", armNFT, with(n, also("kernel", "empty")))
	}
	for _, n := range []int{10, p.most()} {
		add("change", armNFT, params(n))
		add("change-whole", armNFT, params(n))
	}
	add("ready", armNFT, with(p.most(), also("kernel", "full")))
	for _, while := range []string{whileNothing, whileOthers, whileOwn, whileKilled} {
		add("loss", armNFT, with(p.most(), also("while", while)))
	}
	return l
}

func inEveryRoundTheBaselineStandsAtBothEnds(t *testing.T, r result.Run) {
	t.Helper()
	order := map[string][]string{}
	for _, b := range r.Blocks {
		if slices.Contains(compared, b.Measure) {
			key := fmt.Sprint(b.Measure, b.Round)
			order[key] = append(order[key], b.Arm)
		}
	}
	for key, arms := range order {
		if n := len(arms); n < 4 || arms[0] != armDirect || arms[n-1] != armDirect || slices.Contains(arms[1:n-1], armDirect) {
			t.Errorf("%s: order %v", key, arms)
		}
	}
}

// What one change writes follows the endpoints of its Service, not the number of Services, in one transaction; and a
// restart writes nothing.
func whatWasWrittenIsExact(t *testing.T, s result.Summary) {
	t.Helper()
	for _, m := range []string{"change", "file"} {
		for _, c := range s.Select(m, armNFT) {
			if f := c.Counters["facts"]; f < 1 || f > endpoints || c.Counters["transactions"] != 1 {
				t.Errorf("%s at %s Services: %v facts in %v transactions, want at most %d in one", m, c.Params["services"], f, c.Counters["transactions"], endpoints)
			}
		}
	}
	for _, n := range tiny().Services {
		c, _ := s.Cell("restart", armNFT, params(n))
		if c.Counters["facts"] != 0 || c.Counters["transactions"] != 0 {
			t.Errorf("restart at %d Services wrote: %v", n, c.Counters)
		}
	}
}

func reportsFromRawFilesAlone(t *testing.T, dir string) {
	t.Helper()
	copied := t.TempDir()
	for _, name := range []string{result.ManifestFile, result.BlocksFile, result.SamplesFile} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if name == result.SamplesFile && errors.Is(err, os.ErrNotExist) {
			continue // few experiments keep every single time
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(copied, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := report.Build(copied); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{report.HTMLFile, report.MarkdownFile, result.SummaryFile} {
		a, aerr := os.ReadFile(filepath.Join(dir, name))
		b, berr := os.ReadFile(filepath.Join(copied, name))
		if err := errors.Join(aerr, berr); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s is another when made from the raw files alone", name)
		}
	}
}

// once ends a run, as Ctrl-C would, when its raw blocks hold a word.
func once(ctx context.Context, out, word string, cancel func()) {
	for ctx.Err() == nil {
		files, _ := filepath.Glob(filepath.Join(out, "*", result.BlocksFile))
		for _, f := range files {
			if b, _ := os.ReadFile(f); bytes.Contains(b, []byte(word)) {
				cancel()
				return
			}
		}
		rest(ctx, 5*time.Millisecond)
	}
}

func TestInterrupt(t *testing.T) {
	p := tigeraProfile{Name: "tiny", Services: []int{1}, Rounds: 2, Closed: 3 * time.Millisecond, Open: 20 * time.Millisecond, Rate: 500, Each: 5, Work: time.Millisecond, Resyncs: 1}
	tinyTigera := func(ctx context.Context, r *run) (work, error) { return newTigera(ctx, r, p) }
	for measure, begin := range map[string]func(context.Context, *run) (work, error){"file": tinyServices, "loss": tinyServices, "http-kept": tinyTigera} {
		t.Run(measure, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			o := options(t, io.Discard)
			go once(ctx, o.Out, `"measure":"`+measure+`"`, cancel)
			dir, err := perform(ctx, o, begin)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			nothingLeft(t)
			h, err := os.ReadFile(filepath.Join(dir, report.HTMLFile))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(h, []byte("the run ended early: it was interrupted")) {
				t.Error("the report doesn't say that the run was interrupted")
			}
		})
	}
}

func TestSweep(t *testing.T) {
	const gone = "4194304-1" // beyond the greatest process number (PID_MAX_LIMIT)
	folder := filepath.Join(os.TempDir(), folderPrefix)
	for _, who := range []string{gone, owner()} {
		ns, err := netns.New(spacePrefix + who + "-sweep")
		if err != nil {
			t.Fatal(err)
		}
		ns.Close()
		t.Cleanup(func() { netns.Delete(spacePrefix + who + "-sweep") })
		if err := os.MkdirAll(folder+who+"-x/services-1", 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(folder + who + "-x") })
	}
	removed, err := Sweep()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"network namespace " + spacePrefix + gone + "-sweep",
		"folder " + folder + gone + "-x"} {
		if !slices.Contains(removed, want) {
			t.Errorf("%s was not removed: %v", want, removed)
		}
	}
	if left, _ := netns.List(spacePrefix + gone); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if ours, _ := netns.List(spacePrefix + owner() + "-sweep"); len(ours) != 1 {
		t.Error("removed what belongs to a process that runs")
	}
	if _, err := os.Stat(folder + owner() + "-x"); err != nil {
		t.Error(err)
	}
}

// A folder that another user has made in advance is neither used nor swept.
func TestFoldersOfOthersAreLeftAlone(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	const nobody = 65534
	gone := filepath.Join(os.TempDir(), folderPrefix+"4194304-1")
	for _, dir := range []string{filepath.Join(os.TempDir(), folderPrefix+owner()), gone} {
		if err := errors.Join(os.Mkdir(dir, 0o777), os.Chown(dir, nobody, nobody)); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(os.TempDir(), folderPrefix+"4194304-2")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	var r run
	if err := r.room(); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(r.tmp); err != nil || i.Mode().Perm() != 0o700 || !ownFolder(r.tmp) {
		t.Errorf("the run's folder is %s, %v, %v", r.tmp, i, err)
	}
	removed, err := Sweep()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{gone, link} {
		if slices.Contains(removed, "folder "+path) {
			t.Errorf("swept: %s", path)
		}
	}
	if err := r.takeDown(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.tmp); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run's folder is left: %v", err)
	}
}

func TestDead(t *testing.T) {
	for name, want := range map[string]bool{
		owner(): false, owner() + "-direct-node": false, "4194304-1-direct": true, fmt.Sprintf("%d-1", os.Getpid()): true,
		"": false, "somebody": false, "12": false,
	} {
		if got := dead(name); got != want {
			t.Errorf("dead(%q) = %v", name, got)
		}
	}
}

func TestProfiles(t *testing.T) {
	for _, p := range []Profile{Quick(), Full(), tiny()} {
		if err := p.check(); err != nil {
			t.Error(err)
		}
		if p.PerFiles%2 != 0 || p.Batch%2 != 0 || p.Own%servers != 0 {
			t.Errorf("%s: a phase ends with endpoints replaced", p.Name)
		}
	}
	for _, bad := range [][]int{nil, {0}, {-1, 2}, {10, 1}, {5, 5}, {1 << 30}} {
		if err := (Profile{Services: bad}).check(); err == nil {
			t.Errorf("%v Services are no error", bad)
		}
	}
	if n := (Profile{Services: []int{1, 10, 99}}).few(); n != 10 {
		t.Errorf("few of 1, 10, 99 is %d", n)
	}
	if n := (Profile{Services: []int{3, 7}}).few(); n != 3 {
		t.Errorf("few of 3, 7 is %d", n)
	}
}

// Every measure and aim of the design must be of an arm, a measure and a figure that there are.
func TestDesign(t *testing.T) {
	d := design(Quick())
	ids := map[string]bool{}
	for _, m := range d.Measures {
		if ids[m.ID] || m.Title == "" || m.Text == "" || m.Stat == "" {
			t.Errorf("measure %+v", m)
		}
		ids[m.ID] = true
	}
	cells := promised(Quick())
	for _, a := range d.Aims {
		if !slices.ContainsFunc(cells, func(c result.Cell) bool {
			return c.Measure == a.Measure && c.Arm == a.Arm && result.ParamsString(c.Params) == result.ParamsString(a.Params)
		}) {
			t.Errorf("aim %q is of a cell that no run has: %s %s %v", a.ID, a.Measure, a.Arm, a.Params)
		}
	}
}

func TestCluster(t *testing.T) {
	c := newCluster(2500)
	connected := map[int]bool{}
	for _, i := range targets(2500) {
		connected[i] = true
	}
	if len(connected) != manyTargets || !connected[0] {
		t.Errorf("%d Services are connected to, the first: %v", len(connected), connected[0])
	}
	real := netip.PrefixFrom(serverAddr(0), 24).Masked()
	for i := range 2500 {
		s := c.slice(i)
		if len(s.Endpoints) != endpoints || !strings.HasPrefix(s.Name, fmt.Sprintf("svc-%06d-", i)) {
			t.Fatalf("Service %d has %s with %d endpoints", i, s.Name, len(s.Endpoints))
		}
		for k, e := range s.Endpoints {
			if real.Contains(netip.MustParseAddr(e.Addresses[0])) != connected[i] {
				t.Fatalf("Service %d, connected to: %v, has endpoint %d at %s", i, connected[i], k, e.Addresses[0])
			}
		}
	}
	changed := c.with(7, 3, spare(7, 3))
	if changed.Endpoints[3].Addresses[0] == c.slice(7).Endpoints[3].Addresses[0] || changed.Name != c.slice(7).Name {
		t.Error("the change is none, or is of another slice")
	}
}

func TestPinKeepsEveryThread(t *testing.T) {
	p, err := readProcessors()
	if err != nil {
		t.Fatal(err)
	}
	if len(p.load) != 1 || len(p.rest) == 0 || len(p.all) > 1 && slices.Contains(p.rest, p.load[0]) {
		t.Fatalf("processors shared out as %+v", p)
	}
	defer func() {
		if err := pin(os.Getpid(), p.all); err != nil {
			t.Error(err)
		}
	}()
	if err := pin(os.Getpid(), p.rest); err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprint(len(p.rest))
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if got := fmt.Sprint(len(cpuList(string(b)))); got != want {
			t.Errorf("%s may run on %s processors, want %s", task, got, want)
		}
	}
}

// cpuList reads "Cpus_allowed_list: 0-2,5".
func cpuList(status string) (l []int) {
	for line := range strings.Lines(status) {
		rest, ok := strings.CutPrefix(line, "Cpus_allowed_list:")
		if !ok {
			continue
		}
		for _, part := range strings.Split(strings.TrimSpace(rest), ",") {
			var a, b int
			if n, _ := fmt.Sscanf(part, "%d-%d", &a, &b); n == 1 {
				b = a
			}
			for ; a <= b; a++ {
				l = append(l, a)
			}
		}
	}
	return l
}
