package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/load"
)

// Unable is a mode or layout that this machine can't run, and why.
type Unable struct{ Name, Why string }

// FindModes tries modes, each with one Service in namespaces of its own, and returns those that carry a connection:
// those that the user chose, which all must, or else these, or else all that there are. An exact run doesn't try what
// the user chose, since that takes long where it is emulated: it fails where an agent does.
func (b *Testbed) FindModes(ctx context.Context, chosen []string,
	these ...string) (can []string, cannot []Unable, err error) {
	for _, name := range candidates(chosen, these) {
		if _, err := mode.Of(name); err != nil {
			return nil, nil, fmt.Errorf("--modes: %w", err)
		}
		why, tried := b.tried[name]
		tried = tried || b.Config.Exact && len(chosen) > 0
		if !tried {
			var err error
			if why, err = b.try(ctx, name); err != nil {
				return nil, nil, fmt.Errorf("try mode %s: %w", name, err)
			}
			b.tried[name] = why
		}
		switch {
		case why == "":
			can = append(can, name)
		case len(chosen) > 0:
			return nil, nil, fmt.Errorf("mode %s can't run here: %s", name, why)
		default:
			cannot = append(cannot, Unable{Name: name, Why: why})
		}
	}
	return can, cannot, nil
}

// candidates returns the modes that the user chose, or else these, or else all, and of a mode with variants only the
// one that the host uses.
func candidates(chosen, these []string) (names []string) {
	switch {
	case len(chosen) > 0:
		return chosen
	case len(these) > 0:
		return these
	}
	for _, m := range mode.All() {
		if base, _, variant := strings.Cut(m.Name, "-"); !variant ||
			!slices.ContainsFunc(mode.All(), func(o mode.Mode) bool { return o.Name == base }) {
			names = append(names, m.Name)
		}
	}
	return names
}

// try serves one Service in a mode and connects to it. It returns why that fails, "" if it does not.
func (b *Testbed) try(ctx context.Context, mode string) (why string, err error) {
	p, err := NewPair(ctx, b.Name+"-try-"+mode)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	f, err := NewCluster(1).Write(b.Dir, 1000)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.remove()) }()
	n := &Node{Pair: p, Folder: f, Mode: mode}
	if err := b.StartAgent(n); err != nil {
		return "", err
	}
	defer n.Agent.End()
	limited, stop := context.WithTimeout(ctx, b.Within(30*time.Second))
	defer stop()
	if _, err := n.WaitReady(limited); err != nil {
		why = err.Error()
		if _, own, refused := strings.Cut(why, ": fairlead: "); refused { // the agent's own words suffice
			why = own
		}
		return Brief(why), ctx.Err()
	}
	if err := p.Serve(load.Thread{Enter: p.Far.Do}, Everywhere, Sizes, 1); err != nil {
		return "", err
	}
	c := b.Client(p, []netip.AddrPort{ServiceEntry(0)}, 0)
	c.Thread, c.Most = load.Thread{Enter: p.Enter}, 3 // on any processor: it is no measurement
	s, err := c.Run(limited, load.CRR, b.Within(10*time.Second))
	if err != nil || s.Ops > 0 {
		return "", err
	}
	why = fmt.Sprintf("no connection comes through (%v)", s.Errors)
	if state, err := n.Status(); err == nil {
		for owner, f := range state.Failing {
			why += "; " + owner + ": " + f.Error
		}
		why += " " + state.Error
	}
	return Brief(why), nil
}

// Brief returns a reason in one line of 300 characters at most.
func Brief(s string) string {
	if r := []rune(strings.Join(strings.Fields(s), " ")); len(r) > 300 {
		return string(r[:300]) + "…"
	}
	return strings.Join(strings.Fields(s), " ")
}

// StartNode adds an arm's pair with an agent of a mode, and waits until all is in the kernel and the agent rests. It
// returns how long after its start the agent was ready.
func (b *Testbed) StartNode(ctx context.Context, arm, mode string, f *Folder,
	flags ...string) (*Node, time.Duration, error) {
	p, err := b.AddPair(ctx, arm, f.Cluster.Services)
	if err != nil {
		return nil, 0, err
	}
	n := NewNode(p, mode, f, flags...)
	elapsed, err := b.ServeNode(ctx, n)
	if err != nil {
		return nil, 0, err
	}
	return n, elapsed, nil
}

// NewNode returns a node with an agent, not started yet, that serves a pair's near end from a folder.
func NewNode(p *Pair, mode string, f *Folder, flags ...string) *Node {
	return &Node{Pair: p, Folder: f, Mode: mode, flags: flags}
}

// ServeNode starts a node's agent, until the testbed is closed, and waits until all is in the kernel and the agent
// rests. It returns how long after its start the agent was ready.
func (b *Testbed) ServeNode(ctx context.Context, n *Node) (time.Duration, error) {
	if err := b.StartAgent(n); err != nil {
		return 0, err
	}
	b.Defer(func() error { n.Agent.End(); return nil })
	elapsed, err := n.WaitReady(ctx)
	if err != nil {
		return 0, err
	}
	if s, err := n.Status(); err != nil || s.Error != "" || len(s.Failing) > 0 {
		return 0, errors.Join(err, fmt.Errorf("the agent of %s could not make %d Services true: %s %v", n.Pair.Near.Name,
			n.Folder.Cluster.Services, s.Error, s.Failing))
	}
	return elapsed, n.Agent.Settle(ctx)
}
