package nftables

import (
	"fmt"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// load writes parts into the kernel in transactions of at most 4,096 facts, by rank.
func load(b *testing.B, p *Plane, parts []model.ServicePart) {
	all := servicetest.Facts(b, p, parts)
	slices.SortStableFunc(all, func(x, y Fact) int { return x.Key.Rank() - y.Key.Rank() })
	for c := range slices.Chunk(all, 4096) {
		if err := p.Write(b.Context(), c, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkColdSync(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			parts := servicetest.Services(n)
			for b.Loop() {
				b.StopTimer()
				netnstest.With(b, New, func(p *Plane) {
					b.StartTimer()
					load(b, p, parts)
					b.StopTimer()
				})
				b.StartTimer()
			}
		})
	}
}

func BenchmarkReplaceBackend(b *testing.B) {
	for _, n := range []int{10, 10000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			netnstest.With(b, New, func(p *Plane) {
				load(b, p, servicetest.Services(n))
				i := 0
				for b.Loop() {
					old, now := p.Render(servicetest.Pool(i%n, i/n%2)), p.Render(servicetest.Pool(i%n, 1-i/n%2))
					put, del := servicetest.Difference(now, old), servicetest.Difference(old, now)
					if err := p.Write(b.Context(), put, del); err != nil {
						b.Fatal(err)
					}
					i++
				}
			})
		})
	}
}

func BenchmarkRead(b *testing.B) {
	netnstest.With(b, New, func(p *Plane) {
		load(b, p, servicetest.Services(10000))
		for b.Loop() {
			if _, err := p.Read(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
