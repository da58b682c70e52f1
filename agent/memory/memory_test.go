package memory

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// collections counts the collections while f runs, and tells the highest heap seen after each step of f.
func collections(f func(step func())) (n uint32, highest uint64) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before := m.NumGC
	f(func() {
		runtime.ReadMemStats(&m)
		highest = max(highest, m.HeapAlloc)
	})
	return m.NumGC - before, highest
}

// alone is set in the process that this test has to itself: what other tests have in use varies.
const alone = "FAIRLEAD_TEST_ALONE"

func TestRestCollectsWhatItMakes(t *testing.T) {
	if os.Getenv(alone) == "" {
		c := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	const piece, mib = 1 << 20, 1 << 20
	runtime.GC()
	var others runtime.MemStats // what the packages have in use
	runtime.ReadMemStats(&others)
	limit := 100*mib + 2*others.HeapAlloc
	var living [][]byte
	retain := func() { living = append(living, make([]byte, piece)) }
	for range 40 {
		retain()
	}
	Rest()
	runtime.GC()
	n, highest := collections(func(step func()) {
		for range 400 {
			living[0] = make([]byte, piece) // and the last one is garbage
			step()
		}
	})
	if n < 8 || highest > limit {
		t.Errorf("400 MiB of garbage beside 40 MiB in use: %d collections, up to %d MiB in the heap", n, highest/mib)
	}
	n, _ = collections(func(step func()) {
		for range 120 {
			retain()
			step()
		}
	})
	if n == 0 || n > 40 {
		t.Errorf("40 MiB in use grow to 160 MiB: %d collections", n)
	}
	runtime.KeepAlive(living)
}
