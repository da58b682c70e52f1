package model

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Change is what came and what went of one kind of part. A changed part has its old value in Del and its new one in
// Put.
type Change[T any] struct{ Put, Del []T }

// Empty reports whether nothing changed.
func (c Change[T]) Empty() bool { return len(c.Put)+len(c.Del) == 0 }

// Delta is a change of a decided node, by subsystem.
type Delta struct {
	Services  Change[ServicePart]
	Health    Change[*HealthCheck]
	Policies  Change[PolicyPart]
	Triggered []time.Time // when the events behind it happened, by the cluster's clock, as far as it is known
}

// Empty reports whether nothing changed.
func (d Delta) Empty() bool { return d.Services.Empty() && d.Health.Empty() && d.Policies.Empty() }

// Snapshot is a whole decided node.
type Snapshot struct {
	Node         *Node
	ServiceNode  *ServiceNode // its Node is Node
	Frontends    map[Entry]*Frontend
	ClusterIPs   map[netip.Addr]*ClusterIP
	HealthChecks []*HealthCheck
	Policies     *Policies // nil: policies are not enforced
}

// Sorted returns the frontends in the order of their entries.
func (s *Snapshot) Sorted() []*Frontend {
	l := make([]*Frontend, 0, len(s.Frontends))
	for _, f := range s.Frontends {
		l = append(l, f)
	}
	slices.SortFunc(l, func(a, b *Frontend) int { return a.Entry.Compare(b.Entry) })
	return l
}

// Pools returns the pools of all frontends, each once, by name.
func (s *Snapshot) Pools() []*Pool {
	seen := map[*Pool]bool{}
	for _, f := range s.Frontends {
		seen[f.Internal.Pool], seen[f.External.Pool] = true, true
	}
	l := make([]*Pool, 0, len(seen))
	for p := range seen {
		l = append(l, p)
	}
	slices.SortFunc(l, func(a, b *Pool) int { return strings.Compare(a.Name, b.Name) })
	return l
}

// Parts returns everything a service data plane serves: the node, then pools, then frontends, then ClusterIPs.
func (s *Snapshot) Parts() []ServicePart {
	l := []ServicePart{s.ServiceNode}
	for _, p := range s.Pools() {
		l = append(l, p)
	}
	for _, f := range s.Sorted() {
		l = append(l, f)
	}
	for _, a := range slices.SortedFunc(maps.Keys(s.ClusterIPs), netip.Addr.Compare) {
		l = append(l, s.ClusterIPs[a])
	}
	return l
}
