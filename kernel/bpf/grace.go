package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// Grace waits until every program that is running now has ended, so that none still reads what was unlinked before:
// the kernel does so whenever a map of maps is written (maybe_wait_bpf_programs in kernel/bpf/syscall.c).
type Grace struct{ outer, inner *ebpf.Map }

// NewGrace returns one.
func NewGrace() (*Grace, error) {
	of := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	inner, err := ebpf.NewMap(of)
	if err != nil {
		return nil, fmt.Errorf("bpf: make a map: %w", Explain(err))
	}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: of})
	if err != nil {
		inner.Close()
		return nil, fmt.Errorf("bpf: make a map of maps: %w", Explain(err))
	}
	return &Grace{outer, inner}, nil
}

// Wait waits, for some milliseconds.
func (g *Grace) Wait() error {
	if err := g.outer.Put(uint32(0), uint32(g.inner.FD())); err != nil {
		return fmt.Errorf("bpf: wait for running programs: %w", err)
	}
	return nil
}

// Close closes it.
func (g *Grace) Close() {
	g.outer.Close()
	g.inner.Close()
}
