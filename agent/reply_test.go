package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// replyPort is a node port of TCP and UDP, and the source port of connections that leave the node.
const replyPort = 30080

// replyAddresses are the addresses of a node, its pod and a server outside, of one family.
type replyAddresses struct{ node, pod, external, any netip.Addr }

var replyFamilies = []replyAddresses{
	{netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("192.0.2.1"),
		netip.IPv4Unspecified()},
	{netip.MustParseAddr("fd00:77::1"), netip.MustParseAddr("fd00:10:244:1::1"), netip.MustParseAddr("2001:db8::1"),
		netip.IPv6Unspecified()},
}

// masqueradeToReplyPort has the node masquerade what its pod sends to the outside, behind the number of the node port.
const masqueradeToReplyPort = `table inet fl-test {
	chain postrouting {
		type nat hook postrouting priority srcnat
		ip saddr 10.244.1.1 ip daddr 192.0.2.1 ip protocol { tcp, udp } masquerade to :30080
		ip6 saddr fd00:10:244:1::1 ip6 daddr 2001:db8::1 ip6 nexthdr { tcp, udp } masquerade to :30080
	}
}`

// A packet that replies to a flow that the node masquerades, or to what a socket of the node sent, isn't taken for
// one to a node port.
func TestRepliesBypassNodePorts(t *testing.T) {
	here(t, func(t *testing.T, s conformance.Implementation) {
		cluster := servedReplyPort(t, s.Name)
		node, err := cluster.Node("a")
		if err != nil {
			t.Fatal(err)
		}
		pod, err := cluster.Pod("default", "web")
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range replyFamilies {
			server := netip.AddrPortFrom(family.external, 9998)
			own := echo.Options{From: netip.AddrPortFrom(family.node, replyPort), Unconnected: true}
			if s.Name != "userspace" { // see its notes
				probeThrice(t, "the node's socket", node, model.UDP, server, own)
			}
		}
		if err := node.Do(masqueradeReplies); err != nil {
			t.Fatal(err)
		}
		for _, family := range replyFamilies {
			server := netip.AddrPortFrom(family.external, 9997)
			for _, p := range []model.Protocol{model.TCP, model.UDP} {
				probeThrice(t, "the pod", pod, p, server, echo.Options{})
			}
		}
	})
}

func masqueradeReplies() error {
	c := exec.Command("nft", masqueradeToReplyPort)
	if out, err := c.CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	return nil
}

// probeThrice queries a server three times over one connection, or from one port, as a flow goes on.
func probeThrice(t *testing.T, who string, from *sandbox.Host, p model.Protocol, to netip.AddrPort, o echo.Options) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := from.Do(func() error {
		h, err := echo.Open(ctx, p, to, o)
		if err != nil {
			return err
		}
		defer h.Close()
		for range 3 {
			a, err := h.Request(ctx)
			if err != nil {
				return err
			}
			if a.Client.Port() != replyPort {
				t.Errorf("%s of %s is seen at %s, want port %d", p, who, a.Client, replyPort)
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("%s of %s to %s: %v", p, who, to, err)
	}
}

// servedReplyPort makes a cluster whose node serves replyPort in a mode, and a server outside at ports 9997 and 9998.
func servedReplyPort(t *testing.T, chosen string) *sandbox.Cluster {
	t.Helper()
	m, err := mode.Of(chosen)
	if err != nil {
		t.Fatal(err)
	}
	objects := replyObjects()
	cluster, err := sandbox.Up(context.Background(), sandbox.Options{Objects: objects, Serve: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Down(); err != nil {
			t.Error(err)
		}
	})
	err = cluster.External().Do(func() error {
		s, err := echo.Serve("outside", []echo.Port{{Number: 9997, Protocol: model.TCP}, {Number: 9997, Protocol: model.UDP},
			{Number: 9998, Protocol: model.UDP}})
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	host, err := cluster.Node("a")
	if err != nil {
		t.Fatal(err)
	}
	var s *service.Planes
	if err := host.Do(func() (err error) {
		s, err = service.OpenPlanes(m, slog.New(slog.DiscardHandler))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.Change(replyParts(), nil)
	if err := s.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// replyObjects returns the node and its pod.
func replyObjects() []source.Object {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.PodSpec{NodeName: "a",
			Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 8080}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, f := range replyFamilies {
		node.Status.Addresses = append(node.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: f.node.String()})
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: f.pod.String()})
	}
	pod.Status.PodIP = pod.Status.PodIPs[0].IP
	return []source.Object{node, pod}
}

// replyParts returns the node port's frontends, whose only endpoint is the pod.
func replyParts() []model.ServicePart {
	n := &model.ServiceNode{Node: &model.Node{Name: "a"}}
	parts := []model.ServicePart{n}
	for i, f := range replyFamilies {
		n.Addresses = append(n.Addresses, f.node)
		n.NodePorts = append(n.NodePorts, model.Range{First: f.node, Last: f.node})
		for j, p := range []model.Protocol{model.TCP, model.UDP} {
			pool := &model.Pool{ID: uint64(1 + 2*i + j), Protocol: p,
				Backends: []model.Backend{{Addr: netip.AddrPortFrom(f.pod, 8080), Local: true}}}
			to := model.Target{Pool: pool}
			at := model.Entry{Addr: f.any, Port: replyPort, Protocol: p}
			parts = append(parts, pool, &model.Frontend{Entry: at, Internal: to, External: to, Masquerade: model.AllOrigins})
		}
	}
	return parts
}
