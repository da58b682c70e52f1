package controlplane

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// process is one of the programs at work.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
}

// start starts one of the programs under a name, in the host's namespace, apart from the terminal's signals.
func (p *Plane) start(name string, args ...string) error {
	log, err := os.OpenFile(p.File(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	r := &process{exec.Command(p.Program, args...), make(chan struct{})}
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // a child gets its parent-death signal when the thread that made it ends: PR_SET_PDEATHSIG(2const)
		defer runtime.UnlockOSThread()
		err := p.Host.Do(r.cmd.Start)
		started <- err
		if err == nil {
			r.cmd.Wait()
			close(r.ended)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running[name] = r
	return nil
}

// ended is closed when a process has ended; nil if there is none of that name.
func (p *Plane) ended(name string) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.running[name]; r != nil {
		return r.ended
	}
	return nil
}

// Kill kills a process, which gets no chance to say so, and waits for its end.
func (p *Plane) Kill(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.running[name]; r != nil {
		r.cmd.Process.Kill() // an error means that it has ended
		<-r.ended
		delete(p.running, name)
	}
}

// Close kills all.
func (p *Plane) Close() {
	p.mu.Lock()
	names := make([]string, 0, len(p.running))
	for name := range p.running {
		names = append(names, name)
	}
	p.mu.Unlock()
	for _, name := range names {
		p.Kill(name)
	}
	if p.admin != nil {
		p.admin.CloseIdleConnections()
	}
}
