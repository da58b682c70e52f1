package vm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// An exact machine's clocks advance by one nanosecond for each instruction that its processor executes, and over idle
// time at once to the next timer, whatever the host does meanwhile (qemu's -icount shift=0,sleep=off). A repeated
// string instruction counts once for each repetition. The processor's random numbers come from one seed, and addresses
// of kernel and processes are the same at each boot. What the kernel draws is not, such as seeds of its hash tables:
// that depends on when the host answers, too.
//
// A process of the guest can have its instructions traced, at the serial port of the name TracePort: it writes the line
// "start MARK", reads "ok", does what is to be traced, writes "stop PATH" and reads "ok" or what failed. MARK is an
// address in hexadecimal digits that it executes before and after. PATH, below Options.Shared, gets the address of each
// instruction from the first time at MARK to the last, in order, 8 bytes each, little-endian. To trace changes no
// count: qemu writes each address to its log, the guest knows nothing of it.
const TracePort = "fairlead.trace"

// exactly is the kernel's command line of an exact machine: the TSC is a true clock there. To clear a huge page takes
// 2.1 million instructions, and whether a process gets one depends on what memory is free.
const exactly = "no_timer_check tsc=reliable clocksource=tsc nokaslr norandmaps transparent_hugepage=never"

// clock returns what the kernel's command line says of clocks.
func clock(o Options) string {
	if o.Exact {
		return exactly
	}
	return timed
}

// A tracer has qemu log the addresses of instructions while the guest wants it.
type tracer struct {
	shared  []string // where files may be written
	port    *os.File // to the guest
	monitor *os.File // of qemu
	replies *bufio.Reader
	log     *os.File // what qemu logs
	marks   *os.File // the same pipe's other end, for an end mark
	traces  chan trace
	tracing bool
	id      int // of the last command
}

// A trace is what was read of one.
type trace struct {
	addresses []uint64
	err       error
}

// exact returns qemu's arguments of an exact machine, and makes its tracer. It calls pass with the files that qemu
// inherits.
func (m *Machine) exact(o Options, pass func(*os.File) string) (args []string, err error) {
	t := &tracer{shared: o.Shared, traces: make(chan trace, 1)}
	m.tracer = t
	args = []string{"-icount", "shift=0,sleep=off", "-seed", "1"}
	for _, c := range []struct {
		ours   **os.File
		name   string
		device []string
	}{
		{&t.port, "trace", []string{"-device", "virtserialport,chardev=trace,nr=2,name=" + TracePort}},
		{&t.monitor, "monitor", []string{"-mon", "chardev=monitor,mode=control"}},
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return nil, os.NewSyscallError("socketpair", err)
		}
		*c.ours = os.NewFile(uintptr(pair[0]), c.name)
		args = append(args, "-chardev", "socket,id="+c.name+",fd="+pass(os.NewFile(uintptr(pair[1]), c.name)))
		args = append(args, c.device...)
	}
	var theirs *os.File
	if t.log, theirs, err = os.Pipe(); err != nil {
		return nil, err
	}
	dup, err := unix.FcntlInt(theirs.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), theirs.Close())
	}
	t.marks, t.replies = os.NewFile(uintptr(dup), "trace"), bufio.NewReader(t.monitor)
	return append(args, "-D", "/dev/fd/"+pass(theirs)), nil
}

// close closes the tracer's files, by which serve ends.
func (t *tracer) close() error {
	var errs []error
	for _, f := range []*os.File{t.port, t.monitor, t.log, t.marks} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// serve does what the guest writes to its trace port, until the machine ends.
func (t *tracer) serve() {
	greeted := t.greet()
	for in := bufio.NewScanner(t.port); in.Scan(); {
		err, reply := greeted, "ok"
		if err == nil {
			err = t.do(in.Text())
		}
		if err != nil {
			reply = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if _, err := fmt.Fprintln(t.port, reply); err != nil {
			return
		}
	}
}

func (t *tracer) do(line string) error {
	verb, rest, _ := strings.Cut(line, " ")
	switch {
	case verb == "start":
		return t.start(rest)
	case verb == "stop" && t.tracing:
		return t.stop(rest)
	case verb == "stop":
		return errors.New("stop: nothing is traced")
	}
	return fmt.Errorf("invalid request %q: use start MARK or stop PATH", line)
}

// start starts a trace. One that its process left behind ends.
func (t *tracer) start(mark string) error {
	at, err := strconv.ParseUint(mark, 16, 64)
	if err != nil {
		return fmt.Errorf("trace from mark %q: %w", mark, err)
	}
	if t.tracing {
		if _, err := t.end(); err != nil {
			return err
		}
	}
	t.tracing = true
	go func() { // what isn't read stops the machine
		l, err := readTrace(t.log, at)
		t.traces <- trace{l, err}
	}()
	err = t.single("on")
	if err == nil {
		err = t.command("log exec,nochain")
	}
	if err != nil {
		_, eerr := t.end()
		err = errors.Join(err, eerr)
	}
	return err
}

// single has qemu translate each instruction by itself, or not any more: since qemu 8.1 under another name.
func (t *tracer) single(how string) error {
	if t.command("one-insn-per-tb "+how) == nil {
		return nil
	}
	return t.command("singlestep " + how)
}

// end ends the logging, and returns what was read. An error is of the monitor: the trace port is of no more use.
func (t *tracer) end() (trace, error) {
	t.tracing = false
	err := errors.Join(t.command("log none"), t.single("off"))
	if _, werr := io.WriteString(t.marks, traceEnd+"\n"); err != nil || werr != nil { // after all that qemu wrote
		return trace{}, errors.Join(err, werr)
	}
	return <-t.traces, nil
}

// stop ends a trace and writes the part between marks.
func (t *tracer) stop(path string) error {
	r, err := t.end()
	inside := func(dir string) bool { return strings.HasPrefix(filepath.Clean(path), dir+"/") }
	switch err := errors.Join(err, r.err); {
	case err != nil:
		return err
	case !slices.ContainsFunc(t.shared, inside):
		return fmt.Errorf("trace to %s: it is below none of %q", path, t.shared)
	}
	b := make([]byte, 0, 8*len(r.addresses))
	for _, a := range r.addresses {
		b = binary.LittleEndian.AppendUint64(b, a)
	}
	return os.WriteFile(path, b, 0o644)
}

// traceEnd is the line after the last of a trace.
const traceEnd = "end of trace"

// readTrace returns the addresses in qemu's log of executed blocks, an instruction each, from the first time at mark to
// the last. A line is "Trace 0: 0x7f... [base/address/flags/flags] symbol" (qemu, accel/tcg/cpu-exec.c).
func readTrace(r io.Reader, mark uint64) (addresses []uint64, err error) {
	in, last := bufio.NewReaderSize(r, 1<<20), 0
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return nil, fmt.Errorf("read qemu's log: %w", err)
		}
		if string(bytes.TrimSpace(line)) == traceEnd {
			break
		}
		_, rest, ok := bytes.Cut(line, []byte("/"))
		hex, _, _ := bytes.Cut(rest, []byte("/"))
		at, err := strconv.ParseUint(string(hex), 16, 64)
		if !bytes.HasPrefix(line, []byte("Trace ")) || !ok || err != nil {
			continue // of another kind
		}
		if at == mark || last > 0 {
			addresses = append(addresses, at)
		}
		if at == mark {
			last = len(addresses)
		}
	}
	if last == 0 {
		return nil, fmt.Errorf("no instruction at mark %x was executed", mark)
	}
	return addresses[:last], nil
}

const monitorDeadline = time.Minute

// greet opens the monitor (QEMU Machine Protocol).
func (t *tracer) greet() error {
	if err := t.monitor.SetDeadline(time.Now().Add(monitorDeadline)); err != nil {
		return err
	}
	if _, err := t.replies.ReadBytes('\n'); err != nil { // its greeting
		return fmt.Errorf("qemu's monitor: %w", err)
	}
	_, err := t.execute("qmp_capabilities", nil)
	return err
}

// command has the monitor do one of its human-readable commands, which say nothing unless they fail.
func (t *tracer) command(line string) error {
	said, err := t.execute("human-monitor-command", map[string]any{"command-line": line})
	if err == nil && strings.TrimSpace(said) != "" {
		err = errors.New(strings.TrimSpace(said))
	}
	if err != nil {
		return fmt.Errorf("qemu: %s: %w", line, err)
	}
	return nil
}

// execute sends a command to the monitor and returns what it says. It skips events and late replies to others.
func (t *tracer) execute(name string, arguments map[string]any) (said string, err error) {
	if err := t.monitor.SetDeadline(time.Now().Add(monitorDeadline)); err != nil {
		return "", err
	}
	t.id++
	c := map[string]any{"execute": name, "id": t.id}
	if arguments != nil {
		c["arguments"] = arguments
	}
	if err := json.NewEncoder(t.monitor).Encode(c); err != nil {
		return "", err
	}
	for {
		line, err := t.replies.ReadBytes('\n')
		if err != nil {
			return "", err
		}
		var r struct {
			Return any                    `json:"return"`
			Error  *struct{ Desc string } `json:"error"`
			ID     int                    `json:"id"`
		}
		switch err := json.Unmarshal(line, &r); {
		case err != nil:
			return "", err
		case r.ID != t.id:
		case r.Error != nil:
			return "", errors.New(r.Error.Desc)
		default:
			said, _ := r.Return.(string)
			return said, nil
		}
	}
}
