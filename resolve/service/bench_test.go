package service

import (
	"fmt"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/source"
)

// clusterOf makes n Services with ten endpoints each, spread over a hundred nodes and three zones, forty Services to a
// namespace, and this Node.
func clusterOf(n int) []source.Change {
	os := objects(node(zoned("z1"), podCIDRs("10.244.0.0/24"), internalIPs("172.18.0.2")))
	for i := range n {
		os = append(os, numbered(i), numberedSlice(i, 0))
	}
	return puts(os...)
}

func numbered(i int) source.Object {
	return svc(inNamespaceOf(i), named(fmt.Sprintf("web-%d", i)),
		clusterIPs(fmt.Sprintf("10.96.%d.%d", i/250, i%250+1)))
}

func inNamespaceOf(i int) edit { return func(s *corev1.Service) { s.Namespace = namespaceOf(i) } }

func namespaceOf(i int) string { return fmt.Sprintf("ns-%d", i/40) }

// numberedSlice makes Service i's slice; shift changes one endpoint.
func numberedSlice(i, shift int) *discoveryv1.EndpointSlice {
	var es []discoveryv1.Endpoint
	for j := range 10 {
		n := i*10 + j
		at := n
		if j == 0 {
			at += shift * 1_000_000
		}
		es = append(es, ep(fmt.Sprintf("10.%d.%d.%d", 128+at/65536, at/256%256, at%256), on(fmt.Sprintf("n%d", n%100)),
			in(fmt.Sprintf("z%d", n%3)), conditions("ttf")))
	}
	s := slice(eps(es...), sliceNamed(fmt.Sprintf("web-%d-x", i)), of(fmt.Sprintf("web-%d", i)))
	s.Namespace = namespaceOf(i)
	return s
}

func BenchmarkFull(b *testing.B) {
	changes := clusterOf(10_000)
	b.ReportAllocs()
	for b.Loop() {
		if d := New(n1).Apply(changes); len(d.Services.Put) != 30_001 {
			b.Fatal(len(d.Services.Put))
		}
	}
}

func BenchmarkOneSlice(b *testing.B) {
	r := New(n1)
	r.Apply(clusterOf(10_000))
	flip := [2][]source.Change{puts(numberedSlice(5000, 1)), puts(numberedSlice(5000, 0))}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if d := r.Apply(flip[i%2]); len(d.Services.Put) != 2 {
			b.Fatal(d)
		}
	}
}

func BenchmarkOneService(b *testing.B) {
	r := New(n1)
	r.Apply(clusterOf(10_000))
	same := puts(numbered(5000))
	b.ReportAllocs()
	for b.Loop() {
		if d := r.Apply(same); !d.Empty() {
			b.Fatal(d)
		}
	}
}

func BenchmarkProblems(b *testing.B) {
	r := New(n1)
	r.Apply(clusterOf(10_000))
	for b.Loop() {
		r.Problems()
	}
}

func BenchmarkZoneChanges(b *testing.B) {
	r := New(n1)
	r.Apply(clusterOf(10_000))
	flip := [2][]source.Change{puts(node(zoned("z2"), podCIDRs("10.244.0.0/24"), internalIPs("172.18.0.2"))),
		puts(node(zoned("z1"), podCIDRs("10.244.0.0/24"), internalIPs("172.18.0.2")))}
	for i := 0; b.Loop(); i++ {
		r.Apply(flip[i%2])
	}
}

// held returns the heap, in bytes, that a resolver and its model keep for n Services once their objects are gone.
func held(n int) int {
	before := heap()
	r := New(n1)
	r.Apply(clusterOf(n))
	after := heap()
	runtime.KeepAlive(r)
	return after - before
}

func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

func TestMemory(t *testing.T) {
	got := held(10_000)
	t.Logf("10,000 Services with 10 endpoints each hold %.1f MB", float64(got)/1e6)
	if got > 40e6 {
		t.Errorf("%d bytes, more than 40 MB", got)
	}
}

// The cost of one slice doesn't grow with the cluster.
func TestOneSliceAllocates(t *testing.T) {
	allocations := func(n int) float64 {
		r := New(n1)
		r.Apply(clusterOf(n))
		i, flip := 0, [2][]source.Change{puts(numberedSlice(5, 1)), puts(numberedSlice(5, 0))}
		return testing.AllocsPerRun(100, func() { i++; r.Apply(flip[i%2]) })
	}
	few, many := allocations(10), allocations(1000)
	if few != many || many > 40 {
		t.Errorf("%v allocations in a cluster of 10, %v in one of 1000", few, many)
	}
}

// BenchmarkOneSliceScarce is BenchmarkOneSlice where all Services want more than there is, so that each change
// decides anew which of them are served.
func BenchmarkOneSliceScarce(b *testing.B) {
	config := n1
	config.Limits.Total.Frontends = 9000
	r := New(config)
	r.Apply(clusterOf(10_000))
	flip := [2][]source.Change{puts(numberedSlice(10, 1)), puts(numberedSlice(10, 0))}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if d := r.Apply(flip[i%2]); len(d.Services.Put) != 2 {
			b.Fatal(d)
		}
	}
}

// nodesOf returns n Nodes with an address of each family and the ranges of their pods.
func nodesOf(n int) (l []source.Change) {
	for i := range n {
		o := node(podCIDRs(fmt.Sprintf("10.%d.%d.0/24", 100+i>>8, i&255)),
			internalIPs(fmt.Sprintf("172.16.%d.%d", i>>8, i&255), fmt.Sprintf("fd18::%x", i+1)))
		o.Name = fmt.Sprintf("n%d", i+1)
		l = append(l, puts(o)...)
	}
	return l
}

// BenchmarkManyNodes applies 5,000 Nodes beside 1,000 Services at once, and then one Node more, again and again.
func BenchmarkManyNodes(b *testing.B) {
	b.Run("at once", func(b *testing.B) {
		changes := append(clusterOf(1000), nodesOf(5000)...)
		for b.Loop() {
			New(n1).Apply(changes)
		}
	})
	b.Run("one more", func(b *testing.B) {
		r := New(n1)
		r.Apply(append(clusterOf(1000), nodesOf(5000)...))
		o := node(internalIPs("172.17.0.1"))
		o.Name = "new"
		flip := [2][]source.Change{puts(o), dels(o)}
		for i := 0; b.Loop(); i++ {
			if d := r.Apply(flip[i%2]); len(d.Services.Put) != 1 {
				b.Fatal(partNames(d.Services.Put))
			}
		}
	})
}
