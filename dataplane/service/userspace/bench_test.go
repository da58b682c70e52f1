package userspace

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// stream sends bytes from the client to an address for a while, and returns how many arrive in a second.
func (s *stage) stream(l *net.TCPListener, to string, d time.Duration) float64 {
	s.Helper()
	got := make(chan int64, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			got <- 0
			return
		}
		defer c.Close()
		b, n := make([]byte, 1<<18), int64(0)
		for {
			m, err := c.Read(b)
			if n += int64(m); err != nil {
				got <- n
				return
			}
		}
	}()
	c, err := s.dial("tcp4", to)
	s.check(err)
	b, begin := make([]byte, 1<<18), time.Now()
	for time.Since(begin) < d {
		_, err := c.Write(b)
		s.check(err)
	}
	c.Close()
	return float64(<-got) / time.Since(begin).Seconds()
}

// BenchmarkStream returns a TCP stream's bytes in a second as a part of those without the plane, in turn.
func BenchmarkStream(b *testing.B) {
	s := newStage(b)
	l := s.listen(8080)
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	direct, ours := 0.0, 0.0
	for b.Loop() {
		direct += s.stream(l, l.Addr().String(), 300*time.Millisecond)
		ours += s.stream(l, vip.String()+":80", 300*time.Millisecond)
	}
	b.ReportMetric(ours/direct, "×direct")
	b.ReportMetric(ours/float64(b.N)/1e9, "GB/s")
}

// BenchmarkRequest returns the time of a connection with one request of a byte, direct and by the plane, in turn.
func BenchmarkRequest(b *testing.B) {
	s := newStage(b)
	l := s.listen(8080)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.CopyN(c, c, 1)
			c.Close()
		}
	}()
	f, p := serves(model.TCP, 80, 8080)
	s.check(s.apply(p, f))
	latency := map[string]time.Duration{}
	one := make([]byte, 1)
	s.check(s.client.Do(func() error {
		for b.Loop() {
			for _, to := range []string{l.Addr().String(), vip.String() + ":80"} {
				begin := time.Now()
				c, err := net.Dial("tcp4", to)
				if err != nil {
					return err
				}
				if _, err = c.Write(one); err == nil {
					_, err = io.ReadFull(c, one)
				}
				if c.Close(); err != nil {
					return err
				}
				latency[to] += time.Since(begin)
			}
		}
		return nil
	}))
	b.ReportMetric(float64(latency[vip.String()+":80"])/float64(latency[l.Addr().String()]), "×direct")
}

// BenchmarkColdSync notifies a new plane of many Services with ten backends each, and returns what their sockets and
// routes take.
func BenchmarkColdSync(b *testing.B) {
	for _, n := range []int{1, 1000, 9000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				s := newStage(b)
				var parts []model.ServicePart
				for i := range n {
					p := &model.Pool{ID: uint64(i + 1), Protocol: model.TCP}
					for j := range 10 {
						p.Backends = append(p.Backends, model.Backend{
							Addr: netip.AddrPortFrom(number(10<<24|128<<16+uint32(10*i+j)), 8080)})
					}
					t := model.Target{Pool: p}
					parts = append(parts, p, &model.Frontend{Internal: t, External: t,
						Entry: model.Entry{Addr: number(10<<24 | 96<<16 + uint32(i)), Port: 80, Protocol: model.TCP}})
				}
				slab, resident := memory("/proc/meminfo", "Slab:"), memory("/proc/self/status", "VmRSS:")
				used := processor()
				b.StartTimer()
				s.check(s.apply(parts...))
				b.StopTimer()
				b.ReportMetric(float64((processor() - used).Milliseconds()), "ms-processor")
				b.ReportMetric(float64(memory("/proc/meminfo", "Slab:")-slab), "kB-slab")
				b.ReportMetric(float64(memory("/proc/self/status", "VmRSS:")-resident), "kB-resident")
				begin := time.Now()
				facts, err := s.plane.Read(b.Context())
				s.check(err)
				b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms-read")
				if len(facts) < len(parts) {
					b.Fatalf("%d facts of %d parts", len(facts), len(parts))
				}
				s.check(s.plane.Clean(b.Context()))
				b.StartTimer()
			}
		})
	}
}

func number(v uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v)))
}

// processor returns the processors' time that this process has used.
func processor() time.Duration {
	var r unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// memory reads a number of kB from a file of /proc.
func memory(file, name string) (n int) {
	text, _ := os.ReadFile(file)
	if _, rest, found := strings.Cut(string(text), name); found {
		fmt.Sscan(rest, &n)
	}
	return n
}
