package experiment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/progress"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// ErrNoTime is why a run is not begun that would outlast its context.
var ErrNoTime = errors.New("left out for want of time")

// CheckRoot returns an error for another user than root, who can measure nothing.
func CheckRoot() error {
	if os.Geteuid() == 0 {
		return nil
	}
	return errors.New("the lab makes network namespaces and programs the kernel in them, which takes root: run it with " +
		"sudo; nothing outside its own namespaces is changed")
}

// Perform runs an experiment and returns the folder with its raw results. Where ctx ends before the run does, all that
// the run made is removed, the folder holds what was measured so far, and the error is ctx's. A run that is planned to
// outlast ctx's deadline is not begun: the error is ErrNoTime.
func (e Experiment) Perform(ctx context.Context, o Options) (dir string, err error) {
	if err := CheckRoot(); err != nil {
		return "", err
	}
	b, err := testbed.Open(testbed.Config{Seed: o.Seed, Agent: o.Agent, Exact: o.Exact})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	w, err := e.prepare(ctx, b, o)
	if err != nil {
		return "", err
	}
	d := w.Design()
	if o.Exact {
		d = counted(d)
	}
	dir = filepath.Join(o.Out, d.ID+"-"+time.Now().Format("20060102-150405"))
	out, err := result.Create(dir, result.Manifest{
		Design: d, Command: o.Command, Profile: w.ProfileName(), Seed: o.Seed,
		Build: testbed.ReadBuild(), Machine: b.Machine, Before: testbed.ReadLoad(),
	})
	if err != nil {
		return "", err
	}
	if len(b.CPUs.All) == 1 {
		out.Remark("This machine has one processor for us: the load shares it with everything else.")
	}
	steps := w.Steps(out)
	if o.Exact {
		steps = append(steps, foldStep(out))
	}
	err = follow(ctx, b, steps, o)
	outcome := ""
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		err, outcome = ctx.Err(), "its time was up"
	case ctx.Err() != nil:
		err, outcome = ctx.Err(), "it was interrupted"
	case err != nil:
		outcome = err.Error()
	}
	return dir, errors.Join(err, out.Close(outcome, testbed.ReadLoad()))
}

// prepare returns the trial. Where ctx has ended, the error is ctx's, whatever the preparation failed with.
func (e Experiment) prepare(ctx context.Context, b *testbed.Testbed, o Options) (Trial, error) {
	t, err := e.Prepare(ctx, b, o)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("%w\nThe lab needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN, to make network namespaces and "+
			"program them: in a container, run it with --privileged", err)
	} else if err != nil {
		return nil, err
	}
	end, limited := ctx.Deadline()
	if !limited {
		return t, nil
	}
	left, need := time.Until(end), planned(t.Steps(nil))
	switch {
	case left <= 0:
		<-ctx.Done() // whose timer fires at once
		return nil, ctx.Err()
	case need > left:
		return nil, fmt.Errorf("%w: it is planned to take %v, and %v are left", ErrNoTime, need.Round(time.Second),
			left.Round(100*time.Millisecond))
	}
	return t, nil
}

// follow does every step and takes everything down.
func follow(ctx context.Context, b *testbed.Testbed, steps []Step, o Options) (err error) {
	defer func() { err = errors.Join(err, b.Close()) }()
	steps = append(steps, Step{"taking everything down", time.Second, func(context.Context) error { return b.Close() }})
	bar := progress.New(o.Output, len(steps), planned(steps))
	for _, s := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		bar.Step(s.Title, s.Planned)
		if err := s.Do(ctx); err != nil {
			if ctx.Err() != nil {
				bar.Stop("interrupted: taking everything down")
			} else {
				bar.Stop(err.Error())
			}
			return err
		}
	}
	bar.Finish()
	return nil
}
