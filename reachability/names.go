package reachability

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
	"fairlead.dev/fairlead/verdict"
)

// Outside is the name of a client or server that is no part of the cluster: an address reserved for documentation.
const Outside = "outside"

var outside = [...]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// nodePrefix begins the name of a node where it stands beside pods and Services: node/NAME.
const nodePrefix = "node/"

// Names finds the ends of connections among the objects of a cluster.
type Names []source.Object

// named reports whether an object in a namespace goes by name: namespace/name, name.namespace, or name alone in the
// namespace default.
func named(o source.Object, name string) bool {
	k := source.KeyOf(o)
	return name == k.Namespace+"/"+k.Name || name == k.Name+"."+k.Namespace ||
		name == k.Name && k.Namespace == corev1.NamespaceDefault
}

// Service returns the Service that goes by a name: as named has it, as cluster DNS does (web.shop.svc,
// web.shop.svc.cluster.local), or by its name alone where no other namespace has a Service or pod of that name. It is
// nil where there is none.
func (n Names) Service(name string) *corev1.Service {
	dns, rest, is := strings.Cut(name, ".svc")
	is = is && (rest == "" || strings.HasPrefix(rest, "."))
	var alone []source.Object
	for _, o := range n {
		s, isService := o.(*corev1.Service)
		if isService && (named(s, name) || is && named(s, dns)) {
			return s
		}
		if k := source.KeyOf(o); k.Name == name && (isService || k.Kind == source.Pod || k.Kind == source.Node) {
			alone = append(alone, o)
		}
	}
	if len(alone) != 1 {
		return nil
	}
	s, _ := alone[0].(*corev1.Service)
	return s
}

// Unknown returns the error for a name that nothing has, with the nearest name that something has.
func (n Names) Unknown(name string) error {
	names := []string{Outside}
	for _, o := range n {
		k := source.KeyOf(o)
		whole := k.Namespace + "/" + k.Name
		if isPod := k.Kind == source.Pod; (isPod || k.Kind == source.Service) && (name == k.Name || isPod && name == whole) {
			return fmt.Errorf("%q alone doesn't name one Service: there is %s %s", name, k.Kind, whole)
		}
	}
	for _, o := range n {
		switch k := source.KeyOf(o); k.Kind {
		case source.Service, source.Pod:
			names = append(names, k.Namespace+"/"+k.Name)
			if v, ok := o.(*corev1.Pod); ok {
				names = append(names, templateNames(v)...)
			}
			if !strings.Contains(name, "/") {
				names = append(names, k.Name)
			}
		case source.Node:
			names = append(names, k.Name, nodePrefix+k.Name)
		}
	}
	if like := manifest.Nearest(name, names); like != "" {
		return fmt.Errorf("no address, pod, Service or node is named %q: did you mean %q?", name, like)
	}
	return fmt.Errorf("no address, pod, Service or node is named %q: use an address, namespace/name, node/NAME or outside",
		name)
}

// Packet returns the first packet of a connection: from is an address, a pod, a node or "outside", to is one of these
// or a Service, with a port by number or name and perhaps a protocol: shop/web:http, 10.96.0.10:53/udp.
func (n Names) Packet(from, to string) (verdict.Packet, error) {
	var p verdict.Packet
	host, port, ok := cutLast(to, ":")
	if !ok {
		return p, fmt.Errorf("%q has no port: use HOST:PORT, such as shop/web:80 or 10.96.0.10:80/udp", to)
	}
	dst, of, err := n.destination(strings.Trim(host, "[]"))
	if err != nil {
		return p, err
	}
	number, protocol, err := portOf(port, of)
	if err != nil {
		return p, err
	}
	src, err := n.Address(from, dst.Is4())
	if err != nil {
		return p, err
	}
	return verdict.Packet{Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, number), Protocol: protocol}, nil
}

var protocols = map[string]model.Protocol{"tcp": model.TCP, "udp": model.UDP, "sctp": model.SCTP}

// cutLast cuts s at the last sep.
func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// destination returns the address that TO's host stands for, and the Service if it is one.
func (n Names) destination(host string) (netip.Addr, *corev1.Service, error) {
	if s := n.Service(host); s != nil {
		a, err := service.ParseAddr(s.Spec.ClusterIP)
		if err != nil {
			return a, nil, fmt.Errorf("no cluster IP in Service %s/%s: name one of its addresses", s.Namespace, s.Name)
		}
		return a, s, nil
	}
	a, err := n.Address(host, true)
	return a, nil, err
}

// portOf reads a port: a number, or the name of one of a Service's ports, each perhaps with a protocol: 53/udp. Without
// one it is that of the Service's port of that name, else TCP.
func portOf(port string, s *corev1.Service) (uint16, model.Protocol, error) {
	text, suffix, _ := strings.Cut(port, "/")
	protocol := protocols[strings.ToLower(suffix)]
	if suffix != "" && protocol == 0 {
		return 0, 0, fmt.Errorf("invalid protocol %q: use tcp, udp or sctp", suffix)
	}
	if n, err := strconv.ParseUint(text, 10, 16); err == nil && n > 0 {
		return uint16(n), cmp.Or(protocol, model.TCP), nil
	}
	var names []string
	if s != nil {
		for _, p := range s.Spec.Ports {
			if p.Name == text {
				return uint16(p.Port), cmp.Or(protocol, protocols[strings.ToLower(string(p.Protocol))], model.TCP), nil
			}
			names = append(names, p.Name)
		}
	}
	if like := manifest.Nearest(text, names); like != "" {
		return 0, 0, fmt.Errorf("no port %q in Service %s/%s: did you mean %q?", text, s.Namespace, s.Name, like)
	}
	return 0, 0, fmt.Errorf("invalid port %q: use a number from 1 to 65535, or the name of a Service's port %q", text,
		names)
}

// Address returns the address of a host by its name or address, of the family asked for if it has one of each.
func (n Names) Address(host string, v4 bool) (netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return a, nil
	}
	found := n.addresses(host)
	if i := slices.IndexFunc(found, func(a netip.Addr) bool { return a.Is4() == v4 }); i >= 0 {
		return found[i], nil
	}
	if len(found) > 0 {
		return netip.Addr{}, fmt.Errorf("%s has no address of the other end's family, only %v", host, found)
	}
	return netip.Addr{}, n.Unknown(host)
}

// addresses returns the addresses of the outside, or of the pod or node that goes by a name.
func (n Names) addresses(host string) (found []netip.Addr) {
	if host == Outside {
		return outside[:]
	}
	var pods, nodes []netip.Addr
	bare, prefixed := strings.CutPrefix(host, nodePrefix)
	for _, o := range n {
		switch v := o.(type) {
		case *corev1.Pod:
			if named(v, host) {
				pods = append(pods, podAddresses(v)...)
			}
		case *corev1.Node:
			if v.Name == host || prefixed && v.Name == bare {
				nodes = append(nodes, nodeAddresses(v)...)
			}
		}
	}
	return append(pods, nodes...)
}

func podAddresses(v *corev1.Pod) (out []netip.Addr) {
	for _, ip := range v.Status.PodIPs {
		if a, err := service.ParseAddr(ip.IP); err == nil {
			out = append(out, a)
		}
	}
	return out
}

func nodeAddresses(v *corev1.Node) (out []netip.Addr) {
	for _, a := range v.Status.Addresses {
		if a, err := service.ParseAddr(a.Address); err == nil {
			out = append(out, a)
		}
	}
	return out
}

// counts reports whether policies know a pod: it has not ended, and has an address of its own.
func counts(v *corev1.Pod) bool {
	return !v.Spec.HostNetwork && !ended(v)
}

// ended reports whether a pod has run to its end.
func ended(v *corev1.Pod) bool {
	return v.Status.Phase == corev1.PodSucceeded || v.Status.Phase == corev1.PodFailed
}

// Pods returns "namespace/name" of pods by their own addresses.
func (n Names) Pods() map[netip.Addr]string {
	m := map[netip.Addr]string{}
	for _, o := range n {
		if v, ok := o.(*corev1.Pod); ok && !v.Spec.HostNetwork {
			for _, a := range podAddresses(v) {
				m[a] = source.KeyOf(v).Namespace + "/" + v.Name
			}
		}
	}
	return m
}
