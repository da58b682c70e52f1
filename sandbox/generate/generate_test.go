package generate

import (
	"encoding/json"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/source"
)

func TestCluster(t *testing.T) {
	services, endpoints := netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("10.128.0.0/9")
	for _, c := range []struct{ services, endpoints, slices int }{{0, 0, 0}, {3, 0, 0}, {300, 1, 300}, {2, 100, 2},
		{2, 101, 4}, {700, 110, 1400}} {
		seen := map[string]bool{}
		keys := map[source.Key]bool{}
		perNamespace := map[string]int{}
		var nServices, nSlices, nEndpoints, local int
		once := func(text string, in netip.Prefix) {
			if a, err := netip.ParseAddr(text); err != nil || !in.Contains(a) || seen[text] {
				t.Errorf("%+v: address %s is not in %s, or there twice", c, text, in)
			}
			seen[text] = true
		}
		for _, o := range Cluster(c.services, c.endpoints) {
			if k := source.KeyOf(o); keys[k] {
				t.Errorf("%+v: %s twice", c, k)
			} else {
				keys[k] = true
			}
			switch o := o.(type) {
			case *corev1.Service:
				nServices++
				perNamespace[o.Namespace]++
				once(o.Spec.ClusterIP, services)
			case *discoveryv1.EndpointSlice:
				nSlices++
				if !keys[source.Key{Kind: source.Service, Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}] {
					t.Errorf("%+v: %s belongs to no Service", c, o.Name)
				}
				for _, e := range o.Endpoints {
					nEndpoints++
					once(e.Addresses[0], endpoints)
					if *e.NodeName == "a" {
						local++
					}
				}
			}
		}
		if nServices != c.services || nSlices != c.slices || nEndpoints != c.services*c.endpoints ||
			local != min(nEndpoints, perNode) {
			t.Errorf("%+v: %d services, %d slices, %d endpoints, %d local", c, nServices, nSlices, nEndpoints, local)
		}
		if got, want := slices.Sorted(maps.Keys(perNamespace)), Namespaces(c.services); !slices.Equal(got, want) {
			t.Errorf("%+v: namespaces %v, want %v", c, got, want)
		}
		for name, n := range perNamespace {
			if n > PerNamespace {
				t.Errorf("%+v: %d services in namespace %s, want at most %d", c, n, name, PerNamespace)
			}
		}
	}
}

func TestClusterIsTheSameEveryTime(t *testing.T) {
	if !reflect.DeepEqual(Cluster(50, 120), Cluster(50, 120)) {
		t.Error("two clusters of one size differ")
	}
}

func TestLastAddresses(t *testing.T) {
	if a := ServiceAddress(MaxServices - 1); a.String() != "10.111.255.254" {
		t.Error(a)
	}
	if a := EndpointAddress(MaxEndpoints - 1); a.String() != "10.255.255.254" {
		t.Error(a)
	}
	for _, c := range [][2]int{{-1, 1}, {1, -1}, {MaxServices + 1, 0}, {MaxServices, 9}, {1, MaxEndpoints + 1}} {
		if Check(c[0], c[1]) == nil {
			t.Errorf("%v is no error", c)
		}
	}
	if err := Check(MaxServices, 8); err != nil {
		t.Error(err)
	}
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	objects := Cluster(4, 2)
	if err := Write(dir, objects, 4); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if len(files) != 3 {
		t.Errorf("files %v, want 3", files)
	}
	i := 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range strings.Split(string(b), "---\n")[1:] {
			again := reflect.New(reflect.TypeOf(objects[i]).Elem()).Interface()
			if err := json.Unmarshal([]byte(doc), again); err != nil || !reflect.DeepEqual(again, objects[i]) {
				t.Errorf("%v, %v, want %v", again, err, objects[i])
			}
			i++
		}
	}
	if i != len(objects) {
		t.Errorf("%d documents, want %d", i, len(objects))
	}
	if err := Write(dir, objects, 4); err == nil {
		t.Error("a folder that holds files is written into")
	}
	if err := Write(t.TempDir(), objects, 0); err == nil {
		t.Error("no objects to a file is no error")
	}
}

func BenchmarkCluster(b *testing.B) {
	for b.Loop() {
		Cluster(10_000, 10)
	}
}

func BenchmarkWrite(b *testing.B) {
	objects := Cluster(10_000, 10)
	for b.Loop() {
		if err := Write(filepath.Join(b.TempDir(), "x"), objects, 500); err != nil {
			b.Fatal(err)
		}
	}
}
