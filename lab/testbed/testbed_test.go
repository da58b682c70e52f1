package testbed

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

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
	var r Testbed
	if err := r.makeDir(); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(r.Dir); err != nil || i.Mode().Perm() != 0o700 || !ownFolder(r.Dir) {
		t.Errorf("the run's folder is %s, %v, %v", r.Dir, i, err)
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
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.Dir); !errors.Is(err, os.ErrNotExist) {
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

func TestCluster(t *testing.T) {
	c := NewCluster(2500)
	connected := map[int]bool{}
	for _, i := range Targets(2500) {
		connected[i] = true
	}
	if len(connected) != ManyTargets || !connected[0] {
		t.Errorf("%d Services are connected to, the first: %v", len(connected), connected[0])
	}
	real := netip.PrefixFrom(ServerAddr(0), 24).Masked()
	for i := range 2500 {
		s := c.Slice(i)
		if len(s.Endpoints) != Endpoints || !strings.HasPrefix(s.Name, fmt.Sprintf("svc-%06d-", i)) {
			t.Fatalf("Service %d has %s with %d endpoints", i, s.Name, len(s.Endpoints))
		}
		for k, e := range s.Endpoints {
			if real.Contains(netip.MustParseAddr(e.Addresses[0])) != connected[i] {
				t.Fatalf("Service %d, connected to: %v, has endpoint %d at %s", i, connected[i], k, e.Addresses[0])
			}
		}
	}
	changed := c.With(7, 3, Spare(7, 3))
	if changed.Endpoints[3].Addresses[0] == c.Slice(7).Endpoints[3].Addresses[0] || changed.Name != c.Slice(7).Name {
		t.Error("the change is none, or is of another slice")
	}
}

func TestPinCoversEveryThread(t *testing.T) {
	p, err := readProcessors()
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Load) != 1 || len(p.rest) == 0 || len(p.All) > 1 && slices.Contains(p.rest, p.Load[0]) {
		t.Fatalf("processors shared out as %+v", p)
	}
	defer func() {
		if err := pin(os.Getpid(), p.All); err != nil {
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

func TestSaveReplaces(t *testing.T) {
	f, err := NewCluster(1).Write(t.TempDir(), 1)
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.Save(f.Cluster.Slice(0))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := f.Save(f.Cluster.With(0, 1, Spare(0, 1))); err != nil || b != a {
		t.Errorf("an object's next file is %s, %v; the one before was %s", b, err, a)
	}
	text, err := os.ReadFile(a)
	if err != nil || !strings.Contains(string(text), Spare(0, 1).String()) {
		t.Errorf("the file says %s, %v", text, err)
	}
}

// A process's clock counts what it executes, no idle time, and is read until the process has been waited for.
func TestProcessorTime(t *testing.T) {
	exact, timed := &Testbed{Config: Config{Exact: true}}, &Testbed{}
	used, elapsed := exact.Clock(), timed.Clock()
	time.Sleep(200 * time.Millisecond)
	used, elapsed = exact.Clock()-used, timed.Clock()-elapsed
	if used > 100*time.Millisecond || elapsed < 200*time.Millisecond {
		t.Errorf("asleep, this process used %v in %v", used, elapsed)
	}
	used = exact.Clock()
	c := exec.Command("sh", "-c", "i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Waitid(unix.P_PID, c.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	child, err := ProcessorTime(c.Process.Pid)
	if err := errors.Join(err, c.Wait()); err != nil {
		t.Fatal(err)
	}
	if used = exact.Clock() - used; child < time.Millisecond || used < child-10*time.Microsecond {
		t.Errorf("a command used %v, and this process with it %v", child, used)
	}
	if _, err := ProcessorTime(c.Process.Pid); err == nil {
		t.Error("a process that is gone has a clock")
	}
}
