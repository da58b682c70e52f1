package controlplane

import (
	"fmt"
	"os"
	"os/exec"

	"fairlead.dev/fairlead/kernel/child"
)

// start starts the program under a name, in the host's namespace.
func (p *Plane) start(name string, args ...string) error {
	return p.startProgram(name, p.Program, args...)
}

func (p *Plane) startProgram(name, program string, args ...string) error {
	log, err := os.OpenFile(p.File(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	r, err := child.Start(cmd, p.Host.Do)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running[name] = r
	return nil
}

// Process returns a process by its name, such as ServerName's; nil if there is none.
func (p *Plane) Process(name string) *child.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running[name]
}

// ended is closed when a process has ended; nil if there is none of that name.
func (p *Plane) ended(name string) <-chan struct{} {
	if r := p.Process(name); r != nil {
		return r.Ended()
	}
	return nil
}

// Kill kills a process, which gets no chance to say so, and waits for its end.
func (p *Plane) Kill(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.running[name]; r != nil {
		r.Kill()
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
