package load

import (
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// Work is what an application computes for each request: a fixed number of steps, not a fixed time, so that what slows
// it down shows. The zero Work is none.
type Work struct{ Steps int }

// The memory that Work reads: as much as a processor's second cache has, a cache line in each step.
const (
	workMemory = 1 << 19
	cacheLine  = 64
)

// MeasureWork returns the work that takes so much processor time on a thread: the shortest of several tries, since
// whatever else runs only makes one longer.
func MeasureWork(thread Thread, cpu time.Duration) (w Work, err error) {
	const steps, tries = 1 << 20, 7
	err = thread.Do(func() error {
		memory, best := make([]byte, workMemory), time.Duration(math.MaxInt64)
		for range tries {
			before := threadCPU(unix.Gettid())
			Work{steps}.do(memory)
			best = min(best, threadCPU(unix.Gettid())-before)
		}
		w.Steps = int(float64(steps) * float64(cpu) / float64(max(best, 1)))
		return nil
	})
	return w, err
}

// do does the work, on memory of workMemory bytes.
func (w Work) do(memory []byte) {
	at := 0
	for range w.Steps {
		memory[at]++
		at = (at + cacheLine) % len(memory)
	}
}
