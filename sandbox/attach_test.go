package sandbox

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

func TestAttachable(t *testing.T) {
	if err := Attachable(example(t)); err != nil {
		t.Error(err)
	}
	for text, want := range map[string]string{
		"10.0.0.0/24 10.0.0.2":                         "",
		"10.0.0.0/24,fd00::/64 10.0.0.2,fd00::2":       "",
		" 10.0.0.2":                                    "node a has no podCIDRs",
		"10.0.0.0/24 10.0.1.2":                         "pod shop/x has the address 10.0.1.2, which is not in",
		"10.0.0.0/24 10.0.0.1":                         "reserved",
		"10.0.0.0/24 10.0.0.2,10.0.0.3":                "several addresses",
		"10.0.0.0/24,fd00::/64 10.0.0.2":               "one of each of [10.0.0.0/24 fd00::/64]",
		"10.0.0.0/24,10.0.1.0/24 10.0.1.2":             "",
		"10.0.0.0/24 10.0.0.2,fd00::2":                 "pod shop/x has the address fd00::2",
		"10.0.0.0/24,fd00::/64 10.0.0.2,fd00:0:0:1::2": "pod shop/x has the address fd00:0:0:1::2",
	} {
		ranges, ips, _ := strings.Cut(text, " ")
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Spec: corev1.NodeSpec{PodCIDRs: strings.Split(ranges, ",")},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.0.1"},
				{Type: corev1.NodeInternalIP, Address: "fd99::1"}}}}
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "x"}, Spec: corev1.PodSpec{NodeName: "a"}}
		for a := range strings.SplitSeq(ips, ",") {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
		}
		err := Attachable([]source.Object{n, p})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestLinkOfNodes(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1 10.0.0.9":           "[24 64]",
		"10.0.0.1 10.0.3.9":           "[22 64]",
		"10.0.0.1 192.168.0.1":        "[0 64]",
		"10.0.0.1,fd00::1 10.0.0.2":   "[24 64]",
		"fd00:1::1 fd00:2::1 fd00::1": "[24 30]",
	} {
		var objects []source.Object
		for i, addresses := range strings.Fields(text) {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i)}}
			for a := range strings.SplitSeq(addresses, ",") {
				n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
			}
			objects = append(objects, n)
		}
		l, err := newLayout(objects, nil)
		if err != nil {
			t.Fatal(err)
		}
		l.links()
		for name, s := range l.specs {
			if s.host.Role == Node && fmt.Sprint(s.bits) != want {
				t.Errorf("%s: node %s has prefixes of lengths %v, want %s", text, name, s.bits, want)
			}
		}
	}
}
