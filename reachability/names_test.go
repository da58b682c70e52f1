package reachability

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

func TestServiceNames(t *testing.T) {
	w := Names{&corev1.Service{ObjectMeta: meta("shop", "web")},
		&corev1.Service{ObjectMeta: meta("default", "api")}, &corev1.Service{ObjectMeta: meta("test", "api")},
		&corev1.Service{ObjectMeta: meta("shop", "db")}, &corev1.Pod{ObjectMeta: meta("test", "db")}}
	for name, want := range map[string]string{
		"shop/web": "shop/web", "web": "shop/web", "web.shop": "shop/web", "web.shop.svc": "shop/web",
		"web.shop.svc.cluster.local": "shop/web", "api": "default/api", "api.test": "test/api",
		"db": "", "db.shop": "shop/db", "web.test": "", "svc": "", "web.svc": "",
	} {
		got := ""
		if s := w.Service(name); s != nil {
			got = s.Namespace + "/" + s.Name
		}
		if got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestUnknownNamesSayWhatThereIs(t *testing.T) {
	w := Names{&corev1.Pod{ObjectMeta: meta("shop", "client")},
		&corev1.Service{ObjectMeta: meta("shop", "web")}}
	for name, want := range map[string]string{"client": "there is Pod shop/client",
		"shop/client": "there is Pod shop/client",
		"wbe":         `did you mean "web"?`, "shop/nothing": "use an address"} {
		if err := w.Unknown(name); !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}

// A port's name says its protocol, unless the protocol is written out.
func TestPacketToNamedPort(t *testing.T) {
	w := Names{&corev1.Service{
		ObjectMeta: meta("kube-system", "kube-dns"),
		Spec: corev1.ServiceSpec{ClusterIP: "010.96.0.10", Ports: []corev1.ServicePort{
			{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}, {Name: "dns-tcp", Port: 53,
				Protocol: corev1.ProtocolTCP},
			{Name: "signal", Port: 54, Protocol: corev1.ProtocolSCTP}, {Name: "metrics", Port: 9153},
		}},
	}}
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
		p, err := w.Packet("192.0.2.1", to)
		if got := p.Dst.String() + "/" + p.Protocol.String(); (err == nil) != (want != "") || want != "" &&
			got != want {
			t.Errorf("%s: %s, %v; want %q", to, got, err, want)
		}
	}
}
