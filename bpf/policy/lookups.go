package policy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Lookups counts what packets have looked up in maps of network policies.
type Lookups struct{ Packets, Lookups uint64 }

// LoadCounting loads the program at netfilter's hooks to count its lookups in maps, for measurements. Arrays, which are
// read in place, and ports of fragments don't count. In the fast path it is not called.
func (m *Maps) LoadCounting() (*Program, error) {
	p, err := m.load("policy", map[string]uint32{"count_lookups": 1})
	return &Program{program: p}, err
}

// Lookups returns what programs have counted that LoadCounting loaded.
func (m *Maps) Lookups() (l Lookups, err error) {
	for index, n := range map[policyLookupCount]*uint64{policyLookupCountLOOKUPS: &l.Lookups,
		policyLookupCountLOOKUPS_PACKETS: &l.Packets} {
		var each []uint64
		if err := m.named[policyMapFlLookups].Lookup(uint32(index), &each); err != nil {
			return l, fmt.Errorf("bpf: read map %s: %w", policyMapFlLookups, err)
		}
		for _, c := range each {
			*n += c
		}
	}
	return l, nil
}

// Replace has attach attach a program in place of the one with links pinned in the folder, and waits until
// that one no longer runs, which the kernel sees to in the background.
func Replace(ctx context.Context, folder string, attach func() error) error {
	old, err := bpf.ProgramID(filepath.Join(folder, Pinned))
	if err == nil {
		err = attach()
	}
	for err == nil && old != 0 {
		p, gone := ebpf.NewProgramFromID(ebpf.ProgramID(old))
		if gone != nil {
			if errors.Is(gone, fs.ErrNotExist) {
				return nil
			}
			return fmt.Errorf("bpf: look for the program of network policies that was replaced: %w", gone)
		}
		p.Close()
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return err
}
