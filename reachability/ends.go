package reachability

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// end is an end of a connection.
type end struct {
	name    string
	addrs   []netip.Addr
	pod     *corev1.Pod     // nil for others
	service *corev1.Service // nil for others
}

// ends returns what a text of an expectation names: an address, outside, node/NAME, a pod, pods by selector
// (shop/app=web, shop/*, *), or as a destination a Service.
func (c *Cluster) ends(text string, destination bool) ([]end, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return []end{{name: text, addrs: []netip.Addr{a}, pod: c.pods[a]}}, nil
	}
	if namespace, selector, is := selects(text); is {
		return c.selected(text, namespace, selector)
	}
	if destination {
		if s := c.Service(text); s != nil {
			return []end{{name: source.KeyOf(s).String(), addrs: clusterIPs(s), service: s}}, nil
		}
	}
	if l := c.ofTemplate(text); l != nil {
		return l, nil
	}
	addrs := c.addresses(text)
	if len(addrs) == 0 {
		if s := c.Service(text); s != nil {
			return nil, fmt.Errorf("%s is a Service, which opens no connections: name its pods, such as %s/app=%s", text,
				s.Namespace, s.Name)
		}
		for _, o := range c.Names {
			if v, ok := o.(*corev1.Pod); ok && named(v, text) {
				return nil, fmt.Errorf("pod %s has no address", text)
			}
		}
		return nil, c.Unknown(text)
	}
	return []end{{name: text, addrs: addrs, pod: c.pods[addrs[0]]}}, nil
}

// selects reports whether a text names pods by a selector, and cuts it: its namespace is "*" for all of them.
func selects(text string) (namespace, selector string, is bool) {
	if text == "*" {
		return "*", "", true
	}
	namespace, selector, cut := strings.Cut(text, "/")
	if !cut || selector != "*" && !strings.ContainsAny(selector, "=!, ") {
		return "", "", false
	}
	if selector == "*" {
		selector = ""
	}
	return namespace, selector, true
}

// selected returns the pods of a namespace that a selector matches: of those that policies can't tell apart on a node,
// two.
func (c *Cluster) selected(text, namespace, selector string) (out []end, err error) {
	s, err := labels.Parse(selector)
	if err != nil {
		return nil, fmt.Errorf("selector %q: %w", text, err)
	}
	alike := map[string]int{}
	for _, o := range c.Names {
		v, ok := o.(*corev1.Pod)
		if !ok || namespace != "*" && v.Namespace != namespace || !s.Matches(labels.Set(v.Labels)) {
			continue
		}
		addrs := c.podOwn(v)
		if key := v.Spec.NodeName + "\x00" + c.signature(addrs) + "\x00" + portsKey(v); len(addrs) > 0 && alike[key] < 2 {
			alike[key]++
			out = append(out, end{name: v.Namespace + "/" + v.Name, addrs: addrs, pod: v})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s matches no running pod with an address%s", text, c.nearNamespace(namespace))
	}
	return out, nil
}

// ofTemplate returns the pods of the workload that goes by a name: namespace/kind/name or namespace/name.
func (c *Cluster) ofTemplate(text string) (out []end) {
	for _, o := range c.Names {
		v, ok := o.(*corev1.Pod)
		if !ok || !slices.Contains(templateNames(v), text) {
			continue
		}
		if addrs := podAddresses(v); len(addrs) > 0 {
			out = append(out, end{name: v.Namespace + "/" + v.Name, addrs: addrs, pod: c.pods[addrs[0]]})
		}
	}
	return out
}

// podOwn returns the addresses that count as a pod's.
func (c *Cluster) podOwn(v *corev1.Pod) []netip.Addr {
	return slices.DeleteFunc(podAddresses(v), func(a netip.Addr) bool { return c.pods[a] != v })
}

// nearNamespace returns a suggestion where no pod is in a namespace of that name.
func (c *Cluster) nearNamespace(name string) string {
	var known []string
	for _, p := range c.pods {
		known = append(known, p.Namespace)
	}
	slices.Sort(known)
	if like := manifest.Nearest(name, slices.Compact(known)); like != "" && like != name {
		return fmt.Sprintf(": did you mean namespace %q?", like)
	}
	return ""
}

// signature returns a text that is the same for addresses about which policies say the same.
func (c *Cluster) signature(addrs []netip.Addr) string {
	var b strings.Builder
	for _, a := range addrs {
		fmt.Fprintf(&b, "%d", a.BitLen())
		if s := c.policies.Subjects[a]; s != nil {
			for _, rs := range slices.Concat(s.Out[:], s.In[:]) {
				if rs != nil {
					fmt.Fprintf(&b, " %x", rs.ID)
				} else {
					b.WriteString(" -")
				}
			}
		}
		if p := c.policies.Peer(a); p != nil {
			fmt.Fprintf(&b, " by %x", p.Identity.ID)
		}
		b.WriteByte(';')
	}
	return b.String()
}

func clusterIPs(s *corev1.Service) (out []netip.Addr) {
	for _, text := range append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...) {
		if a, err := service.ParseAddr(text); err == nil && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// port is where a connection goes to.
type port struct {
	protocol model.Protocol
	number   uint16
	every    bool // each port of each protocol
}

// at returns the ends that e stands for at a port, and its number there: a headless Service is its endpoints.
func (c *Cluster) at(e end, text string) ([]end, port, error) {
	if text == "*" {
		if e.service != nil {
			return nil, port{}, fmt.Errorf(`port "*" of %s: name one of its ports, or its pods`, e.name)
		}
		return []end{e}, port{every: true}, nil
	}
	if e.service == nil {
		p, err := podPort(text, e)
		return []end{e}, p, err
	}
	number, protocol, err := portOf(text, e.service)
	p := port{protocol: protocol, number: number}
	if err != nil || len(e.addrs) > 0 {
		return []end{e}, p, err
	}
	l, target := c.endpoints(e.service, number, protocol)
	if len(l) == 0 {
		return nil, p, fmt.Errorf("%s has neither a cluster IP nor an endpoint at port %s", e.name, text)
	}
	p.number = target
	return l, p, nil
}

// endpoints returns the endpoints of a headless Service, and the number of its port there.
func (c *Cluster) endpoints(s *corev1.Service, number uint16, protocol model.Protocol) (out []end, target uint16) {
	name := ""
	for _, p := range s.Spec.Ports {
		if uint16(p.Port) == number && protocolOf(p.Protocol) == protocol {
			name = p.Name
		}
	}
	for _, o := range c.Names {
		v, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || v.Namespace != s.Namespace || v.Labels[discoveryv1.LabelServiceName] != s.Name {
			continue
		}
		i := slices.IndexFunc(v.Ports, func(p discoveryv1.EndpointPort) bool {
			return p.Port != nil && (p.Name == nil && name == "" || p.Name != nil && *p.Name == name)
		})
		if i < 0 {
			continue
		}
		target = uint16(*v.Ports[i].Port)
		for _, ep := range v.Endpoints {
			for _, text := range ep.Addresses {
				if a, err := service.ParseAddr(text); err == nil {
					e := end{name: a.String(), addrs: []netip.Addr{a}, pod: c.pods[a]}
					if ref := ep.TargetRef; ref != nil {
						e.name = ref.Namespace + "/" + ref.Name
					}
					out = append(out, e)
				}
			}
		}
	}
	return out, target
}

// podPort reads a port of an end that is no Service: a number, or the name of a container's port.
func podPort(text string, e end) (port, error) {
	name, suffix, _ := strings.Cut(text, "/")
	protocol := protocols[strings.ToLower(suffix)]
	if suffix != "" && protocol == 0 {
		return port{}, fmt.Errorf("invalid protocol %q: use tcp, udp or sctp", suffix)
	}
	if n, err := strconv.ParseUint(name, 10, 16); err == nil && n > 0 {
		return port{protocol: cmp.Or(protocol, model.TCP), number: uint16(n)}, nil
	}
	var names []string
	for _, p := range containerPorts(e.pod) {
		of := protocolOf(p.Protocol)
		if p.Name == name && (protocol == 0 || protocol == of) {
			return port{protocol: of, number: uint16(p.ContainerPort)}, nil
		}
		names = append(names, p.Name)
	}
	if like := manifest.Nearest(name, names); like != "" && like != name {
		return port{}, fmt.Errorf("no port %q in %s: did you mean %q?", text, e.name, like)
	}
	return port{}, fmt.Errorf("no port %q in %s: use a number from 1 to 65535, or the name of a container's port", text,
		e.name)
}

// containerPorts returns the ports of all containers of a pod, none of nil.
func containerPorts(v *corev1.Pod) (out []corev1.ContainerPort) {
	if v == nil {
		return nil
	}
	for _, cs := range [][]corev1.Container{v.Spec.InitContainers, v.Spec.Containers} {
		for i := range cs {
			out = append(out, cs[i].Ports...)
		}
	}
	return out
}

// portsKey returns a text that is the same for pods whose containers have the same ports.
func portsKey(v *corev1.Pod) string {
	var l []string
	for _, p := range containerPorts(v) {
		l = append(l, fmt.Sprint(p.Name, p.Protocol, p.ContainerPort))
	}
	slices.Sort(l)
	return strings.Join(l, ",")
}
