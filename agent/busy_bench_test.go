package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// BenchmarkPolicyChangesUnderLoad measures from a change of a policy until a pod's connection fares by it, while 20
// others keep the processors busy, and pods open connections and flood datagrams to ever other ports, which fill
// connection tracking. It reports the median, the 99th percentile and the longest, in ms.
func BenchmarkPolicyChangesUnderLoad(t *testing.B) {
	for _, engine := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(engine, func(t *testing.B) {
			b := newWorldBed(t, unreadWorld, "nftables", engine)
			send, ready, stop := b.start()
			defer stop()
			send <- b.of(source.Kinds()...)
			<-ready
			client, err := b.cluster.Pod("shop", "client")
			b.must(err)
			defer busy(t, 20)()
			defer flood(client)()
			i := slices.IndexFunc(b.objects, func(o source.Object) bool {
				return source.KeyOf(o).Kind == source.NetworkPolicy
			})
			policy := source.Change{Key: source.KeyOf(b.objects[i]), Object: b.objects[i]}
			var latencies []time.Duration
			for range max(100, t.N) {
				send <- source.Batch{Changes: []source.Change{{Key: policy.Key}}}
				latencies = append(latencies, b.until(client, nil))
				send <- source.Batch{Changes: []source.Change{policy}}
				latencies = append(latencies, b.until(client, echo.Timeout))
			}
			slices.Sort(latencies)
			for name, d := range map[string]time.Duration{"p50-ms": latencies[len(latencies)/2],
				"p99-ms": latencies[len(latencies)*99/100], "max-ms": latencies[len(latencies)-1]} {
				t.ReportMetric(float64(d.Microseconds())/1000, name)
			}
		})
	}
}

// until returns how long it takes until the client's connection to the database fares so.
func (b *worldBed) until(client *sandbox.Host, want error) time.Duration {
	b.Helper()
	begin := time.Now()
	for time.Since(begin) < time.Minute {
		var is error
		b.must(client.Do(func() error {
			ctx, cancel := context.WithTimeout(b.Context(), 20*time.Millisecond)
			defer cancel()
			_, is = echo.Request(ctx, model.TCP, netip.MustParseAddrPort("10.244.1.4:80"), echo.Options{})
			return nil
		}))
		if is == want || want != nil && errors.Is(is, want) {
			return time.Since(begin)
		}
	}
	b.Fatal("a change isn't in force after a minute")
	return 0
}

// flood has a pod connect to a Service and send datagrams to each port of a pod until stop.
func flood(client *sandbox.Host) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	for range 2 {
		ended.Go(func() {
			client.Do(func() error {
				for ctx.Err() == nil {
					within, done := context.WithTimeout(ctx, time.Second)
					echo.Request(within, model.TCP, netip.MustParseAddrPort("10.96.0.10:80"), echo.Options{})
					done()
				}
				return nil
			})
		})
	}
	ended.Go(func() {
		client.Do(func() error {
			var from []net.PacketConn
			for range 8 {
				c, err := net.ListenPacket("udp", ":0")
				if err != nil {
					return err
				}
				defer c.Close()
				from = append(from, c)
			}
			for n := 0; ctx.Err() == nil; n++ {
				from[n%8].WriteTo([]byte("x"), &net.UDPAddr{IP: net.IPv4(10, 244, 1, 3), Port: 1000 + n/8%60000})
			}
			return nil
		})
	})
	return func() { cancel(); ended.Wait() }
}

// busy has n processes do nothing but compute until stop.
func busy(t testing.TB, n int) (stop func()) {
	var l []*exec.Cmd
	for range n {
		c := exec.Command("sh", "-c", "while :; do :; done")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		l = append(l, c)
	}
	return func() {
		for _, c := range l {
			c.Process.Kill()
			c.Wait()
		}
	}
}
