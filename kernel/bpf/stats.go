package bpf

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
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
		return nil, fmt.Errorf("bpf: have the kernel count programs' runs: %w", Explain(err))
	}
	return c, nil
}

// RunOf returns the statistics of a program at a hook, and closes it.
func RunOf(hook string, p *ebpf.Program) (Run, error) {
	defer p.Close()
	s, err := p.Stats()
	if err != nil {
		return Run{}, fmt.Errorf("bpf: read what was counted of %s: %w", hook, err)
	}
	i, err := p.Info()
	if err != nil {
		return Run{}, fmt.Errorf("bpf: read the program of %s: %w", hook, err)
	}
	r := Run{Hook: hook, Count: s.RunCount, Time: s.Runtime}
	if size, err := i.TranslatedSize(); err == nil { // an error means that the kernel doesn't say
		r.Instructions = size / asm.InstructionSize
	}
	if n, ok := i.VerifiedInstructions(); ok {
		r.Verified = int(n)
	}
	return r, nil
}

// Overhead is what counting itself does: shown is the time that is counted of a run of a program that does nothing,
// cost is what each run takes longer. No other may Measure meanwhile.
func Overhead() (shown, cost time.Duration, err error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "fl_nothing", Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return 0, 0, fmt.Errorf("bpf: load a program that does nothing: %w", Explain(err))
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
		return 0, 0, fmt.Errorf("bpf: run a program that does nothing: %w", Explain(err))
	}
	s, err := p.Stats()
	if err != nil || s.RunCount == 0 {
		return 0, 0, errors.Join(errors.New("bpf: the kernel counts no runs"), err)
	}
	return s.Runtime / time.Duration(s.RunCount), max(0, counted-bare), nil
}
