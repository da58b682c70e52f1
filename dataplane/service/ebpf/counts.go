package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	serviceplane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
)

// What the programs report and count, and which of it is wanted.
type (
	Event        = service.Event
	Filter       = service.Filter
	PacketCounts = device.PacketCounts
)

// errNoPrograms is the error where no programs are attached.
var errNoPrograms = errors.New(
	"ebpf: no programs of this version are attached in this network namespace: run the agent there with --mode ebpf " +
		"(the other modes have no hooks to look through), and this command with its --ebpf flags",
)

// withMaps calls f with the maps as they are, which others may write meanwhile.
func (p *Plane) withMaps(f func(*device.Maps) error) error {
	if _, err := os.Stat(p.linksFolder()); err != nil {
		return errNoPrograms
	}
	m, err := device.OpenMaps(p.mapsFolder(), p.Sizes)
	if bpf.Absent(err) {
		return errNoPrograms
	}
	if err != nil {
		return err
	}
	return errors.Join(f(m), m.Close())
}

// Counts returns the counts of all pools held, by ID: none where nothing is in the kernel. It may be called at any
// time.
func (p *Plane) Counts() (counts map[uint64]serviceplane.Count, err error) {
	err = p.withMaps(func(m *device.Maps) error {
		counts = map[uint64]serviceplane.Count{}
		for i := range m.Pools {
			if pool := &m.Pools[i]; atomic.LoadUint32(&pool.Extent) != 0 {
				counts[pool.Id] = serviceplane.Count{Connections: atomic.LoadUint64(&pool.Connections),
					Refused: atomic.LoadUint64(&pool.Refused)}
			}
		}
		return nil
	})
	if errors.Is(err, errNoPrograms) {
		err = nil
	}
	return counts, err
}

// Trace calls yield with each connect() and first datagram to a frontend until ctx ends, and returns the number of
// lost events.
func (p *Plane) Trace(ctx context.Context, f Filter, yield func(Event)) (lost uint64, err error) {
	err = p.withMaps(func(m *device.Maps) (err error) {
		lost, err = m.Trace(ctx, f, yield)
		return err
	})
	return lost, err
}

// Hosts returns the network namespaces of this machine, whose cookies events contain.
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

// Runs returns the statistics of the programs of the calling thread's network namespace.
func Runs() ([]bpf.Run, error) {
	folder, _, err := bpf.Folder()
	if err != nil {
		return nil, err
	}
	runs, err := service.Runs(filepath.Join(folder, linksName))
	if err != nil {
		return nil, err
	}
	packets, err := device.Runs(filepath.Join(folder, devicesName))
	return append(runs, packets...), err
}

// Packets returns what became of packets at the node's devices; nil where nothing is in the kernel. It may be called at
// any time.
func (p *Plane) Packets() (l []serviceplane.Outcome, err error) {
	c, err := p.PacketCounts()
	if c != nil {
		c.Each(func(name string, n uint64) { l = append(l, serviceplane.Outcome{Name: name, Packets: n}) })
	}
	return l, err
}

// PacketCounts returns what Packets returns, as numbers.
func (p *Plane) PacketCounts() (counts *PacketCounts, err error) {
	err = p.withMaps(func(m *device.Maps) error {
		c, err := m.PacketCounts()
		counts = &c
		return err
	})
	if errors.Is(err, errNoPrograms) {
		err = nil
	}
	return counts, err
}
