package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

// Run judges a subject by every case.
func Run(t *testing.T, s Implementation) {
	cases, err := Cases()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("cases", func(t *testing.T) {
		for _, c := range cases {
			name := strings.TrimSuffix(strings.TrimPrefix(c.File, "cases/"), ".txt")
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				RunCase(t, s, c)
			})
		}
	})
}

// RunCase judges a subject by one case, in a sandbox of its own.
func RunCase(t *testing.T, s Implementation, c *Case) {
	t.Helper()
	wrong, refused := tryCase(t.Context(), s, c, enough)
	for _, r := range refused {
		t.Logf("%s:%s", c.File, r)
	}
	for _, w := range wrong {
		t.Errorf("%s:%s\n  It must hold that: %s", c.File, w, c.Comment)
	}
}

// repairTime is how long a subject may take to see and mend what a stranger has done.
const repairTime = 5 * time.Second

// enough is how many faults of a case are shown: after that the rest would be more of the same, and slow.
const enough = 5

// tryCase returns what is wrong, each beginning with its line in the case's file where it has one, and stops after
// limit. It also gives what the subject refuses to serve; where the rest of the case hangs on that, it ends there.
func tryCase(ctx context.Context, s Implementation, c *Case, limit int) (wrong, refused []string) {
	config := Config{}
	if first := c.Steps[0].Config; first != nil {
		config = *first
	}
	w, err := newTestbed(ctx, s, config)
	if err != nil {
		return []string{" " + err.Error()}, nil
	}
	defer func() {
		refused = w.refused
		if err := w.close(); err != nil {
			wrong = append(wrong, " "+err.Error())
		}
	}()
	explicit := false
	for i := range c.Steps {
		step := &c.Steps[i]
		if i := slices.IndexFunc(step.Unless, func(l unlessLine) bool { return l.Mode == s.Name }); i >= 0 {
			w.refused = append(w.refused, " not asked of "+s.Name+" from here on: "+step.Unless[i].Why)
			return wrong, nil
		}
		if err := w.applyStep(ctx, step); err != nil {
			return append(wrong, fmt.Sprintf(" step %d: %v", i+1, err)), nil
		}
		is := w.check(ctx, step, limit-len(wrong))
		for end := time.Now().Add(s.within(repairTime)); len(step.InjectFault) > 0 && len(is) > 0 && time.Now().Before(end); {
			is = w.check(ctx, step, limit-len(wrong))
		}
		if wrong = append(wrong, is...); len(wrong) >= limit || w.ended {
			return wrong, nil
		}
		explicit = explicit || step.problemsExplicit
	}
	if !explicit {
		for _, p := range w.problems() {
			wrong = append(wrong, " a problem that the case doesn't expect: "+p)
		}
	}
	return wrong, nil
}

// check returns what a step's expectations find wrong, each with its line, and sends no more packets after limit.
func (w *testbed) check(ctx context.Context, s *Step, limit int) (wrong []string) {
	for i := range s.Packets {
		if wrong = append(wrong, w.checkPacket(ctx, &s.Packets[i])...); len(wrong) >= limit || w.ended {
			return wrong
		}
	}
	for _, l := range s.Health {
		if is := w.health(l); is != "" {
			wrong = append(wrong, fmt.Sprintf("%d: %s: %s", l.Line, l.Text, is))
		}
	}
	if s.problemsExplicit {
		wrong = append(wrong, w.checkProblems(s)...)
	}
	return wrong
}

// checkPacket judges a line for each of its clients, by verdict and then by real packets, until one is wrong.
func (w *testbed) checkPacket(ctx context.Context, l *packetLine) (wrong []string) {
	if l.Flow != "" {
		f := w.flows[l.Flow]
		if w.lost[l.Flow] {
			w.refused = append(w.refused, fmt.Sprintf("%d: %s: connections through %s end with its agent", l.Line, l.Text,
				w.implementation.Name))
			return nil
		}
		if f == nil {
			return []string{fmt.Sprintf("%d: %s: the flow was never opened", l.Line, l.Text)}
		}
		if is := f.again(ctx, l); is != "" {
			wrong = append(wrong, fmt.Sprintf("%d: %s\n  %s; last it was %s\n%s", l.Line, l.Text, is, f.last, w.dump(f.j.node)))
		}
		return wrong
	}
	expected := l.expected(w.known)
	for _, c := range l.Clients {
		j := w.assess(c, l.To, l.Proto, l.Via)
		is := j.differs(l, expected)
		if r := w.implementation.leaves(j, l.Size); is == "" && r != "" {
			w.refused = append(w.refused, fmt.Sprintf("%d: %s: %s refuses it: %s", l.Line, l.Text, w.implementation.Name, r))
			w.ended = l.Open != "" || l.As != "" // later lines need what this one would have remembered
		} else if is == "" {
			if is = (probe{w: w, l: l, c: c, j: j}).run(ctx); is != "" {
				is = w.implementation.Name + ": " + is + "\n" + w.dump(j.node)
			}
		}
		if is != "" {
			return []string{fmt.Sprintf("%d: %s\n  %s: %s\n  verdict: %s", l.Line, l.Text, c.Name, is, j)}
		}
	}
	return nil
}

// health returns how a node's health check differs from the line, or "".
func (w *testbed) health(l healthLine) string {
	checks := w.agents[l.Node].services.HealthChecks
	i := slices.IndexFunc(checks, func(h *model.HealthCheck) bool { return h.Owner == l.Owner && int(h.Port) == l.Port })
	switch {
	case i < 0 && l.Local >= 0:
		return "there is no such health check"
	case i >= 0 && l.Local < 0:
		return "there is one"
	case i >= 0 && checks[i].Local != l.Local:
		return fmt.Sprintf("it counts %d", checks[i].Local)
	}
	return ""
}

// problems returns the reasons and objects of all problems that stand on any node, sorted, each once.
func (w *testbed) problems() (l []string) {
	for _, n := range nodes {
		for _, p := range w.agents[n].resolver.Problems() {
			if p.Reason != "SchedulerNotAvailable" { // that is about the subject
				l = append(l, p.Reason+" "+p.Object.String())
			}
		}
	}
	slices.Sort(l)
	return slices.Compact(l)
}

func (w *testbed) checkProblems(s *Step) (wrong []string) {
	stand := w.problems()
	for _, l := range s.Problems {
		text := l.Reason + " " + l.Object
		if i := slices.Index(stand, text); i >= 0 {
			stand = slices.Delete(stand, i, i+1)
		} else {
			wrong = append(wrong, fmt.Sprintf("%d: no problem is %s", l.Line, text))
		}
	}
	for _, p := range stand {
		wrong = append(wrong, fmt.Sprintf("%d: a problem that isn't expected: %s", s.problemsLine, p))
	}
	return wrong
}
