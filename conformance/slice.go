package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// sliceLine is one line of a slices section: EndpointSlices in short.
//
//	NAME PORT…: ENDPOINT…
//
// NAME is [NAMESPACE/]SERVICE, with #N for a second slice of the same Service, *WEIGHT for endpoints of another weight
// than 1, and /4 or /6 for one family only. PORT is [NAME=]NUMBER[-LAST][/PROTOCOL]. ENDPOINT is a pod or
// ADDRESS[@NODE], with (CONDITION,…) or not.
type sliceLine struct {
	Line      int
	Name      string // as written, without the family: what "remove: slice NAME" names
	Namespace string
	Service   string
	Weight    string
	Families  []bool // true: IPv6
	Ports     []slicePort
	Endpoints []sliceEndpoint
	Without   []string // leave out the places remembered under these names
}

type slicePort struct {
	Name        string
	First, Last uint16
	Protocol    corev1.Protocol
}

type sliceEndpoint struct {
	Name                       string        // "$NAME" for a remembered place
	Addrs                      [2]netip.Addr // IPv4, IPv6; invalid where there is none
	Node                       string
	Ready, Serving, Terminates bool
	Zones, Nodes               []string // hints
}

// parseSlice reads a line of a slices section.
func parseSlice(text string) (l sliceLine, err error) {
	left, right, found := strings.Cut(text+" ", ": ")
	words := strings.Fields(left)
	if !found || len(words) < 2 {
		return l, fmt.Errorf("%q is not of the form: SERVICE PORT…: ENDPOINT…", text)
	}
	l.Name, l.Families = words[0], []bool{false, true}
	if n, ok := strings.CutSuffix(l.Name, "/4"); ok {
		l.Name, l.Families = n, []bool{false}
	} else if n, ok := strings.CutSuffix(l.Name, "/6"); ok {
		l.Name, l.Families = n, []bool{true}
	}
	l.Name, l.Weight, _ = strings.Cut(l.Name, "*")
	l.Service, _, _ = strings.Cut(l.Name, "#")
	if l.Namespace, l.Service, found = strings.Cut(l.Service, "/"); !found {
		l.Namespace, l.Service = "default", l.Namespace
	}
	for _, w := range words[1:] {
		p, err := parsePort(w)
		if err != nil {
			return l, err
		}
		l.Ports = append(l.Ports, p)
	}
	for _, w := range strings.Fields(right) {
		if n, ok := strings.CutPrefix(w, "-$"); ok {
			l.Without = append(l.Without, n)
		} else if e, err := parseEndpoint(w); err != nil {
			return l, err
		} else {
			l.Endpoints = append(l.Endpoints, e)
		}
	}
	return l, nil
}

// parsePort reads "http=8080/tcp", "8080", "http=9000-9033".
func parsePort(w string) (p slicePort, err error) {
	bad := fmt.Errorf("%q is no port: [NAME=]NUMBER[-LAST][/PROTOCOL]", w)
	name, number, named := strings.Cut(w, "=")
	if !named {
		name, number = "", w
	}
	number, proto, explicit := strings.Cut(number, "/")
	if !explicit {
		proto = "tcp"
	}
	if _, err := parseProtocol(proto); err != nil {
		return p, err
	}
	first, last, ranged := strings.Cut(number, "-")
	f, err := strconv.ParseUint(first, 10, 16)
	if err != nil {
		return p, bad
	}
	t := f
	if ranged {
		if t, err = strconv.ParseUint(last, 10, 16); err != nil || t < f || t-f >= 1000 {
			return p, bad
		}
	}
	return slicePort{name, uint16(f), uint16(t), corev1.Protocol(strings.ToUpper(proto))}, nil
}

// parseEndpoint reads "web-1", "10.244.9.9@b", "web-2(terminating)", "web-3(zone=z2)".
func parseEndpoint(w string) (sliceEndpoint, error) {
	name, conditions, explicit := strings.Cut(strings.TrimSuffix(w, ")"), "(")
	e := sliceEndpoint{Name: name, Ready: true, Serving: true}
	if p := memberNamed(name); p != nil {
		e.of(p)
	} else if !strings.HasPrefix(name, "$") {
		addr, node, _ := strings.Cut(name, "@")
		a, err := netip.ParseAddr(addr)
		if err != nil || appendNodes(new([]string), node) != nil {
			return e, fmt.Errorf("%q is neither a name of the cast nor ADDRESS@NODE", name)
		}
		i := 0
		if e.Node = node; a.Is6() {
			i = 1
		}
		e.Addrs[i] = a
	}
	if !explicit {
		return e, nil
	}
	for _, c := range strings.Split(conditions, ",") {
		switch k, v, _ := strings.Cut(c, "="); {
		case c == "notready":
			e.Ready, e.Serving = false, false
		case c == "terminating":
			e.Ready, e.Terminates = false, true
		case c == "notserving":
			e.Ready, e.Serving = false, false
		case k == "zone" && v != "":
			e.Zones = append(e.Zones, v)
		case k == "node" && v != "":
			e.Nodes = append(e.Nodes, v)
		default:
			return e, fmt.Errorf("%q is no condition: notready, terminating, notserving, zone=ZONE or node=NODE", c)
		}
	}
	return e, nil
}

// of makes e an endpoint in p.
func (e *sliceEndpoint) of(p *member) {
	e.Name, e.Node, e.Addrs = p.Name, p.Node, [2]netip.Addr{p.addr(false), p.addr(true)}
}

// references returns the names of remembered places that the line needs.
func (l sliceLine) references() []string {
	names := slices.Clone(l.Without)
	for _, e := range l.Endpoints {
		if n, ok := strings.CutPrefix(e.Name, "$"); ok {
			names = append(names, n)
		}
	}
	return names
}

// settle puts places in for the names under which they are remembered.
func (l sliceLine) settle(known map[string]netip.AddrPort) sliceLine {
	out := make([]sliceEndpoint, 0, len(l.Endpoints))
	for _, e := range l.Endpoints {
		if n, ok := strings.CutPrefix(e.Name, "$"); ok {
			if p := memberNamed(nameOf(known[n].Addr())); p != nil {
				e.of(p)
			}
		}
		if !slices.ContainsFunc(l.Without, func(n string) bool { return slices.Contains(e.Addrs[:], known[n].Addr()) }) {
			out = append(out, e)
		}
	}
	l.Endpoints = out
	return l
}

// slices returns the objects that the line stands for. Of a range of ports, each has slices of its own.
func (l sliceLine) slices() []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	n := 1
	for _, p := range l.Ports {
		n = max(n, int(p.Last-p.First)+1)
	}
	name := strings.ReplaceAll(strings.TrimPrefix(l.Name, l.Namespace+"/"), "#", "-")
	for i := range n {
		for _, six := range l.Families {
			out = append(out, l.slice(fmt.Sprintf("%s-%d%s", name, i, familySuffix[b2i(six)]), i, six))
		}
	}
	return out
}

// familySuffix ends the names of the objects of each family.
var familySuffix = [2]string{"-v4", "-v6"}

// makes reports whether k, made by an earlier line of this name, is of a family that the line speaks of.
func (l sliceLine) makes(k source.Key) bool {
	return slices.ContainsFunc(l.Families, func(
		six bool) bool {
		return strings.HasSuffix(k.Name, familySuffix[b2i(six)])
	})
}

// slice returns the i-th slice of one family.
func (l sliceLine) slice(name string, i int, six bool) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: l.Namespace, Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: l.Service}},
		AddressType: [...]discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}[b2i(six)],
	}
	if l.Weight != "" {
		s.Annotations = map[string]string{resolve.WeightAnnotation: l.Weight}
	}
	for _, p := range l.Ports {
		if number := int32(p.First) + int32(i); number <= int32(p.Last) {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &number, Protocol: &p.Protocol})
		}
	}
	for _, e := range l.Endpoints {
		if a := e.Addrs[b2i(six)]; a.IsValid() {
			s.Endpoints = append(s.Endpoints, e.endpoint(a))
		}
	}
	return s
}

func (e sliceEndpoint) endpoint(a netip.Addr) discoveryv1.Endpoint {
	o := discoveryv1.Endpoint{
		Addresses:  []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: &e.Ready, Serving: &e.Serving, Terminating: &e.Terminates},
	}
	if e.Node != "" {
		o.NodeName = &e.Node
		zone := zoneOf(e.Node)
		o.Zone = &zone
	}
	if len(e.Zones)+len(e.Nodes) > 0 {
		o.Hints = &discoveryv1.EndpointHints{}
	}
	for _, z := range e.Zones {
		o.Hints.ForZones = append(o.Hints.ForZones, discoveryv1.ForZone{Name: z})
	}
	for _, n := range e.Nodes {
		o.Hints.ForNodes = append(o.Hints.ForNodes, discoveryv1.ForNode{Name: n})
	}
	return o
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
