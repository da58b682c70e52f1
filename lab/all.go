package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/testbed"
)

// RunAll runs experiments in turn, all within a time unless that is 0, and returns the folder with their folders and
// one page that judges all claims. What can't run here or would outlast the time is named there and left out, as is
// what counts no instructions where these are to be counted. Where ctx ends, what was measured until then is reported,
// all that the runs made is removed, and the error is ctx's.
func RunAll(ctx context.Context, experiments []experiment.Experiment, o experiment.Options,
	within time.Duration) (dir string, err error) {
	s := report.Suite{Schema: report.SuiteSchema, Command: o.Command, Started: time.Now().Round(0), Within: within,
		Outcome: "it was killed", Claims: Claims()} // unless it says otherwise at its end
	for _, e := range experiments {
		if e.Second != nil && o.Second != "" {
			if err := e.Second(o.Second); err != nil {
				return "", err
			}
		}
	}
	dir = filepath.Join(o.Out, "all-"+s.Started.Format("20060102-150405"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the run's folder: %w", err)
	}
	o.Out = dir
	limited, stop := ctx, func() {}
	if within > 0 {
		limited, stop = context.WithTimeout(ctx, within)
	}
	defer stop()
	experiments = slices.Clone(experiments) // those that repeat an article first: time may be short
	slices.SortStableFunc(experiments, func(a, b experiment.Experiment) int {
		return cmp.Compare(min(1, len(b.Repeats)), min(1, len(a.Repeats)))
	})
	for i, e := range experiments {
		if err := saveSuite(dir, &s); err != nil { // for a run that is killed
			return dir, err
		}
		if o.Exact && !e.Exact {
			s.Parts = append(s.Parts, report.SuitePart{Experiment: e.Name, Question: e.Short, Outcome: uncounted})
			continue
		}
		if limited.Err() != nil {
			s.Parts = append(s.Parts, report.SuitePart{Experiment: e.Name, Question: e.Short, Outcome: ended(ctx)})
			continue
		}
		fmt.Fprintf(o.Output, "%s (%d of %d)\n", e.Name, i+1, len(experiments))
		s.Parts = append(s.Parts, runPart(limited, e, o))
	}
	s.Outcome = ""
	if ctx.Err() != nil {
		s.Outcome = "it was interrupted"
	}
	return dir, errors.Join(ctx.Err(), saveSuite(dir, &s))
}

// saveSuite writes a suite as it is by now, and its page.
func saveSuite(dir string, s *report.Suite) error {
	s.Ended = time.Now().Round(0)
	if err := s.Write(dir); err != nil {
		return err
	}
	return report.BuildSuite(dir)
}

// uncounted is why an exact run leaves an experiment out.
const uncounted = "left out: it counts no instructions"

// ended returns why an experiment is not begun.
func ended(ctx context.Context) string {
	if ctx.Err() != nil {
		return "not begun: the run was interrupted"
	}
	return "not begun: the time was up"
}

// runPart runs one experiment of several. What keeps it from its end is its outcome: the others go on.
func runPart(ctx context.Context, e experiment.Experiment, o experiment.Options) report.SuitePart {
	p := report.SuitePart{Experiment: e.Name, Question: e.Short}
	if e.Second == nil {
		o.Second = ""
	}
	began := time.Now()
	dir, err := Run(ctx, e, o)
	p.Elapsed = time.Since(began)
	if dir != "" {
		p.Folder = filepath.Base(dir)
	}
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded):
		p.Outcome = "the time was up before its end"
	case errors.Is(err, context.Canceled):
		p.Outcome = "interrupted before its end"
	default:
		p.Outcome = testbed.Brief(err.Error())
	}
	if p.Outcome != "" {
		fmt.Fprintf(o.Output, "%s: %s\n", e.Name, p.Outcome)
	}
	return p
}
