package strip

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/source"
)

func TestForgetsWhenLarge(t *testing.T) {
	w := New()
	for i := range 3 * maxWords {
		w.text(fmt.Sprint(i))
		w.set(map[string]string{"app": fmt.Sprint(i)})
		w.ports([]corev1.Container{{Name: fmt.Sprint(i)}})
	}
	if len(w.known) > maxWords || len(w.labels) > maxSets || len(w.containers) > maxSets {
		t.Errorf("%d words, %d sets of labels and %d lists of containers are remembered", len(w.known), len(w.labels),
			len(w.containers))
	}
}

// FuzzStrip takes objects as bytes that no API server has validated.
func FuzzStrip(f *testing.F) {
	odd := corev1.Protocol("QUIC")
	for _, s := range []*discoveryv1.EndpointSlice{
		{},
		{Endpoints: []discoveryv1.Endpoint{{}, {Addresses: []string{"", "10.0.0.1"}}},
			Ports: []discoveryv1.EndpointPort{{}, {Protocol: &odd}}},
	} {
		b, err := s.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	w := New()
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, o := range []interface {
			source.Object
			Unmarshal([]byte) error
		}{new(corev1.Service), new(discoveryv1.EndpointSlice), new(corev1.Node), new(corev1.Pod), new(corev1.Namespace),
			new(networkingv1.NetworkPolicy)} {
			if o.Unmarshal(b) != nil {
				continue
			}
			name := o.GetName()
			w.Strip(o)
			w.Strip(o) // again is no harm
			if o.GetName() != name {
				t.Errorf("%T %q became %q", o, name, o.GetName())
			}
		}
	})
}

// TestUIDsOfOtherNodesPodsAreDropped is about memory: there are many.
func TestUIDsOfOtherNodesPodsAreDropped(t *testing.T) {
	w := New()
	w.Node = "n1"
	for node, want := range map[string]types.UID{"n1": "x", "n2": "", "": ""} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "x"}, Spec: corev1.PodSpec{NodeName: node}}
		if w.Strip(p); p.UID != want {
			t.Errorf("node %q: %q", node, p.UID)
		}
	}
}
