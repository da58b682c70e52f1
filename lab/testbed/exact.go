package testbed

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/sandbox/vm"
)

// Operations of a block in an exact machine: its numbers are medians, and few operations differ.
const (
	exactWarm   = 10
	exactOps    = 51
	exactTraced = 10
)

// tracePort returns the device of the serial port where an exact machine takes requests to trace instructions (package
// sandbox/vm), "" on any other machine.
func tracePort() string {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name") // the pattern is well-formed
	for _, path := range names {
		if b, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(b)) == vm.TracePort {
			return filepath.Join("/dev", filepath.Base(filepath.Dir(path)))
		}
	}
	return ""
}

// InExact reports whether this machine's clock counts instructions.
func InExact() bool { return tracePort() != "" }

// exact returns how a pair's client of a target counts, nil where times are measured.
func (b *Testbed) exact(p *Pair, to []netip.AddrPort) *load.Exact {
	server := p.inlineAt(to)
	if server == nil {
		return nil // or its servers have threads, as where a mode is tried
	}
	e := &load.Exact{Server: server, Warm: exactWarm, Ops: exactOps, Traced: exactTraced}
	if path := b.trace; path != "" {
		e.Trace = func(mark uintptr, f func() error) error { return traced(path, mark, f) }
	}
	return e
}

// inlineAt returns the server of a pair that listens at the port of the targets, nil where none is inline. Where there
// is but one, a Service may stand for it at another port.
func (p *Pair) inlineAt(to []netip.AddrPort) *load.Inline {
	if len(p.inline) == 1 {
		return p.inline[0]
	}
	for _, s := range p.inline {
		if slices.ContainsFunc(s.Addrs, func(a netip.AddrPort) bool { return len(to) > 0 && a.Port() == to[0].Port() }) {
			return s
		}
	}
	return nil
}

// traced has the instructions traced that f executes, from the first at mark to the last, into a file.
func traced(path string, mark uintptr, f func() error) (err error) {
	port, err := os.OpenFile(tracePort(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer port.Close()
	in := bufio.NewReader(port)
	send := func(request string) error {
		if _, err := io.WriteString(port, request+"\n"); err != nil {
			return err
		}
		reply, err := in.ReadString('\n')
		if reply = strings.TrimSpace(reply); err == nil && reply != "ok" {
			err = errors.New(reply)
		}
		return err
	}
	if err := send(fmt.Sprintf("start %x", mark)); err != nil {
		return fmt.Errorf("trace instructions: %w", err)
	}
	err = f()
	if serr := send("stop " + path); serr != nil {
		err = errors.Join(err, fmt.Errorf("trace instructions: %w", serr))
	}
	return err
}

// traceFile returns the file for a trace of an operation in an arm, in the first round of an exact run; "" for none.
func (t *Traffic) traceFile(round int, p *Pair, o Operation) (string, error) {
	if !t.bed.Config.Exact || round > 0 {
		return "", nil
	}
	return t.out.Trace(result.Trace{Measure: o.Measure, Arm: p.Arm, Params: p.Params})
}

// preferSoftirqs puts the kernel's threads for softirqs before the load: kernels before 6.3 leave all packets to them
// once one is to run, and on one processor a load of real-time priority would keep it waiting. Without that priority,
// others' turns come into up to every other operation and move the median.
func preferSoftirqs() error {
	threads, _ := filepath.Glob("/proc/[0-9]*/comm") // the pattern is well-formed
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(b), "ksoftirqd/") {
			continue // or it has ended
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil {
			err = load.Prefer(pid)
		}
		if err != nil {
			return fmt.Errorf("prefer the thread %s: %w", strings.TrimSpace(string(b)), err)
		}
	}
	return nil
}

// quiet keeps Go's collector out of what is counted: it collects between blocks alone.
func quiet() (restore func() error) {
	before := debug.SetGCPercent(-1)
	return func() error { debug.SetGCPercent(before); return nil }
}
