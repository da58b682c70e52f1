package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"fairlead.dev/fairlead/kernel/child"
	"fairlead.dev/fairlead/sandbox"
)

// Agent is the state of one node's agent.
type Agent struct {
	Node     string `json:"node"`
	State    string `json:"state"` // Starting, Ready, NotReady or Crashed
	PID      int    `json:"pid,omitempty"`
	Restarts int    `json:"restarts"`
	Error    string `json:"error,omitempty"` // how it ended last time
	Log      string `json:"log"`             // path of its output
}

// The states of an agent.
const (
	Starting = "starting"
	Ready    = "ready"
	NotReady = "not ready" // was ready, and isn't now
	Crashed  = "crashed"   // will be started again
)

// How long things may take.
const (
	farewell  = 10 * time.Second        // from SIGTERM to SIGKILL
	firstWait = 250 * time.Millisecond  // before a crashed agent is started again; doubles
	lastWait  = 10 * time.Second        // at most
	impatient = 50 * time.Millisecond   // between questions until an agent is ready
	patient   = 1000 * time.Millisecond // between questions to one that is
)

// agent keeps one node's agent running.
type agent struct {
	host *sandbox.Host
	end  func() // ends it and waits for that
}

// hire starts the agent of a node and keeps it running until end is called.
func (d *daemon) hire(ctx context.Context, h *sandbox.Host) *agent {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	a := Agent{Node: h.Node, State: Starting, Log: filepath.Join(Folder(d.Name), "node-"+h.Node+".log")}
	d.record(a)
	if err := d.prepare(h.Node); err != nil {
		slog.Error("the agent can't connect pods", "node", h.Node, "error", err)
	}
	go func() {
		defer close(done)
		defer d.forget(h.Node)
		d.supervise(ctx, h, a)
	}()
	return &agent{host: h, end: func() {
		cancel()
		<-done
	}}
}

// prepare makes the folder that a node's agent has where it connects pods.
func (d *daemon) prepare(node string) error {
	if !d.Network {
		return nil
	}
	return os.MkdirAll(AgentFolder(d.Name, node), 0o755)
}

// supervise starts the agent again whenever it ends, until ctx does.
func (d *daemon) supervise(ctx context.Context, h *sandbox.Host, a Agent) {
	for wait := firstWait; ; wait = min(2*wait, lastWait) {
		began := time.Now()
		err := d.runOnce(ctx, h, &a)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait = firstWait
		}
		slog.Warn("agent ended, will be started again", "node", h.Node, "error", err, "after", wait)
		a.State, a.PID, a.Error = Crashed, 0, err.Error()
		a.Restarts++
		d.record(a)
		if !sleep(ctx, wait) {
			return
		}
		a.State = Starting
	}
}

// sleep waits, and reports whether ctx still stands.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// runOnce starts the agent and waits until it ends; once ctx ends it is told to. The error says how it ended, never
// nil.
func (d *daemon) runOnce(ctx context.Context, h *sandbox.Host, a *Agent) error {
	out, err := os.OpenFile(a.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open agent's log: %w", err)
	}
	defer out.Close()
	args := d.Agent(h.Node)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, "/"
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = farewell
	p, err := child.Start(cmd, h.Do)
	if err != nil {
		return fmt.Errorf("start agent: %w", err)
	}
	a.PID = p.PID
	d.record(*a)
	d.attend(h, a, p.Ended())
	if p.Err() == nil {
		return errors.New("ended with status 0")
	}
	return p.Err()
}

// attend records whether the agent is ready, until it has ended.
func (d *daemon) attend(h *sandbox.Host, a *Agent, ended <-chan struct{}) {
	web := client(h)
	defer web.CloseIdleConnections()
	for wait := impatient; ; {
		select {
		case <-ended:
			return
		case <-time.After(wait):
		}
		state := a.State
		switch ready := isReady(web); {
		case ready:
			state, wait = Ready, patient
		case state == Ready:
			state, wait = NotReady, impatient
		}
		if state != a.State {
			a.State = state
			d.record(*a)
		}
	}
}

// client queries from within the host's namespace.
func client(h *sandbox.Host) *http.Client {
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = h.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	return &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: dial}}
}

func isReady(web *http.Client) bool {
	r, err := web.Get("http://127.0.0.1:10249/readyz")
	if err != nil {
		return false
	}
	defer r.Body.Close()
	io.Copy(io.Discard, io.LimitReader(r.Body, 1<<16))
	return r.StatusCode == http.StatusOK
}
