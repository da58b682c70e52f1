package resolve

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

// port is a Service's port as read.
type port struct {
	index          int
	name           string
	protocol       model.Protocol
	number, onNode uint16 // onNode: the node port; 0: none
	groups         [2]int // by index in bothFamilies; -1: none
}

func (r *reading) readPorts() {
	ports := make([]port, 0, len(r.svc.Spec.Ports))
	for i := range r.svc.Spec.Ports {
		if p, ok := r.readPort(i, ports); ok {
			r.addGroups(&p)
			ports = append(ports, p)
		}
	}
	r.out.entries = make([]entry, 0, (len(r.in)+1)*len(ports))
	for _, w := range r.in {
		for i := range ports {
			r.addEntry(&ports[i], w.addr, ports[i].number, w.via, w.index)
		}
	}
	for i := range ports {
		for _, f := range bothFamilies {
			if ports[i].onNode != 0 && r.families.has(f) {
				r.addEntry(&ports[i], f.any(), ports[i].onNode, viaNodePort, 0)
			}
		}
	}
	r.namePools()
}

// readPort reads spec.ports[i]; before are those read already.
func (r *reading) readPort(i int, before []port) (p port, ok bool) {
	in := &r.svc.Spec.Ports[i]
	p = port{index: i, name: in.Name}
	var err *flaw
	if p.protocol, err = parseProtocol(in.Protocol); err != nil {
		r.flawed(fmt.Sprintf("spec.ports[%d].protocol", i), err, "this port is not served; correct it")
		return p, false
	}
	if p.number, err = parsePort(in.Port); err != nil {
		r.flawed(fmt.Sprintf("spec.ports[%d].port", i), err, "this port is not served; correct it")
		return p, false
	}
	if slices.ContainsFunc(before, func(o port) bool { return o.name == p.name && o.protocol == p.protocol }) {
		r.add(fmt.Sprintf("spec.ports[%d].name", i), "DuplicateName", "an earlier port has the name %q and protocol %s too: this one is not served; give it another name", p.name, p.protocol)
		return p, false
	}
	p.onNode = r.readNodePort(i, in.NodePort)
	return p, true
}

func (r *reading) readNodePort(i int, n int32) uint16 {
	if n == 0 {
		return 0
	}
	field := fmt.Sprintf("spec.ports[%d].nodePort", i)
	if !r.hasNodePorts() {
		r.add(field, "NodePortLeftOut", "the type has no node ports: %d is not served; use type NodePort or LoadBalancer", n)
		return 0
	}
	number, err := parsePort(n)
	if err != nil {
		r.flawed(field, err, "the node port is not served; correct it")
	}
	return number
}

// addGroups makes the groups of a port.
func (r *reading) addGroups(p *port) {
	label := r.out.label
	if p.name != "" {
		label += ":" + word(p.name)
	}
	for i, f := range bothFamilies {
		p.groups[i] = -1
		if r.families.has(f) {
			p.groups[i] = len(r.out.groups)
			r.out.groups = append(r.out.groups, group{label: label, port: intern(p.name), protocol: p.protocol, family: f})
		}
	}
}

func (r *reading) addEntry(p *port, addr netip.Addr, number uint16, v via, index int) {
	g := p.groups[slices.Index(bothFamilies[:], familyOf(addr))]
	r.out.entries = append(r.out.entries, entry{
		Entry: model.Entry{Addr: addr, Port: number, Protocol: p.protocol},
		via:   v, group: int32(g), port: int32(p.index), index: int32(index),
	})
}

// namePools names the pools that the entries need. An external entry with the Local policy needs both: clients on this
// node and in its pods use the whole cluster's endpoints.
func (r *reading) namePools() {
	for i := range r.out.entries {
		e := &r.out.entries[i]
		if e.via != viaClusterIP || !r.out.internal {
			r.namePool(e.group, cluster, "cluster")
		}
		if r.out.isLocal(e) {
			r.namePool(e.group, onlyLocal, "local")
		}
	}
}

func (r *reading) namePool(index int32, scope int, what string) {
	g := &r.out.groups[index]
	if g.pools[scope].name != "" {
		return
	}
	name := g.label + " " + g.protocol.String() + " " + g.family.String() + " " + what
	g.pools[scope] = poolName{name, r.hash(name)}
	g.label = name[:len(g.label)] // one text in memory for both
}

// word gives s, quoted if it holds anything that names in Kubernetes don't, so that names put together stay apart.
func word(s string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_'
	}
	if s != "" && strings.IndexFunc(s, func(c rune) bool { return !plain(c) }) < 0 {
		return s
	}
	return strconv.Quote(s)
}
