package main

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

// A port's name says its protocol, unless the protocol is written out.
func TestPacketToNamedPort(t *testing.T) {
	w := &snapshot{objects: []source.Object{&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-dns"},
		Spec: corev1.ServiceSpec{ClusterIP: "010.96.0.10", Ports: []corev1.ServicePort{
			{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}, {Name: "dns-tcp", Port: 53,
				Protocol: corev1.ProtocolTCP},
			{Name: "signal", Port: 54, Protocol: corev1.ProtocolSCTP}, {Name: "metrics", Port: 9153},
		}},
	}}}
	for to, want := range map[string]string{
		"kube-system/kube-dns:dns":     "10.96.0.10:53/udp",
		"kube-system/kube-dns:dns-tcp": "10.96.0.10:53/tcp",
		"kube-system/kube-dns:signal":  "10.96.0.10:54/sctp",
		"kube-system/kube-dns:metrics": "10.96.0.10:9153/tcp",
		"kube-system/kube-dns:dns/TCP": "10.96.0.10:53/tcp",
		"kube-system/kube-dns:53":      "10.96.0.10:53/tcp",
		"kube-system/kube-dns:53/udp":  "10.96.0.10:53/udp",
		"kube-system/kube-dns:dsn":     "",
	} {
		p, err := w.packet("192.0.2.1", to)
		if got := p.Dst.String() + "/" + p.Protocol.String(); (err == nil) != (want != "") || want != "" &&
			got != want {
			t.Errorf("%s: %s, %v; want %q", to, got, err, want)
		}
	}
}
