package nftables

import (
	"fmt"

	"fairlead.dev/fairlead/dataplane/maglev"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// deed is a kind of step.
type deed uint32

const (
	rejects   deed = iota // answers that nothing is there
	drops                 // says nothing
	restricts             // lets permitted sources go on
	splits                // tells clients inside from those outside
	picks                 // draws a backend
	remotes               // has this node and pods find a node port of another node's
)

// next is what is to be done with a packet whose frontend was found. Its code stands in the frontend's element; equal
// codes share a chain.
type next struct {
	does     deed
	any      bool   // the frontend is a node port
	external bool   // the pool is that of the stage outside
	size     uint32 // slots to draw from: a backend has as many as its share
	seconds  uint32 // of affinity
	by       selection
	ports    bool   // a hash of the client's address takes in its port
	pool     uint32 // of a pool that has a chain of its own, what its name begins with: turns are counted there
}

// selection is a way of choosing a slot.
type selection uint32

const (
	atRandom selection = iota
	roundRobin
	bySource
	byDestination
)

// selections reports how schedulers choose. Weights are in the number of slots.
var selections = map[model.Scheduler]selection{
	model.Random: atRandom, model.RoundRobin: roundRobin, model.WeightedRoundRobin: roundRobin,
	model.SourceHash: bySource, model.Maglev: bySource, model.DestinationHash: byDestination,
}

// pick returns the step that serves a target.
func pick(t model.Target, any, external bool) next {
	p := t.Pool
	switch {
	case len(p.Backends) > 0:
		n := next{does: picks, any: any, external: external, size: size(p), seconds: uint32(p.Affinity.Seconds()),
			by: selections[p.Scheduler], ports: p.Ports}
		if n.by == roundRobin {
			n.pool = uint32(p.ID >> 32)
		}
		return n
	case t.Empty == model.Drop:
		return next{does: drops}
	}
	return next{does: rejects}
}

// slots returns what a number is drawn for: the index of a backend in each slot.
func slots(p *model.Pool) (l []uint16) {
	if p.Scheduler == model.Maglev {
		return maglev.Table(p.Backends, int(size(p)))
	}
	if n := size(p); n <= seated {
		return assignSlots(p, int(n))
	}
	for i, b := range p.Backends {
		for range shares(p, b) {
			l = append(l, uint16(i))
		}
	}
	return l
}

// size returns the number of a pool's slots. Maglev's table has about a hundred for each backend: each is an element of
// a map here.
func size(p *model.Pool) (n uint32) {
	if p.Scheduler == model.Maglev {
		return uint32(maglev.Entries(p, tableEntries))
	}
	for _, b := range p.Backends {
		n += uint32(shares(p, b))
	}
	return n
}

// shares returns in how many slots a backend stands.
func shares(p *model.Pool, b model.Backend) int {
	if p.Scheduler == model.RoundRobin {
		return 1
	}
	return b.Share()
}

// code returns the step in three registers: how many; how long, how and what; whose.
func (n next) code() []byte {
	what := n.seconds<<12 | uint32(n.by)<<10 | uint32(n.does)
	for bit, is := range map[int]bool{8: n.any, 9: n.external, 29: n.ports} {
		if is {
			what |= 1 << bit
		}
	}
	return nft.Word(nft.Word(nft.Word(nil, n.size), what), n.pool)
}

// chain names the chain that does n, such as restricted4-any or pick6-10-outside-10800s.
func (n next) chain(f *proto) string {
	name := map[deed]string{rejects: "refuse", restricts: "restricted" + f.Name, splits: "split" + f.Name,
		picks: "pick" + f.Name, remotes: "remote" + f.Name}[n.does]
	if n.does == picks {
		name += fmt.Sprintf("-%d", n.size)
	}
	if n.any {
		name += "-any"
	}
	if n.external {
		name += "-outside"
	}
	if n.seconds > 0 {
		name += fmt.Sprintf("-%ds", n.seconds)
	}
	switch n.by {
	case roundRobin:
		name += fmt.Sprintf("-turn-%08x", n.pool)
	case bySource:
		name += "-source"
	case byDestination:
		name += "-destination"
	}
	if n.ports {
		name += "-port"
	}
	return name
}

// stage returns the stage whose element names n's pool.
func (n next) stage() uint32 {
	if n.external {
		return stageExternal
	}
	return stageEntry
}

// rules returns the chain that draws a backend.
func (n next) rules(f *proto) [][]nft.Expr {
	if n.seconds > 0 {
		return n.remembering(f)
	}
	return [][]nft.Expr{n.selecting(f)}
}

// number puts the number of a slot at to. It may use the registers from free on, of which it needs one more than an
// address takes.
func (n next) number(f *proto, to, free int) []nft.Expr {
	at := f.Src
	switch n.by {
	case atRandom:
		return nft.Exprs(nft.Random(n.size, nft.R(to)))
	case roundRobin:
		return nft.Exprs(nft.RoundRobin(n.size, nft.R(to)))
	case byDestination:
		at = f.Dst
	}
	width, load := uint32(4*f.Words), nft.Exprs(f.Address(at, free))
	if n.ports {
		width += 4
		load = append(load, nft.Payload(nft.TransportHeader, 0, 2, nft.R(free+f.Words)))
	}
	return append(load, nft.Hash(nft.R(free), width, n.size, nft.R(to)))
}
