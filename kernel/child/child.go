// Package child starts programs that don't outlive this one.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Process is a child that the kernel kills when this process dies. The terminal's signals don't reach it: it is in a
// process group of its own, with what it starts itself.
type Process struct {
	PID   int
	cmd   *exec.Cmd
	ended chan struct{} // closed once it has; err is set then
	err   error
}

// Start starts a command from within in, such as (*netns.Namespace).Do; nil: from where this process is. It sets the
// command's SysProcAttr. A thread is kept until the child has ended.
func Start(cmd *exec.Cmd, in func(func() error) error) (*Process, error) {
	if in == nil {
		in = func(f func() error) error { return f() }
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	p := &Process{cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the signal comes when the thread that made the child ends: PR_SET_PDEATHSIG(2const)
		defer runtime.UnlockOSThread()
		err := in(cmd.Start)
		if err == nil {
			p.PID = cmd.Process.Pid
		} else if cmd.Process != nil { // in failed afterwards
			cmd.Process.Kill()
			cmd.Wait()
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Ended is closed once it has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Err is how it ended, once it has: see (*exec.Cmd).Wait.
func (p *Process) Err() error { return p.err }

// Kill ends it without a word (SIGKILL) and waits for that.
func (p *Process) Kill() {
	p.cmd.Process.Kill() // an error means that it has ended
	<-p.ended
}

// End queries it to end (SIGTERM), as an operator would, and kills it if it hasn't within a while.
func (p *Process) End(within time.Duration) {
	p.cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
	select {
	case <-p.ended:
	case <-time.After(within):
	}
	p.Kill()
}
