// Package model holds the nouns of a decided node: what a data plane is to do, with every question of meaning answered.
// Each subsystem has its own sealed kind of part (ServicePart); what is true of the node alone is Node.
//
// Values are immutable once built: the same pointer means no change. There is no I/O here, no Kubernetes and no
// behaviour beyond printing and comparing.
package model

import (
	"fmt"
	"net/netip"
	"strings"
)

// Node is what is true of this node alone, whatever it serves.
type Node struct {
	Name      string
	Addresses []netip.Addr   // the node's own, as far as known; sorted. For verdict: a kernel knows its addresses itself
	Pods      []netip.Prefix // sources that count as pods; sorted, none inside another
	// PodInterfaces are interfaces of this node: packets that arrive on them count as pods', whatever their source. Pods
	// is empty then.
	PodInterfaces Interfaces
}

// Protocol is a transport protocol by its IP protocol number.
type Protocol uint8

// The protocols of Services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns "tcp", "udp", "sctp", or the number.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprint(uint8(p))
}

// Origin reports where a packet comes from, seen from this node.
type Origin uint8

// The origins. An address of this node wins over a pod's range that holds it.
const (
	FromNode     Origin = iota // the source is one of this node's own addresses
	FromPod                    // the source is a pod's, by Node.Pods or Node.PodInterfaces
	FromExternal               // anything else
)

// String returns "node", "pod" or "external".
func (o Origin) String() string { return [...]string{"node", "pod", "external"}[o] }

// Origins is a set of origins, a bit each (1 << Origin).
type Origins uint8

// OriginsOf makes a set.
func OriginsOf(os ...Origin) (s Origins) {
	for _, o := range os {
		s |= 1 << o
	}
	return s
}

// AllOrigins holds every origin.
const AllOrigins = Origins(1<<FromNode | 1<<FromPod | 1<<FromExternal)

// Has reports whether o is in the set.
func (s Origins) Has(o Origin) bool { return s&(1<<o) != 0 }

// String returns the members, comma-separated, or "none".
func (s Origins) String() string {
	var l []string
	for _, o := range []Origin{FromNode, FromPod, FromExternal} {
		if s.Has(o) {
			l = append(l, o.String())
		}
	}
	if l == nil {
		return "none"
	}
	return strings.Join(l, ",")
}

// Range is the addresses from First to Last, both included, of one family.
type Range struct{ First, Last netip.Addr }

// Contains reports whether a is in the range.
func (r Range) Contains(a netip.Addr) bool {
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// String returns "first-last".
func (r Range) String() string { return r.First.String() + "-" + r.Last.String() }

// Interfaces names network interfaces of the node: one, or with Prefix all whose names begin with Name. The zero value
// names none.
type Interfaces struct {
	Name   string
	Prefix bool
}

// Has reports whether i names the interface of that name.
func (i Interfaces) Has(name string) bool {
	if i.Name == "" {
		return false
	}
	return name == i.Name || i.Prefix && strings.HasPrefix(name, i.Name)
}

// String returns "cni0", "veth*", or "" for none.
func (i Interfaces) String() string {
	if i.Prefix {
		return i.Name + "*"
	}
	return i.Name
}
