package text

import (
	"errors"
	"fmt"
	"strings"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/verdict"
)

// Explanation prints an explanation for people.
type Explanation struct{ *inspect.Explanation }

// branch is a line of explain's tree.
type branch struct {
	depth int
	text  string
}

// branches returns the lines of the tree for people.
func (e Explanation) branches() (l []branch) {
	add := func(depth int, format string, args ...any) {
		l = append(l, branch{depth, fmt.Sprintf(format, args...)})
	}
	by := ""
	if e.Interface != "" && e.Origin != "node" {
		by = ", by interface " + e.Interface
	}
	origins := map[string]string{"node": "the node itself", "pod": "a pod of this node's network", "external": "external"}
	add(0, "source, seen from node %s: %s%s", e.Node, origins[e.Origin], by)
	e.frontend(add)
	if len(e.Candidates) > 0 {
		forwarded := map[bool]string{true: "forwarded", false: "translated"}[e.Outcome == "forward"]
		add(0, "%s to one of %d endpoints, chosen by %s", forwarded, len(e.Candidates), e.Scheduler)
		for _, c := range e.Candidates {
			add(1, "%s", candidateLine(c))
		}
	}
	for _, p := range e.Policies {
		evaluationBranches(p, len(e.Policies) == 1, add)
	}
	switch {
	case e.Outcome == "forward", e.Outcome == "drop" && len(e.Policies) > 0:
	case e.Outcome == "pass":
		add(0, "not translated: it follows the node's routes and other rules")
	default:
		add(0, "%s: %s", map[string]string{"reject": "rejected", "drop": "dropped"}[e.Outcome], e.Reason)
	}
	if e.Unselected != nil {
		add(0, "existing flows also stay with serving endpoints that get no new ones: %s", Few(e.Unselected))
	}
	if e.Counts != nil {
		add(0, "clients so far: %d connections to an endpoint, %d rejected without one", e.Counts.Connections,
			e.Counts.Refused)
	}
	for _, p := range e.Problems {
		add(0, "problem: %s", p)
	}
	if e.PolicyKernel == "" {
		add(0, "kernel: %s", e.Kernel)
	} else {
		add(0, "kernel: Services %s; policies %s", e.Kernel, e.PolicyKernel)
	}
	return l
}

// frontend adds what is said of the frontend.
func (e Explanation) frontend(add func(depth int, format string, args ...any)) {
	for _, step := range e.Stages {
		switch {
		case step.Stage == verdict.StageFrontend && e.Service == "":
			add(0, "%s", e.noFrontend())
		case step.Stage == verdict.StageFrontend:
			add(0, "frontend: %s of Service %s", e.Via, e.Service)
		case step.Stage == verdict.StageSources && e.Sources != nil:
			add(1, "allowed source ranges: %s", strings.Join(e.Sources, ", "))
		}
	}
	if e.Policy != "" {
		add(1, "%s", e.Policy)
	}
	if e.Affinity != "" {
		add(1, "session affinity: ClientIP, %s", e.Affinity)
	}
}

// noFrontend returns what is said where no frontend matches: the reason, unless the outcome's line has it.
func (e Explanation) noFrontend() string {
	if e.Outcome == "pass" || len(e.Stages) > 1 {
		return "frontend: none: " + e.Stages[0].Reason + e.Unserved
	}
	return "frontend: none"
}

// candidateLine returns what is said of a candidate.
func candidateLine(c inspect.Candidate) string {
	words := []string{c.Address}
	if c.Pod != "" {
		words[0] += " pod " + c.Pod
	}
	if c.Local {
		words = append(words, "on this node")
	} else {
		words = append(words, "remote")
	}
	if c.Weight > 0 {
		words = append(words, fmt.Sprintf("weight %d", c.Weight))
	}
	words = append(words, "sees source "+c.Sees)
	if c.DSR {
		words = append(words, "its node answers the client directly")
	}
	if c.Dropped {
		words = append(words, "dropped by policies")
	}
	return strings.Join(words, ", ")
}

// Tree prints it as a tree, each reason below what it is of.
func (e Explanation) Tree(p *cli.Page) error {
	l := e.branches()
	err := p.Paragraph("", "", e.From+" → "+e.To)
	for i, b := range l {
		last := true // of its depth below the same branch
		for _, next := range l[i+1:] {
			if next.depth <= b.depth {
				last = next.depth < b.depth
				break
			}
		}
		indent := strings.Repeat("│  ", b.depth)
		first, rest := indent+"├─ ", indent+"│  "
		if last {
			first, rest = indent+"└─ ", indent+"   "
		}
		err = errors.Join(err, p.Paragraph(first, rest, b.text))
	}
	for _, n := range e.Remarks {
		err = errors.Join(err, p.Paragraph("note: ", "      ", fmt.Sprintf("mode %s: %s", e.Mode, n)))
	}
	if e.Remark != "" {
		err = errors.Join(err, p.Paragraph("note: ", "      ", e.Remark))
	}
	return err
}

// evaluationBranches adds the lines of an evaluation, which is that of all endpoints or of some.
func evaluationBranches(p inspect.Evaluation, all bool, add func(depth int, format string, args ...any)) {
	title := "policies"
	if !all {
		title += " for " + Few(p.Backends)
	}
	add(0, "%s: %s: %s", title, map[string]string{"accept": "accepted", "drop": "dropped"}[p.Verdict], p.Reason)
	if p.Bypassed != "" {
		add(1, "not enforced for what is bridged: %s", p.Bypassed)
	}
	for _, s := range p.Steps {
		text := fmt.Sprintf("%s of %s, tier %s, port entry %s, peer %s: %s", s.Direction, s.Pod, s.Tier, s.Entry, s.Peer,
			s.Decision)
		if len(s.By) > 0 {
			text += ", by " + Few(s.By)
		}
		if s.Kernel != inspect.InSync {
			text += "; kernel: " + s.Kernel
		}
		add(1, "%s", text)
		if len(s.Audited) > 0 {
			add(2, "inspect.Audit: %s would drop it", Few(s.Audited))
		}
	}
}
