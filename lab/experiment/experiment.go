package experiment

import (
	"context"
	"fmt"
	"io"
	"time"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiment is one that the lab can run.
type Experiment struct {
	Name     string
	Short    string   // what it answers, in a sentence
	Long     string   // how, and how long that takes
	Repeats  string   // the article whose measurements it repeats; "": none
	Services []int    // the numbers of Services that it varies unless Options names others; nil: it varies none
	Sizes    bool     // Options may say how many endpoints these have
	Compares bool     // modes, of which Options may name some
	Layouts  []string // of kube-proxy's rules that it compares with, of which Options may name some
	Subjects []string // others' programs that it takes
	Rounds   bool     // of which Options may say how many
	Exact    bool     // it can count instructions

	// Second returns why a folder is no run of it under the second kernel, for which it has a panel; nil: it has none.
	Second func(folder string) error

	Prepare func(context.Context, *testbed.Testbed, Options) (Trial, error)
}

// Options is what the user wants of a run.
type Options struct {
	Quick     bool
	Rounds    int      // 0: as many as the profile has
	Services  []int    // numbers of Services, rising; nil: the experiment's own
	Endpoints int      // of each Service; 0: the experiment's own
	Modes     []string // to be compared; nil: all that run here
	Layouts   []string // of kube-proxy's rules, or NoLayouts alone; nil: all that run here
	Subjects  []string // others' programs to be measured beside ours, such as kube-proxy=PATH
	Second    string   // folder of a run of the same experiment under the second kernel; "": none
	Exact     bool     // instructions are counted instead of time
	Seed      uint64
	Out       string    // folder in which the run's own is made
	Agent     []string  // the program whose "run" is the agent, with arguments that come before
	Command   []string  // that repeats the run, for the report
	Output    io.Writer // for progress
}

// Choose returns the profile that the user wants: quick or full, and what exact makes of that for a run that counts
// instructions; nil: there is none such.
func Choose[P any](o Options, quick, full P, exact func(P) P) P {
	p := full
	if o.Quick {
		p = quick
	}
	if o.Exact && exact != nil {
		p = exact(p)
	}
	return p
}

// RoundsOr returns how many there are: as many as the user wants, or the profile's; of a quick exact run few.
func (o Options) RoundsOr(profile int) int {
	switch {
	case o.Rounds > 0:
		return o.Rounds
	case o.Exact && o.Quick:
		return min(profile, quickExactRounds)
	}
	return profile
}

// Trial is an experiment that has found out what this machine can do.
type Trial interface {
	ProfileName() string // its name, such as "quick"
	Design() result.Design
	Steps(*result.Writer) []Step // of which the blocks go there
}

// Planned returns how long a run is planned to take on a testbed, on which it measures nothing.
func (e Experiment) Planned(ctx context.Context, b *testbed.Testbed, o Options) (d time.Duration, err error) {
	t, err := e.Prepare(ctx, b, o)
	if err != nil {
		return 0, err
	}
	return planned(t.Steps(nil)), nil
}

// planned returns how long steps are planned to take together.
func planned(steps []Step) (d time.Duration) {
	for _, s := range steps {
		d += s.Planned
	}
	return d
}

// Step is a piece of a run, between two updates of the progress bar.
type Step struct {
	Title   string
	Planned time.Duration
	Do      func(context.Context) error
}

// Plan is steps as they are listed.
type Plan []Step

// Add adds a step.
func (p *Plan) Add(what string, planned time.Duration, do func(context.Context) error) {
	*p = append(*p, Step{what, planned, do})
}

// Times adds n steps, one a round.
func (p *Plan) Times(n int, what string, planned time.Duration, do func(ctx context.Context, round int) error) {
	for i := range n {
		p.Add(fmt.Sprintf("%s, %d of %d", what, i+1, n), planned, func(ctx context.Context) error { return do(ctx, i) })
	}
}

// Thousands returns "10,000".
func Thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", Thousands(n/1000), n%1000)
}
