package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
)

// What the programs report and count, and which of it is wanted.
type (
	Event        = bpf.Event
	Filter       = bpf.Filter
	PacketCounts = bpf.PacketCounts
)

// Count is what a pool's clients on this node were told since it was written.
type Count struct {
	Connections uint64 // TCP connections and UDP flows given a backend
	Refused     uint64 // those for which there was none
}

// errNothing says that there is nothing to look at.
var errNothing = errors.New("ebpf: no programs of this version are attached in this network namespace: run the agent there with --mode ebpf " +
	"(the other modes have no hooks to look through), and this command with its --ebpf flags")

// look calls f with the maps as they are, beside whoever writes them.
func (p *Plane) look(f func(*bpf.Maps) error) error {
	if _, err := os.Stat(p.linksFolder()); err != nil {
		return errNothing
	}
	m, err := bpf.OpenMaps(p.mapsFolder(), p.Sizes)
	if bpf.Absent(err) {
		return errNothing
	}
	if err != nil {
		return err
	}
	return errors.Join(f(m), m.Close())
}

// Counts gives the counts of all pools held, by ID: none where nothing is in the kernel. It may be called at any time.
func (p *Plane) Counts() (counts map[uint64]Count, err error) {
	err = p.look(func(m *bpf.Maps) error {
		counts = map[uint64]Count{}
		for i := range m.Pools {
			if pool := &m.Pools[i]; atomic.LoadUint32(&pool.Extent) != 0 {
				counts[pool.Id] = Count{atomic.LoadUint64(&pool.Connections), atomic.LoadUint64(&pool.Refused)}
			}
		}
		return nil
	})
	if errors.Is(err, errNothing) {
		err = nil
	}
	return counts, err
}

// Trace calls take with what each connect() and first datagram to a frontend comes to, until ctx ends, and gives how many of
// these were lost.
func (p *Plane) Trace(ctx context.Context, f Filter, take func(Event)) (lost uint64, err error) {
	err = p.look(func(m *bpf.Maps) (err error) {
		lost, err = m.Trace(ctx, f, take)
		return err
	})
	return lost, err
}

// Hosts tells of the network namespaces of this machine, whose cookies events bear.
func Hosts() ([]netns.Host, error) {
	hosts, err := netns.Hosts()
	if err != nil {
		return nil, fmt.Errorf("ebpf: find the clients' network namespaces: %w", err)
	}
	return hosts, nil
}

// Names of folders within the plane's: pins of hooks, and of programs for packets.
const (
	linksName   = "links"
	devicesName = "devices"
)

// Runs gives what the kernel knows of the programs of the calling thread's network namespace.
func Runs() ([]bpf.Run, error) {
	folder, _, err := bpf.Folder()
	if err != nil {
		return nil, err
	}
	return bpf.Runs(filepath.Join(folder, linksName), filepath.Join(folder, devicesName))
}

// Packets gives what became of packets at the node's devices; nil where nothing is in the kernel. It may be called at any time.
func (p *Plane) Packets() (counts *PacketCounts, err error) {
	err = p.look(func(m *bpf.Maps) error {
		c, err := m.PacketCounts()
		counts = &c
		return err
	})
	if errors.Is(err, errNothing) {
		err = nil
	}
	return counts, err
}
