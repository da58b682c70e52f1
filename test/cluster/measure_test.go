package cluster

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

var (
	measured = flag.Bool("measure", false, "measure (make measure)")
	services = flag.Int("services", 10000, "Services, of ten endpoints each")
	subjects = flag.String("modes", "nftables,ebpf", "modes; kube-proxy-nftables and kube-proxy-iptables are kube-proxy's, at KUBE_PROXY")
	rate     = flag.Int("rate", 100, "endpoint changes a second, meanwhile")
	samples  = flag.Int("samples", 200, "changes that are waited for")
	rest     = flag.Duration("rest", 10*time.Second, "how long an agent at rest is watched")
	flood    = flag.Int("flood", 0, "changes at the end, as fast as they are taken: 36000 are an hour of 10 a second")
	profile  = flag.String("profile", "", "where to write the heap's profile after the start, by mode")
)

// row is what was measured of one subject.
type row struct {
	name               string
	cold               time.Duration // from the start to all in the kernel
	after, later, last kubeproxy.Usage
	idle               float64         // of a core
	connectable        []time.Duration // from the PATCH's begin to the first connection, sorted
	eventP50, eventP99 float64         // seconds from a change's arrival to the kernel; 0 where not told
	changes            int64
	churned            time.Duration
}

// TestMeasure prints a table. It judges nothing: times on a shared machine are no gate.
func TestMeasure(t *testing.T) {
	if !*measured {
		t.Log("only measured with -measure: make -C test/cluster measure")
		return
	}
	begin := time.Now()
	targets := load(t, *services)
	t.Logf("%d Services × 10 told to the API server in %v", *services, time.Since(begin).Round(time.Second))
	to := service(t, "probe", web1)
	var rows []row
	for name := range strings.SplitSeq(*subjects, ",") {
		t.Run(name, func(t *testing.T) { rows = append(rows, measure(t, name, to, targets)) })
	}
	t.Logf("%d Services × 10, %d changes/s:\n%s", *services, *rate, table(rows))
}

// load tells the API server of a generated cluster, but for what has the address that the API server takes itself.
func load(t *testing.T, n int) (targets []*discoveryv1.EndpointSlice) {
	t.Helper()
	plane.must(t, "POST", "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": generate.Namespace}}, nil)
	objects := make(chan source.Object)
	var workers sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 16 {
		workers.Go(func() {
			for o := range objects {
				path := "/api/v1/namespaces/" + generate.Namespace + "/services"
				if _, ok := o.(*discoveryv1.EndpointSlice); ok {
					path = "/apis/discovery.k8s.io/v1/namespaces/" + generate.Namespace + "/endpointslices"
				}
				if err := plane.api(first, "POST", path, o, nil); err != nil {
					failed.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	for i, o := range generate.Cluster(n+1, 10) {
		switch o := o.(type) {
		case *corev1.Service:
			if i == 1 {
				continue
			}
		case *discoveryv1.EndpointSlice:
			if i == 2 {
				continue
			}
			targets = append(targets, o)
		default:
			continue
		}
		objects <- o
	}
	close(objects)
	workers.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
	return targets
}

// measure measures one subject.
func measure(t *testing.T, name string, to netip.AddrPort, targets []*discoveryv1.EndpointSlice) (r row) {
	r.name = name
	pid, cold, metrics := subject(t, name, to)
	r.cold = cold
	until(t, "the probe answers", func() error { _, err := ask(to); return err })
	const settled = 5 * time.Second
	time.Sleep(settled) // what the start leaves is let go
	before := usage(t, pid)
	time.Sleep(*rest) // rest is measured
	r.after = usage(t, pid)
	r.idle = float64(r.after.CPU()-before.CPU()) / float64(*rest)
	was := metrics()
	stop := churn(targets, *rate)
	begin := time.Now()
	place := 1
	if pod, err := ask(to); err == nil && pod == "default/web-2" {
		place = 0
	}
	for range *samples {
		ip, pod := []string{web1, web2}[place], []string{"web-1", "web-2"}[place]
		place = 1 - place
		start := time.Now()
		plane.must(t, "PATCH", sliceList+"/probe", patch(ip), nil)
		reaches(t, to, pod)
		r.connectable = append(r.connectable, time.Since(start))
		time.Sleep(rand.N(20 * time.Millisecond)) // not in step with anything
	}
	r.changes, r.churned = stop(t), time.Since(begin)
	slices.Sort(r.connectable)
	now := metrics()
	r.eventP50, r.eventP99 = now.since(was).quantile(.5), now.since(was).quantile(.99)
	r.later = usage(t, pid)
	r.last = r.later
	if *flood > 0 {
		r.last = inundate(t, pid, targets, settled)
	}
	return r
}

// inundate makes changes as fast as they are taken, and gives what the process has used once it is at rest again.
func inundate(t *testing.T, pid int, targets []*discoveryv1.EndpointSlice, settled time.Duration) kubeproxy.Usage {
	begin, n := time.Now(), int64(0)
	for n < int64(*flood) {
		stop := churn(targets, 500)
		time.Sleep(time.Second)
		n += stop(t)
	}
	u := usage(t, pid)
	t.Logf("%d changes in %v; %d MiB at once after them", n, time.Since(begin).Round(time.Second), u.Resident>>20)
	time.Sleep(settled)
	return usage(t, pid)
}

// subject starts one and gives its process, how long it took to serve, and its histogram of programming times.
func subject(t *testing.T, name string, to netip.AddrPort) (pid int, cold time.Duration, metrics func() histogram) {
	begin := time.Now()
	mode, isProxy := strings.CutPrefix(name, "kube-proxy-")
	if !isProxy {
		a := startAgent(t, "fairlead", mode, "--profiling")
		a.serving(t)
		if *profile != "" {
			a.profile(t, *profile+"-"+name)
		}
		return a.cmd.Process.Pid, time.Since(begin), func() histogram { return scrape(t, a.web, "http://127.0.0.1:10249/metrics") }
	}
	kubeconfig, err := plane.kubeconfig("kube-proxy", first, "system:masters")
	check(t, err)
	h, err := box.Node("a")
	check(t, err)
	args := []string{"--kubeconfig", kubeconfig, "--hostname-override=a", "--proxy-mode=" + mode, "--cluster-cidr=10.128.0.0/16", "--conntrack-max-per-core=0"}
	cmd := exec.Command(os.Getenv("KUBE_PROXY"), args...)
	log := &safe{}
	cmd.Stdout, cmd.Stderr = log, log
	check(t, h.Do(cmd.Start))
	t.Cleanup(func() {
		cmd.Process.Signal(unix.SIGTERM)
		cmd.Wait()
		clean := exec.Command(os.Getenv("KUBE_PROXY"), append(args, "--cleanup")...)
		var out bytes.Buffer
		clean.Stdout, clean.Stderr = &out, &out
		if err := errors.Join(h.Do(clean.Start), clean.Wait()); err != nil {
			t.Logf("kube-proxy --cleanup: %v: %s", err, &out)
		}
		if t.Failed() {
			t.Logf("kube-proxy's log:\n%s", log)
		}
	})
	until(t, "kube-proxy serves the probe", func() error { _, err := ask(to); return err })
	return cmd.Process.Pid, time.Since(begin), func() histogram { return nil }
}

// profile writes what of the heap lives, for `go tool pprof`.
func (a *running) profile(t *testing.T, file string) {
	t.Helper()
	r, err := a.web.Get("http://127.0.0.1:10249/debug/pprof/heap?gc=1")
	check(t, err)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	check(t, err, os.WriteFile(file, b, 0o644))
}

func usage(t *testing.T, pid int) kubeproxy.Usage {
	t.Helper()
	u, err := kubeproxy.UsageOf(pid)
	check(t, err)
	return u
}

// churn changes one endpoint of some EndpointSlice, rate times a second, until it is stopped. It gives how often it did.
func churn(targets []*discoveryv1.EndpointSlice, rate int) (stop func(*testing.T) int64) {
	ctx, cancel := context.WithCancel(context.Background())
	var n atomic.Int64
	var failed atomic.Pointer[error]
	var all sync.WaitGroup
	all.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			s := targets[rand.IntN(len(targets))]
			all.Go(func() {
				es := slices.Clone(s.Endpoints)
				es[0].Addresses = []string{fmt.Sprintf("10.200.%d.%d", rand.IntN(256), 1+rand.IntN(254))}
				err := plane.api(first, "PATCH", "/apis/discovery.k8s.io/v1/namespaces/"+s.Namespace+"/endpointslices/"+s.Name, map[string]any{"endpoints": es}, nil)
				if err != nil {
					failed.CompareAndSwap(nil, &err)
				}
				n.Add(1)
			})
		}
	})
	return func(t *testing.T) int64 {
		cancel()
		all.Wait()
		if err := failed.Load(); err != nil {
			t.Error(*err)
		}
		return n.Load()
	}
}

// histogram counts observations by upper bound, cumulated.
type histogram []bucket

type bucket struct {
	bound float64
	count uint64
}

// scrape reads the programming times.
func scrape(t *testing.T, web *http.Client, url string) (h histogram) {
	t.Helper()
	r, err := web.Get(url)
	check(t, err)
	defer r.Body.Close()
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(r.Body)
	check(t, err)
	for _, b := range families["fairlead_programming_seconds"].GetMetric()[0].GetHistogram().GetBucket() {
		h = append(h, bucket{b.GetUpperBound(), b.GetCumulativeCount()})
	}
	return h
}

// since gives what came after an earlier scrape.
func (h histogram) since(before histogram) histogram {
	h = slices.Clone(h)
	for i := range h {
		h[i].count -= before[i].count
	}
	return h
}

// quantile gives the upper bound of the bucket that holds it.
func (h histogram) quantile(q float64) float64 {
	for _, b := range h {
		if total := h[len(h)-1].count; total > 0 && float64(b.count) >= q*float64(total) {
			return b.bound
		}
	}
	return 0
}

// table prints rows.
func table(rows []row) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tcold ms\tcold CPU ms\tMiB\tMiB later\tMiB at last\tMiB peak\tidle %\tPATCH→connection p50 ms\tp99 ms\tevent→kernel p50 ms ≤\tp99 ms ≤\tchanges/s\tCPU ms/change\t")
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	const mib = 1 << 20
	for _, r := range rows {
		l := r.connectable
		fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%d\t%d\t%d\t%d\t%.4f\t%.1f\t%.1f\t%.2f\t%.2f\t%.0f\t%.2f\t\n", r.name, ms(r.cold), ms(r.after.CPU()), r.after.Resident/mib, r.later.Resident/mib,
			r.last.Resident/mib, r.last.Peak/mib, 100*r.idle, ms(l[len(l)/2]), ms(l[len(l)-1-len(l)/100]), 1000*r.eventP50, 1000*r.eventP99,
			float64(r.changes)/r.churned.Seconds(), ms(r.later.CPU()-r.after.CPU())/float64(r.changes))
	}
	w.Flush()
	return b.String()
}
