package nftables

import (
	"fmt"

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
	size    uint32 // backends to draw from
	seconds uint32 // of affinity
}

// pick gives the step that serves a target.
func pick(t model.Target, any, outside bool) next {
	switch {
	case len(t.Pool.Backends) > 0:
		return next{picks, any, outside, uint32(len(t.Pool.Backends)), uint32(t.Pool.Affinity.Seconds())}
	case t.Empty == model.Drop:
		return next{does: drops}
	}
	return next{does: refuses}
}

// code gives the step in two registers: how many; how long and what.
func (n next) code() []byte {
	what := n.seconds<<12 | uint32(n.does)
	if n.any {
		what |= 1 << 8
	}
	if n.outside {
		what |= 1 << 9
	}
	return word(word(nil, n.size), what)
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
