package service

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// hostPortPod returns a pod with a port, at 10.0.0.1.
func hostPortPod(onNode string, port corev1.ContainerPort) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "1"},
		Spec:   corev1.PodSpec{NodeName: onNode, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{port}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}}
}

// Host ports are at 127.0.0.1, which takes a sysctl, unless that is not to be.
func TestHostPortsAtLocalhost(t *testing.T) {
	for _, no := range []bool{false, true} {
		c := n1
		c.HostPorts, c.NoLocalHostPorts = true, no
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.Node}, Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}}}
		pod := hostPortPod(c.Node, corev1.ContainerPort{ContainerPort: 80, HostPort: 8080, Protocol: corev1.ProtocolTCP})
		frontends, local := 0, 0
		changes := []source.Change{{Key: source.KeyOf(node), Object: node}, {Key: source.KeyOf(pod), Object: pod}}
		for _, p := range New(c).Apply(changes).Services.Put {
			switch p := p.(type) {
			case *model.ServiceNode:
				if p.Localhost == no {
					t.Errorf("without them %v: the node's setting is %v", no, p.Localhost)
				}
			case *model.Frontend:
				frontends++
				if p.Entry.Addr == localhost {
					local++
				}
			}
		}
		if frontends == 0 || (local > 0) == no {
			t.Errorf("without them %v: %d of %d frontends are at 127.0.0.1", no, local, frontends)
		}
	}
}

// An endpoint that is a host port of this node is the pod behind it, as long as it is; at another node it is no such.
func TestEndpointIsHostPort(t *testing.T) {
	c := n1
	c.HostPorts, c.DirectServerReturn = true, true
	pod := func(inside int32, hostIP string) *corev1.Pod {
		return hostPortPod(c.Node, corev1.ContainerPort{ContainerPort: inside, HostPort: 30080, HostIP: hostIP})
	}
	here, n2 := ep("172.18.0.3"), func(n *corev1.Node) { n.Name = "n2" }
	here.NodeName = nil
	r := resolved(c, svc(), node(internalIPs("172.18.0.3", "172.18.0.5")), node(n2, internalIPs("172.18.0.4")),
		slice(eps(here, ep("172.18.0.4"), ep("172.18.0.5")), slicePorts(eport("http", 30080))))
	is := func(what, want string) {
		t.Helper()
		got := frontLines(r.Services())
		if !slices.Contains(got, "10.96.0.1:80/tcp ClusterIP -> "+want) {
			t.Errorf("%s: %q, without one to %s", what, got, want)
		}
		same(t, what+": problems", problemLines(r), nil)
	}
	is("without a host port", "172.18.0.3:30080 172.18.0.4:30080 172.18.0.5:30080")
	r.Apply(puts(pod(80, "")))
	is("of all addresses", "10.0.0.1:80* 172.18.0.4:30080")
	for _, b := range frontend(t, r, "10.96.0.1:80/tcp").Internal.Pool.Backends {
		if b.Remote || b.Local != (b.Addr.Port() == 80) {
			t.Errorf("backend %+v", b)
		}
	}
	r.Apply(puts(pod(81, "172.18.0.5")))
	is("of one address, at another port", "10.0.0.1:81* 172.18.0.3:30080 172.18.0.4:30080")
	r.Apply(dels(pod(81, "")))
	is("without it again", "172.18.0.3:30080 172.18.0.4:30080 172.18.0.5:30080")
}
