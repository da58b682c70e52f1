package agent

import (
	"fmt"
	"sync"

	"fairlead.dev/fairlead/source"
)

// RejectedConfig is why the newest configuration of a process is not in force, for the status page and Events. It
// outlives agents. The zero value says that it is.
type RejectedConfig struct {
	mu     sync.Mutex
	reason string
	report func() // called when the reason changes
}

// Set changes why the newest configuration is not in force; nil: it is.
func (r *RejectedConfig) Set(reason error) {
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
func (r *RejectedConfig) follow(report func()) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report = report
}

// problems returns the problem of a node that the newest configuration is not in force, if it isn't.
func (r *RejectedConfig) problems(node string) []source.Problem {
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
