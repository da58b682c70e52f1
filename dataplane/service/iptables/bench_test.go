package iptables

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/servicetest"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// spent returns the processor time of the commands that were run since the last call, which other load changes little.
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
				netnstest.With(b, func() (*Plane, error) { return NewVariant(v) }, func(p *Plane) {
					run(b, n, p)
					b.ReportMetric(float64(spent().Milliseconds())/float64(b.N), "cpu-ms/op")
				})
			})
		}
	}
}

func load(b *testing.B, p *Plane, n int) []Fact {
	all := servicetest.Facts(b, p, servicetest.Services(n))
	if err := p.Write(b.Context(), all, nil); err != nil {
		b.Error(err)
	}
	return all
}

func BenchmarkColdSync(b *testing.B) {
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
			old, now := p.Render(servicetest.Pool(i%n, i/n%2)), p.Render(servicetest.Pool(i%n, 1-i/n%2))
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
		one := p.Render(servicetest.Frontend(n/3, servicetest.Pool(n/3, 0)))
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
