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

// Run is what the kernel counts of a program: its size, and its runs while they are Measured.
type Run struct {
	Hook         string // such as connect4, or arrive-14 of packets behind a link-layer header of 14 bytes
	Count        uint64
	Time         time.Duration // in all
	Instructions int           // after the verifier's rewriting; 0 where the kernel doesn't say
	Verified     int           // that the verifier processed, on all paths; 0 before Linux 5.16
}

// Measure has the kernel count the runs of every program until it is closed: see Overhead.
func Measure() (io.Closer, error) {
	c, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("bpf: have the kernel count programs' runs: %w", explain(err))
	}
	return c, nil
}

// Runs returns the statistics of the programs for sockets, whose links are pinned in the first folder, and of those
// for packets in the second, if there are some.
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

// appendRun adds the statistics of a program, and closes it.
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

// Overhead is what counting itself does: shown is the time that is counted of a run of a program that does nothing,
// cost is what each run takes longer. No other may Measure meanwhile.
func Overhead() (shown, cost time.Duration, err error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "fl_nothing", Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return 0, 0, fmt.Errorf("bpf: load a program that does nothing: %w", explain(err))
	}
	defer p.Close()
	const runs = 1 << 17
	run := func() (elapsed time.Duration) {
		if err == nil {
			_, elapsed, err = p.Benchmark(make([]byte, 14), runs, nil)
		}
		return elapsed
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

// PacketCounts counts packets at devices since the maps were created, by outcome.
type PacketCounts struct {
	Began      uint64 // flows
	Rejected   uint64 // packets rejected: no backend
	Dropped    uint64 // packets dropped by policy
	NoPort     uint64 // packets dropped: no free port to masquerade with
	NoAddress  uint64 // packets dropped: the node has no address to masquerade with
	MapFull    uint64 // packets dropped: no space for the flow
	Redirected uint64 // packets redirected to a pod of the node, bypassing the host stack
	Forged     uint64 // packets dropped: the reverse path check failed
}

// Each calls f with each count and a name for it, in snake_case.
func (c PacketCounts) Each(f func(outcome string, packets uint64)) {
	f("began", c.Began)
	f("rejected", c.Rejected)
	f("silenced", c.Dropped)
	f("no_port", c.NoPort)
	f("no_address", c.NoAddress)
	f("no_room", c.MapFull)
	f("handed_over", c.Redirected)
	f("forged", c.Forged)
}

// PacketCounts reads them.
func (m *Maps) PacketCounts() (c PacketCounts, err error) {
	for what, to := range map[devicePacketEvent]*uint64{
		devicePacketEventEVENT_FLOW:       &c.Began,
		devicePacketEventEVENT_REJECTED:   &c.Rejected,
		devicePacketEventEVENT_DROPPED:    &c.Dropped,
		devicePacketEventEVENT_NO_PORT:    &c.NoPort,
		devicePacketEventEVENT_NO_ADDRESS: &c.NoAddress,
		devicePacketEventEVENT_MAP_FULL:   &c.MapFull,
		devicePacketEventEVENT_REDIRECTED: &c.Redirected,
		devicePacketEventEVENT_FORGED:     &c.Forged,
	} {
		var each []uint64 // by processor
		if err := m.named[deviceMapFlPackets].Lookup(uint32(what), &each); err != nil {
			return c, fmt.Errorf("bpf: read counts of packets: %w", err)
		}
		for _, n := range each {
			*to += n
		}
	}
	return c, nil
}
