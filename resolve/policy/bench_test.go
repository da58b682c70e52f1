package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// sizes are those of clusters of benchmarks.
var sizes = []generate.PolicySize{
	{Pods: 1_000, Namespaces: 250, Here: 110, Cluster: 20}, {Pods: 10_000, Namespaces: 2_500, Here: 110, Cluster: 20},
	{Pods: 100_000, Namespaces: 25_000, Here: 110}, {Pods: 100_000, Namespaces: 25_000, Here: 110, Cluster: 20},
	{Pods: 100_000, Namespaces: 200, Here: 250, Cluster: 50},
	{Pods: 100_000, Namespaces: 25_000, Here: 110, Cluster: 200}, {Pods: 100_000, Namespaces: 25_000, Here: 100_000},
}

// sizeName names a benchmark of a size.
func sizeName(s generate.PolicySize) string {
	return fmt.Sprintf("pods=%d/namespaces=%d/here=%d/cluster=%d", s.Pods, s.Namespaces, s.Here, s.Cluster)
}

// changesOf returns what makes objects known.
func changesOf(objects []source.Object) (changes []source.Change) {
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	return changes
}

// processorTime returns what this process has had of processors.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkStart makes a node's policies of everything at once. Measured on a virtual machine with two processors of an
// Intel Xeon, of which other programs had most (load 14 to 22), so that the same row differs by half from run to run;
// "go test ./resolve/policy -run xxx -bench Start -benchtime 3x", without parsing and the objects' own memory:
//
//	pods × policies, namespaces, pods here, cluster policies | CPU ms | heap MiB
//	1,000 × 750, 250, 110, 20                                |      6 |   1
//	10,000 × 7,500, 2,500, 110, 20                           |     69 |   9
//	100,000 × 75,000, 25,000, 110, 0                         |    825 |  83
//	100,000 × 75,000, 25,000, 110, 20                        |    949 |  92
//	100,000 × 75,000, 200, 250, 50                           |  1,511 | 103
//	100,000 × 75,000, 25,000, 110, 200                       |  1,480 |  95
//	100,000 × 75,000, 25,000, all, 0                         |  3,724 | 206
func BenchmarkStart(b *testing.B) {
	for _, s := range sizes {
		b.Run(sizeName(s), func(b *testing.B) {
			changes := changesOf(generate.NewPolicyCluster(s).Objects)
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				begin := processorTime()
				r := New(Config{Node: generate.PolicyNode})
				change := r.Apply(changes)
				b.ReportMetric(float64((processorTime() - begin).Milliseconds()), "cpu-ms")
				b.StopTimer()
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/(1<<20), "MiB")
				parts := map[string]int{}
				for _, p := range change.Put {
					switch p := p.(type) {
					case *model.Peer:
						parts["peers"]++
					case *model.PeerVerdict:
						parts["verdicts"]++
					case *model.Ruleset:
						parts["entries"] += len(p.Ports)
					}
				}
				for unit, n := range parts {
					b.ReportMetric(float64(n), unit)
				}
				runtime.KeepAlive(r)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkChange changes one object of a cluster at a time. On that machine, in the same circumstances, 100,000 pods
// in 25,000 namespaces with 75,000 policies, 110 pods here and 20 cluster policies durations (-benchtime 2000x) at p50
// / p99: a label of a pod elsewhere 18 / 213 µs, of a local pod 12 / 100 µs, of a namespace 15 / 86 µs, a policy 9 /
// 157 µs.
func BenchmarkChange(b *testing.B) {
	for _, s := range sizes {
		c := generate.NewPolicyCluster(s)
		r := New(Config{Node: generate.PolicyNode})
		r.Apply(changesOf(c.Objects))
		for _, of := range []struct {
			name string
			make func() source.Object
		}{
			{"label of a pod elsewhere", func() source.Object { return c.Relabelled(s.Pods - 1 - rand.IntN(s.Pods/2)) }},
			{"label of a local pod", func() source.Object { return c.Relabelled(rand.IntN(s.Here)) }},
			{"label of a namespace", func() source.Object {
				return c.Namespace(rand.IntN(s.Namespaces), fmt.Sprint(rand.IntN(5)))
			}},
			{"policy", func() source.Object { return c.Policy(rand.IntN(s.Pods * 3 / 4)) }},
		} {
			b.Run(sizeName(s)+"/"+of.name, func(b *testing.B) {
				var durations []time.Duration
				for b.Loop() {
					b.StopTimer()
					o := of.make()
					b.StartTimer()
					begin := time.Now()
					r.Apply([]source.Change{{Key: source.KeyOf(o), Object: o}})
					durations = append(durations, time.Since(begin))
				}
				slices.Sort(durations)
				b.ReportMetric(float64(durations[len(durations)/2].Nanoseconds())/1000, "p50-µs")
				b.ReportMetric(float64(durations[len(durations)*99/100].Nanoseconds())/1000, "p99-µs")
			})
		}
	}
}

// BenchmarkManyPolicies has 10,000 policies on the same 250 pods, each with a port and a peer of its own.
func BenchmarkManyPolicies(b *testing.B) {
	const policies, here = 10_000, 250
	var changes []source.Change
	put := func(o source.Object) { changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o}) }
	one := func(i int) *networkingv1.NetworkPolicy {
		p, port := &networkingv1.NetworkPolicy{}, intstr.FromInt32(int32(1000+i))
		p.Namespace, p.Name = "ns", fmt.Sprintf("policy-%d", i)
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{
			Ports: []networkingv1.NetworkPolicyPort{{Port: &port}},
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
				"peer": fmt.Sprint(i)}}}}}}
		return p
	}
	for i := range here {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("pod-%d", i),
			Labels: map[string]string{"peer": fmt.Sprint(i)}}}
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		p.Spec.NodeName, p.Status.PodIPs = "node", []corev1.PodIP{{IP: addr.String()}}
		put(p)
	}
	for i := range policies {
		put(one(i))
	}
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			begin := processorTime()
			New(Config{Node: "node", ImpliedNamespaces: true}).Apply(changes)
			b.ReportMetric(float64((processorTime() - begin).Milliseconds()), "cpu-ms")
		}
	})
	b.Run("policy", func(b *testing.B) {
		r := New(Config{Node: "node", ImpliedNamespaces: true})
		r.Apply(changes)
		for i := 0; b.Loop(); i++ {
			o := one(i % policies)
			if i%2 == 0 {
				o.Spec.Ingress[0].From[0].PodSelector.MatchLabels["peer"] = "none"
			}
			r.Apply([]source.Change{{Key: source.KeyOf(o), Object: o}})
		}
	})
}
