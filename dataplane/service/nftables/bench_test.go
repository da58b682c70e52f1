package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// services gives n Services with ten backends each.
func services(n int) []model.Part {
	parts := []model.Part{&model.Node{Name: "a", Pods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")},
		NodePorts: []model.Range{{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("126.255.255.255")}}}}
	for i := range n {
		p := tenBackends(i, 0)
		parts = append(parts, p, frontendOf(i, p))
	}
	return parts
}

func address(base uint32, i int) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, base+uint32(i))))
}

// tenBackends gives the pool of the i-th Service; shift replaces the last backend.
func tenBackends(i, shift int) *model.Pool {
	p := &model.Pool{ID: uint64(i) << 16, Name: fmt.Sprint(i), Protocol: model.TCP}
	for j := range 10 {
		if j == 9 {
			j += shift * 1_000_000
		}
		p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(address(10<<24|128<<16, i*10+j), 8080)})
	}
	return p
}

func frontendOf(i int, p *model.Pool) *model.Frontend {
	t := model.Target{Pool: p}
	return &model.Frontend{Entry: model.Entry{Addr: address(10<<24|96<<16, i), Port: 80, Protocol: model.TCP}, Inside: t, Outside: t, Hide: model.OriginsOf(model.FromNode, model.FromOutside)}
}

// load writes parts into the kernel in transactions of at most 4,096 facts, by rank.
func load(b *testing.B, p *Plane, parts []model.Part) {
	seen := map[Key]bool{}
	var all []Fact
	for _, part := range parts {
		for _, f := range p.Render(part) {
			if !seen[f.Key] {
				seen[f.Key] = true
				all = append(all, f)
			}
		}
	}
	slices.SortStableFunc(all, func(x, y Fact) int { return x.Key.Rank() - y.Key.Rank() })
	for c := range slices.Chunk(all, 4096) {
		if err := p.Write(b.Context(), c, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCold(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			parts := services(n)
			for b.Loop() {
				b.StopTimer()
				inNamespace(b, func() {
					p, err := New()
					if err != nil {
						b.Fatal(err)
					}
					defer p.Close()
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
			inNamespace(b, func() {
				p, err := New()
				if err != nil {
					b.Fatal(err)
				}
				defer p.Close()
				load(b, p, services(n))
				i := 0
				for b.Loop() {
					old, now := p.Render(tenBackends(i%n, i/n%2)), p.Render(tenBackends(i%n, 1-i/n%2))
					put, del := difference(now, old), difference(old, now)
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
	inNamespace(b, func() {
		p, err := New()
		if err != nil {
			b.Fatal(err)
		}
		defer p.Close()
		load(b, p, services(10000))
		for b.Loop() {
			if _, err := p.Read(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
