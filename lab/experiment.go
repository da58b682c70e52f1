package lab

import (
	"context"
	"fmt"
	"time"

	"fairlead.dev/fairlead/lab/result"
)

// Experiment is one that the lab can run.
type Experiment struct {
	Name     string
	Short    string   // what it answers, in a sentence
	Long     string   // how, and how long that takes
	Services []int    // the numbers of Services that it varies unless told others; nil: it varies none
	Sizes    bool     // Options may say how many endpoints these have
	Compares bool     // modes, of which Options may name some
	Layouts  []string // of kube-proxy's rules that it compares with, of which Options may name some
	Subjects []string // others' programs that it takes
	Rounds   bool     // of which Options may say how many
	begin    func(context.Context, *run) (work, error)
}

// Experiments are all there are.
func Experiments() []Experiment {
	return []Experiment{servicesExperiment, tigeraExperiment, connectExperiment, centurylinkExperiment, balanceExperiment, controlExperiment}
}

// work is an experiment that has found out what this machine can do.
type work interface {
	profile() string // its name, such as "quick"
	design() result.Design
	steps() []step
}

// Run runs the experiment and gives the folder with its results. Where ctx ends before the run does, all that the run made is
// taken down, the report is of what was measured so far, and the error is ctx's.
func (e Experiment) Run(ctx context.Context, o Options) (dir string, err error) {
	return perform(ctx, o, e.begin)
}

// step is a piece of a run, between two looks at the progress bar.
type step struct {
	what    string
	planned time.Duration
	do      func(context.Context) error
}

// plan is steps as they are listed.
type plan []step

func (p *plan) add(what string, planned time.Duration, do func(context.Context) error) {
	*p = append(*p, step{what, planned, do})
}

// times adds a step that is done so many times.
func (p *plan) times(n int, what string, planned time.Duration, do func(ctx context.Context, round int) error) {
	for i := range n {
		p.add(fmt.Sprintf("%s, %d of %d", what, i+1, n), planned, func(ctx context.Context) error { return do(ctx, i) })
	}
}

// thousands gives "10,000".
func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
