package service

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Host ports. A pod of this node with some is served as a Service with one endpoint, itself: its declared entries are
// at the node's own addresses, and its pools have the one backend whatever the pod's readiness, as with CNI's portmap.

// hostPorts is what is known of this node's pods with host ports.
type hostPorts struct {
	pods     map[source.Key]*corev1.Pod // those that run, with host ports
	attached source.Attached
}

// AttachPod takes in the addresses that a pod of this node has been given: its host ports are served before its status
// names them. The next Delta has what changes by them.
func (r *Resolver) AttachPod(key source.Key, uid string, addresses []netip.Addr) {
	if r.set.HostPorts {
		r.hostPorts.attached.Attach(key, uid, addresses)
		r.declarePod(key)
	}
}

// DetachPod takes in that a pod of this node has addresses no more. The next Delta has what changes by it.
func (r *Resolver) DetachPod(key source.Key, addresses []netip.Addr) {
	if r.hostPorts.attached.Detach(key, addresses, r.hostPorts.pods[key] != nil) {
		r.declarePod(key)
	}
}

// HasHostPorts reports whether a pod of this node is known to have host ports.
func (r *Resolver) HasHostPorts(key source.Key, uid string) bool {
	o := r.hostPorts.pods[key]
	return o != nil && source.Same(string(o.UID), uid)
}

// applyPod takes a Pod in, if its host ports are this node's to serve, or that it is gone.
func (r *Resolver) applyPod(key source.Key, obj *corev1.Pod) {
	if !r.set.HostPorts {
		return
	}
	_, known := r.hostPorts.pods[key]
	switch {
	case obj != nil && obj.Spec.NodeName == r.set.Node && hasHostPorts(obj):
		r.hostPorts.pods[key] = obj
	case known:
		delete(r.hostPorts.pods, key)
		r.hostPorts.attached.Forget(key)
	default:
		return
	}
	r.declarePod(key)
}

// hasHostPorts reports whether a pod runs in a network of its own and has host ports.
func hasHostPorts(obj *corev1.Pod) (some bool) {
	if obj.Spec.HostNetwork || obj.Status.Phase == corev1.PodSucceeded || obj.Status.Phase == corev1.PodFailed {
		return false
	}
	eachHostPort(obj, func(string, int, int, *corev1.ContainerPort) { some = true })
	return some
}

// eachHostPort calls visit for each host port of a pod's containers and sidecars, with the list that has the container
// and the indexes of container and port.
func eachHostPort(obj *corev1.Pod, visit func(list string, container, port int, p *corev1.ContainerPort)) {
	for _, l := range []struct {
		name       string
		containers []corev1.Container
	}{{"containers", obj.Spec.Containers}, {"initContainers", obj.Spec.InitContainers}} {
		for i := range l.containers {
			c := &l.containers[i]
			sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
			if l.name == "initContainers" && !sidecar {
				continue
			}
			for k := range c.Ports {
				if c.Ports[k].HostPort != 0 {
					visit(l.name, i, k, &c.Ports[k])
				}
			}
		}
	}
}

// declarePod declares a pod's host ports anew.
func (r *Resolver) declarePod(key source.Key) {
	obj := r.hostPorts.pods[key]
	if _, known := r.services[key]; obj == nil && !known {
		return
	}
	s := r.service(key)
	if s.claimed {
		r.withdraw(s)
	}
	for _, e := range s.slices {
		r.indexBlocks(e, -1)
	}
	s.declared, s.slices = nil, nil
	if obj != nil {
		s.declared, s.slices = r.readHostPorts(obj)
	}
	for _, e := range s.slices {
		r.indexBlocks(e, 1)
	}
	r.oldestFirst, r.costsChanged = nil, true
	r.touch(s, true)
}

// declarePods declares all host ports anew, since this node has other addresses.
func (r *Resolver) declarePods() {
	for key := range r.hostPorts.pods {
		r.declarePod(key)
	}
}

// podReading is a pod's host ports being read.
type podReading struct {
	report
	*nodeState
	out   *declared
	ips   [2]netip.Addr // by index in bothFamilies; zero: none
	ports [2]*endpointSlice
}

// readHostPorts returns what a pod's host ports ask for, and the pod as an endpoint.
func (r *Resolver) readHostPorts(obj *corev1.Pod) (*declared, []*endpointSlice) {
	p := &podReading{nodeState: r.nodeState, out: &declared{created: math.MaxInt64}}
	p.object = source.KeyOf(obj)
	p.out.label = "pod " + word(obj.Namespace) + "/" + word(obj.Name)
	if !obj.CreationTimestamp.IsZero() {
		p.out.created = obj.CreationTimestamp.Unix()
	}
	attached, known := r.hostPorts.attached.Of(p.object, obj)
	if !known {
		for _, ip := range obj.Status.PodIPs {
			if a, err := parseAddr(ip.IP); err == nil {
				attached = append(attached, a)
			}
		}
	}
	p.readAddresses(attached)
	limit := r.set.limits.Service.Frontends
	left := 0
	eachHostPort(obj, func(list string, container, port int, c *corev1.ContainerPort) {
		for _, e := range p.read(list, container, port, c) {
			if len(p.out.fixed) == limit {
				left++
				continue
			}
			p.out.fixed = append(p.out.fixed, e)
		}
	})
	if left > 0 {
		p.add("spec.containers", "TooManyFrontends", "%d addresses and ports of it are not served: %d are the most for one "+
			"pod; use fewer host ports, or raise the limit", left, limit)
	}
	p.out.frontends = len(p.out.fixed)
	p.out.indexGroups()
	p.out.problems = p.report.problems
	return p.out, slices.DeleteFunc(slices.Clone(p.ports[:]), func(s *endpointSlice) bool { return s == nil })
}

// pod returns the pod's address and container port that x, a claim for a host port, leads to.
func (x claim) pod() (at netip.AddrPort) {
	for _, h := range match(nil, x.by.declared, x.by.slices) {
		if h.group == x.entry().group {
			at = netip.AddrPortFrom(h.slice.endpoints[0].addr(), h.number)
		}
	}
	return at
}

// readAddresses takes the pod's addresses, the first of each family.
func (p *podReading) readAddresses(l []netip.Addr) {
	for _, a := range l {
		if i := familyOf(a).index(); !p.ips[i].IsValid() {
			p.ips[i] = a
		}
	}
	for i, f := range bothFamilies {
		if a := p.ips[i]; a.IsValid() {
			p.ports[i] = &endpointSlice{name: f.String(), family: f,
				endpoints: []endpoint{newEndpoint(a, character{is: ready | serving | onSomeNode | local})}}
		}
	}
}

// read returns the entries of one host port.
func (p *podReading) read(list string, container, port int, c *corev1.ContainerPort) (entries []entry) {
	path := func(name string) string { return fmt.Sprintf("spec.%s[%d].ports[%d].%s", list, container, port, name) }
	protocol, err := parseProtocol(c.Protocol)
	if err != nil {
		p.flawed(path("protocol"), err, "this host port is not served; correct it")
		return nil
	}
	number, err := parsePort(c.HostPort)
	if err != nil {
		p.flawed(path("hostPort"), err, "it is not served; correct it")
		return nil
	}
	inside, err := parsePort(c.ContainerPort)
	if err != nil {
		p.flawed(path("containerPort"), err, "its host port is not served; correct it")
		return nil
	}
	var host netip.Addr
	if c.HostIP != "" {
		if host, err = p.hostIP(c.HostIP); err != nil {
			p.flawed(path("hostIP"), err, "this host port is not served; use an address of node "+p.model.Name+
				", or remove it for all of them")
			return nil
		}
	}
	e := entry{via: viaHostPort, index: int32(container), port: int32(port)}
	if list == "initContainers" {
		e.index = -1 - e.index
	}
	for i, f := range bothFamilies {
		if !p.ips[i].IsValid() || host.IsValid() && familyOf(host) != f {
			continue
		}
		e.group = p.group(i, protocol, inside)
		for _, a := range p.hostAddresses(f, host) {
			e.Entry = model.Entry{Addr: a, Port: number, Protocol: protocol}
			entries = append(entries, e)
		}
	}
	return entries
}

// hostIP reads a hostIP: an address of this node, or the unspecified one.
func (p *podReading) hostIP(text string) (netip.Addr, *flaw) {
	a, err := ParseAddr(text)
	switch {
	case err != nil:
		return a, &flaw{"InvalidAddress", fmt.Sprintf("%q is not an IP address", text)}
	case a.Is4() && a.IsLoopback() && !p.model.Localhost:
		return a, &flaw{"UnusableAddress",
			fmt.Sprintf("%s takes no host ports, since iptables.localhostNodePorts is false", a)}
	case a == localhost && p.Capabilities.NoLocal != "":
		return a, &flaw{"UnusableAddress",
			fmt.Sprintf("data plane %s takes no host ports at %s: %s", p.Capabilities.Name, a, p.Capabilities.NoLocal)}
	case a.IsUnspecified(), a.Is4() && a.IsLoopback(), p.owns(a):
		return a, nil
	case a.IsLoopback():
		return a, &flaw{"UnusableAddress", fmt.Sprintf("%s never leaves the loopback device", a)}
	}
	return a, &flaw{"HostIPNotOfNode", fmt.Sprintf("%s is not an address of node %s", a, p.model.Name)}
}

// localhost is where processes of the node reach host ports of all addresses, too.
var localhost = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// hostAddresses returns the addresses of a family at which a host port is served: host alone if that is one address;
// else every address of the node. Those that don't take node ports stand one by one.
func (p *podReading) hostAddresses(f family, host netip.Addr) (l []netip.Addr) {
	if host.IsValid() && !host.IsUnspecified() {
		return []netip.Addr{host}
	}
	l = append(l, f.any())
	addresses := slices.Clone(p.model.Addresses)
	if p.model.Localhost && p.Capabilities.NoLocal == "" {
		addresses = append(addresses, localhost)
	}
	for _, a := range addresses {
		if familyOf(a) == f && !p.hasNodePorts(a) && !a.IsLinkLocalUnicast() {
			l = append(l, a)
		}
	}
	return l
}

// group returns the index of the group of a container's port, a new one for the first host port of it.
func (p *podReading) group(family int, protocol model.Protocol, inside uint16) int32 {
	name := intern(strconv.Itoa(int(inside)))
	k := groupKey{name, protocol, bothFamilies[family]}
	if i := p.out.groupOf(k); i >= 0 {
		return int32(i)
	}
	g := group{port: name, protocol: protocol, family: k.family}
	g.needs[cluster] = true
	p.out.groups = append(p.out.groups, g)
	s := p.ports[family]
	s.ports = append(s.ports, slicePort{name, protocol, inside})
	return int32(len(p.out.groups) - 1)
}
