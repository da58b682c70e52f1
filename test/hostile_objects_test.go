package test_test

import (
	"fmt"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// hostileKind is a kind of hostile objects, which live in namespaces of their own. Without a creation time and by their
// names they count as older than the shop.
type hostileKind struct {
	name    string
	objects func(ns string) []source.Object
	mayFit  bool // all of it may be served: a plane that needs no table for it refuses nothing
	mayPass bool // nothing of it need be refused
}

// hostileKinds are what a tenant may write into namespaces of its own to harm others.
var hostileKinds = []hostileKind{
	{name: "maglev", objects: maglevTables, mayFit: true},
	{name: "wide", objects: wideService},
	{name: "frontends", objects: frontendProduct},
	{name: "backends", objects: backendProduct},
	{name: "conflict", objects: conflictingServices},
	{name: "self", objects: ownEndpoint},
	{name: "mutual", objects: mutualEndpoints},
	{name: "grab-pods", objects: grabPods},
	{name: "grab-api", objects: grabAPIServer},
	{name: "grab-service", objects: grabService},
	{name: "weights", objects: weightedSlices, mayFit: true},
	{name: "foreign", objects: foreignEndpoint, mayPass: true},
	{name: "cross", objects: crossedEndpoints, mayPass: true},
}

// The addresses that hostile Services want to take from others, and what answers at each.
var (
	webPods      = []string{"10.128.1.10", "10.128.2.10", "10.128.3.10"}
	apiEndpoints = []string{"172.18.0.11", "172.18.0.12"} // of nodes a and b
)

const (
	webIP, cartIP = "10.96.0.10", "10.96.0.11"
	trapIP        = "10.128.3.66" // of the tenant's pod
	trapPort      = 9999
)

// fixtureYAML is what stands beside the shop: the tenant's pod, and an API server on nodes a and b.
const fixtureYAML = `
apiVersion: v1
kind: Pod
metadata: {namespace: evil, name: trap}
spec: {nodeName: c, containers: [{name: trap, ports: [{containerPort: 9999}]}]}
status: {phase: Running, podIP: 10.128.3.66, podIPs: [{ip: 10.128.3.66}]}
---
apiVersion: v1
kind: Pod
metadata: {namespace: kube-system, name: apiserver-a}
spec: {nodeName: a, hostNetwork: true, containers: [{name: apiserver, ports: [{containerPort: 6443}]}]}
status: {phase: Running, podIP: 172.18.0.11, podIPs: [{ip: 172.18.0.11}]}
---
apiVersion: v1
kind: Pod
metadata: {namespace: kube-system, name: apiserver-b}
spec: {nodeName: b, hostNetwork: true, containers: [{name: apiserver, ports: [{containerPort: 6443}]}]}
status: {phase: Running, podIP: 172.18.0.12, podIPs: [{ip: 172.18.0.12}]}
---
apiVersion: v1
kind: Service
metadata: {namespace: default, name: kubernetes}
spec:
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1]
  ports: [{name: https, port: 443, targetPort: 6443}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: default, name: kubernetes, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
ports: [{name: https, port: 6443}]
endpoints:
- {addresses: [172.18.0.11], conditions: {ready: true}}
- {addresses: [172.18.0.12], conditions: {ready: true}}
`

// hostileService returns a Service of so many TCP ports from 1000 on.
func hostileService(ns, name, clusterIP string, ports int, externalIPs ...string) *corev1.Service {
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Annotations: map[string]string{}},
		Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, ExternalIPs: externalIPs},
	}
	for i := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: portName(i), Port: int32(1000 + i),
			Protocol: corev1.ProtocolTCP})
	}
	return s
}

// atPort sets another number for the first port of s, of the Service and of its endpoints.
func atPort(s *corev1.Service, port int32) *corev1.Service {
	s.Spec.Ports[0].Port = port
	return s
}

// hostileSlice returns the n-th EndpointSlice of s, with each of its ports at the same number, or all at the one given.
func hostileSlice(s *corev1.Service, n int, port int32, addresses ...string) *discoveryv1.EndpointSlice {
	ready := true
	e := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: fmt.Sprintf("%s-%d", s.Name, n),
			Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}, Annotations: map[string]string{}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, p := range s.Spec.Ports {
		to := p.Port
		if port != 0 {
			to = port
		}
		e.Ports = append(e.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &to})
	}
	for _, a := range addresses {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{a},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
	}
	return e
}

func portName(i int) string { return "p" + strconv.Itoa(i) }

// addressesFrom returns n addresses from the first on.
func addressesFrom(first string, n int) (l []string) {
	for a := netip.MustParseAddr(first); len(l) < n; a = a.Next() {
		l = append(l, a.String())
	}
	return l
}

// maglevTables takes more entries of Maglev tables than a node has room for.
func maglevTables(ns string) []source.Object {
	s := hostileService(ns, "maglev", "10.96.66.1", 650)
	s.Annotations[resolve.SchedulerAnnotation] = "maglev"
	return []source.Object{s, hostileSlice(s, 0, 0, addressesFrom("10.200.1.1", 11)...)}
}

// wideService has more frontends than a node has room for.
func wideService(ns string) []source.Object {
	return []source.Object{hostileService(ns, "wide", "10.96.66.2", 255, addressesFrom("203.0.1.1", 260)...)}
}

// frontendProduct makes a million frontends of a small object.
func frontendProduct(ns string) []source.Object {
	return []source.Object{hostileService(ns, "frontends", "10.96.66.3", 1000, addressesFrom("198.18.0.1", 1000)...)}
}

// backendProduct makes a million backends of two small objects.
func backendProduct(ns string) []source.Object {
	s := hostileService(ns, "backends", "10.96.66.4", 1000)
	return []source.Object{s, hostileSlice(s, 0, 0, addressesFrom("10.201.0.1", 1000)...)}
}

// conflictingServices want the same 90,000 entries.
func conflictingServices(ns string) []source.Object {
	ips := addressesFrom("198.19.0.1", 300)
	return []source.Object{hostileService(ns, "conflict-1", "10.96.66.5", 300, ips...), hostileService(ns, "conflict-2",
		"10.96.66.6", 300, ips...)}
}

// ownEndpoint is a Service that is its own endpoint.
func ownEndpoint(ns string) []source.Object {
	s := atPort(hostileService(ns, "self", "10.96.66.7", 2), 80)
	s.Spec.Ports[1].Port, s.Spec.Ports[1].Protocol = 81, corev1.ProtocolUDP
	return []source.Object{s, hostileSlice(s, 0, 0, s.Spec.ClusterIP)}
}

// mutualEndpoints are two Services of a namespace, each the other's endpoint.
func mutualEndpoints(ns string) []source.Object {
	a, b := atPort(hostileService(ns, "mutual-1", "10.96.66.8", 1), 80), atPort(hostileService(ns, "mutual-2",
		"10.96.66.9", 1), 80)
	return []source.Object{a, b, hostileSlice(a, 0, 0, b.Spec.ClusterIP), hostileSlice(b, 0, 0, a.Spec.ClusterIP)}
}

// crossedEndpoints are two Services of two namespaces, each the other's endpoint.
func crossedEndpoints(ns string) []source.Object {
	a, b := atPort(hostileService(ns, "cross-1", "10.96.66.10", 1), 80), atPort(hostileService(ns+"-2", "cross-2",
		"10.96.66.11", 1), 80)
	return []source.Object{a, b, hostileSlice(a, 0, 0, b.Spec.ClusterIP), hostileSlice(b, 0, 0, a.Spec.ClusterIP)}
}

// foreignEndpoint has another namespace's Service as its endpoint.
func foreignEndpoint(ns string) []source.Object {
	s := atPort(hostileService(ns, "foreign", "10.96.66.12", 1), 80)
	return []source.Object{s, hostileSlice(s, 0, 0, webIP)}
}

// grabbing returns a Service that leads other addresses to the tenant's pod.
func grabbing(ns, name, clusterIP string, port int32, externalIPs ...string) []source.Object {
	s := atPort(hostileService(ns, name, clusterIP, 1, externalIPs...), port)
	return []source.Object{s, hostileSlice(s, 0, trapPort, trapIP)}
}

// grabPods takes the addresses of the shop's pods.
func grabPods(ns string) []source.Object {
	return grabbing(ns, "grab-pods", "10.96.66.13", 8080, webPods...)
}

// grabAPIServer takes the addresses of the API server.
func grabAPIServer(ns string) []source.Object {
	return grabbing(ns, "grab-api", "10.96.66.14", 6443, apiEndpoints...)
}

// grabService takes a port of other Services' ClusterIPs that they don't have.
func grabService(ns string) []source.Object {
	return grabbing(ns, "grab-service", "10.96.66.15", 81, webIP, cartIP)
}

// weightedSlices are 200 ports of eleven slices each, of weights that have no common divisor.
func weightedSlices(ns string) []source.Object {
	s := hostileService(ns, "weights", "10.96.66.16", 200)
	s.Annotations[resolve.SchedulerAnnotation] = "weighted-round-robin"
	l := []source.Object{s}
	for i := range 11 {
		e := hostileSlice(s, i, 0, addressesFrom("10.200.2.1", 11)[i])
		e.Annotations[resolve.WeightAnnotation] = strconv.Itoa(256 - i)
		l = append(l, e)
	}
	return l
}
