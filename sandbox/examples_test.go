package sandbox

import (
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

const shopFolder = "../examples/shop"

// example reads the example shop, which must be without a fault.
func example(t *testing.T) []source.Object {
	t.Helper()
	objects, problems, err := manifest.Load(shopFolder)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
	return objects
}

// Each endpoint of the example is a port of a pod that answers there; the pod of an endpoint is the one it names.
func TestExampleEndpointsReply(t *testing.T) {
	objects := example(t)
	c := up(t, Options{Objects: objects, Serve: true})
	requested := 0
	for _, o := range objects {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		for _, e := range s.Endpoints {
			h := must(t)(c.Pod(e.TargetRef.Namespace, e.TargetRef.Name))
			if h.Node != *e.NodeName {
				t.Errorf("%s: endpoint %s is on node %s, its pod on %s", s.Name, e.Addresses[0], *e.NodeName, h.Node)
			}
			a := h.Addresses[0]
			if s.AddressType == discoveryv1.AddressTypeIPv6 {
				a = h.Addresses[1]
			}
			if a.String() != e.Addresses[0] {
				t.Errorf("%s: endpoint %s, its pod has %s", s.Name, e.Addresses[0], a)
			}
			for _, p := range s.Ports {
				requested++
				port := echo.Port{Number: uint16(*p.Port), Protocol: protocols[*p.Protocol]}
				if got, err := probe(t, c.External(), port, a); err != nil || "pod "+got.Pod != h.Name {
					t.Errorf("%s port %s: %+v, %v", h.Name, port, got, err)
				}
			}
		}
	}
	if requested < 20 {
		t.Errorf("asked only %d times", requested)
	}
}

// The README's tables name every Service and node with all its addresses, and every pod.
func TestExampleReadme(t *testing.T) {
	readme, err := os.ReadFile(shopFolder + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(readme), "\n")
	row := func(name string, want ...string) error {
		for _, l := range lines {
			if strings.HasPrefix(l, "| "+name+" |") {
				var errs []error
				for _, w := range want {
					if !strings.Contains(l, w) {
						errs = append(errs, errors.New(name+": the README doesn't say "+w))
					}
				}
				return errors.Join(errs...)
			}
		}
		return errors.New("the README has no row of " + name)
	}
	for _, o := range example(t) {
		var err error
		switch o := o.(type) {
		case *corev1.Service:
			var want []string
			for _, ip := range o.Spec.ClusterIPs {
				want = append(want, strings.Replace(ip, "None", "none", 1))
			}
			for _, i := range o.Status.LoadBalancer.Ingress {
				want = append(want, i.IP)
			}
			err = row("`"+o.Name+"`", append(want, o.Spec.LoadBalancerSourceRanges...)...)
		case *corev1.Node:
			err = row(o.Name, o.Labels[corev1.LabelTopologyZone], o.Status.Addresses[0].Address, o.Status.Addresses[1].Address)
		case *corev1.Pod:
			err = row(o.Spec.NodeName, o.Name)
		}
		if err != nil {
			t.Error(err)
		}
	}
}
