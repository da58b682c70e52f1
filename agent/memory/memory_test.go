package memory

import (
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/cgroup"
)

// collections counts the collections while f runs.
func collections(f func()) uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before := m.NumGC
	f()
	runtime.ReadMemStats(&m)
	return m.NumGC - before
}

// alone is set in the process that this test has to itself: what other tests have in use varies.
const alone = "FAIRLEAD_TEST_ALONE"

func TestHeadroomAndContainer(t *testing.T) {
	const mib = 1 << 20
	for live, want := range map[int64]int64{8 * mib: 4 * mib, 32 * mib: 8 * mib, 128 * mib: 32 * mib} {
		if got := headroom(live); got != want {
			t.Errorf("a living heap of %d MiB may grow by %d MiB, want %d", live/mib, got/mib, want/mib)
		}
	}
	for _, of := range []struct{ environment, container, want int64 }{
		{math.MaxInt64, 512 * mib, 384 * mib}, {100 * mib, 512 * mib, 100 * mib}, {400 * mib, 512 * mib, 384 * mib},
	} {
		if got := boundOf(of.environment, of.container); got != of.want {
			t.Errorf("of %d MiB and a container's %d MiB the process has %d", of.environment/mib, of.container/mib, got/mib)
		}
	}
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	Start()
	if limit, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(50); percent != 50 ||
		limit != boundOf(math.MaxInt64, cgroup.MemoryLimit()) {
		t.Errorf("while it starts the limit is %d, and garbage collected at %d %%", limit, percent)
	}
}

func TestRestCollectsWhatItMakes(t *testing.T) {
	if os.Getenv(alone) == "" {
		c := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	const piece = 1 << 20
	var living [][]byte
	retain := func() { living = append(living, make([]byte, piece)) }
	for range 40 {
		retain()
	}
	Rest()
	runtime.GC()
	// How high the heap comes meanwhile depends on when a busy machine runs the collector; how often it is collected
	// says how much garbage there is between two.
	if n := collections(func() {
		for range 400 {
			living[0] = make([]byte, piece) // and the last one is garbage
		}
	}); n < 8 {
		t.Errorf("400 MiB of garbage beside 40 MiB in use: %d collections", n)
	}
	if n := collections(func() {
		for range 120 {
			retain()
		}
	}); n == 0 || n > 40 {
		t.Errorf("40 MiB in use grow to 160 MiB: %d collections", n)
	}
	runtime.KeepAlive(living)
}

func TestRestReturnsWhatTheStartHeld(t *testing.T) {
	if os.Getenv(alone) == "" {
		c := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	settled = 100 * time.Millisecond
	const mib = 1 << 20
	living, held := make([][]byte, 64), make([][]byte, 20) // less than the headroom: the runtime returns what is more
	for _, l := range [][][]byte{living, held} {
		for i := range l {
			l[i] = make([]byte, mib)
		}
	}
	Rest()
	runtime.KeepAlive(held)
	held = nil
	runtime.GC() // it is free now, and the process's still
	var m runtime.MemStats
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if runtime.ReadMemStats(&m); m.HeapIdle-m.HeapReleased < 8*mib {
			runtime.KeepAlive(living)
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d MiB are free and not returned", (m.HeapIdle-m.HeapReleased)/mib)
		}
	}
}
