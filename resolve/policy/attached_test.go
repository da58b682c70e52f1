package policy

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// subjects is the addresses of pods in force, by what changed.
type subjects map[netip.Addr]string

func (s subjects) change(c model.Change[model.PolicyPart]) {
	for _, p := range c.Del {
		if v, is := p.(*model.Subject); is {
			delete(s, v.Addr)
		}
	}
	for _, p := range c.Put {
		if v, is := p.(*model.Subject); is {
			s[v.Addr] = v.Pod
		}
	}
}

// TestAttachedPodHasItsAddressAtOnce has a pod attached before and after its Pod is known, attached anew and detached,
// whatever its status says meanwhile.
func TestAttachedPodHasItsAddressAtOnce(t *testing.T) {
	one, two, status := netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("10.0.1.3"), netip.MustParseAddr("10.0.1.9")
	key := source.Key{Kind: source.Pod, Namespace: "shop", Name: "web"}
	pod := func(ips ...netip.Addr) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.PodSpec{NodeName: "n1"}}
		for _, a := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
		}
		return p
	}
	r := New(Config{Node: "n1", ImpliedNamespaces: true})
	has := subjects{}
	put := func(o *corev1.Pod) {
		c := source.Change{Key: key}
		if o != nil {
			c.Object = o
		}
		has.change(r.Apply([]source.Change{c}))
	}
	for i, step := range []struct {
		do   func()
		want []netip.Addr
	}{
		{func() { r.AttachPod(key, []netip.Addr{one}) }, nil},
		{func() { put(pod()) }, []netip.Addr{one}},
		{func() { put(pod(status)) }, []netip.Addr{one}},
		{func() { r.AttachPod(key, []netip.Addr{two}) }, []netip.Addr{two}},
		{func() { r.DetachPod(key, []netip.Addr{one}) }, []netip.Addr{two}}, // late: it has been attached anew
		{func() { r.DetachPod(key, []netip.Addr{two}) }, nil},
		{func() { put(pod(status)) }, nil},
		{func() { put(nil) }, nil},
		{func() { put(pod(status)) }, []netip.Addr{status}}, // another pod of that name, that was not attached here
		{func() { r.AttachPod(key, []netip.Addr{one}) }, []netip.Addr{one}},
		{func() { put(nil) }, nil},
		{func() { r.DetachPod(key, []netip.Addr{one}) }, nil},
	} {
		step.do()
		has.change(r.Apply(nil))
		var got []netip.Addr
		for a := range has {
			got = append(got, a)
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("step %d: %v, want %v", i+1, got, step.want)
		}
	}
	if len(r.here)+len(r.attached) > 0 {
		t.Errorf("what is remembered in the end: %v %v", r.here, r.attached)
	}
	if r.HasPod(key) {
		t.Error("a pod that is gone is known")
	}
}
