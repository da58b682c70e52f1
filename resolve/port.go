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
	limit := r.set.limits.Service.Frontends
	ports := make([]port, 0, min(len(r.svc.Spec.Ports), limit))
	names := map[groupKey]bool{}
	for i := range r.svc.Spec.Ports {
		if p, ok := r.readPort(i, names); ok && len(ports) == limit {
			r.out.left += len(r.in)
		} else if ok {
			r.addGroups(&p)
			ports = append(ports, p)
		}
	}
	r.out.indexGroups()
	r.out.entries = make([]entry, 0, min((len(r.in)+1)*len(ports), limit))
	for i, w := range r.in {
		if len(r.out.entries) == limit {
			r.out.left += (len(r.in) - i) * len(ports)
			break
		}
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
	if r.out.left > 0 {
		r.add("spec.ports", "TooManyFrontends", "%d addresses and ports of it are not served: %d are the most for one Service, and %d source ranges "+
			"of all of them; use fewer ports, addresses or ranges, or raise the limit", r.out.left, limit, limit*rangesPerFrontend)
	}
	r.namePools()
}

// rangesPerFrontend is how many source ranges a Service may have, all its frontends' together, for each frontend that it
// may have.
const rangesPerFrontend = 4

// readPort reads spec.ports[i]; names are those of the ports read already.
func (r *reading) readPort(i int, names map[groupKey]bool) (p port, ok bool) {
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
	key := groupKey{port: intern(p.name), protocol: p.protocol}
	if names[key] {
		r.add(fmt.Sprintf("spec.ports[%d].name", i), "DuplicateName", "an earlier port has the name %q and protocol %s too: this one is not served; give it another name", p.name, p.protocol)
		return p, false
	}
	names[key] = true
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
	limit := r.set.limits.Service.Frontends
	ranges := 0
	if v == viaLoadBalancer {
		ranges = len(r.out.sources)
	}
	if len(r.out.entries) == limit || r.out.ranges+ranges > limit*rangesPerFrontend {
		r.out.left++
		return
	}
	r.out.ranges += ranges
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
