package agent

import (
	"fmt"
	"log/slog"
	"sync"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/source"
)

// Predecessor holds the services of an agent whose connections run through this process after the agent has ended, so
// that they serve until another agent of the process does. The zero value holds none. It serves one agent at a time.
type Predecessor struct{ services *Services }

// holds reports whether services are held.
func (p *Predecessor) holds() bool { return p != nil && p.services != nil }

// Close ends the services that are held.
func (p *Predecessor) Close() error {
	if !p.holds() {
		return nil
	}
	s := p.services
	p.services = nil
	return s.Close()
}

// succeed ends s, or holds it where it serves only while it runs and a Predecessor is there.
func (p *Predecessor) succeed(m mode.Mode, s *Services) error {
	if p == nil || !m.Ends {
		return s.Close()
	}
	err := p.Close()
	p.services = s
	return err
}

// Refusal is why the newest configuration of a process is not in force, for the status page and Events. It outlives
// agents. The zero value says that it is.
type Refusal struct {
	mu     sync.Mutex
	reason string
	report func() // called when the reason changes
}

// Set changes why the newest configuration is not in force; nil: it is.
func (r *Refusal) Set(reason error) {
	r.mu.Lock()
	r.reason = ""
	if reason != nil {
		r.reason = reason.Error()
	}
	report := r.report
	r.mu.Unlock()
	if report != nil {
		report()
	}
}

// follow has report called at each change, in place of an earlier one; nil: none is.
func (r *Refusal) follow(report func()) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report = report
}

// problems returns the problem of a node that the newest configuration is not in force, if it isn't.
func (r *Refusal) problems(node string) []source.Problem {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reason == "" {
		return nil
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: node}, Reason: "ConfigurationRefused",
		Message: fmt.Sprintf("the changed configuration was rejected, the last one stays in force: %s", r.reason)}}
}

// begin makes the node ready for the first write, once everything that could refuse the start has passed.
func (a *Agent) begin() {
	o := &a.options
	if o.Prepare != nil {
		o.Prepare()
	}
	if err := mode.PreserveConnections(o.Mode); err != nil {
		o.Log.Warn("connections of the previous mode may be interrupted", "error", err)
	}
	if o.Mode.Ends { // a predecessor has the sockets that this mode needs
		closePredecessor(o.Log, o.Predecessor)
	}
}

// closePredecessor ends what served before and logs what fails.
func closePredecessor(log *slog.Logger, p *Predecessor) {
	if err := p.Close(); err != nil {
		log.Warn("stopping the servers of the previous configuration failed", "error", err)
	}
}
