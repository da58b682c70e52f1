// Package generate makes large clusters of Services and EndpointSlices, the same ones every time.
//
// It is for measuring and for tests of size: the endpoints are addresses only, there are no Pods behind them.
package generate

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/source"
)

// The most that the address ranges hold.
const (
	MaxServices  = 1<<20 - 2 // ClusterIPs in 10.96.0.0/12
	MaxEndpoints = 1<<23 - 2 // endpoints of all Services in 10.128.0.0/9
)

const (
	PerNamespace = 40  // Services of a namespace; no namespace holds a large share of a large cluster
	PerSlice     = 100 // endpoints of an EndpointSlice, as kube-controller-manager has it by default
	perNode      = 110 // endpoints on a node, the kubelet's default for pods
)

// Check reports whether so many Services of so many endpoints each can be.
func Check(services, endpoints int) error {
	switch {
	case services < 0 || endpoints < 0:
		return errors.New("generate a cluster: less than nothing is asked for")
	case services > MaxServices:
		return fmt.Errorf("generate a cluster: %d services, at most %d have a ClusterIP", services, MaxServices)
	case endpoints > 0 && services > MaxEndpoints/endpoints:
		return fmt.Errorf("generate a cluster: %d × %d endpoints, at most %d have an address", services, endpoints,
			MaxEndpoints)
	}
	return nil
}

// Namespace returns the namespace of Service i, counted from 0.
func Namespace(i int) string { return fmt.Sprintf("large-%05d", i/PerNamespace) }

// Namespaces returns the namespaces of the first so many Services.
func Namespaces(services int) (l []string) {
	for i := 0; i < services; i += PerNamespace {
		l = append(l, Namespace(i))
	}
	return l
}

// Cluster returns a Node "a" and Services with a TCP port 80, each of that many ready endpoints on port 8080, up to a
// hundred to an EndpointSlice and forty Services to a namespace. The first 110 endpoints are on Node a, further ones on
// nodes that are not among the objects. It panics where Check returns an error.
func Cluster(services, endpoints int) []source.Object {
	if err := Check(services, endpoints); err != nil {
		panic(err)
	}
	objects := make([]source.Object, 0, 1+services*(1+(endpoints+PerSlice-1)/PerSlice))
	objects = append(objects, node())
	for i := range services {
		objects = append(objects, service(i))
		for first := 0; first < endpoints; first += PerSlice {
			objects = append(objects, slice(i, first, i*endpoints+first, min(PerSlice, endpoints-first)))
		}
	}
	return objects
}

// ServiceAddress is the ClusterIP of Service i, counted from 0.
func ServiceAddress(i int) netip.Addr { return address([4]byte{10, 96}, i) }

// EndpointAddress is the address of endpoint i of all, counted from 0.
func EndpointAddress(i int) netip.Addr { return address([4]byte{10, 128}, i) }

// address returns the i-th address after that of a network.
func address(network [4]byte, i int) netip.Addr {
	i++
	return netip.AddrFrom4([4]byte{network[0], network[1] + byte(i>>16), byte(i >> 8), byte(i)})
}

func name(i int) string { return fmt.Sprintf("svc-%06d", i) }

func node() *corev1.Node {
	return &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.128.0.0/24", PodCIDRs: []string{"10.128.0.0/24"}},
		Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.18.0.2"}},
		},
	}
}

func service(i int) *corev1.Service {
	ip := ServiceAddress(i).String()
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace(i), Name: name(i)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{
				Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080),
			}},
		},
	}
}

// slice is n endpoints of Service i from its first on, which are those of all from all on.
func slice(i, first, all, n int) *discoveryv1.EndpointSlice {
	ready, port, portName, tcp := true, int32(8080), "http", corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: Namespace(i), Name: fmt.Sprintf("%s-%d", name(i), first/PerSlice),
			Labels: map[string]string{discoveryv1.LabelServiceName: name(i)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   make([]discoveryv1.Endpoint, n),
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Protocol: &tcp, Port: &port}},
	}
	for k := range s.Endpoints {
		s.Endpoints[k] = discoveryv1.Endpoint{
			Addresses:  []string{EndpointAddress(all + k).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			NodeName:   nodeOf(all + k),
		}
	}
	return s
}

func nodeOf(endpoint int) *string {
	n := "a"
	if endpoint >= perNode {
		n = fmt.Sprintf("n%d", endpoint/perNode)
	}
	return &n
}

// Write writes the objects into a new or empty folder, so many to a file, as JSON documents, which are YAML.
func Write(dir string, objects []source.Object, perFile int) error {
	if perFile < 1 {
		return fmt.Errorf("write objects into %s: %d to a file", dir, perFile)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write objects: %w", err)
	}
	if there, err := os.ReadDir(dir); err != nil || len(there) > 0 {
		return errors.Join(err, fmt.Errorf("write objects into %s: the folder must be empty", dir))
	}
	for i := 0; i < len(objects); i += perFile {
		path := filepath.Join(dir, fmt.Sprintf("objects-%06d.yaml", i/perFile))
		if err := writeFile(path, objects[i:min(i+perFile, len(objects))]); err != nil {
			return fmt.Errorf("write objects: %w", err)
		}
	}
	return nil
}

func writeFile(path string, objects []source.Object) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriter(f)
	out := json.NewEncoder(w)
	for _, o := range objects {
		w.WriteString("---\n")
		if err := out.Encode(o); err != nil {
			return err
		}
	}
	return errors.Join(w.Flush(), f.Close())
}
