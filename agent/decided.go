package agent

import (
	"errors"

	"fairlead.dev/fairlead/inspect"
)

// decided returns all that the node decided, an error before the first batch.
func (a *Agent) decided() (*inspect.Decided, error) {
	ofNode := a.nodeProblems()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.batches.count == 0 {
		return nil, errors.New("the agent has not listed the cluster's objects yet")
	}
	d := &inspect.Decided{}
	for _, s := range a.subsystems {
		s.Decided(d)
	}
	d.Problems, d.Lost = append(a.inputProblems(), ofNode...), inspect.Lost(a.problems)
	return d, nil
}
