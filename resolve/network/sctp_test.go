package network

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

// TestSCTPNotMasqueraded names the Pods of this node that have ports of SCTP, where only other protocols are
// masqueraded.
func TestSCTPNotMasqueraded(t *testing.T) {
	pod := func(name, node string, host bool, protocol corev1.Protocol) source.Change {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "tel", Name: name}, Spec: corev1.PodSpec{NodeName: node,
			HostNetwork: host, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Protocol: protocol}}}}}}
		return source.Change{Key: source.KeyOf(p), Object: p}
	}
	for _, c := range []struct {
		name          string
		unmasqueraded bool
		masquerade    bool
		pod           source.Change
		problem       bool
	}{
		{"SCTP", true, true, pod("mme", "a", false, corev1.ProtocolSCTP), true},
		{"TCP", true, true, pod("mme", "a", false, corev1.ProtocolTCP), false},
		{"of another node", true, true, pod("mme", "b", false, corev1.ProtocolSCTP), false},
		{"in the node's network", true, true, pod("mme", "a", true, corev1.ProtocolSCTP), false},
		{"masqueraded by nf_tables", false, true, pod("mme", "a", false, corev1.ProtocolSCTP), false},
		{"without masquerading", true, false, pod("mme", "a", false, corev1.ProtocolSCTP), false},
	} {
		config := config()
		config.SCTPUnmasqueraded, config.Masquerade.Off = c.unmasqueraded, !c.masquerade
		r := New(config)
		r.Apply(cluster(2))
		named := func() bool {
			return slices.ContainsFunc(r.Problems(), func(p source.Problem) bool {
				return p.Reason == "SCTPNotMasqueraded" && p.Object == c.pod.Key && strings.Contains(p.Message, "nftables")
			})
		}
		r.Apply([]source.Change{c.pod})
		if named() != c.problem {
			t.Errorf("%s: problems %v, want one of SCTP: %t", c.name, r.Problems(), c.problem)
		}
		r.Apply([]source.Change{{Key: c.pod.Key}})
		if named() {
			t.Errorf("%s: the Pod is gone, the problem isn't: %v", c.name, r.Problems())
		}
	}
}
