package ebpf

import (
	"context"
	"errors"
	"sync/atomic"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Count is what a pool's clients on this node were told since it was written.
type Count struct {
	Connections uint64 // TCP connections and UDP flows given a backend
	Refused     uint64 // those for which there was none
}

// errNothing says that a plane can't look at what it never read.
var errNothing = errors.New("ebpf: nothing of this version is in the kernel: is the agent running, in this mode and network namespace?")

// Counts gives the counts of all pools held, by ID. It needs a Read before.
func (p *Plane) Counts() (map[uint64]Count, error) {
	if p.maps == nil {
		return nil, errNothing
	}
	counts := make(map[uint64]Count, len(p.pools))
	for id, i := range p.pools {
		c := &p.maps.Counts[i]
		counts[id] = Count{atomic.LoadUint64(&c.Connections), atomic.LoadUint64(&c.Refused)}
	}
	return counts, nil
}

// Trace calls take with what each connect() and first datagram to a frontend comes to, until ctx ends: only of one pool or
// one network namespace (by cookie) where these are not 0. It needs a Read before.
func (p *Plane) Trace(ctx context.Context, pool, namespace uint64, take func(bpf.Event)) error {
	if p.maps == nil {
		return errNothing
	}
	return p.maps.Trace(ctx, pool, namespace, take)
}

// Packets gives what became of packets at the node's devices. It needs a Read before.
func (p *Plane) Packets() (bpf.PacketCounts, error) {
	if p.maps == nil {
		return bpf.PacketCounts{}, errNothing
	}
	return p.maps.PacketCounts()
}
