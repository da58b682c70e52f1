package kubeproxy

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

var (
	services = flag.String("services", "1000,10000", "numbers of Services, of ten endpoints each")
	changes  = flag.Int("changes", 30, "endpoint changes, each from a moment of rest; a fifth of that above "+
		"5,000 Services")
)

// sizes are the numbers of Services that are wanted.
func sizes(b *testing.B) (l []int) {
	for text := range strings.SplitSeq(*services, ",") {
		n, err := strconv.Atoi(text)
		check(b, err)
		l = append(l, n)
	}
	return l
}

// running is a program that keeps a kernel as its source says.
type running struct {
	wall, sync time.Duration // cold: from its start until all was in the kernel; of that, in its sync, 0 if it doesn't say
	usage      func() (kubeproxy.Usage, error)
	apply      func(source.Object) error
	stop       func()
}

// implementation is something that can be started.
type implementation struct {
	name  string
	most  int // Services that end in an acceptable time
	start func(*testing.B, *netns.Namespace, []source.Object) running
}

func subjects() (l []implementation) {
	for _, w := range modes {
		most := 1 << 20
		if w.variant == kubeproxy.Nft {
			most = 1000 // 414 s at 5,000 have been seen
		}
		l = append(l, implementation{"kube-proxy-" + w.name, most,
			func(b *testing.B, ns *netns.Namespace, objects []source.Object) running {
				return startKubeProxy(b, ns, objects, w.mode, w.variant)
			}})
	}
	return append(l, implementation{"fairlead-nftables", 1 << 20, startFairlead},
		implementation{"fairlead-nftables-api", 1 << 20, startFairleadFromAPI})
}

func startKubeProxy(b *testing.B, ns *netns.Namespace, objects []source.Object, mode kubeproxy.Mode,
	variant kubeproxy.Variant) running {
	n, cold, err := kubeproxy.NewNode(patience(b, 20*time.Minute), options(b, ns, mode, variant), objects...)
	check(b, err)
	return running{cold.Wall, cold.Sync, n.Usage, n.Apply, func() { check(b, n.Close()) }}
}

// startFairlead starts `fairlead run` from a folder with one object to a file.
func startFairlead(b *testing.B, ns *netns.Namespace, objects []source.Object) running {
	dir := filepath.Join(b.TempDir(), "objects")
	check(b, generate.Write(dir, objects, 1))
	r := fairlead(b, ns, "--source", dir)
	r.apply = func(s source.Object) error {
		text, err := json.Marshal(s)
		next := dir + ".next"
		check(b, err, os.WriteFile(next, text, 0o644))
		// the probe's slice is the last
		return os.Rename(next, filepath.Join(dir, fmt.Sprintf("objects-%06d.yaml", len(objects)-1)))
	}
	return r
}

// startFairleadFromAPI starts `fairlead run` from the same API server as kube-proxy's.
func startFairleadFromAPI(b *testing.B, ns *netns.Namespace, objects []source.Object) running {
	s := apiserver.New(objects...)
	s.Encode()
	at, stop := serveAt(b, ns, s, "127.0.0.1:0")
	kubeconfig := filepath.Join(b.TempDir(), "kubeconfig")
	check(b, os.WriteFile(kubeconfig, apiserver.Kubeconfig("http://"+at), 0o600))
	r := fairlead(b, ns, "--kubeconfig", kubeconfig)
	r.apply = func(o source.Object) error {
		s.Apply(source.Change{Key: source.KeyOf(o), Object: o})
		return nil
	}
	end := r.stop
	r.stop = func() {
		end()
		stop()
	}
	return r
}

// fairlead starts `fairlead run` with further arguments and waits until it is ready.
func fairlead(b *testing.B, ns *netns.Namespace, args ...string) running {
	const address = "127.0.0.1:10249"
	cmd := exec.Command(program(b, "FAIRLEAD"), append([]string{"run", "--node", nodeName, "--status-address", address},
		args...)...)
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Setpgid: true}
	begin := time.Now()
	check(b, ns.Do(cmd.Start))
	web := &http.Client{Transport: &http.Transport{DialContext: func(_ context.Context, network,
		address string) (c net.Conn, err error) {
		err = ns.Do(func() error {
			c, err = net.Dial(network, address)
			return err
		})
		return c, err
	}}}
	for timeout := time.After(2 * time.Minute); ; {
		if r, err := web.Get("http://" + address + "/readyz"); err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				break
			}
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-timeout:
			cmd.Process.Kill()
			b.Fatal("fairlead is not ready after two minutes")
		}
	}
	wall := time.Since(begin)
	return running{wall, 0, func() (kubeproxy.Usage, error) { return kubeproxy.UsageOf(cmd.Process.Pid) }, nil, func() {
		cmd.Process.Signal(unix.SIGTERM)
		cmd.Wait()
	}}
}

// BenchmarkSubjects starts each subject with nothing in the kernel, then moves an endpoint, again and again, each time
// from a moment of rest. Run it with -benchtime 1x -count N: each count is one start.
func BenchmarkSubjects(b *testing.B) {
	for _, n := range sizes(b) {
		for _, s := range subjects() {
			if n > s.most {
				continue
			}
			b.Run(fmt.Sprintf("%s/services=%d", s.name, n), func(b *testing.B) {
				for b.Loop() {
					measure(b, s, n)
				}
			})
		}
	}
}

func measure(b *testing.B, s implementation, n int) {
	ns := space(b)
	p := probe(b, ns)
	r := s.start(b, ns, append(generate.Cluster(n, 10), p.Objects()...))
	stopped := false
	stop := func() {
		if !stopped {
			r.stop()
		}
		stopped = true
	}
	defer stop()
	cold, err := r.usage()
	check(b, err, p.Reach(patience(b, time.Minute)))
	settle(b, r)
	before, err := r.usage()
	check(b, err)
	times := *changes
	if n > 5000 {
		times = max(1, times/5)
	}
	var latency []time.Duration
	for range times {
		t, err := p.Move(patience(b, 5*time.Minute), r.apply)
		check(b, err)
		latency = append(latency, t)
		settle(b, r)
	}
	after, err := r.usage()
	check(b, err)
	stop()
	slices.Sort(latency)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(r.wall), "cold-ms")
	b.ReportMetric(ms(cold.CPU()), "cold-cpu-ms")
	if r.sync > 0 {
		b.ReportMetric(ms(r.sync), "sync-ms")
	}
	b.ReportMetric(float64(cold.Resident)/(1<<20), "MiB")
	b.ReportMetric(float64(after.Resident)/(1<<20), "MiB-later")
	b.ReportMetric(ms(latency[len(latency)/2]), "change-p50-ms")
	b.ReportMetric(ms(latency[len(latency)-1-len(latency)/100]), "change-p99-ms")
	b.ReportMetric(ms(after.CPU()-before.CPU())/float64(times), "change-cpu-ms")
}

// settle waits until a program has rested for longer than kube-proxy leaves between two syncs.
func settle(b *testing.B, r running) {
	const window, enough = 300 * time.Millisecond, 5
	rested := 0
	for range 400 {
		before, err := r.usage()
		check(b, err)
		time.Sleep(window) // rest is measured, nothing is waited for
		after, err := r.usage()
		check(b, err)
		if rested++; after.CPU()-before.CPU() > window/15 {
			rested = 0
		}
		if rested == enough {
			return
		}
	}
}

// BenchmarkInProcess is Fairlead's resolver, loop and nftables plane alone, with the objects at hand: what kube-proxy's
// own sync-ms is to be held against.
func BenchmarkInProcess(b *testing.B) {
	for _, n := range sizes(b) {
		var all []source.Change
		for _, o := range generate.Cluster(n, 10) {
			all = append(all, source.Change{Key: source.KeyOf(o), Object: o})
		}
		b.Run(fmt.Sprintf("fairlead-nftables/services=%d", n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				ns := space(b)
				plane := &timed{}
				check(b, ns.Do(func() (err error) {
					plane.Plane, err = nftables.New()
					return err
				}))
				ctx, cancel := context.WithCancel(patience(b, time.Minute))
				loop := reconcile.New[model.ServicePart, nftables.Key, string](plane,
					reconcile.Options[model.ServicePart]{Owner: model.OwnerOf})
				done := make(chan struct{})
				go func() {
					loop.Run(ctx)
					close(done)
				}()
				runtime.GC() // of the cluster's making
				before := used()
				b.StartTimer()
				begin := time.Now()
				resolver := resolve.New(resolve.Config{Node: nodeName, Addresses: []netip.Addr{addresses[0]}})
				parts := resolver.Apply(all).Services.Put
				resolved := time.Since(begin)
				loop.Change(parts, nil)
				check(b, loop.Sync(ctx))
				wall := time.Since(begin)
				b.StopTimer()
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(float64(resolved.Microseconds())/1000, "resolve-ms")
				b.ReportMetric(float64(wall.Microseconds())/1000, "sync-ms")
				b.ReportMetric(float64((used()-before).Microseconds())/1000, "sync-cpu-ms")
				cancel()
				<-done
				b.ReportMetric(float64(plane.wrote.Microseconds())/1000, "kernel-ms")
				check(b, plane.Close())
				b.StartTimer()
			}
		})
	}
}

// timed is a plane that keeps how long its writes took. Its loop has ended when that is looked at.
type timed struct {
	*nftables.Plane
	wrote time.Duration
}

func (t *timed) Write(ctx context.Context, put, del []nftables.Fact) error {
	begin := time.Now()
	err := t.Plane.Write(ctx, put, del)
	t.wrote += time.Since(begin)
	return err
}

// used is the processor time of this process.
func used() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		panic(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
