package ebpf_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/model"
)

// world returns so many Services with so many endpoints each, with the facts that they need.
func world(p *ebpf.Plane, services, endpoints int) (facts []ebpf.Fact, pools []*model.Pool) {
	facts = render(p, &model.ServiceNode{Node: &model.Node{Name: "a"}})
	for i := range services {
		v := &model.Pool{ID: uint64(i + 1), Name: fmt.Sprint("pool ", i), Protocol: model.TCP}
		for k := range endpoints {
			a := netip.AddrFrom4([4]byte{10, 128 + byte(i>>12), byte(i >> 4), byte(i<<4) + byte(k)})
			v.Backends = append(v.Backends, model.Backend{Addr: netip.AddrPortFrom(a, 8080)})
		}
		e := model.Entry{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, Protocol: model.TCP}
		t := model.Target{Pool: v}
		facts = append(facts, p.Render(v)...)
		facts = append(facts, p.Render(&model.Frontend{Service: v.Name, Entry: e, Internal: t, External: t})...)
		pools = append(pools, v)
	}
	return facts, pools
}

// BenchmarkColdSync writes 10,000 Services with 10 endpoints each into empty maps, then has programs work on them. It
// tells the two apart: the second takes as long for one Service.
func BenchmarkColdSync(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		var wall, cpu [ebpf.KindHooks + 1]time.Duration
		for range b.N {
			b.StopTimer()
			p := opened(b, o)
			facts, _ := world(p, 10_000, 10)
			b.StartTimer()
			byKind := map[ebpf.Kind][]ebpf.Fact{}
			for _, f := range facts {
				byKind[f.Key.Kind] = append(byKind[f.Key.Kind], f)
			}
			for k := ebpf.KindMaps; k <= ebpf.KindHooks; k++ {
				begin, at := spent(), time.Now()
				if err := p.Write(context.Background(), byKind[k], nil); err != nil {
					b.Fatal(err)
				}
				wall[k] += time.Since(at)
				cpu[k] += spent() - begin
			}
			b.StopTimer()
			if err := p.Clean(context.Background()); err != nil {
				b.Fatal(err)
			}
			p.Close()
		}
		report := func(what string, from, to ebpf.Kind) {
			var w, c time.Duration
			for k := from; k <= to; k++ {
				w, c = w+wall[k], c+cpu[k]
			}
			b.ReportMetric(w.Seconds()*1000/float64(b.N), what+"-ms")
			b.ReportMetric(c.Seconds()*1000/float64(b.N), what+"-cpu-ms")
		}
		report("empty-maps", ebpf.KindMaps, ebpf.KindMaps)
		report("facts", ebpf.KindMaps+1, ebpf.KindFrontend)
		report("programs", ebpf.KindDevices, ebpf.KindHooks)
	})
}

// BenchmarkChange replaces an endpoint of one of 10,000 Services with 10 each.
func BenchmarkChange(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		facts, pools := world(p, 10_000, 10)
		if err := p.Write(context.Background(), facts, nil); err != nil {
			b.Fatal(err)
		}
		now := map[uint64]ebpf.Fact{}
		for _, v := range pools {
			now[v.ID] = p.Render(v)[0]
		}
		defer clean(b, p)
		b.ResetTimer()
		begin := spent()
		defer func() { b.ReportMetric(float64((spent()-begin).Nanoseconds())/float64(b.N), "cpu-ns/op") }()
		for i := range b.N {
			v := *pools[i*7919%len(pools)]
			v.Backends = slices.Clone(v.Backends)
			v.Backends[i%10].Addr = netip.AddrPortFrom(v.Backends[i%10].Addr.Addr(), uint16(i%60000+1))
			put := p.Render(&v)
			if err := p.Write(context.Background(), put, []ebpf.Fact{now[v.ID]}); err != nil {
				b.Fatal(err)
			}
			now[v.ID] = put[0]
		}
	})
}

// BenchmarkRead reads 10,000 Services with 10 endpoints each back, as after a restart.
func BenchmarkRead(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		facts, _ := world(p, 10_000, 10)
		if err := p.Write(context.Background(), facts, nil); err != nil {
			b.Fatal(err)
		}
		defer clean(b, p)
		b.ResetTimer()
		for range b.N {
			if held, err := p.Read(context.Background()); err != nil || len(held) != len(facts) {
				b.Fatal(len(held), err)
			}
		}
	})
}

// spent returns the processor time of the calling thread: on a busy machine, that says more than the clock.
func spent() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkUDPChange removes an endpoint from a Service and adds it again, where sockets might be connected to it.
func BenchmarkUDPChange(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		defer clean(b, p)
		all, less := poolOf(1, false, model.UDP, 1, 2, 3), poolOf(1, false, model.UDP, 1, 2)
		write(b, p, render(p, theNode, all), nil)
		b.ResetTimer()
		for range b.N {
			write(b, p, p.Render(less), p.Render(all))
			write(b, p, p.Render(all), p.Render(less))
		}
	})
}
