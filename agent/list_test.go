package agent

import (
	"fmt"
	"slices"
	"testing"

	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// recorder is a subsystem that decides one part by each update, and records what it is called with.
type recorder struct {
	subsystem.Subsystem
	name  string
	calls *[]string
}

func (r recorder) Problems() (p subsystem.Problems) { return p }

func (r recorder) Decide(_ subsystem.Update, d *model.Delta) bool {
	if d == nil {
		*r.calls = append(*r.calls, r.name+" has facts")
		return true
	}
	*r.calls = append(*r.calls, fmt.Sprintf("%s decides after %d", r.name, len(d.Services.Put)))
	d.Services.Put = append(d.Services.Put, &model.Pool{})
	return true
}

func (r recorder) Change(_ subsystem.Update, d model.Delta) {
	*r.calls = append(*r.calls, fmt.Sprintf("%s has %d", r.name, len(d.Services.Put)))
}

// Each subsystem decides by what those before it have decided, and hears of all. Before the source has been read,
// facts are recorded alone.
func TestSubsystemsDecideInOrder(t *testing.T) {
	var calls []string
	a := agentOf(recorder{name: "a", calls: &calls}, recorder{name: "b", calls: &calls})
	expect := func(want ...string) {
		t.Helper()
		if !slices.Equal(calls, want) {
			t.Errorf("%q, want %q", calls, want)
		}
		calls = nil
	}
	a.Apply(subsystem.Update{Node: true})
	expect("a has facts", "b has facts")
	a.batches.count = 1 // else it waits for the first sync
	a.consume(t.Context(), source.Batch{})
	expect("a decides after 0", "b decides after 1", "a has 2", "b has 2")
	a.Apply(subsystem.Update{Node: true})
	expect("a decides after 0", "b decides after 1", "a has 2", "b has 2")
}
