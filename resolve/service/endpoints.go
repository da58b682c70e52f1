package service

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// traits is what an endpoint is, a bit each.
type traits uint8

const (
	ready       traits = 1 << iota
	serving            // answers, perhaps while terminating
	terminating        // goes away
	local              // runs on this node
	onSomeNode         // says which node it runs on
	forSomeNode        // hints say which nodes should use it
	forThisNode        // this node is among them
)

// has reports whether all of x are there.
func (t traits) has(x traits) bool { return t&x == x }

// draining reports whether the endpoint takes traffic if no ready one does (KEP-1669).
func (t traits) draining() bool { return t.has(serving | terminating) }

// worth orders endpoints of the same address and port: the one of higher worth stands for both.
func (t traits) worth() (w int) {
	for i, good := range [...]bool{t.has(local), t.has(serving), t.has(ready), !t.has(terminating)} {
		if good {
			w |= 1 << i
		}
	}
	return w
}

// endpoint is what an EndpointSlice says of one endpoint, as far as it counts. There are many, so what many have in
// common is there once.
type endpoint struct {
	ip   [16]byte // an IPv4 address as IPv6 has it
	what unique.Handle[character]
}

// character is what an EndpointSlice says of an endpoint beside its address.
type character struct {
	zone     unique.Handle[string] // where it runs; zero: not said
	forZones unique.Handle[string] // the zones that should use it by its hints, comma-separated; zero: not said
	is       traits
	weight   uint16
}

func newEndpoint(a netip.Addr, what character) endpoint { return endpoint{a.As16(), unique.Make(what)} }

// addr returns the address as ParseAddr does.
func (e *endpoint) addr() netip.Addr { return netip.AddrFrom16(e.ip).Unmap() }

func (e *endpoint) is() traits { return e.what.Value().is }

// slicePort is a port of an EndpointSlice.
type slicePort struct {
	name     unique.Handle[string]
	protocol model.Protocol
	number   uint16
}

// endpointSlice is an EndpointSlice as read.
type endpointSlice struct {
	name      string
	family    family // zero where the slice is of no use
	ports     []slicePort
	endpoints []endpoint // by address
	weight    uint16     // of each endpoint
	problems  problems
	triggered int64 // when what the slice tells of happened, in ns since 1970; 0: not said
}

// ownerOf returns the name of the Service that a slice belongs to; "" where the slice is for none that is served.
func ownerOf(obj *discoveryv1.EndpointSlice) string {
	if _, headless := obj.Labels[corev1.IsHeadlessService]; headless {
		return ""
	}
	return obj.Labels[discoveryv1.LabelServiceName]
}

// readSlice takes from an EndpointSlice what counts on the node.
func readSlice(obj *discoveryv1.EndpointSlice, node string) *endpointSlice {
	s, rep := &endpointSlice{name: obj.Name}, &report{object: source.KeyOf(obj)}
	switch obj.AddressType {
	case discoveryv1.AddressTypeIPv4:
		s.family = ipv4
	case discoveryv1.AddressTypeIPv6:
		s.family = ipv6
	case discoveryv1.AddressTypeFQDN:
		rep.add("addressType", "NameNotAddress",
			"the slice has names instead of addresses: it is ignored; use a slice of type IPv4 or IPv6")
	default:
		rep.add("addressType", "UnknownValue", "%q is unknown: the slice is ignored; use IPv4 or IPv6", obj.AddressType)
	}
	if t, err := time.Parse(time.RFC3339Nano, obj.Annotations[corev1.EndpointsLastChangeTriggerTime]); err == nil {
		s.triggered = t.UnixNano()
	}
	if s.family != 0 {
		s.readPorts(obj, rep)
		s.readEndpoints(obj, node, rep)
	}
	s.problems = rep.problems
	return s
}

func (s *endpointSlice) readPorts(obj *discoveryv1.EndpointSlice, rep *report) {
	s.ports = make([]slicePort, 0, len(obj.Ports))
	for i, p := range obj.Ports {
		port, err := readSlicePort(p)
		if err != nil {
			rep.flawed(fmt.Sprintf("ports[%d]", i), err, "this port of the slice is left out; correct it")
			continue
		}
		s.ports = append(s.ports, port)
	}
}

func readSlicePort(p discoveryv1.EndpointPort) (out slicePort, err *flaw) {
	if p.Name != nil {
		out.name = intern(*p.Name)
	}
	out.protocol = model.TCP
	if p.Protocol != nil {
		if out.protocol, err = parseProtocol(*p.Protocol); err != nil {
			return out, err
		}
	}
	if p.Port == nil {
		return out, &flaw{"PortMissing", "a port without a number"}
	}
	out.number, err = parsePort(*p.Port)
	return out, err
}

func (s *endpointSlice) readEndpoints(obj *discoveryv1.EndpointSlice, node string, rep *report) {
	s.endpoints = make([]endpoint, 0, len(obj.Endpoints))
	s.weight = readWeight(obj.Annotations, rep)
	for i := range obj.Endpoints {
		e := &obj.Endpoints[i]
		addr, err := s.parseEndpoint(e)
		if err != nil {
			rep.flawed(fmt.Sprintf("endpoints[%d].addresses", i), err, "this endpoint is left out; correct it")
			continue
		}
		if len(e.Addresses) > 1 {
			rep.add(fmt.Sprintf("endpoints[%d].addresses", i), "AddressesLeftOut",
				"only the first of %d addresses is used, as the API says; list an endpoint for each", len(e.Addresses))
		}
		s.endpoints = append(s.endpoints, readEndpoint(addr, e, node, s.weight))
	}
	slices.SortStableFunc(s.endpoints, func(a, b endpoint) int { return bytes.Compare(a.ip[:], b.ip[:]) })
}

func (s *endpointSlice) parseEndpoint(e *discoveryv1.Endpoint) (netip.Addr, *flaw) {
	if len(e.Addresses) == 0 {
		return netip.Addr{}, &flaw{"InvalidAddress", "an endpoint without an address"}
	}
	addr, err := parseAddr(e.Addresses[0])
	if err == nil && familyOf(addr) != s.family {
		err = &flaw{"WrongFamily", fmt.Sprintf("%s is not of the slice's addressType", addr)}
	}
	return addr, err
}

func readEndpoint(addr netip.Addr, e *discoveryv1.Endpoint, node string, weight uint16) endpoint {
	out := character{weight: weight}
	set := func(t traits, yes bool) {
		if yes {
			out.is |= t
		}
	}
	c := &e.Conditions
	set(ready, c.Ready == nil || *c.Ready)
	set(serving, c.Serving == nil || *c.Serving)
	set(terminating, c.Terminating != nil && *c.Terminating)
	if e.NodeName != nil && *e.NodeName != "" {
		out.is |= onSomeNode
		set(local, *e.NodeName == node)
	}
	if e.Zone != nil {
		out.zone = intern(*e.Zone)
	}
	if h := e.Hints; h != nil {
		set(forSomeNode, len(h.ForNodes) > 0)
		set(forThisNode, node != "" && slices.ContainsFunc(h.ForNodes,
			func(n discoveryv1.ForNode) bool { return n.Name == node }))
		out.forZones = joinZones(h.ForZones)
	}
	return newEndpoint(addr, out)
}

// joinZones returns the zones as one text: label values hold no comma.
func joinZones(zones []discoveryv1.ForZone) unique.Handle[string] {
	if len(zones) == 1 {
		return intern(zones[0].Name)
	}
	var names []string
	for _, z := range zones {
		names = append(names, z.Name)
	}
	return intern(strings.Join(names, ","))
}

// parseProtocol reads a protocol; none is TCP, as the API defaults it.
func parseProtocol(p corev1.Protocol) (model.Protocol, *flaw) {
	switch p {
	case corev1.ProtocolTCP, "":
		return model.TCP, nil
	case corev1.ProtocolUDP:
		return model.UDP, nil
	case corev1.ProtocolSCTP:
		return model.SCTP, nil
	}
	return 0, &flaw{"UnknownProtocol", fmt.Sprintf("protocol %q is not TCP, UDP or SCTP", p)}
}

// parsePort reads the number of a port, 1 to 65535.
func parsePort(n int32) (uint16, *flaw) {
	if n < 1 || n > 65535 {
		return 0, &flaw{"InvalidPort", fmt.Sprintf("%d is not a port number from 1 to 65535", n)}
	}
	return uint16(n), nil
}

// candidate is an endpoint behind one port of a Service.
type candidate struct {
	at netip.AddrPort
	*endpoint
}

// hit is a port of a slice that is a group's.
type hit struct {
	group  int32
	number uint16
	slice  *endpointSlice
}

// match adds to hits the ports of the slices all that are d's, by group. It costs what the slices' ports are, whatever
// the number of d's.
func match(hits []hit, d *declared, all []*endpointSlice) []hit {
	start := len(hits)
	for _, s := range all {
		for _, p := range s.ports {
			if g := d.groupOf(groupKey{p.name, p.protocol, s.family}); g >= 0 {
				hits = append(hits, hit{int32(g), p.number, s})
			}
		}
	}
	slices.SortStableFunc(hits[start:], func(a, b hit) int { return int(a.group) - int(b.group) })
	return hits
}

// gather fills list with the endpoints of hits, those of one group, by address and port, each once. With a limit above
// 0 it takes the first so many.
func gather(list []candidate, hits []hit, limit int) []candidate {
	list = list[:0]
	for _, h := range hits {
		for i := range h.slice.endpoints {
			if limit > 0 && len(list) == limit {
				break
			}
			e := &h.slice.endpoints[i]
			list = append(list, candidate{netip.AddrPortFrom(e.addr(), h.number), e})
		}
	}
	return once(list)
}

// once sorts candidates and returns the worthiest of each address and port; the first of several equal ones.
func once(list []candidate) []candidate {
	slices.SortStableFunc(list, func(a, b candidate) int { return a.at.Compare(b.at) })
	merged := list[:0]
	for _, c := range list {
		n := len(merged)
		if n == 0 || merged[n-1].at != c.at {
			merged = append(merged, c)
		} else if c.is().worth() > merged[n-1].is().worth() {
			merged[n-1] = c
		}
	}
	return merged
}

// backend returns the candidate as a backend without a weight. Where it runs on another node, remote reports whether it
// is said.
func (c candidate) backend(remote func(candidate) bool) model.Backend {
	here := c.is().has(local)
	return model.Backend{Addr: c.at, Local: here, Remote: c.is().has(onSomeNode) && !here && remote(c)}
}

// choose fills list with the candidates that take traffic on this node: the ready ones that fit, or, where there is
// none, the draining ones in scope (KEP-1669). A ready one that doesn't fit topology is never replaced by a draining
// one: topology is only obeyed where it leaves a ready one. Whether they run on other nodes is told only where it
// matters.
func choose(list []model.Backend, of []candidate, inScope, fits func(*endpoint) bool,
	remote func(candidate) bool) []model.Backend {
	list = list[:0]
	for _, want := range [...]func(e *endpoint) bool{
		func(e *endpoint) bool { return e.is().has(ready) && inScope(e) && fits(e) },
		func(e *endpoint) bool { return e.is().draining() && inScope(e) },
	} {
		for _, c := range of {
			if want(c.endpoint) {
				b := c.backend(remote)
				b.Weight = c.what.Value().weight
				list = append(list, b)
			}
		}
		if len(list) > 0 {
			reduce(list)
			return list
		}
	}
	return list
}

// unselect fills list with the candidates that serve but are none of the backends, which choose made of them: both are
// sorted. What is ready counts as serving, since it gets new flows: with publishNotReadyAddresses it may say that it
// isn't.
func unselect(list []model.Backend, of []candidate, backends []model.Backend,
	remote func(candidate) bool) []model.Backend {
	list = list[:0]
	for _, c := range of {
		switch {
		case len(backends) > 0 && backends[0].Addr == c.at:
			backends = backends[1:]
		case c.is().has(serving) || c.is().has(ready):
			list = append(list, c.backend(remote))
		}
	}
	return list
}
