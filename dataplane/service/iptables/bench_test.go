package iptables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// services gives n Services with ten backends each.
func services(n int) []model.Part {
	at := make([]uint32, n)
	for i := range at {
		at[i] = uint32(i)
	}
	return servicesAt(at)
}

// servicesAt gives Services at addresses counted from 10.96.0.0.
func servicesAt(at []uint32) []model.Part {
	parts := []model.Part{&model.Node{Name: "a", Pods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")},
		NodePorts: []model.Range{{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("126.255.255.255")}}}}
	for i, a := range at {
		p := tenBackends(i, 0)
		parts = append(parts, p, frontendOf(int(a), p))
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

// spent gives the processor time of the commands that were run since the last call, which other load changes little.
func spent() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_CHILDREN, &u)
	all := time.Duration(u.Utime.Nano() + u.Stime.Nano())
	now := all - before
	before = all
	return now
}

var before time.Duration

// sizes runs a benchmark at two sizes with both variants, each in a namespace of its own.
func sizes(b *testing.B, run func(b *testing.B, n int, p *Plane)) {
	for _, v := range []Variant{Legacy, NFT} {
		for _, n := range []int{10, 10000} {
			b.Run(fmt.Sprintf("%s/services=%d", v, n), func(b *testing.B) {
				inNamespace(b, func() {
					p, err := NewVariant(v)
					if err != nil {
						b.Error(err)
						return
					}
					defer p.Close()
					run(b, n, p)
					b.ReportMetric(float64(spent().Milliseconds())/float64(b.N), "cpu-ms/op")
				})
			})
		}
	}
}

func load(b *testing.B, p *Plane, n int) []Fact {
	all := facts(b, p, services(n))
	if err := p.Write(b.Context(), all, nil); err != nil {
		b.Error(err)
	}
	return all
}

func BenchmarkCold(b *testing.B) {
	sizes(b, func(b *testing.B, n int, p *Plane) {
		spent()
		for b.Loop() {
			all := load(b, p, n)
			b.StopTimer() // the processor time counts the removal, too
			if err := p.Write(b.Context(), nil, all); err != nil {
				b.Error(err)
			}
			b.StartTimer()
		}
	})
}

// BenchmarkChange replaces one backend of one pool.
func BenchmarkChange(b *testing.B) {
	sizes(b, func(b *testing.B, n int, p *Plane) {
		load(b, p, n)
		spent()
		i := 0
		for b.Loop() {
			old, now := p.Render(tenBackends(i%n, i/n%2)), p.Render(tenBackends(i%n, 1-i/n%2))
			if err := p.Write(b.Context(), now, old); err != nil {
				b.Error(err)
				return
			}
			i++
		}
	})
}

// BenchmarkFrontend removes one frontend, or adds it again.
func BenchmarkFrontend(b *testing.B) {
	sizes(b, func(b *testing.B, n int, p *Plane) {
		load(b, p, n)
		spent()
		one := p.Render(frontendOf(n/3, tenBackends(n/3, 0)))
		i := 0
		for b.Loop() {
			put, del := one, []Fact(nil)
			if i%2 == 0 {
				put, del = nil, one
			}
			if err := p.Write(b.Context(), put, del); err != nil {
				b.Error(err)
				return
			}
			i++
		}
	})
}

func BenchmarkRead(b *testing.B) {
	sizes(b, func(b *testing.B, n int, p *Plane) {
		load(b, p, n)
		spent()
		for b.Loop() {
			if _, err := p.Read(b.Context()); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
