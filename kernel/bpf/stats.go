package bpf

import (
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Run is what the kernel counted of a hook's program while somebody Measured.
type Run struct {
	Hook  string // such as connect4
	Count uint64
	Time  time.Duration // in all
}

// Measure has the kernel count the runs of every program, whoever's, until it is closed. That costs each run some 50 ns.
func Measure() (io.Closer, error) {
	c, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("bpf: have the kernel count programs' runs: %w", explain(err))
	}
	return c, nil
}

// Runs gives what was counted of the programs whose links are pinned in the folder.
func Runs(folder string) (runs []Run, err error) {
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(filepath.Join(folder, h.name), nil)
		if err != nil {
			return nil, fmt.Errorf("bpf: read link %s: %w", h.name, err)
		}
		i, err := l.Info()
		l.Close()
		if err != nil {
			return nil, fmt.Errorf("bpf: read link %s: %w", h.name, err)
		}
		p, err := ebpf.NewProgramFromID(i.Program)
		if err != nil {
			return nil, fmt.Errorf("bpf: open the program of %s: %w", h.name, err)
		}
		s, err := p.Stats()
		p.Close()
		if err != nil {
			return nil, fmt.Errorf("bpf: read what was counted of %s: %w", h.name, err)
		}
		runs = append(runs, Run{h.name, s.RunCount, s.Runtime})
	}
	return runs, nil
}

// PacketCounts is what became of packets at devices since the maps were made.
type PacketCounts struct {
	Began     uint64 // flows
	Rejected  uint64 // packets answered that nobody is there
	Silenced  uint64 // packets dropped as was asked for
	NoPort    uint64 // packets dropped: no port was free to hide their client
	NoAddress uint64 // packets dropped: the node has no address to hide their client
	NoRoom    uint64 // packets dropped: their flow found no room
}

// Each calls f with each count and a name for it, in snake_case.
func (c PacketCounts) Each(f func(outcome string, packets uint64)) {
	f("began", c.Began)
	f("rejected", c.Rejected)
	f("silenced", c.Silenced)
	f("no_port", c.NoPort)
	f("no_address", c.NoAddress)
	f("no_room", c.NoRoom)
}

// PacketCounts reads them.
func (m *Maps) PacketCounts() (c PacketCounts, err error) {
	for what, to := range map[packetsEventOfPacket]*uint64{
		packetsEventOfPacketBEGAN: &c.Began, packetsEventOfPacketREJECTED: &c.Rejected, packetsEventOfPacketSILENCED: &c.Silenced,
		packetsEventOfPacketNO_PORT: &c.NoPort, packetsEventOfPacketNO_ADDRESS: &c.NoAddress, packetsEventOfPacketNO_ROOM: &c.NoRoom,
	} {
		var each []uint64 // by processor
		if err := m.named[packetsMapPackets].Lookup(uint32(what), &each); err != nil {
			return c, fmt.Errorf("bpf: read counts of packets: %w", err)
		}
		for _, n := range each {
			*to += n
		}
	}
	return c, nil
}
