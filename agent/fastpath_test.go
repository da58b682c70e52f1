package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox/echo"
)

// labelledPod is a Pod of node a with an address.
func labelledPod(name, address string) *corev1.Pod {
	labels := map[string]string{"app": name}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: labels},
		Spec:   corev1.PodSpec{NodeName: "a"},
		Status: corev1.PodStatus{PodIP: address, PodIPs: []corev1.PodIP{{IP: address}}, Phase: corev1.PodRunning}}
}

// onlyFromFront is a policy by which web is reached by front alone.
var onlyFromFront = &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
	Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
			{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "front"}}}}}}}}

// TestFastPathOnOwnNetwork runs a whole agent that connects the pods, serves Services by mode ebpf and has policies in
// force: packets between pods are redirected, and what leaves the cluster is masqueraded all the same.
func TestFastPathOnOwnNetwork(t *testing.T) {
	web, front, wire := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	socket := filepath.Join(t.TempDir(), "cni.sock")
	inNode(t, func(ctx context.Context) error {
		here, err := netns.Current()
		if err != nil {
			return err
		}
		defer here.Close()
		if err := wireUp(here, wire); err != nil {
			return err
		}
		o, err := ownNetwork(socket, filepath.Join(t.TempDir(), "records"))
		if err != nil {
			return err
		}
		ctx, stop := context.WithTimeout(ctx, 50*time.Second)
		defer stop()
		done := make(chan error, 1)
		go func() {
			defer stop()
			err := attachPod(ctx, socket, "c-1", web) // of the two addresses, the first
			if err == nil {
				err = attachPodAs(ctx, socket, "c-2", "front", front)
			}
			if err == nil {
				err = awaitRedirected(ctx, here, front)
			}
			if err == nil {
				err = front.Do(func() error { return seenAs(ctx, "192.168.0.2:80", "192.168.0.1") })
			}
			done <- err
		}()
		return errors.Join(Run(ctx, o), <-done, mode.CleanNetwork(context.Background()))
	})
}

// ownNetwork returns the options of an agent of node a that does all by eBPF.
func ownNetwork(socket, records string) (o Options, err error) {
	chosen, err := mode.Of("ebpf")
	if err != nil {
		return o, err
	}
	engine, err := mode.EngineOf("ebpf")
	return Options{Mode: chosen.With(mode.Options{PodNetwork: true, Policies: true}), Log: slog.New(slog.DiscardHandler),
		Resolve: resolve.Config{Node: "a", Objects: resolve.Objects{HostPorts: true}},
		Servers: Servers{Metrics: "127.0.0.1:10249"},
		Source: sourceOf{networkNode("a", "192.168.0.1", "10.244.1.0/24"), labelledPod("web", "10.244.1.2"),
			labelledPod("front", "10.244.1.3"), onlyFromFront},
		Policies: &PolicyOptions{Engine: engine, Resolve: policy.Config{Node: "a", ImpliedNamespaces: true}},
		Network: &NetworkOptions{Resolve: network.Config{Node: "a"}, Socket: socket, Boot: "x", Records: records,
			Follow: func(ctx context.Context, notify func([]network.Device, bool)) error {
				notify([]network.Device{{Name: "eth0", MTU: 1500, Prefixes: []netip.Prefix{
					netip.MustParsePrefix("192.168.0.1/24")}}}, false)
				<-ctx.Done()
				return nil
			}}}, err
}

// wireUp connects a node with what is outside of the cluster, where a server is that knows no way to pods.
func wireUp(node, wire *netns.Namespace) error {
	l, err := link.Dial(node)
	if err != nil {
		return err
	}
	defer l.Close()
	dev, err := l.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0"}, wire)
	if err = errors.Join(err, l.AddAddress(dev, netip.MustParsePrefix("192.168.0.1/24")),
		sysctl.Set(node, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
			sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"})); err != nil {
		return err
	}
	w, err := link.Dial(wire)
	if err != nil {
		return err
	}
	defer w.Close()
	far, err := w.Index("eth0")
	err = errors.Join(err, w.Up(far), w.AddAddress(far, netip.MustParsePrefix("192.168.0.2/24")))
	return errors.Join(err, wire.Do(func() error {
		_, err := echo.Serve("wire", []echo.Port{{Number: 80, Protocol: model.TCP}}) // ends with the test's process
		return err
	}))
}

// seenAs returns an error unless a server sees the calling thread's network namespace at an address.
func seenAs(ctx context.Context, server, address string) error {
	reply, err := echo.Request(ctx, model.TCP, netip.MustParseAddrPort(server), echo.Options{})
	if err == nil && reply.Client.Addr().String() != address {
		err = fmt.Errorf("%s sees %s, want %s", server, reply.Client, address)
	}
	return err
}

// awaitRedirected has a pod send requests until the agent reports that packets were evaluated and redirected, and that
// the fast path is on.
func awaitRedirected(ctx context.Context, node, pod *netns.Namespace) (err error) {
	wanted := []string{`fairlead_fast_path_enabled{ip_family="IPv4"} 1`, `fairlead_fast_path_enabled{ip_family="IPv6"} 1`}
	const redirected = `fairlead_policy_ebpf_packets_total{outcome="redirected"} `
	page := ""
	for ctx.Err() == nil {
		request := func() error { return seenAs(ctx, "10.244.1.2:80", "10.244.1.3") }
		if err := errors.Join(pod.Do(request), node.Do(func() error { page, err = metricsPage(); return err })); err != nil {
			return err
		}
		_, n, found := strings.Cut(page, redirected)
		if found && !strings.HasPrefix(n, "0\n") && strings.Contains(page, wanted[0]) && strings.Contains(page, wanted[1]) {
			return nil
		}
	}
	var lines []string
	for l := range strings.Lines(page) {
		if strings.Contains(l, "fast_path") || strings.Contains(l, redirected[:len(redirected)-1]) {
			lines = append(lines, l)
		}
	}
	return fmt.Errorf("no packet was redirected: %q", lines)
}

// metricsPage reads the agent's metrics, from the calling thread's network namespace.
func metricsPage() (string, error) {
	c, err := net.Dial("tcp", "127.0.0.1:10249")
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}
