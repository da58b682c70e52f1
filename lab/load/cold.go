package load

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Memory is room to be walked, so that a processor's caches hold that and nothing else. It is for one thread at a time.
type Memory struct {
	b   []byte
	sum byte // of what was read, so that it must be
}

// line is the distance of two reads: no processor has shorter lines in its caches.
const line = 64

// NewMemory maps so many bytes, in large pages if there are such.
func NewMemory(size int) (*Memory, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map %d MiB to be walked: %w", size>>20, err)
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish
	for i := 0; i < len(b); i += line {
		b[i] = 1 // a page of its own for each address: what was never written is all one page
	}
	return &Memory{b: b}, nil
}

// Walk reads each half of it twice. On a processor whose caches are no larger than a half, nothing that was there
// before is in them then. Twice, since after some walks of one reading each connect() took two thirds of what it took
// after the first: most likely large caches learn to keep what is used again against what is read once and no more
// (Qureshi et al., Adaptive Insertion Policies for High Performance Caching, 2007).
func (m *Memory) Walk() {
	sum, half := m.sum, len(m.b)/2
	for _, b := range [][]byte{m.b[:half], m.b[:half], m.b[half:], m.b[half:]} {
		for i := 0; i < len(b); i += line {
			sum += b[i]
		}
	}
	m.sum = sum
}

// Size is its bytes.
func (m *Memory) Size() int { return len(m.b) }

// Close unmaps the memory.
func (m *Memory) Close() error { return unix.Munmap(m.b) }

// LastCache is the size in bytes of the largest cache that a processor has or shares, 0 where the kernel doesn't say
// (/sys/devices/system/cpu/cpuN/cache).
func LastCache(cpu int) (size int) {
	files, _ := filepath.Glob(fmt.Sprintf("/sys/devices/system/cpu/cpu%d/cache/index*/size", cpu))
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		size = max(size, cacheSize(strings.TrimSpace(string(b))))
	}
	return size
}

// cacheSize reads "32768K", 0 where it is none.
func cacheSize(s string) int {
	kib, ok := strings.CutSuffix(s, "K")
	n, err := strconv.ParseUint(kib, 10, 31)
	if !ok || err != nil {
		return 0
	}
	return int(n) << 10
}
