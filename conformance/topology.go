package conformance

import (
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/source"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// member is one host of the cast: a node, a pod, or the one outside.
type member struct {
	Name  string
	Node  string       // where a pod runs, or which node it is; empty for the one outside
	Addrs []netip.Addr // of both families; the first of a family is its main one
	Host  bool         // a pod that lives in its node's network
}

// namespaceOf returns the namespace of a pod: that of the clients, or that of the Services.
func (m *member) namespaceOf() string {
	if strings.HasPrefix(m.Name, "client-") {
		return "clients"
	}
	return "default"
}

// namespaces are the Namespaces of the pods, with their labels.
var namespaces = map[string]string{"default": "web", "clients": "clients"}

// topology is who plays in every case. cases/README.md shows it as a table.
var topology = []member{
	{"node-a", "a", addrs("192.168.77.1", "fd00:77::1", "192.168.78.1", "fd00:78::1"), false},
	{"node-b", "b", addrs("192.168.77.2", "fd00:77::2", "192.168.78.2", "fd00:78::2"), false},
	{"client-a", "a", addrs("10.244.1.10", "fd00:10:244:1::10"), false},
	{"client-b", "b", addrs("10.244.2.10", "fd00:10:244:2::10"), false},
	{"web-1", "a", addrs("10.244.1.1", "fd00:10:244:1::1"), false},
	{"web-2", "b", addrs("10.244.2.2", "fd00:10:244:2::2"), false},
	{"web-3", "b", addrs("10.244.2.3", "fd00:10:244:2::3"), false},
	{"host-b", "b", addrs("192.168.77.2", "fd00:77::2"), true},
	{"outside", "", addrs("192.0.2.1", "2001:db8::1", "198.51.100.1", "2001:db8:1::1"), false},
}

// apiServer is the endpoint of Service default/kubernetes, which no case has: an address of node a.
var apiServer = netip.MustParseAddrPort("192.168.77.1:6443")

// zones are the zones of the nodes.
var zones = map[string]string{"a": "z1", "b": "z2"}

// podRanges are the nodes' podCIDRs.
var podRanges = map[string][]string{
	"a": {"10.244.1.0/24", "fd00:10:244:1::/64"},
	"b": {"10.244.2.0/24", "fd00:10:244:2::/64"},
}

func addrs(texts ...string) (l []netip.Addr) {
	for _, t := range texts {
		l = append(l, netip.MustParseAddr(t))
	}
	return l
}

// addr returns the main address of a family.
func (m *member) addr(six bool) netip.Addr {
	for _, a := range m.Addrs {
		if a.Is6() == six {
			return a
		}
	}
	return netip.Addr{}
}

// isNode reports whether m is a node itself.
func (m *member) isNode() bool { return m.Name == "node-"+m.Node }

// onNode reports whether m is in a node's network: the node itself, or a pod there.
func (m *member) onNode() bool { return m.isNode() || m.Host }

// memberNamed finds a member of the cast by name.
func memberNamed(name string) *member {
	for i := range topology {
		if topology[i].Name == name {
			return &topology[i]
		}
	}
	return nil
}

// topologyAddr is the IPv4 address of a member, also of "NAME.4", or, of "NAME.6", its IPv6 address.
func topologyAddr(name string) netip.Addr {
	name, _ = strings.CutSuffix(name, ".4")
	if n, six := strings.CutSuffix(name, ".6"); memberNamed(n) != nil {
		return memberNamed(n).addr(six)
	}
	return netip.Addr{}
}

func topologyNames() (l []string) {
	for _, m := range topology {
		l = append(l, m.Name)
	}
	return l
}

// nameOf returns the pod of the cast, or else the member, that has the address.
func nameOf(a netip.Addr) string {
	for _, m := range topology {
		if slices.Contains(m.Addrs, a) {
			return m.Name
		}
	}
	return a.String()
}

func zoneOf(node string) string { return zones[node] }

// topologyObjects returns the nodes, pods and namespaces of the cast.
func topologyObjects() (l []source.Object) {
	for name, team := range namespaces {
		l = append(l, &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: name,
				Labels: map[string]string{"team": team, corev1.LabelMetadataName: name}}})
	}
	for _, m := range topology {
		switch {
		case m.isNode():
			l = append(l, m.nodeObject())
		case m.Node != "":
			l = append(l, m.podObject())
		}
	}
	return l
}

func (m *member) nodeObject() *corev1.Node {
	n := &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: m.Node, Labels: map[string]string{
			corev1.LabelTopologyZone: zoneOf(m.Node), corev1.LabelHostname: m.Node}},
		Spec: corev1.NodeSpec{PodCIDR: podRanges[m.Node][0], PodCIDRs: podRanges[m.Node]},
	}
	for i, a := range m.Addrs {
		kind := corev1.NodeInternalIP
		if i > 1 {
			kind = corev1.NodeExternalIP
		}
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: kind, Address: a.String()})
	}
	return n
}

func (m *member) podObject() *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: m.namespaceOf(), Name: m.Name, Labels: map[string]string{"app": m.Name}},
		Spec: corev1.PodSpec{NodeName: m.Node, HostNetwork: m.Host,
			Containers: []corev1.Container{{Name: "echo", Ports: m.ports()}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: m.Addrs[0].String()},
	}
	for _, a := range m.Addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	return p
}

// ports returns what a pod answers on: 8080 (http), 8443, 9000 to 9033 and 9053 of TCP, 8053 of UDP (dns), 8905 of SCTP
// (sig). On its node's network, 8443 alone.
func (m *member) ports() (l []corev1.ContainerPort) {
	add := func(name string, p corev1.Protocol, first, last int32) {
		for n := first; n <= last; n++ {
			l = append(l, corev1.ContainerPort{Name: name, ContainerPort: n, Protocol: p})
		}
	}
	add("", corev1.ProtocolTCP, 8443, 8443)
	if m.Host {
		return l
	}
	add("http", corev1.ProtocolTCP, 8080, 8080)
	add("", corev1.ProtocolTCP, 9000, 9033)
	add("", corev1.ProtocolTCP, 9053, 9053)
	add("dns", corev1.ProtocolUDP, 8053, 8053)
	add("sig", corev1.ProtocolSCTP, 8905, 8905)
	return l
}
