package device

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// BenchmarkMemory queries the kernel how much memory maps take: of those that the agent writes bytes for each element,
// by maps filled up to the last; of those that state writes all of it.
func BenchmarkMemory(b *testing.B) {
	const many = 1 << 16
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	sizes := service.Sizes{Frontends: many, Pools: many, Slots: many}
	m, err := CreateMaps(filepath.Join(folder, "maps"), sizes)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close(); os.RemoveAll(folder) })
	empty := memlock(b, m, deviceMapFlServices)
	keys := make([]service.Entry, many)
	for i := range keys {
		keys[i] = service.Entry{Port: uint16(i), Protocol: 6}
	}
	for part := range slices.Chunk(keys, 4096) {
		if err := m.PutFrontends(part, make([]service.Frontend, len(part))); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(memlock(b, m, deviceMapFlServices)-empty)/many, "B/frontend")
	b.ReportMetric(float64(empty)/many, "B/frontend-room")
	b.ReportMetric(float64(memlock(b, m, deviceMapFlPools))/many, "B/pool")
	b.ReportMetric(float64(memlock(b, m, deviceMapFlBackends))/many, "B/slot")
	specs, err := mapSpecs(sizes)
	if err != nil {
		b.Fatal(err)
	}
	sum := uint64(0)
	for name, spec := range specs {
		if filepath.Base(filepath.Dir(pin("/maps-0", spec))) == bpf.StateFolder {
			sum += memlock(b, m, name)
		}
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
