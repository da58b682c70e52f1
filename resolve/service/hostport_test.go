package service

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Host ports are at 127.0.0.1, which takes a sysctl, unless that is not to be.
func TestHostPortsAtLocalhost(t *testing.T) {
	for _, no := range []bool{false, true} {
		c := n1
		c.HostPorts, c.NoLocalHostPorts = true, no
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.Node}, Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}}}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "1"},
			Spec: corev1.PodSpec{NodeName: c.Node, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{
				{ContainerPort: 80, HostPort: 8080, Protocol: corev1.ProtocolTCP}}}}},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}}
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
