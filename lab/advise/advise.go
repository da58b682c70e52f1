package advise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// Request is a question to Run.
type Request struct {
	Config
	PerSecond float64         // changes of endpoints that are assumed
	Watch     source.Source   // of which they are counted instead, while it is measured; nil: they are not
	Objects   []source.Object // as the cluster has them
	Resolve   resolve.Config  // for the advised node
	Options   mode.Options
	// is called with the folder of the raw results, before that is removed; nil: nothing is
	Report func(dir string, a Advice) error
}

// ErrInterrupted is why there is no advice where ctx ended first, or would have. Beside it stands the reason.
var ErrInterrupted = errors.New("interrupted: there is no advice")

// Run measures and decides. It needs root. All that it makes is removed, also where ctx ends: then the error is
// ErrInterrupted and ctx's. What a killed run left is removed by the next.
func Run(ctx context.Context, q Request, o experiment.Options) (a Advice, err error) {
	lacks, err := Lacks(q.Objects, q.Resolve, q.Options, mode.Names())
	if err != nil {
		return a, err
	}
	if o.Out, err = testbed.NewFolder(); err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.Out)) }()
	counted := &churn{from: q.Watch}
	if q.Watch != nil {
		defer counted.follow(ctx)()
	}
	t := newTrial(q.Config, o.Quick)
	dir, err := t.experiment().Perform(ctx, o)
	if err != nil && (ctx.Err() != nil || errors.Is(err, experiment.ErrNoTime)) {
		return a, fmt.Errorf("%w: %w", ErrInterrupted, err)
	}
	if err != nil {
		return a, err
	}
	r, err := result.Read(dir)
	if err != nil {
		return a, err
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		return a, fmt.Errorf("summarize: %w", err)
	}
	options := Options(r, s, q.Current, t.list, t.cannot)
	for i := range options {
		c := options[i].Candidate
		options[i].Lacks, options[i].Changes = lacks[c.Mode], Differences(q.Current, c)
	}
	perSecond, remarks := q.PerSecond, slices.Clone(q.Cluster.Remarks)
	if q.Watch != nil {
		var remark string
		perSecond, remark = counted.rate(time.Now(), perSecond)
		remarks = append(remarks, remark)
	}
	a = Decide(options, perSecond)
	a.Sizes, a.Remarks = q.Cluster.Sizes, remarks
	if s.Noise.Noisy {
		for _, why := range s.Noise.Why {
			a.Remarks = append(a.Remarks, "This run was noisy: "+why+".")
		}
	}
	for _, name := range sorted(t.cannot) {
		a.Remarks = append(a.Remarks, name+" is not measured: "+t.cannot[name])
	}
	if q.Report != nil {
		err = q.Report(dir, a)
	}
	return a, err
}
