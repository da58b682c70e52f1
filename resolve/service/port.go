package service

import (
	"fmt"
	"net/netip"
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
	d, limit := r.out, r.set.limits.Service.Frontends
	d.portList = make([]port, 0, min(len(r.svc.Spec.Ports), limit))
	names := map[groupKey]bool{}
	extra := 0
	for i := range r.svc.Spec.Ports {
		if p, ok := r.readPort(i, names); ok && len(d.portList) == limit {
			extra += len(d.ingressAddresses)
		} else if ok {
			r.addGroups(&p)
			d.portList = append(d.portList, p)
		}
	}
	d.indexGroups()
	left, ranges := d.eachEntry(limit, func(e entry) {
		d.frontends++
		d.groups[e.group].need(d, &e)
	})
	d.ranges = ranges
	if left += extra; left > 0 {
		r.add("spec.ports", "TooManyFrontends", "%d addresses and ports of it are not served: %d are the most for "+
			"one Service, "+
			"and %d source ranges of all of them; use fewer ports, addresses or ranges, or raise the limit",
			left, limit, limit*rangesPerFrontend)
	}
}

// eachEntry calls add with each entry of d, the first limit of them, and returns how many are left out and the source
// ranges of the others.
func (d *declared) eachEntry(limit int, add func(entry)) (left, ranges int) {
	for _, e := range d.fixed {
		add(e)
	}
	n := 0
	one := func(p *port, addr netip.Addr, number uint16, v via, index int) {
		more := 0
		if v == viaLoadBalancer {
			more = len(d.sources)
		}
		if n == limit || ranges+more > limit*rangesPerFrontend {
			left++
			return
		}
		n, ranges = n+1, ranges+more
		add(entry{
			Entry: model.Entry{Addr: addr, Port: number, Protocol: p.protocol},
			via:   v, group: int32(p.groups[familyOf(addr).index()]), port: int32(p.index), index: int32(index),
		})
	}
	for i, w := range d.ingressAddresses {
		if n == limit {
			left += (len(d.ingressAddresses) - i) * len(d.portList)
			break
		}
		for i := range d.portList {
			one(&d.portList[i], w.addr, d.portList[i].number, w.via, w.index)
		}
	}
	for i := range d.portList {
		for _, f := range bothFamilies {
			if p := &d.portList[i]; p.onNode != 0 && p.groups[f.index()] >= 0 {
				one(p, f.any(), p.onNode, viaNodePort, 0)
			}
		}
	}
	return left, ranges
}

// expand makes the entries, and names the pools that they need. hash returns the ID of a pool from its name.
func (d *declared) expand(limit int, hash func(string) uint64) {
	d.entries = make([]entry, 0, d.frontends)
	d.eachEntry(limit, func(e entry) { d.entries = append(d.entries, e) })
	for i := range d.groups {
		d.groups[i].namePools(d.label, hash)
	}
}

// collapse undoes expand: a Service that is not served takes no more memory than what it says.
func (d *declared) collapse() {
	d.entries = nil
	for i := range d.groups {
		d.groups[i].label, d.groups[i].pools = "", [scopes]poolName{}
	}
}

// rangesPerFrontend is how many source ranges a Service may have, all its frontends' together, for each frontend that
// it may have.
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
		r.add(fmt.Sprintf("spec.ports[%d].name", i), "DuplicateName", "an earlier port has the name %q and protocol %s too: "+
			"this one is not served; give it another name", p.name, p.protocol)
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
	for i, f := range bothFamilies {
		p.groups[i] = -1
		if r.families.has(f) {
			p.groups[i] = len(r.out.groups)
			r.out.groups = append(r.out.groups, group{port: intern(p.name), protocol: p.protocol, family: f})
		}
	}
}

// need records the pools that an entry needs. An external entry with the Local policy needs both: clients on this node
// and in its pods use the whole cluster's endpoints.
func (g *group) need(d *declared, e *entry) {
	g.needs[cluster] = g.needs[cluster] || e.via != viaClusterIP || !d.internal
	g.needs[onlyLocal] = g.needs[onlyLocal] || d.isLocal(e)
}

// namePools names the pools that g needs, by the Service's label.
func (g *group) namePools(service string, hash func(string) uint64) {
	g.label = service
	if port := nameOf(g.port); port != "" {
		g.label += ":" + word(port)
	}
	for scope, what := range [scopes]string{cluster: "cluster", onlyLocal: "local"} {
		if g.needs[scope] {
			name := g.label + " " + g.protocol.String() + " " + g.family.String() + " " + what
			g.pools[scope] = poolName{name, hash(name)}
			g.label = name[:len(g.label)] // one text in memory for both
		}
	}
}

// word returns s, quoted if it holds anything that names in Kubernetes don't, so that names put together stay apart.
func word(s string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_'
	}
	if s != "" && strings.IndexFunc(s, func(c rune) bool { return !plain(c) }) < 0 {
		return s
	}
	return strconv.Quote(s)
}
