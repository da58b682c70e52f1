package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// Where a client outside asks: the pod itself, or a node port that hides the client.
var (
	direct   = netip.MustParseAddrPort("10.244.1.1:8080")
	nodePort = netip.MustParseAddrPort("192.168.77.1:30080")
)

// BenchmarkNodePort has clients outside ask a pod itself and through a node port that hides them, in the modes nftables
// and ebpf in turn: a connection that is opened, asked over and closed, and a round trip over one that is kept. Each
// iteration is one of each. It reports medians and their ratios.
func BenchmarkNodePort(b *testing.B) {
	var benchPaths []*benchPath
	for _, chosen := range []string{"nftables", "ebpf"} {
		from := served30080(b, chosen).External()
		benchPaths = append(benchPaths, newBenchPath(b, chosen+"-direct", from, direct),
			newBenchPath(b, chosen, from, nodePort))
	}
	b.ResetTimer()
	for range b.N {
		for _, w := range benchPaths {
			w.connect(b)
			w.again(b)
		}
	}
	for _, what := range []struct {
		name  string
		times func(*benchPath) []time.Duration
	}{{"connection", func(w *benchPath) []time.Duration { return w.connections }},
		{"round-trip", func(w *benchPath) []time.Duration { return w.rounds }}} {
		m := map[string]float64{}
		for _, w := range benchPaths {
			m[w.name] = median(what.times(w))
		}
		nftables, ebpf := m["nftables"]/m["nftables-direct"], m["ebpf"]/m["ebpf-direct"]
		b.ReportMetric(m["ebpf-direct"], what.name+"-direct-ns")
		b.ReportMetric(nftables, what.name+"-nftables×direct")
		b.ReportMetric(ebpf, what.name+"-ebpf×direct")
		b.ReportMetric(ebpf/nftables, what.name+"-ebpf×nftables")
		b.ReportMetric(m["ebpf"]/m["nftables"], what.name+"-ebpf-raw×nftables")
		b.ReportMetric(m["ebpf-direct"]/m["nftables-direct"], what.name+"-ebpf-direct×nftables-direct")
	}
}

func median(l []time.Duration) float64 {
	slices.Sort(l)
	return float64(l[len(l)/2].Nanoseconds())
}

// served30080 makes a cluster whose node serves the node port in a mode.
func served30080(b testing.TB, chosen string) *sandbox.Cluster {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodePort.Addr().String()}}}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.PodSpec{NodeName: "a",
			Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: int32(direct.Port())}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: direct.Addr().String()}}
	m, err := mode.Of(chosen)
	if err != nil {
		b.Fatal(err)
	}
	cluster, err := sandbox.Up(context.Background(), sandbox.Options{Objects: []source.Object{node, pod}, Serve: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := cluster.Down(); err != nil {
			b.Error(err)
		}
	})
	host, err := cluster.Node("a")
	if err != nil {
		b.Fatal(err)
	}
	var s *service.Planes
	if err := host.Do(func() (err error) {
		s, err = service.OpenPlanes(m, slog.New(slog.DiscardHandler))
		return err
	}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	pool := &model.Pool{ID: 1, Protocol: model.TCP, Backends: []model.Backend{{Addr: direct, Local: true}}}
	to, at := model.Target{Pool: pool}, nodePort.Addr()
	s.Change([]model.ServicePart{
		&model.ServiceNode{Node: &model.Node{Name: "a", Addresses: []netip.Addr{at}},
			NodePorts: []model.Range{{First: at, Last: at}}}, pool,
		&model.Frontend{Entry: model.Entry{Addr: netip.IPv4Unspecified(), Port: nodePort.Port(), Protocol: model.TCP},
			Internal: to, External: to, Masquerade: model.AllOrigins},
	}, nil)
	if err := s.Sync(context.Background()); err != nil {
		b.Fatal(err)
	}
	return cluster
}

// benchPath is a client's way to the pod, and how long it took.
type benchPath struct {
	name                string
	from                *sandbox.Host
	to                  netip.AddrPort
	flow                *echo.Flow
	connections, rounds []time.Duration
}

func newBenchPath(b *testing.B, name string, from *sandbox.Host, to netip.AddrPort) *benchPath {
	w := &benchPath{name: name, from: from, to: to}
	err := from.Do(func() (err error) {
		w.flow, err = echo.Open(context.Background(), model.TCP, to, echo.Options{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { w.flow.Close() })
	return w
}

// connect opens a connection, asks over it once and closes it.
func (w *benchPath) connect(b *testing.B) {
	err := w.from.Do(func() error {
		begin := time.Now()
		_, err := echo.Request(context.Background(), model.TCP, w.to, echo.Options{})
		w.connections = append(w.connections, time.Since(begin))
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
}

// again queries over the kept connection.
func (w *benchPath) again(b *testing.B) {
	begin := time.Now()
	if _, err := w.flow.Request(context.Background()); err != nil {
		b.Fatal(err)
	}
	w.rounds = append(w.rounds, time.Since(begin))
}
