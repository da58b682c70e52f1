package conformance

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Run judges a service data plane by every case of Services, or a pair by every case of policies.
func Run(t *testing.T, s Implementation) { RunPart(t, s, 0, 1) }

// RunPart is Run with the cases whose number leaves part when it is divided by parts: so many parts are all cases.
func RunPart(t *testing.T, s Implementation, part, parts int) {
	subsystem := "service"
	if s.Engine != nil {
		subsystem = "policy"
	}
	runCases(t, s, subsystem, part, parts)
}

// RunNetwork judges a pair over its pod network by every case of that, with nodes on one link and on links of their
// own.
func RunNetwork(t *testing.T, s Implementation) {
	t.Run("network", func(t *testing.T) { runCases(t, s, "network", 0, 1) })
	apart := *s.Network
	apart.Name, apart.Apart = apart.Name+"-apart", true
	s.Network = &apart
	t.Run("network-apart", func(t *testing.T) { runCases(t, s, "network", 0, 1) })
}

// runCases judges a subject by a subsystem's cases, as RunPart does.
func runCases(t *testing.T, s Implementation, subsystem string, part, parts int) {
	cases, err := Cases(subsystem)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("cases", func(t *testing.T) {
		for i, c := range cases {
			if i%parts != part {
				continue
			}
			name := strings.TrimSuffix(path.Base(c.File), ".txt")
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
// limit. It also returns what the subject refuses to serve; where the rest of the case hangs on that, it ends there.
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
		if i := slices.IndexFunc(step.Unless, func(l unlessLine) bool { return s.named(l.Mode) }); i >= 0 {
			w.refused = append(w.refused, " not asked of "+s.label()+" from here on: "+step.Unless[i].Why)
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
	for l := s.Packets; len(l) > 0; {
		n := 1
		for n < len(l) && w.independent(&l[n-1]) && w.independent(&l[n]) {
			n++
		}
		if wrong = append(wrong, w.checkPackets(ctx, l[:n])...); len(wrong) >= limit || w.ended {
			return wrong
		}
		l = l[n:]
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

// independent reports whether a line can be checked beside others: it opens no flow, remembers nothing and moves no
// address or route. Where packets wait for a timeout this saves most of the time.
func (w *testbed) independent(l *packetLine) bool {
	own := func(c client) bool { return slices.Contains(memberNamed(c.Name).Addrs, c.Addr) && c.Port == 0 }
	return w.implementation.Engine != nil && l.Open+l.Flow+l.As+l.Via == "" &&
		(l.Action == verdict.Forward || memberNamed(nameOf(l.To.Addr())) != nil) &&
		!slices.ContainsFunc(l.Clients, func(c client) bool { return !own(c) })
}

// checkPackets judges lines, several at once.
func (w *testbed) checkPackets(ctx context.Context, lines []packetLine) []string {
	wrong := make([][]string, len(lines))
	var wg sync.WaitGroup
	for i := range lines {
		wg.Go(func() { wrong[i] = w.checkPacket(ctx, &lines[i]) })
	}
	wg.Wait()
	return slices.Concat(wrong...)
}

// refuse records a line that is judged by verdict alone, and why. ends: later lines need what it would have remembered.
func (w *testbed) refuse(l *packetLine, why string, ends bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = append(w.refused, fmt.Sprintf("%d: %s: %s", l.Line, l.Text, why))
	w.ended = w.ended || ends
}

// checkPacket judges a line for each of its clients, by verdict and then by real packets, until one is wrong.
func (w *testbed) checkPacket(ctx context.Context, l *packetLine) (wrong []string) {
	if l.Flow != "" {
		f := w.flows[l.Flow]
		if w.lost[l.Flow] {
			w.refuse(l, fmt.Sprintf("connections through %s end with its agent", w.implementation.Name), false)
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
	if w.independent(l) && len(l.Clients) > 1 {
		each := make([]packetLine, len(l.Clients))
		for i, c := range l.Clients {
			each[i] = *l
			each[i].Clients = []client{c}
		}
		return w.checkPackets(ctx, each)
	}
	for _, c := range l.Clients {
		j := w.assess(c, l.To, l.Proto, l.Via)
		is := ""
		switch of := w.flows[l.Quotes]; {
		case l.Quotes != "" && of == nil:
			is = "the flow was never opened"
		case l.Quotes == "" || of.client.Addr() != l.To.Addr(): // else it is related, and not evaluated
			is = j.differs(l, expected)
		}
		if r := w.implementation.leaves(j, l.Size); is == "" && r != "" {
			w.refuse(l, fmt.Sprintf("%s refuses it: %s", w.implementation.Name, r), l.Open != "" || l.As != "")
		} else if is == "" {
			if is = (probe{w: w, l: l, c: c, j: j}).run(ctx); is != "" {
				is = w.implementation.label() + ": " + is + "\n" + w.dump(j.node)
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
		problems := w.agents[n].resolver.Problems()
		if p := w.agents[n].policies; p != nil {
			problems = slices.Concat(problems, p.resolver.Problems())
		}
		for _, p := range problems {
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
