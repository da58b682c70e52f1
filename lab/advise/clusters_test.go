package advise

import (
	"cmp"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/stats"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// writeTo is where TestThreeClusters leaves their objects, for `fairlead advise --source`: go test ./lab/advise -run
// ThreeClusters -write DIR
var writeTo = flag.String("write", "", "write the objects of three clusters to folders below this one")

// recorded is a cluster, and what was measured of it: testdata/NAME.json is what `fairlead advise -o json` printed,
// less remarks and what would change.
type recorded struct {
	name, node string
	objects    func() []source.Object
}

// probed is how many Services have the names of those that are measured, and are left out.
const probed = probes + 1

var threeClusters = []recorded{
	{"ten", "a", func() []source.Object { return generate.Cluster(10+probed, 3) }},
	{"churn", "a", func() []source.Object { return generate.Cluster(5000+probed, 10) }},
	{"policies", generate.PolicyNode, func() []source.Object {
		size := generate.PolicySize{Pods: 667, Namespaces: 40, Here: 60}
		return append(generate.Cluster(100+probed, 5)[1:], generate.NewPolicyCluster(size).Objects...)
	}},
}

// typed returns an object with what a file needs.
func typed(o source.Object) source.Object {
	switch o := o.(type) {
	case *corev1.Namespace:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}
	case *corev1.Node:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	case *corev1.Pod:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	case *networkingv1.NetworkPolicy:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}
	}
	return o
}

// long is what a long experiment measured of the same candidates.
type long struct {
	Cluster string                    `json:"cluster"`
	Command string                    `json:"command"`
	Of      string                    `json:"of"` // what was measured: less is better
	Arms    map[string]stats.Estimate `json:"arms"`
}

// On three clusters the advice is the long experiments' best candidate, or within its interval. All figures are
// recorded, so that what is tested is the decision alone.
func TestThreeClusters(t *testing.T) {
	var longs []long
	if *writeTo == "" {
		read(t, "long", &longs)
	}
	for _, r := range threeClusters {
		t.Run(r.name, func(t *testing.T) {
			objects := r.objects()
			if *writeTo != "" {
				for i, o := range objects {
					objects[i] = typed(o)
				}
				if err := generate.Write(filepath.Join(*writeTo, r.name), objects, 1000); err != nil {
					t.Fatal(err)
				}
				return
			}
			var a Advice
			read(t, r.name, &a)
			if got := Transplant(objects, r.node, true).Sizes; got != a.Sizes {
				t.Errorf("the cluster is %+v, what was measured %+v", got, a.Sizes)
			}
			got := Decide(a.Options, a.PerSecond)
			if got.Outcome != a.Outcome || got.Recommended != a.Recommended {
				t.Errorf("%s: %v; recorded were %s: %v", got.Outcome, got.Recommended, a.Outcome, a.Recommended)
			}
			compared := 0
			for _, l := range longs {
				if l.Cluster == r.name {
					compared++
					l.holds(t, got.Recommended)
				}
			}
			if compared == 0 {
				t.Error("no long experiment is recorded")
			}
		})
	}
}

// read reads a recording.
func read(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// holds complains where a candidate is neither the best of a long experiment nor within its interval.
func (l long) holds(t *testing.T, c Candidate) {
	t.Helper()
	best := ""
	for arm, e := range l.Arms {
		if best == "" || e.Value < l.Arms[best].Value {
			best = arm
		}
	}
	got, ok := l.Arms[c.arm()]
	if !ok {
		got, ok = l.Arms[cmp.Or(c.Engine, c.Mode)]
	}
	if !ok || got.CI.Low > l.Arms[best].CI.High {
		t.Errorf("%s: the best is %s with %+v, advised is %v with %+v", l.Of, best, l.Arms[best], c, got)
	}
}
