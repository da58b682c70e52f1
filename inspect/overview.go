package inspect

import (
	"fmt"
	"maps"
	"slices"

	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Overview is what a node has decided of Services and policies, and whether its kernel holds it.
type Overview struct {
	Node      string            `json:"node"`
	Wanted    int               `json:"factsWanted"`
	Held      int               `json:"factsHeld"`
	Missing   int               `json:"factsMissing"`
	Extra     int               `json:"factsExtra"`
	Frontends []Frontend        `json:"frontends"`
	Counts    []Count           `json:"counts,omitempty"`
	Packets   []Packets         `json:"packets,omitempty"`
	FastPath  *service.FastPath `json:"fastPath,omitempty"`
	Health    []HealthCheck     `json:"healthChecks,omitempty"`
	Policies  *Policies         `json:"policies,omitempty"`
	Problems  []source.Problem  `json:"problems,omitempty"`
}

// Frontend is an address of a Service.
type Frontend struct {
	Service  string   `json:"service"`
	Via      string   `json:"via"`
	Entry    string   `json:"entry"`
	Internal []string `json:"internal"` // endpoints for the node and its pods
	External []string `json:"external"` // endpoints for all other clients
	Affinity string   `json:"sessionAffinity,omitempty"`
	// Masquerade names the origins of clients whose source address becomes the node's, Direct those of them that keep
	// it before endpoints whose node answers the client directly.
	Masquerade string   `json:"masquerade"`
	DSR        string   `json:"directServerReturn,omitempty"`
	Sources    []string `json:"allowedSources,omitempty"`
	Kernel     string   `json:"kernel"`

	Address string      `json:"-"` // Entry for people
	Owner   model.Owner `json:"-"`
}

// Count is what became of a Service's clients on the node.
type Count struct {
	Service     string `json:"service"`
	Connections uint64 `json:"connections"` // of clients on this node, given an endpoint
	Refused     uint64 `json:"refused"`     // for want of one

	Owner model.Owner `json:"-"`
}

// Packets counts packets at the node's devices by what became of them, as the metric fairlead_packets_total does.
type Packets struct {
	Outcome string `json:"outcome"`
	Packets uint64 `json:"packets"`
}

// HealthCheck is a port where a load balancer learns whether the node has endpoints of a Service.
type HealthCheck struct {
	Service string `json:"service"`
	Port    uint16 `json:"port"`
	Local   int    `json:"localBackends"`

	Owner model.Owner `json:"-"`
}

// Overview returns the Services of these names, all and the policies where there is none. A name that nothing has is an
// error.
func (n *Node) Overview(a *Audit, names []string) (*Overview, error) {
	s := &Overview{Node: n.Services.Node.Name, Wanted: a.Wanted, Held: a.Held, Missing: len(a.Put), Extra: len(a.Del),
		FastPath: a.FastPath, Problems: n.Problems}
	s.gather(n, a)
	if len(names) == 0 {
		s.Policies = n.policies(a)
		return s, nil
	}
	return s, s.filter(n, names)
}

// gather adds all that there is of Services.
func (s *Overview) gather(n *Node, a *Audit) {
	for _, f := range n.Services.Sorted() {
		row := Frontend{Service: f.Service, Via: f.Via, Entry: f.Entry.String(), Address: address(f.Entry),
			Owner: f.Owner, Internal: endpoints(f.Internal), External: endpoints(f.External),
			Masquerade: f.Masquerade.String(), Kernel: n.frontend(a, f)}
		if f.Internal.Pool.Affinity > 0 {
			row.Affinity = f.Internal.Pool.Affinity.String()
		}
		if f.DSR != 0 {
			row.DSR = f.DSR.String()
		}
		for _, p := range f.Sources {
			row.Sources = append(row.Sources, p.String())
		}
		s.Frontends = append(s.Frontends, row)
	}
	counts, owners := n.counts(a), map[string]model.Owner{}
	for _, p := range n.Services.Pools() {
		owners[p.Service] = p.Owner
	}
	for _, o := range a.Packets {
		s.Packets = append(s.Packets, Packets{o.Name, o.Packets})
	}
	for _, service := range slices.Sorted(maps.Keys(counts)) {
		s.Counts = append(s.Counts, Count{service, counts[service].Connections, counts[service].Refused,
			owners[service]})
	}
	for _, h := range n.Services.HealthChecks {
		s.Health = append(s.Health, HealthCheck{h.Owner.String(), h.Port, h.Local, h.Owner})
	}
}

// filter leaves the Services of these names.
func (s *Overview) filter(n *Node, names []string) error {
	wanted, known := map[source.Key]bool{}, n.serviceNames()
	for _, name := range names {
		v := known.Service(name)
		if v == nil && n.List != nil { // one without a frontend
			if _, err := n.All(); err == nil {
				known = n.names()
				v = known.Service(name)
			}
		}
		if v == nil {
			return known.Unknown(name)
		}
		wanted[source.KeyOf(v)] = true
	}
	other := func(o model.Owner) bool { return !wanted[keyOf(o)] }
	s.Frontends = slices.DeleteFunc(s.Frontends, func(f Frontend) bool { return other(f.Owner) })
	s.Counts = slices.DeleteFunc(s.Counts, func(c Count) bool { return other(c.Owner) })
	s.Health = slices.DeleteFunc(s.Health, func(h HealthCheck) bool { return other(h.Owner) })
	s.Problems = slices.DeleteFunc(s.Problems, func(p source.Problem) bool {
		return p.Object.Kind == source.Service && !wanted[p.Object]
	})
	return nil
}

// counts returns what became of clients on this node, by Service.
func (n *Node) counts(a *Audit) map[string]service.Count {
	pools := n.Pools()
	return service.PerService(a.Counts, func(id uint64) string {
		if p := pools[id]; p != nil {
			return p.Service
		}
		return ""
	})
}

// endpoints lists a target's backends, or what becomes of packets without any.
func endpoints(t model.Target) (l []string) {
	for _, b := range t.Pool.Backends {
		l = append(l, b.Addr.String())
	}
	if l == nil {
		return []string{t.Empty.String()}
	}
	return l
}

// address returns an entry as people read it: a node port, which is at all of the node's addresses of a family, by its
// family.
func address(e model.Entry) string {
	if !e.AnyAddr() {
		return e.String()
	}
	family := "IPv4"
	if e.Addr.Is6() {
		family = "IPv6"
	}
	return fmt.Sprintf("port %d/%s, %s", e.Port, e.Protocol, family)
}
