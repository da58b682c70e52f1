package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

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
		{func() { r.AttachPod(key, "", []netip.Addr{one}) }, nil},
		{func() { put(pod()) }, []netip.Addr{one}},
		{func() { put(pod(status)) }, []netip.Addr{one}},
		{func() { r.AttachPod(key, "", []netip.Addr{two}) }, []netip.Addr{two}},
		{func() { r.DetachPod(key, []netip.Addr{one}) }, []netip.Addr{two}}, // late: it has been attached anew
		{func() { r.DetachPod(key, []netip.Addr{two}) }, nil},
		{func() { put(pod(status)) }, nil},
		{func() { put(nil) }, nil},
		{func() { put(pod(status)) }, []netip.Addr{status}}, // another pod of that name, that was not attached here
		{func() { r.AttachPod(key, "", []netip.Addr{one}) }, []netip.Addr{one}},
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
	if r.HasPod(key, "") {
		t.Error("a pod that is gone is known")
	}
}

// TestPodThatMovedHasItsOwnAddress has a pod that was attached here come again on another node, before and after its
// DEL, and come back.
func TestPodThatMovedHasItsOwnAddress(t *testing.T) {
	one, two, three := netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("10.0.2.7"), netip.MustParseAddr("10.0.1.9")
	key := source.Key{Kind: source.Pod, Namespace: "shop", Name: "db-0"}
	pod := func(uid types.UID, node string, ips ...netip.Addr) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db-0", UID: uid}}
		p.Spec.NodeName = node
		for _, a := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
		}
		return p
	}
	r := New(Config{Node: "n1", ImpliedNamespaces: true})
	put := func(o *corev1.Pod) {
		c := source.Change{Key: key}
		if o != nil {
			c.Object = o
		}
		r.Apply([]source.Change{c})
	}
	for i, step := range []struct {
		do   func()
		want netip.Addr
	}{
		{func() { r.AttachPod(key, "old", []netip.Addr{one}) }, netip.Addr{}},
		{func() { put(pod("old", "n1")) }, one},
		{func() { put(pod("old", "n1", one)) }, one},
		{func() { put(nil) }, netip.Addr{}},
		{func() { put(pod("new", "n2")) }, netip.Addr{}},
		{func() { put(pod("new", "n2", two)) }, two},
		{func() { r.DetachPod(key, []netip.Addr{one}) }, two},
		{func() { put(pod("newer", "n1")) }, netip.Addr{}},
		{func() { r.AttachPod(key, "newest", []netip.Addr{three}) }, netip.Addr{}}, // whose Pod hasn't come
		{func() { put(pod("newer", "n1", one)) }, netip.Addr{}},
		{func() { put(pod("newest", "n1")) }, three},
		{func() { put(pod("moved without a word", "n2", two)) }, two},
		{func() { r.DetachPod(key, []netip.Addr{three}) }, two},
		{func() { put(nil) }, netip.Addr{}},
	} {
		step.do()
		r.Apply(nil)
		var got netip.Addr
		if p := r.podOf(key); p != nil && p.addresses[1] == nil {
			got = p.addresses[0].Addr
		}
		if got != step.want {
			t.Errorf("step %d: %v, want %v", i+1, got, step.want)
		}
	}
	if len(r.here)+len(r.attached) > 0 {
		t.Errorf("what is remembered in the end: %v %v", r.here, r.attached)
	}
}

// TestAddressesFollowTheirPods draws Pods that are created, come again under their names on this node or another, with
// or without a word of their end, and what the container runtime does meanwhile, whose DEL may come late or never: an
// address is that of the Pod that it was given to last and of no other, and each pod that is attached has its own.
func TestAddressesFollowTheirPods(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := moving{r: New(Config{Node: "n1", ImpliedNamespaces: true}), pods: map[source.Key]*corev1.Pod{},
			attached: map[source.Key]assignment{}, free: addressesFrom("10.0.1.2", 4)}
		t.Repeat(map[string]func(*rapid.T){"create": w.create, "end": w.end, "status": w.status, "ADD": w.add, "DEL": w.del,
			"": w.check})
	})
}

// moving is a world of pods that move.
type moving struct {
	r        *Resolver
	pods     map[source.Key]*corev1.Pod // as they are known
	attached map[source.Key]assignment  // as the container runtime has them
	free     []netip.Addr               // of this node
	made     int                        // Pods so far
}

// assignment is an address and the Pod that has it.
type assignment struct {
	uid types.UID
	at  netip.Addr
}

func addressesFrom(first string, n int) (l []netip.Addr) {
	for a := netip.MustParseAddr(first); len(l) < n; a = a.Next() {
		l = append(l, a)
	}
	return l
}

func (w *moving) name(t *rapid.T) source.Key {
	return source.Key{Kind: source.Pod, Namespace: "shop",
		Name: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")}
}

func (w *moving) put(key source.Key, o *corev1.Pod) {
	c := source.Change{Key: key}
	if w.pods[key] = o; o != nil {
		c.Object = o
	} else {
		delete(w.pods, key)
	}
	w.r.Apply([]source.Change{c})
}

// create has a Pod come, in place of one of its name.
func (w *moving) create(t *rapid.T) {
	key := w.name(t)
	w.made++
	o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: key.Name, UID: types.UID(fmt.Sprint(w.made))}}
	o.Spec.NodeName = rapid.SampledFrom([]string{"n1", "n1", "n2"}).Draw(t, "node")
	w.put(key, o)
}

func (w *moving) end(t *rapid.T) { w.put(w.name(t), nil) }

// status has a Pod's status name the address that it was given, on another node one of that.
func (w *moving) status(t *rapid.T) {
	key := w.name(t)
	o := w.pods[key]
	if o == nil {
		return
	}
	o = o.DeepCopy()
	if h := w.attached[key]; o.Spec.NodeName == "n1" && h.uid == o.UID {
		o.Status.PodIPs = []corev1.PodIP{{IP: h.at.String()}}
	} else if o.Spec.NodeName == "n2" {
		o.Status.PodIPs = []corev1.PodIP{{IP: rapid.SampledFrom([]string{"10.0.2.2", "10.0.2.3"}).Draw(t, "address")}}
	}
	w.put(key, o)
}

// add attaches a Pod of this node that is known, or one that comes only now.
func (w *moving) add(t *rapid.T) {
	key := w.name(t)
	if w.attached[key].uid != "" || len(w.free) == 0 {
		return
	}
	h := assignment{"", w.free[0]}
	if o := w.pods[key]; o != nil && o.Spec.NodeName == "n1" && rapid.Bool().Draw(t, "known") {
		h.uid = o.UID
	} else {
		w.made++
		h.uid = types.UID(fmt.Sprint(w.made))
	}
	w.free, w.attached[key] = w.free[1:], h
	w.r.AttachPod(key, string(h.uid), []netip.Addr{h.at})
	w.r.Apply(nil)
}

// del detaches what is attached, if anything is.
func (w *moving) del(t *rapid.T) {
	key := w.name(t)
	if h := w.attached[key]; h.uid != "" {
		delete(w.attached, key)
		w.free = append([]netip.Addr{h.at}, w.free...) // the next pod has it
		w.r.DetachPod(key, []netip.Addr{h.at})
		w.r.Apply(nil)
	}
}

func (w *moving) check(t *rapid.T) {
	owners := map[netip.Addr]types.UID{}
	for _, h := range w.attached {
		owners[h.at] = h.uid
	}
	var pods []*pod
	for _, n := range w.r.namespaces {
		pods = append(pods, n.pods...)
	}
	for _, p := range pods {
		key := source.Key{Kind: source.Pod, Namespace: p.class.namespace.name, Name: p.name}
		for _, a := range w.r.addressesOf(p) {
			if owner, owned := owners[a.Addr]; owned && owner != w.pods[key].UID ||
				!owned && netip.MustParsePrefix("10.0.1.0/24").Contains(a.Addr) {
				t.Errorf("%s of UID %s has %s, which is of UID %q", key, w.pods[key].UID, a.Addr, owner)
			}
		}
	}
	for key, h := range w.attached {
		o := w.pods[key]
		if o == nil || o.UID != h.uid {
			continue
		}
		if p := w.r.podOf(key); p == nil || p.addresses[1] != nil || p.addresses[0].Addr != h.at {
			t.Errorf("%s was given %s and hasn't got it", key, h.at)
		}
	}
}
