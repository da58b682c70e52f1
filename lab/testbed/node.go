package testbed

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/reconcile"
)

// statusAddress is that of every agent, each in its own network namespace.
const statusAddress = "127.0.0.1:10249"

// Patience limits what takes seconds at most.
const Patience = 2 * time.Minute

// Node is a pair whose near end is served by an agent: the same program as users run, with a folder of manifests or an
// API server as its source.
type Node struct {
	Pair       *Pair
	Folder     *Folder
	Mode       string
	Kubeconfig string   // path of a kubeconfig; "": the source is the folder
	name       string   // in the cluster; "": NodeName
	flags      []string // of its agent, beyond those that every agent has

	Agent  *Process // nil: none yet
	web    *http.Client
	begun  time.Time
	exact  bool                              // instructions are counted
	within func(time.Duration) time.Duration // the testbed's
}

// Process is a running program and its log.
type Process struct {
	name  string // in errors
	Child *child.Process
	log   *os.File
}

// StartAgent starts a node's agent.
func (b *Testbed) StartAgent(n *Node) error {
	if Hooks(n.Mode) {
		n.Pair.Group()
	}
	log, err := os.CreateTemp(b.Dir, "agent-*.log")
	if err != nil {
		return fmt.Errorf("start the agent of %s: %w", n.Pair.Near.Name, err)
	}
	command := b.Config.Agent
	args := append(command[1:len(command):len(command)], "run", "--node", cmp.Or(n.name, NodeName), "--mode", n.Mode,
		"--status-address", statusAddress)
	if n.Kubeconfig != "" {
		args = append(args, "--kubeconfig", n.Kubeconfig)
	} else {
		args = append(args, "--source", n.Folder.dir)
	}
	cmd := exec.Command(command[0], append(args, n.flags...)...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	a := &Process{name: "the agent of " + n.Pair.Near.Name, log: log}
	n.web, n.within, n.begun = httpClient(n.Pair, b.Within(30*time.Second)), b.Within, time.Now()
	n.exact = b.Config.Exact
	if a.Child, err = child.Start(cmd, n.Pair.Enter); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", a.name, err), log.Close())
	}
	n.Agent, n.Pair.Agent = a, a
	return nil
}

// httpClient returns a client that connects from within the pair's node.
func httpClient(p *Pair, timeout time.Duration) *http.Client {
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = p.Near.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	return &http.Client{Timeout: timeout, Transport: &http.Transport{DialContext: dial}}
}

// Get returns a page of the agent's status server and its HTTP status.
func (n *Node) Get(path string) ([]byte, int, error) {
	r, err := n.web.Get("http://" + statusAddress + path)
	if err != nil {
		return nil, 0, err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	return b, r.StatusCode, err
}

// Metric returns the number of a time series in the agent's metrics, such as `up{a="b"}`, 0 where there is none of that
// name.
func (n *Node) Metric(series string) (float64, error) {
	text, _, err := n.Get("/metrics")
	if err != nil {
		return 0, fmt.Errorf("read the metrics of %s: %w", n.Agent.name, err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, nil
}

// WaitReady waits until the agent is ready, which means that all is in the kernel, and returns how long after its start
// that was; in an exact run, its processor time until then.
func (n *Node) WaitReady(ctx context.Context) (time.Duration, error) {
	limit := n.within(Patience)
	late, pause := time.After(limit), 2*time.Millisecond
	if n.exact { // to answer costs the agent instructions, and idle time costs none
		pause = 50 * time.Millisecond
	}
	for {
		if _, code, err := n.Get("/readyz"); err == nil && code == http.StatusOK {
			if n.exact {
				return n.Agent.Used()
			}
			return time.Since(n.begun), nil
		}
		select {
		case <-time.After(pause):
		case <-n.Agent.Child.Ended():
			return 0, n.Agent.Err()
		case <-late:
			return 0, fmt.Errorf("%s is not ready after %v: %s", n.Agent.name, limit, n.Agent.last())
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Err returns an error once the process has ended by itself: what it wrote into the kernel may go on working without
// it.
func (a *Process) Err() error {
	select {
	case <-a.Child.Ended():
		return fmt.Errorf("%s ended by itself: %v: %s", a.name, a.Child.Err(), a.last())
	default:
		return nil
	}
}

// last returns the end of what the process wrote.
func (a *Process) last() string {
	b, _ := os.ReadFile(a.log.Name())
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// Status returns the state of the loop of the agent's mode.
func (n *Node) Status() (reconcile.Status, error) {
	b, _, err := n.Get("/status")
	var s agent.State
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return reconcile.Status{}, fmt.Errorf("ask %s for its state: %w", n.Agent.name, err)
	}
	return s.Loops[s.Mode], nil
}

// Kill ends the process by SIGKILL and waits for that.
func (a *Process) Kill() {
	a.Child.Kill()
	a.log.Close()
}

// End ends the process by SIGTERM, as an operator would, and kills it if it does not end.
func (a *Process) End() {
	a.Child.End(10 * time.Second)
	a.Kill()
}

// tasks returns the content of a file of each of its threads.
func (a *Process) tasks(file string) (texts []string, err error) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/%s", a.Child.PID, file))
	for _, p := range paths {
		b, rerr := os.ReadFile(p)
		if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
			continue // that thread has ended
		}
		err = errors.Join(err, rerr)
		texts = append(texts, string(b))
	}
	if err == nil && len(texts) == 0 {
		err = fmt.Errorf("%s has no thread: %w", a.name, os.ErrProcessDone)
	}
	return texts, err
}

// Used returns the processor time of all its threads.
func (a *Process) Used() (time.Duration, error) {
	d, err := ProcessorTime(a.Child.PID)
	if err != nil {
		return 0, fmt.Errorf("read the processor time of %s: %w", a.name, err)
	}
	return d, nil
}

// UsedByAll returns the processor time of the process and of the commands that it ran and waited for, the latter in
// ticks of 10 ms (proc_pid_stat(5): fields 16 and 17).
func (a *Process) UsedByAll() (time.Duration, error) {
	own, err := a.Used()
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.Child.PID))
	if err != nil {
		return 0, fmt.Errorf("read the processor time of %s: %w", a.name, err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:])) // from field 3 on
	if len(f) < 15 {
		return 0, fmt.Errorf("read the processor time of %s: %d fields in its stat", a.name, len(f))
	}
	const tick = time.Second / 100
	for _, s := range f[13:15] {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the processor time of %s: %w", a.name, err)
		}
		own += time.Duration(n) * tick
	}
	return own, nil
}

// CPU is Used, 0 where it can't be read.
func (a *Process) CPU() time.Duration {
	d, _ := a.Used()
	return d
}

// Woken returns how many times its threads went to sleep by themselves.
func (a *Process) Woken() (sum float64, err error) {
	texts, err := a.tasks("status")
	for _, t := range texts {
		sum += float64(statusField(t, "voluntary_ctxt_switches"))
	}
	return sum, err
}

// Memory returns the resident memory in bytes, and its peak.
func (a *Process) Memory() (now, most int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Child.PID))
	if err != nil {
		return 0, 0, fmt.Errorf("read the memory of %s: %w", a.name, err)
	}
	return statusField(string(b), "VmRSS") << 10, statusField(string(b), "VmHWM") << 10, nil
}

// statusField returns a number in /proc/PID/status, 0 if it isn't there.
func statusField(text, name string) (v int64) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			fmt.Sscan(rest, &v)
		}
	}
	return v
}

// Settle waits until the process rests, ten seconds at most: until it uses no more than 2 % of a processor in a fifth
// of a second.
func (a *Process) Settle(ctx context.Context) error { return Settle(ctx, a.Used) }

// Settle waits likewise until what has used so much processor time rests.
func Settle(ctx context.Context, used func() (time.Duration, error)) error {
	const window = 200 * time.Millisecond
	for range 50 {
		before, err := used()
		if err != nil {
			return err
		}
		if err := Sleep(ctx, window); err != nil {
			return err
		}
		after, err := used()
		if err != nil {
			return err
		}
		if after-before < window/50 {
			return nil
		}
	}
	return nil
}

// Sleep waits for d, or returns ctx's error.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ChangeTimeout limits the wait for a change.
const ChangeTimeout = 5 * time.Second

// Change saves a file and waits until the agent has written what follows from it.
func (n *Node) Change(ctx context.Context, save func() error) error {
	before, err := n.Status()
	if err != nil {
		return err
	}
	if err := save(); err != nil {
		return err
	}
	for end := time.Now().Add(n.within(ChangeTimeout)); time.Now().Before(end); {
		s, err := n.Status()
		if err != nil {
			return err
		}
		if s.Writes > before.Writes && s.Unsynced == 0 {
			return Sleep(ctx, 50*time.Millisecond)
		}
		if err := Sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("the agent of %s wrote nothing in %v", n.Pair.Near.Name, n.within(ChangeTimeout))
}
