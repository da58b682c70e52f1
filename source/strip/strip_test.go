package strip

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/source"
)

func TestForgetsWhenLarge(t *testing.T) {
	w := New()
	for i := range 3 * maxWords {
		w.text(fmt.Sprint(i))
	}
	if len(w.known) > maxWords {
		t.Errorf("%d words are remembered", len(w.known))
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
