package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// unable is a mode that this machine can't do, and why.
type unable struct{ mode, why string }

// findModes tries every mode, or those of the names, or those that the user named, each with one Service in namespaces of its own, and gives those
// that carry a connection. One that a user named must be among them.
func (r *run) findModes(ctx context.Context, names ...string) (can []string, cannot []unable, err error) {
	for _, name := range r.candidates(names) {
		if _, err := agent.ModeOf(name); err != nil {
			return nil, nil, fmt.Errorf("--modes: %w", err)
		}
		why, err := r.try(ctx, name)
		if err != nil {
			return nil, nil, fmt.Errorf("try mode %s: %w", name, err)
		}
		switch {
		case why == "":
			can = append(can, name)
		case len(r.Modes) > 0:
			return nil, nil, fmt.Errorf("mode %s can't run here: %s", name, why)
		default:
			cannot = append(cannot, unable{name, why})
		}
	}
	return can, cannot, nil
}

// candidates are those modes that the user named, or else these, or else all. Of one that comes in variants, only the one that the host uses.
func (r *run) candidates(these []string) (names []string) {
	switch {
	case len(r.Modes) > 0:
		return r.Modes
	case len(these) > 0:
		return these
	}
	for _, m := range agent.Modes() {
		if base, _, variant := strings.Cut(m.Name, "-"); !variant || !slices.ContainsFunc(agent.Modes(), func(o agent.Mode) bool { return o.Name == base }) {
			names = append(names, m.Name)
		}
	}
	return names
}

// try serves one Service in a mode and connects to it. It gives why that fails, if it does.
func (r *run) try(ctx context.Context, mode string) (why string, err error) {
	p, err := newPair(ctx, r.id+"-try-"+mode)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	f, err := newCluster(1).write(r.tmp, 1000)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.remove()) }()
	n := &node{pair: p, folder: f, service: -1, mode: mode}
	if err := r.hire(n); err != nil {
		return "", err
	}
	defer n.end()
	limited, stop := context.WithTimeout(ctx, within(30*time.Second))
	defer stop()
	if _, err := n.wait(limited); err != nil {
		return brief(err.Error()), ctx.Err()
	}
	if err := p.serve(load.Place{Enter: p.far.Do}, everywhere, sizes, 1); err != nil {
		return "", err
	}
	c := r.client(p, []netip.AddrPort{entry(0)}, 0)
	c.Place, c.Most = load.Place{Enter: p.enter}, 3 // on any processor: whether it works is asked, not how fast
	s, err := c.Run(limited, load.CRR, within(10*time.Second))
	if err != nil || s.Ops > 0 {
		return "", err
	}
	why = fmt.Sprintf("no connection comes through (%v)", s.Errors)
	if state, err := n.loop(); err == nil {
		for owner, f := range state.Failing {
			why += "; " + owner + ": " + f.Error
		}
		why += " " + state.Error
	}
	return brief(why), nil
}

// brief keeps a reason to a line.
func brief(s string) string {
	if r := []rune(strings.Join(strings.Fields(s), " ")); len(r) > 300 {
		return string(r[:300]) + "…"
	}
	return strings.Join(strings.Fields(s), " ")
}

// unableWords tell of modes that are not measured.
func unableWords(l []unable) (words []string) {
	for _, u := range l {
		words = append(words, fmt.Sprintf("Mode %s: it can't run here: %s.", u.mode, strings.TrimSuffix(u.why, ".")))
	}
	return words
}

// styles are the same for a mode in every experiment: iptables blue and userspace red, as the article of CenturyLink has them.
var styles = map[string]int{"iptables": 1, "userspace": 7, "nftables": 3, armEBPF: 4, "ipvs": 6, old: 5, present: 2, proxy: 8, armStack: 8 /* never beside it */}

// modeArms are arms of modes.
func modeArms(modes []string) (arms []result.Arm) {
	for _, m := range modes {
		arms = append(arms, result.Arm{ID: m, Title: m, Style: styles[m], Text: "Services' addresses, in a pair whose node is served by `fairlead run --mode " + m + "` from a folder of manifests"})
	}
	return arms
}

// baselines are the arms without a Service.
func baselines() []result.Arm {
	return []result.Arm{
		{ID: armDirect, Title: "direct", Text: "the servers' own addresses, in a pair of network namespaces without any rule and without conntrack"},
		{ID: armAgain, Title: "direct again", Text: "the same in another pair of namespaces: what it differs from direct is what this run can't tell from nothing"},
	}
}

// staff starts an agent of a mode in a pair of its own, an arm's, and waits until all is in the kernel and it rests.
func (r *run) staff(ctx context.Context, arm, mode string, f *folder, flags ...string) (*node, time.Duration, error) {
	p, err := r.pair(ctx, arm, f.services)
	if err != nil {
		return nil, 0, err
	}
	n := &node{pair: p, folder: f, service: -1, mode: mode, flags: flags}
	if err := r.hire(n); err != nil {
		return nil, 0, err
	}
	r.later(func() error { n.end(); return nil })
	took, err := n.wait(ctx)
	if err != nil {
		return nil, 0, err
	}
	if s, err := n.loop(); err != nil || s.Error != "" || len(s.Failing) > 0 {
		return nil, 0, errors.Join(err, fmt.Errorf("the agent of %s could not make %d Services true: %s %v", p.node.Name, f.services, s.Error, s.Failing))
	}
	return n, took, n.settle(ctx)
}
