package bpf

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Run is what the kernel knows of a program: its size, and what was counted of it while somebody Measured.
type Run struct {
	Hook         string // such as connect4, or arrive-14 of packets behind a link-layer header of 14 bytes
	Count        uint64
	Time         time.Duration // in all
	Instructions int           // after the verifier's rewriting; 0 where the kernel doesn't say
	Verified     int           // that the verifier walked, along every way; 0 before Linux 5.16
}

// Measure has the kernel count the runs of every program, whoever's, until it is closed: see Overhead.
func Measure() (io.Closer, error) {
	c, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("bpf: have the kernel count programs' runs: %w", explain(err))
	}
	return c, nil
}

// Runs gives what is known of the programs for sockets, whose links are pinned in the first folder, and of those for packets
// in the second, if there are some.
func Runs(links, devices string) (runs []Run, err error) {
	for _, h := range hooks {
		p, err := hooked(filepath.Join(links, h.name))
		if err != nil {
			return nil, fmt.Errorf("bpf: open the program of %s: %w", h.name, err)
		}
		if runs, err = appendRun(runs, h.name, p); err != nil {
			return nil, err
		}
	}
	d, err := OpenDevicePrograms(devices)
	if errors.Is(err, fs.ErrNotExist) {
		return runs, nil
	}
	if err != nil {
		return nil, err
	}
	for _, w := range directions {
		for _, header := range headers {
			name := w.program(header)
			if d.by[name] == nil {
				continue
			}
			if runs, err = appendRun(runs, name, d.by[name]); err != nil {
				return nil, err
			}
		}
	}
	return runs, nil
}

// hooked opens the program that a pinned link leads to.
func hooked(pin string) (*ebpf.Program, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	i, err := l.Info()
	if err != nil {
		return nil, err
	}
	return ebpf.NewProgramFromID(i.Program)
}

// appendRun adds what is known of a program, and gives it back.
func appendRun(runs []Run, hook string, p *ebpf.Program) ([]Run, error) {
	defer p.Close()
	s, err := p.Stats()
	if err != nil {
		return nil, fmt.Errorf("bpf: read what was counted of %s: %w", hook, err)
	}
	i, err := p.Info()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the program of %s: %w", hook, err)
	}
	r := Run{Hook: hook, Count: s.RunCount, Time: s.Runtime}
	if size, err := i.TranslatedSize(); err == nil { // an error means that the kernel doesn't say
		r.Instructions = size / asm.InstructionSize
	}
	if n, ok := i.VerifiedInstructions(); ok {
		r.Verified = int(n)
	}
	return append(runs, r), nil
}

// Overhead is what counting itself does: shown is the time that is counted of a run of a program that does nothing, cost is
// what each run takes longer. Nobody else may Measure meanwhile.
func Overhead() (shown, cost time.Duration, err error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "fl_nothing", Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return 0, 0, fmt.Errorf("bpf: load a program that does nothing: %w", explain(err))
	}
	defer p.Close()
	const runs = 1 << 17
	run := func() (took time.Duration) {
		if err == nil {
			_, took, err = p.Benchmark(make([]byte, 14), runs, nil)
		}
		return took
	}
	run() // once for the caches
	bare := run()
	stop, merr := Measure()
	if merr != nil {
		return 0, 0, merr
	}
	defer stop.Close()
	counted := run()
	if err != nil {
		return 0, 0, fmt.Errorf("bpf: run a program that does nothing: %w", explain(err))
	}
	s, err := p.Stats()
	if err != nil || s.RunCount == 0 {
		return 0, 0, errors.Join(errors.New("bpf: the kernel counts no runs"), err)
	}
	return s.Runtime / time.Duration(s.RunCount), max(0, counted-bare), nil
}

// PacketCounts is what became of packets at devices since the maps were made.
type PacketCounts struct {
	Began     uint64 // flows
	Rejected  uint64 // packets answered that nobody is there
	Silenced  uint64 // packets dropped as was asked for
	NoPort    uint64 // packets dropped: no port was free to hide their client
	NoAddress uint64 // packets dropped: the node has no address to hide their client
	NoRoom    uint64 // packets dropped: their flow found no room
	Handed    uint64 // packets handed over to a pod of the node, past the node's stack
	Forged    uint64 // packets dropped: the route back to the source of a new flow doesn't lead to the device that they came in by
}

// Each calls f with each count and a name for it, in snake_case.
func (c PacketCounts) Each(f func(outcome string, packets uint64)) {
	f("began", c.Began)
	f("rejected", c.Rejected)
	f("silenced", c.Silenced)
	f("no_port", c.NoPort)
	f("no_address", c.NoAddress)
	f("no_room", c.NoRoom)
	f("handed_over", c.Handed)
	f("forged", c.Forged)
}

// PacketCounts reads them.
func (m *Maps) PacketCounts() (c PacketCounts, err error) {
	for what, to := range map[packetsEventOfPacket]*uint64{
		packetsEventOfPacketBEGAN: &c.Began, packetsEventOfPacketREJECTED: &c.Rejected, packetsEventOfPacketSILENCED: &c.Silenced,
		packetsEventOfPacketNO_PORT: &c.NoPort, packetsEventOfPacketNO_ADDRESS: &c.NoAddress, packetsEventOfPacketNO_ROOM: &c.NoRoom,
		packetsEventOfPacketHANDED: &c.Handed, packetsEventOfPacketFORGED: &c.Forged,
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
