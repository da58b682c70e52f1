package service

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// TestOverlaysPortIsNoServices has Services with entries and endpoints at the overlay's port: those at an address of a
// node are refused, in whichever order Services, slices and Nodes come, and no longer once the Node is gone.
func TestOverlaysPortIsNoServices(t *testing.T) {
	const port = 4789
	udp := func(number int32) edit { return ports(sport("udp", number)) }
	leads := func(to string, number int32) source.Object {
		return slice(eps(ep(to)), slicePorts(eport("udp", number)))
	}
	n2 := node(func(n *corev1.Node) { n.Name = "n2" }, internalIPs("172.18.0.22"))
	const entry = "10.96.0.1:80/udp ClusterIP -> "
	for _, c := range []struct {
		name            string
		objects         []source.Object
		want, wantAlone []string // frontends, and without Node n2
		reason          string   // ""; of a problem while there is n2
	}{
		{"an endpoint", objects(svc(udp(80)), leads("172.18.0.22", port)), lines(entry + "reject"),
			lines(entry + "172.18.0.22:4789"), "EndpointRefused"},
		{"another port", objects(svc(udp(80)), leads("172.18.0.22", port+1)), lines(entry + "172.18.0.22:4790"),
			lines(entry + "172.18.0.22:4790"), ""},
		{"a pod's port", objects(svc(udp(80)), leads("10.0.0.1", port)), lines(entry + "10.0.0.1:4789"),
			lines(entry + "10.0.0.1:4789"), ""},
		{"TCP", objects(svc(ports(sport("http", 80))), slice(eps(ep("172.18.0.22")),
			slicePorts(eport("http", port)))),
			lines("10.96.0.1:80/tcp ClusterIP -> 172.18.0.22:4789"),
			lines("10.96.0.1:80/tcp ClusterIP -> 172.18.0.22:4789"), ""},
		{"an external address", objects(svc(clusterIPs("None"), udp(port), externalIPs("172.18.0.22"))), nil, nil, ""},
		{"an ingress", objects(svc(udp(port), ingress("172.18.0.22"))),
			lines("10.96.0.1:4789/udp ClusterIP -> reject"),
			lines("10.96.0.1:4789/udp ClusterIP -> reject", "172.18.0.22:4789/udp LoadBalancer -> reject"),
			"AddressRefused"},
		{"a node port", objects(svc(udp(80), nodePort(port))), lines(entry + "reject"), lines(entry + "reject"),
			"AddressRefused"},
	} {
		config := n1
		config.OverlayPort = port
		around := append(slices.Clone(c.objects), node())
		for _, order := range [][]source.Object{append(slices.Clone(around), n2), append(objects(n2), around...)} {
			r := New(config)
			for _, o := range order {
				r.Apply(puts(o))
			}
			same(t, c.name, frontLines(r.Services()), c.want)
			if refused := strings.Contains(strings.Join(problemLines(r), ","), "Refused"); refused != (c.reason != "") ||
				!strings.Contains(strings.Join(problemLines(r), ","), c.reason) {
				t.Errorf("%s: problems %q, want %q", c.name, problemLines(r), c.reason)
			}
			r.Apply(dels(n2))
			same(t, c.name+", without the Node", frontLines(r.Services()), c.wantAlone)
		}
	}
}

// TestOverlaysPortIsNoHostPort has a pod with that host port.
func TestOverlaysPortIsNoHostPort(t *testing.T) {
	config := n1
	config.HostPorts, config.NoLocalHostPorts, config.OverlayPort = true, true, 4789
	for protocol, refused := range map[corev1.Protocol]bool{corev1.ProtocolUDP: true, corev1.ProtocolTCP: false} {
		r := New(config)
		r.Apply(puts(node(), hostPortPod(config.Node, corev1.ContainerPort{ContainerPort: 80, HostPort: 4789,
			Protocol: protocol})))
		if none := len(r.Services().Frontends) == 0; none != refused {
			t.Errorf("%s: %q", protocol, frontLines(r.Services()))
		}
	}
}
