package ipvs

import (
	"fmt"

	"fairlead.dev/fairlead/kernel/ipvs"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// deed is what is done with a packet that opens a connection to a frontend, before IPVS sees it. Its code stands in the
// frontend's element; equal codes share a chain.
type deed struct {
	does    does
	any     bool   // the frontend is a node port
	stage   uint32 // whose element names the pool
	seconds uint32 // of affinity
}

type does uint32

const (
	passes    does = iota // leaves it to IPVS
	rejects               // answers that nothing is there
	drops                 // says nothing
	restricts             // lets permitted sources go on
	splits                // tells clients inside from those outside
	knows                 // sends a client that is known to its backend again, leaves others to IPVS
)

// serve returns what serves a target.
func serve(t model.Target, any bool, stage uint32) deed {
	switch {
	case len(t.Pool.Backends) > 0 && t.Pool.Affinity > 0:
		return deed{does: knows, any: any, stage: stage, seconds: seconds(t.Pool)}
	case len(t.Pool.Backends) > 0:
		return deed{does: passes}
	case t.Empty == model.Drop:
		return deed{does: drops}
	}
	return deed{does: rejects}
}

// code returns the deed in a register.
func (d deed) code() []byte {
	what := uint32(d.does) | d.stage<<4 | d.seconds<<8
	if d.any {
		what |= 1 << 3
	}
	return nft.Word(nil, what)
}

// chain names the chain that does d, such as restricted4-any or known6-10800s-outside.
func (d deed) chain(f *proto) string {
	switch d.does {
	case passes:
		return "pass"
	case rejects:
		return "refuse"
	}
	name := map[does]string{restricts: "restricted", splits: "split", knows: "known"}[d.does] + f.Name
	if d.does == knows {
		name += fmt.Sprintf("-%ds", d.seconds) + [...]string{stageEntry: "", stageInternal: "-inside",
			stageExternal: "-outside"}[d.stage]
	}
	if d.any {
		name += "-any"
	}
	return name
}

// affinityChain names the chain that remembers who got which backend.
func affinityChain(f *proto, seconds uint32) string {
	return fmt.Sprintf("keep%s-%ds", f.Name, seconds)
}

// scheduler is how a pool's virtual service chooses.
type scheduler struct {
	name  string // as IPVS has it
	flags uint32
	tcp   bool // for a pool of TCP, whose connections outlive their backend's leaving it
}

// schedulerOf returns a pool's scheduler. sh and mh go on to the next where their choice takes no more connections.
func schedulerOf(v *model.Pool) scheduler {
	s := scheduler{name: v.Scheduler.IPVS(), tcp: v.Protocol == model.TCP}
	switch v.Scheduler {
	case model.Random, model.DestinationHash: // not among our Capabilities
		s.name = model.WeightedRoundRobin.IPVS()
	case model.SourceHash, model.Maglev:
		s.flags = ipvs.Fallback
		if v.Ports {
			s.flags |= ipvs.WithPort
		}
	}
	return s
}

// String returns the value of a service's fact, such as "mh fallback port tcp".
func (s scheduler) String() string {
	text := s.name
	for _, w := range words {
		if s.flags&w.flag != 0 {
			text += " " + w.name
		}
	}
	if s.tcp {
		text += " tcp"
	}
	return text
}

var words = []struct {
	flag uint32
	name string
}{{ipvs.Fallback, "fallback"}, {ipvs.WithPort, "port"}}
