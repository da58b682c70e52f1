package attach

import (
	"context"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
)

// exactly returns how much of a profile an exact run measures: in some calls the agent collects its garbage, so that
// few calls have no steady median.
func (p profile) exactly() profile {
	p.Rounds, p.Each = experiment.ExactRounds, 11
	return p
}

// What ends the names of measures of the agent's part: between call and return, and afterwards.
const (
	suffixAgent = "-agent"
	suffixLater = "-later"
)

// counted is what a call of the plugin takes.
type counted struct {
	plugin time.Duration // it and the programs that it runs, from its start to its end
	agent  time.Duration // meanwhile
	later  time.Duration // likewise, from then until it rests
}

// count counts a call, from a moment of rest.
func (n *node) count(ctx context.Context, call func() (time.Duration, error)) (c counted, err error) {
	if err := n.rest(ctx); err != nil {
		return c, err
	}
	before, err := n.usedByAgent()
	if err != nil {
		return c, err
	}
	if c.plugin, err = call(); err != nil {
		return c, err
	}
	during, err := n.usedByAgent()
	if err != nil {
		return c, err
	}
	if err := n.rest(ctx); err != nil {
		return c, err
	}
	after, err := n.usedByAgent()
	c.agent, c.later = during-before, after-during
	return c, err
}

// rest waits until the agent has nothing to do.
func (n *node) rest(ctx context.Context) error {
	if n.agent == nil {
		return nil
	}
	return n.agent.Settle(ctx)
}

// usedByAgent returns the processor time of the node's agent, 0 where there is none.
func (n *node) usedByAgent() (time.Duration, error) {
	if n.agent == nil {
		return 0, nil
	}
	return n.agent.Used()
}

// exactDesign makes a design that of an exact run.
func exactDesign(d *result.Design) {
	for _, of := range []struct{ id, title string }{{"add", "ADD"}, {"del", "DEL"}} {
		d.Measures = append(d.Measures,
			result.Measure{ID: of.id + suffixAgent, Title: of.title + ": of that, the agent", Unit: result.Instructions,
				Stat: result.P50, Text: "what its process executes between the plugin's start and end"},
			result.Measure{ID: of.id + suffixLater, Title: of.title + ": the agent, afterwards", Unit: result.Instructions,
				Stat: result.Mean, Text: "what its process executes from the plugin's end until it rests, collections of its " +
					"garbage with it: the mean of a block"})
	}
	last := len(d.Method) - 1 // of the kernel's lock, for which calls wait
	d.Method = append(d.Method[:last:last], "A call begins when the agent rests. What it takes is processor time: of the "+
		"plugin's process and the programs that it runs, to 2,000 instructions, and of the agent's, each with the kernel's "+
		"work for it.")
	d.Missing = append(d.Missing, "How long a call waits, such as for duplicate address detection. What the kernel's own "+
		"threads do, and the lab itself to start a plugin.")
}
