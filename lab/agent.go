package lab

import (
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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/kernel/child"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/reconcile"
)

// statusAddress is the agents', each in its own network namespace.
const statusAddress = "127.0.0.1:10249"

// patience is how long anything may take that takes seconds at most.
const patience = 2 * time.Minute

// emulated says that the processor is.
var emulated = sync.OnceValue(func() bool { return result.ReadMachine().Emulated() })

// within gives how long what takes d at most may take here: on an emulated processor, ten times as long.
func within(d time.Duration) time.Duration {
	if emulated() {
		return 10 * d
	}
	return d
}

// node is a pair whose node has an agent: the same program as users run, from a folder of manifests.
type node struct {
	*pair
	*folder
	*process
	conn    *nft.Conn
	signals <-chan struct{} // one for each transaction of the agent that wrote into its table
	blind   func() error    // ends the signals
	service int             // whose endpoint is replaced at present; -1: none
	mode    string
	api     string   // path of a kubeconfig, for an agent that is told by an API server instead of a folder
	flags   []string // of its agent, beyond those that every one has
}

// process is an agent at work.
type process struct {
	child *child.Process
	name  string   // of its network namespace
	log   *os.File // what it says
	web   *http.Client
	begun time.Time
}

// hire starts a node's agent.
func (r *run) hire(n *node) error {
	if hooks(n.mode) {
		n.pair.group()
	}
	log, err := os.CreateTemp(r.tmp, "agent-*.log")
	if err != nil {
		return fmt.Errorf("start the agent of %s: %w", n.pair.node.Name, err)
	}
	a := &process{name: n.pair.node.Name, log: log, web: client(n.pair)}
	args := append(r.Agent[1:len(r.Agent):len(r.Agent)], "run", "--node", nodeName, "--mode", n.mode, "--status-address", statusAddress)
	if n.api != "" {
		args = append(args, "--kubeconfig", n.api)
	} else {
		args = append(args, "--source", n.dir)
	}
	args = append(args, n.flags...)
	cmd := exec.Command(r.Agent[0], args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	a.begun = time.Now()
	if a.child, err = child.Start(cmd, n.pair.enter); err != nil {
		return errors.Join(fmt.Errorf("start the agent of %s: %w", a.name, err), log.Close())
	}
	n.process, n.pair.agent = a, a
	return nil
}

// client asks from within the pair's node.
func client(p *pair) *http.Client {
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = p.node.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	return &http.Client{Timeout: within(30 * time.Second), Transport: &http.Transport{DialContext: dial}}
}

// get asks the agent's status page.
func (a *process) get(path string) ([]byte, int, error) {
	r, err := a.web.Get("http://" + statusAddress + path)
	if err != nil {
		return nil, 0, err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	return b, r.StatusCode, err
}

// wait waits until the agent says that all is in the kernel, and gives how long after its start that was.
func (a *process) wait(ctx context.Context) (time.Duration, error) {
	give := time.After(within(patience))
	for {
		if _, code, err := a.get("/readyz"); err == nil && code == http.StatusOK {
			return time.Since(a.begun), nil
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-a.child.Ended():
			return 0, a.ended()
		case <-give:
			return 0, fmt.Errorf("the agent of %s is not ready after %v: %s", a.name, within(patience), a.last())
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// ended is an error once the agent has ended by itself: what it wrote into the kernel may go on working without it.
func (a *process) ended() error {
	select {
	case <-a.child.Ended():
		return fmt.Errorf("the agent of %s ended by itself: %v: %s", a.name, a.child.Err(), a.last())
	default:
		return nil
	}
}

// last is the end of what the agent said.
func (a *process) last() string {
	b, _ := os.ReadFile(a.log.Name())
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// loop is how the loop of the agent's mode does.
func (a *process) loop() (reconcile.Status, error) {
	b, _, err := a.get("/status")
	var s agent.State
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return reconcile.Status{}, fmt.Errorf("ask the agent of %s for its state: %w", a.name, err)
	}
	return s.Loops[s.Mode], nil
}

// kill ends the agent without a word (SIGKILL) and waits for that.
func (a *process) kill() {
	a.child.Kill()
	a.web.CloseIdleConnections()
	a.log.Close()
}

// end asks the agent to end (SIGTERM), as an operator would, and kills it if it does not.
func (a *process) end() {
	a.child.End(10 * time.Second)
	a.kill()
}

// tasks gives what is in a file of each of the agent's threads.
func (a *process) tasks(file string) (texts []string, err error) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/%s", a.child.PID, file))
	for _, p := range paths {
		b, rerr := os.ReadFile(p)
		if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
			continue // that thread has ended
		}
		err = errors.Join(err, rerr)
		texts = append(texts, string(b))
	}
	if err == nil && len(texts) == 0 {
		err = fmt.Errorf("the agent of %s has no thread: %w", a.name, os.ErrProcessDone)
	}
	return texts, err
}

// used is the processor time of the agent's threads (/proc/PID/task/TID/schedstat, first field).
func (a *process) used() (sum time.Duration, err error) {
	texts, err := a.tasks("schedstat")
	for _, t := range texts {
		ns, _, _ := strings.Cut(t, " ")
		n, perr := strconv.ParseInt(ns, 10, 64)
		err = errors.Join(err, perr)
		sum += time.Duration(n)
	}
	return sum, err
}

// CPU is the same, 0 where it can't be read.
func (a *process) CPU() time.Duration {
	d, _ := a.used()
	return d
}

// woken is how many times the agent's threads went to sleep by themselves.
func (a *process) woken() (sum float64, err error) {
	texts, err := a.tasks("status")
	for _, t := range texts {
		sum += float64(statusField(t, "voluntary_ctxt_switches"))
	}
	return sum, err
}

// memory is the agent's resident memory in bytes, and the most that it ever was.
func (a *process) memory() (now, most int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.child.PID))
	if err != nil {
		return 0, 0, fmt.Errorf("read the memory of the agent of %s: %w", a.name, err)
	}
	return statusField(string(b), "VmRSS") << 10, statusField(string(b), "VmHWM") << 10, nil
}

// statusField is a number in /proc/PID/status, 0 if it isn't there.
func statusField(text, name string) (v int64) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			fmt.Sscan(rest, &v)
		}
	}
	return v
}

// settle waits until the agent rests: no more than 2 % of a processor in a fifth of a second. After ten seconds it goes on.
func (a *process) settle(ctx context.Context) error { return settle(ctx, a.used) }

// settle does that with whoever has used so much.
func settle(ctx context.Context, used func() (time.Duration, error)) error {
	const window = 200 * time.Millisecond
	for range 50 {
		before, err := used()
		if err != nil {
			return err
		}
		if err := rest(ctx, window); err != nil {
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

// rest waits.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
