package service

import (
	"strings"
	"unique"
)

// distribution is a Service's spec.trafficDistribution.
type distribution uint8

const (
	anywhere  distribution = iota // not set
	closeZone                     // PreferSameZone, and PreferClose, its first name
	closeNode                     // PreferSameNode
)

// String returns the word for spec.trafficDistribution.
func (d distribution) String() string { return [...]string{"", "PreferSameZone", "PreferSameNode"}[d] }

// nearness is how near to this node the endpoints must be that take its traffic.
type nearness uint8

const (
	wherever nearness = iota
	inZone
	onNode
)

// topology reports which endpoints this node should use, by their hints (KEP-2433, KEP-3015).
type topology struct {
	zone unique.Handle[string] // this node's; zero: not known
	// set where no endpoint carries a hint: zone and node of the endpoint itself stand for hints
	own  distribution
	need nearness
}

// topologyFor decides as kube-proxy does (pkg/proxy/topology.go): the same node if every ready endpoint has node hints
// and one is for this node; else the same zone if every ready endpoint has zone hints and one is for this zone; else
// wherever. A Service that asks for a distribution while none of its ready endpoints has any hint is decided as if each
// were hinted for its own zone and, with PreferSameNode, its own node: what the EndpointSlice controller would have
// written.
func topologyFor(of []candidate, requested distribution, zone unique.Handle[string]) topology {
	t := topology{zone: zone}
	if !hinted(of) {
		t.own = requested
	}
	forNode, forZone := tally{every: true}, tally{every: true}
	for _, c := range of {
		if c.is().has(ready) {
			forNode.count(t.nodes(c.endpoint))
			forZone.count(t.zones(c.endpoint))
		}
	}
	switch {
	case forNode.holds():
		t.need = onNode
	case forZone.holds():
		t.need = inZone
	}
	return t
}

// hinted reports whether a ready endpoint has a hint.
func hinted(of []candidate) bool {
	for _, c := range of {
		if c.is().has(ready) && (c.is().has(forSomeNode) || c.what.Value().forZones != unique.Handle[string]{}) {
			return true
		}
	}
	return false
}

// nodes reports whether e is meant for some nodes only, and whether this node is one of them.
func (t *topology) nodes(e *endpoint) (some, this bool) {
	if t.own == closeNode {
		return e.is().has(onSomeNode), e.is().has(local)
	}
	return e.is().has(forSomeNode), e.is().has(forThisNode)
}

// zones reports whether e is meant for some zones only, and whether this node's is one of them.
func (t *topology) zones(e *endpoint) (some, this bool) {
	what := e.what.Value()
	list := what.forZones
	if t.own == closeNode || t.own == closeZone {
		list = what.zone
	}
	var none unique.Handle[string]
	if list == none || t.zone == none {
		return list != none, false
	}
	return true, list == t.zone || listed(list.Value(), t.zone.Value())
}

// listed reports whether name is in the comma-separated list.
func listed(list, name string) bool {
	for item := range strings.SplitSeq(list, ",") {
		if item == name {
			return true
		}
	}
	return false
}

// fits reports whether e is near enough.
func (t *topology) fits(e *endpoint) bool {
	this := true
	switch t.need {
	case onNode:
		_, this = t.nodes(e)
	case inZone:
		_, this = t.zones(e)
	}
	return this
}

// tally counts whether every endpoint is meant for some, and one for this.
type tally struct{ every, one bool }

func (t *tally) count(some, this bool) {
	t.every = t.every && some
	t.one = t.one || this
}

func (t tally) holds() bool { return t.every && t.one }
