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
	refuses   deed = iota // answers that nothing is there
	drops                 // says nothing
	restricts             // lets permitted sources go on
	splits                // tells clients inside from those outside
	picks                 // draws a backend
)

// next is what is to be done with a packet whose frontend was found. Its code stands in the frontend's element; equal
// codes share a chain.
type next struct {
	does    deed
	any     bool   // the frontend is a node port
	outside bool   // the pool is that of the stage outside
	size    uint32 // slots to draw from: a backend has as many as its share
	seconds uint32 // of affinity
	by      draw
	ports   bool   // a hash of the client's address takes in its port
	pool    uint32 // of a pool that has a chain of its own, what its name begins with: turns are counted there
}

// draw is a way of choosing a slot.
type draw uint32

const (
	atRandom draw = iota
	inTurn
	bySource
	byDestination
)

// draws tells how schedulers choose. Weights are in the number of slots.
var draws = map[model.Scheduler]draw{
	model.Random: atRandom, model.RoundRobin: inTurn, model.WeightedRoundRobin: inTurn,
	model.SourceHash: bySource, model.Maglev: bySource, model.DestinationHash: byDestination,
}

// pick gives the step that serves a target.
func pick(t model.Target, any, outside bool) next {
	p := t.Pool
	switch {
	case len(p.Backends) > 0:
		n := next{does: picks, any: any, outside: outside, size: size(p), seconds: uint32(p.Affinity.Seconds()), by: draws[p.Scheduler], ports: p.Ports}
		if n.by == inTurn {
			n.pool = uint32(p.ID >> 32)
		}
		return n
	case t.Empty == model.Drop:
		return next{does: drops}
	}
	return next{does: refuses}
}

// slots gives what a number is drawn for: the index of a backend in each slot.
func slots(p *model.Pool) (l []uint16) {
	if p.Scheduler == model.Maglev {
		return maglev.Table(p.Backends, int(size(p)))
	}
	if n := size(p); n <= seated {
		return seats(p, int(n))
	}
	for i, b := range p.Backends {
		for range shares(p, b) {
			l = append(l, uint16(i))
		}
	}
	return l
}

// size gives the number of a pool's slots. Maglev's table has about a hundred for each backend: each is an element of a
// map here.
func size(p *model.Pool) (n uint32) {
	if p.Scheduler == model.Maglev {
		return uint32(maglev.Entries(p, Abilities.Table))
	}
	for _, b := range p.Backends {
		n += uint32(shares(p, b))
	}
	return n
}

// shares gives in how many slots a backend stands.
func shares(p *model.Pool, b model.Backend) int {
	if p.Scheduler == model.RoundRobin {
		return 1
	}
	return b.Share()
}

// code gives the step in three registers: how many; how long, how and what; whose.
func (n next) code() []byte {
	what := n.seconds<<12 | uint32(n.by)<<10 | uint32(n.does)
	for bit, is := range map[int]bool{8: n.any, 9: n.outside, 29: n.ports} {
		if is {
			what |= 1 << bit
		}
	}
	return nft.Word(nft.Word(nft.Word(nil, n.size), what), n.pool)
}

// chain names the chain that does n, such as restricted4-any or pick6-10-outside-10800s.
func (n next) chain(f *proto) string {
	name := map[deed]string{refuses: "refuse", restricts: "restricted" + f.name, splits: "split" + f.name, picks: "pick" + f.name}[n.does]
	if n.does == picks {
		name += fmt.Sprintf("-%d", n.size)
	}
	if n.any {
		name += "-any"
	}
	if n.outside {
		name += "-outside"
	}
	if n.seconds > 0 {
		name += fmt.Sprintf("-%ds", n.seconds)
	}
	switch n.by {
	case inTurn:
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

// stage gives the stage whose element names n's pool.
func (n next) stage() uint32 {
	if n.outside {
		return stageOutside
	}
	return stageEntry
}

// rules gives the chain that draws a backend.
func (n next) rules(f *proto) [][]nft.Expr {
	if n.seconds > 0 {
		return n.remembering(f)
	}
	return [][]nft.Expr{n.drawing(f)}
}

// number puts the number of a slot at to. It may use the registers from free on, of which it needs one more than an address
// takes.
func (n next) number(f *proto, to, free int) []nft.Expr {
	at := f.src
	switch n.by {
	case atRandom:
		return nft.Exprs(nft.Random(n.size, nft.R(to)))
	case inTurn:
		return nft.Exprs(nft.Turn(n.size, nft.R(to)))
	case byDestination:
		at = f.dst
	}
	width, load := uint32(4*f.words), nft.Exprs(nft.Payload(nft.NetworkHeader, at, uint32(4*f.words), nft.R(free)))
	if n.ports {
		width += 4
		load = append(load, nft.Payload(nft.TransportHeader, 0, 2, nft.R(free+f.words)))
	}
	return append(load, nft.Hash(nft.R(free), width, n.size, nft.R(to)))
}
