package bpf

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// BenchmarkMemory queries the kernel how much memory maps take: of those that the agent writes bytes for each element,
// by maps filled up to the last; of those that state writes all of it.
func BenchmarkMemory(b *testing.B) {
	const many = 1 << 16
	folder := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	m, err := CreateMaps(filepath.Join(folder, "maps"), Sizes{Frontends: many, Pools: many, Slots: many})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close(); os.RemoveAll(folder) })
	empty := memlock(b, m, serviceMapFlServices)
	keys := make([]Entry, many)
	for i := range keys {
		keys[i] = Entry{Port: uint16(i), Protocol: 6}
	}
	for part := range slices.Chunk(keys, 4096) {
		if err := m.PutFrontends(part, make([]Frontend, len(part))); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(memlock(b, m, serviceMapFlServices)-empty)/many, "B/frontend")
	b.ReportMetric(float64(empty)/many, "B/frontend-room")
	b.ReportMetric(float64(memlock(b, m, serviceMapFlPools))/many, "B/pool")
	b.ReportMetric(float64(memlock(b, m, serviceMapFlBackends))/many, "B/slot")
	sum := uint64(0)
	for name := range state {
		sum += memlock(b, m, name)
	}
	b.ReportMetric(float64(sum)/(1<<20), "MiB-state")
}

// memlock returns how many bytes of the kernel's memory a map uses.
func memlock(b *testing.B, m *Maps, name string) uint64 {
	i, err := m.named[name].Info()
	if err != nil {
		b.Fatal(err)
	}
	bytes, ok := i.Memlock()
	if !ok {
		b.Fatal(fmt.Errorf("the kernel doesn't tell what memory map %s takes", name))
	}
	return bytes
}
