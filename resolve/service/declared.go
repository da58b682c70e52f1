package service

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unique"

	"fairlead.dev/fairlead/model"
)

// via is the kind of way into a Service.
type via uint8

const (
	viaClusterIP via = iota
	viaLoadBalancer
	viaExternalIP
	viaNodePort
	viaHostPort
)

// String returns the word for model.Frontend.Via.
func (v via) String() string {
	return [...]string{model.ViaClusterIP, "LoadBalancer", "ExternalIP", "NodePort", model.ViaHostPort}[v]
}

// declared is what a Service asks for, whatever its endpoints and the node, or a pod with host ports on this node.
type declared struct {
	label string // "shop/web"
	// Unix seconds; the highest number where not said, so that those with an age come first
	created          int64
	ingressAddresses []ingressAddress // addresses by which traffic enters
	foreign          []netip.Addr     // ClusterIPs, if another proxy serves the Service
	portList         []port
	groups           []group
	frontends        int     // how many entries it has, made or not
	fixed            []entry // a pod's, in place of those that addresses and ports come to
	entries          []entry // in the order in which they take an entry that two of them want; nil unless expanded
	distributed
	restrictions
	health   uint16           // port of the health check; 0: none
	index    map[groupKey]int // of groups, where they are many
	problems problems
}

// distributed is which endpoints clients of a Service get.
type distributed struct {
	internal  bool // internalTrafficPolicy: Local
	external  bool // externalTrafficPolicy: Local
	spread    distribution
	affinity  time.Duration
	scheduler model.Scheduler
	ports     bool // the scheduler hashes the client's port too
}

// restrictions are the clients that a Service serves.
type restrictions struct {
	sources    []netip.Prefix // for ingress addresses of restricted families: the only ones let in
	restricted families       // families that sources restrict
	ranges     int            // source ranges of all frontends
}

// groupKey is what tells the groups of a Service apart.
type groupKey struct {
	port     unique.Handle[string]
	protocol model.Protocol
	family   family
}

// fewGroups is how many groups are searched one by one.
const fewGroups = 8

// groupOf returns the index of a group, -1 for none.
func (d *declared) groupOf(k groupKey) int {
	if d.index != nil {
		if i, ok := d.index[k]; ok {
			return i
		}
		return -1
	}
	return slices.IndexFunc(d.groups, func(g group) bool { return groupKey{g.port, g.protocol, g.family} == k })
}

// indexGroups prepares groupOf.
func (d *declared) indexGroups() {
	if len(d.groups) <= fewGroups {
		return
	}
	d.index = make(map[groupKey]int, len(d.groups))
	for i := range d.groups {
		g := &d.groups[i]
		d.index[groupKey{g.port, g.protocol, g.family}] = i
	}
}

// group is what one port of a Service has in one family: endpoints, and pools of them.
type group struct {
	port     unique.Handle[string]
	protocol model.Protocol
	family   family
	needs    [scopes]bool // which pools its entries need

	// Empty unless expanded.
	label string // "shop/web:http", the start of its pools' names
	pools [scopes]poolName
}

// The pools of a group.
const (
	cluster = iota // all of the cluster's endpoints
	onlyLocal
	scopes
)

// poolName names a pool; zero where no policy needs the pool.
type poolName struct {
	name string
	id   uint64
}

// entry is a way into a Service.
type entry struct {
	model.Entry
	via   via
	group int32
	port  int32 // index in spec.ports, of a host port in those of its container
	index int32 // of the address in its list; of a host port that of the container, -1 and below for sidecars
}

// field returns the path of what asks for the entry.
func (e *entry) field() string { return field(e.via, int(e.index), int(e.port)) }

// field returns the path of the address at that index of its list, or of the port's node port or host port. A
// clusterIP's index is -1 where spec.clusterIP alone is given.
func field(v via, index, port int) string {
	switch {
	case v == viaHostPort && index < 0:
		return fmt.Sprintf("spec.initContainers[%d].ports[%d].hostPort", -1-index, port)
	case v == viaHostPort:
		return fmt.Sprintf("spec.containers[%d].ports[%d].hostPort", index, port)
	case v == viaNodePort:
		return fmt.Sprintf("spec.ports[%d].nodePort", port)
	case v == viaExternalIP:
		return fmt.Sprintf("spec.externalIPs[%d]", index)
	case v == viaLoadBalancer:
		return fmt.Sprintf("status.loadBalancer.ingress[%d].ip", index)
	case index < 0:
		return "spec.clusterIP"
	}
	return fmt.Sprintf("spec.clusterIPs[%d]", index)
}

// isLocal reports whether the entry's traffic from outside goes to endpoints of this node only.
func (d *declared) isLocal(e *entry) bool {
	return e.via == viaClusterIP && d.internal || e.via != viaClusterIP && d.external
}
