package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// BenchmarkNodePort has a client outside connect, ask and close, to a pod itself and through a node port that hides it, in each
// mode. Compare within one run alone: each iteration of a sub-benchmark is one of each.
func BenchmarkNodePort(b *testing.B) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.77.1"}}}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.PodSpec{NodeName: "a",
		Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 8080}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.244.1.1"}}
	for _, name := range []string{"nftables", "ebpf"} {
		b.Run(name, func(b *testing.B) {
			m, err := ModeOf(name)
			if err != nil {
				b.Fatal(err)
			}
			cluster, err := sandbox.Up(context.Background(), sandbox.Options{Objects: []source.Object{node, pod}, Serve: true})
			if err != nil {
				b.Fatal(err)
			}
			defer cluster.Down()
			host, err := cluster.Node("a")
			if err != nil {
				b.Fatal(err)
			}
			var s *Services
			if err := host.Do(func() (err error) { s, err = OpenServices(m, slog.New(slog.DiscardHandler)); return err }); err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			at := netip.MustParseAddr("192.168.77.1")
			pool := &model.Pool{ID: 1, Protocol: model.TCP, Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.244.1.1:8080"), Local: true}}}
			to := model.Target{Pool: pool}
			s.Change([]model.Part{
				&model.Node{Name: "a", Addresses: []netip.Addr{at}, NodePorts: []model.Range{{First: at, Last: at}}}, pool,
				&model.Frontend{Entry: model.Entry{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: model.TCP}, Inside: to, Outside: to, Hide: model.AllOrigins},
			}, nil)
			if err := s.Sync(context.Background()); err != nil {
				b.Fatal(err)
			}
			compare(b, cluster.Outside(), "10.244.1.1:8080", "192.168.77.1:30080")
		})
	}
}

// compare asks at both addresses in turn and reports the mean times, and their ratio.
func compare(b *testing.B, from *sandbox.Host, direct, through string) {
	var took [2]time.Duration
	err := from.Do(func() error {
		for range b.N {
			for i, to := range []string{direct, through} {
				begin := time.Now()
				if _, err := echo.Ask(context.Background(), model.TCP, netip.MustParseAddrPort(to), echo.Options{}); err != nil {
					return err
				}
				took[i] += time.Since(begin)
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(took[0].Nanoseconds())/float64(b.N), "direct-ns")
	b.ReportMetric(float64(took[1].Nanoseconds())/float64(b.N), "node-port-ns")
	b.ReportMetric(float64(took[1])/float64(took[0]), "×direct")
}
