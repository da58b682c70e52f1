package conformance

import (
	"context"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Implementation is a service data plane to be judged, and perhaps a policy engine beside it.
type Implementation struct {
	model.Capabilities
	// Start makes the plane in the calling thread's network namespace. Runner takes the decided node's changes. What an
	// earlier Runner left in the kernel is put right, not flushed.
	Start func() (Runner[model.ServicePart], error)
	// Engine makes it a pair: cases of policies are run by a service data plane and a policy engine. Nil: no policies.
	Engine            *Engine
	Network           *PodNetwork // connects pods; nil: wires do
	UnpolicedServices string      // why policy engines don't evaluate what clients send to Services; "": they do
	// Slow is how many times longer than on a real processor anything may take that must happen, such as an answer: 1 if
	// zero.
	Slow int
}

// Engine is a policy engine to be judged beside a service data plane.
type Engine struct {
	Name  string                                   // as policy.engine has it, such as nftables
	Start func() (Runner[model.PolicyPart], error) // as Implementation.Start
}

// label returns the name of the pair, such as "ebpf with policy engine nftables".
func (s Implementation) label() string {
	label := s.Name
	if s.Engine != nil {
		label += " with policy engine " + s.Engine.Name
	}
	if s.Network != nil {
		label += " over pod network " + s.Network.Name
	}
	return label
}

// named reports whether a line of an unless section is about s: by its mode, by "engine=" and its policy engine, or by
// "network=" and its pod network.
func (s Implementation) named(name string) bool {
	if engine, is := strings.CutPrefix(name, "engine="); is {
		return s.Engine != nil && s.Engine.Name == engine
	}
	if network, is := strings.CutPrefix(name, "network="); is {
		return s.Network != nil && s.Network.Name == network
	}
	return name == s.Name
}

// within returns how long what takes d at most may take of this subject.
func (s Implementation) within(d time.Duration) time.Duration {
	return d * time.Duration(max(1, s.Slow))
}

// Runner is a data plane for parts of type T at work on one node. Its methods are called by one goroutine at a time.
type Runner[T any] interface {
	// Change takes what is now and what is no more, as model.Delta has it.
	Change(put, del []T)
	// Sync returns once the kernel is as told, or with the reason why it can't be.
	Sync(ctx context.Context) error
	// Close stops and leaves the kernel as it is.
	Close() error
}

// FaultInjector is a Runner that can do what a stranger could: remove some of what it wrote from the kernel, past its
// own bookkeeping; that must be mended within seconds. It is called in the node's network namespace. Cases with a
// section disturb need it.
type FaultInjector interface {
	InjectFault(ctx context.Context) error
}

// Dumper is a Runner that can show what the kernel holds of it, for the messages of failed cases. It is called in the
// node's network namespace.
type Dumper interface{ Dump() string }

// cannot returns why the subject doesn't serve f, or does not leave alone what no frontend takes (f is nil), in
// questions and answers of that many bytes, or "".
func (s Implementation) cannot(f *model.Frontend, protocol model.Protocol, size int) string {
	if f != nil {
		protocol = f.Entry.Protocol
		if why := s.WhyNot(f); why != "" {
			return why
		}
	}
	if size > shortest {
		return model.First(s.Long, f, protocol)
	}
	return ""
}

// leaves returns why the subject doesn't do with a packet of so many bytes what verdict says, or "".
func (s Implementation) leaves(j assessment, size int) string {
	if j.outcome.Frontend == nil && j.outcome.Action != verdict.Pass && !j.denied() {
		if why := model.First(s.Unmatched, nil, j.packet.Protocol); why != "" {
			return why
		}
	}
	if why := s.unpoliced(j); why != "" {
		return why
	}
	return s.cannot(j.outcome.Frontend, j.packet.Protocol, size)
}

// unpoliced returns why no policy engine evaluates the packet in this mode, or "".
func (s Implementation) unpoliced(j assessment) string {
	if s.Engine == nil || j.outcome.Frontend == nil {
		return ""
	}
	return s.UnpolicedServices
}

// shortest is how long a packet of any path may be, of IPv6 (RFC 8200, section 5): what is in it is shorter.
const shortest = 1280 - 40 - 20
