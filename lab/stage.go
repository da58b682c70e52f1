package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/result"
)

// stage is the arms that experiments by number of Services share: direct, twice; kube-proxy's rules; our modes.
type stage struct {
	*run
	counts  []int // numbers of Services, rising
	again   int   // full writes of kube-proxy's rules of 2019 at the greatest number, one at the others; 0: none
	modes   []string
	layouts []classic.Layout
	cannot  []unable
	folders []*folder // by number of Services
	worlds  []*world
	nodes   []*node
}

// newStage finds out which of the layouts and modes this machine can do: of all modes, or those that are named, if not the
// user named some.
func newStage(ctx context.Context, r *run, counts []int, again int, layouts []classic.Layout, modes ...string) (*stage, error) {
	if err := (Profile{Services: counts}).check(); err != nil {
		return nil, err
	}
	s := &stage{run: r, counts: counts, again: again}
	var err error
	if s.modes, s.cannot, err = r.findModes(ctx, modes...); err != nil {
		return nil, err
	}
	if layouts, err = r.chosen(layouts); err != nil {
		return nil, err
	}
	for _, l := range layouts {
		if err := r.tryLayout(ctx, l); err != nil {
			if r.Layouts != nil {
				return nil, fmt.Errorf("layout %s can't be written here: %w", l, err)
			}
			s.cannot = append(s.cannot, unable{l.String(), brief(err.Error())})
			continue
		}
		s.layouts = append(s.layouts, l)
	}
	return s, nil
}

// NoLayouts among Options.Layouts, alone, is none of them.
const NoLayouts = "none"

// chosen are those of the layouts that the user named, or all of them.
func (r *run) chosen(layouts []classic.Layout) (l []classic.Layout, err error) {
	if r.Layouts == nil {
		return layouts, nil
	}
	if len(r.Layouts) == 0 {
		return nil, fmt.Errorf("--layouts: choose of %s, or %s alone", strings.Join(names(layouts), ", "), NoLayouts)
	}
	if slices.Equal(r.Layouts, []string{NoLayouts}) {
		return nil, nil
	}
	for _, name := range r.Layouts {
		i := slices.IndexFunc(layouts, func(l classic.Layout) bool { return l.String() == name })
		if i < 0 || slices.Contains(l, layouts[i]) {
			return nil, fmt.Errorf("--layouts %q: choose of %s, each once, or %s alone", name, strings.Join(names(layouts), ", "), NoLayouts)
		}
		l = append(l, layouts[i])
	}
	return l, nil
}

// names of layouts.
func names(layouts []classic.Layout) (l []string) {
	for _, layout := range layouts {
		l = append(l, layout.String())
	}
	return l
}

// tryLayout writes one Service's rules in a namespace of their own.
func (r *run) tryLayout(ctx context.Context, l classic.Layout) (err error) {
	ns, err := newSpace(r.id + "-try")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.drop(ns)) }()
	w, err := newWorld(1)
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		return write(ctx, l, classic.FromParts(w.parts))
	})
}

// most is the greatest number of Services.
func (r *stage) most() int { return slices.Max(r.counts) }

// raise adds the steps that make namespaces and have all kernels programmed.
func (r *stage) raise(l *plan) {
	l.add("writing manifests", time.Duration(r.most())*30*time.Microsecond, r.prepare)
	for _, layout := range r.layouts {
		for i, n := range r.counts {
			l.add(fmt.Sprintf("writing %s of %s Services", layout, thousands(n)), writes(layout, n)*time.Duration(1+r.resyncs(layout, n)), func(ctx context.Context) error {
				return r.install(ctx, layout, i)
			})
		}
	}
	for _, mode := range r.modes {
		each := 300 * time.Microsecond
		if strings.HasPrefix(mode, "iptables") { // whose commands take longer
			each *= 2
		}
		for i, n := range r.counts {
			l.add(fmt.Sprintf("starting %s of %s Services", mode, thousands(n)), time.Second/2+time.Duration(n)*each, func(ctx context.Context) error {
				return r.start(ctx, mode, i)
			})
		}
	}
}

// writes is about how long kube-proxy's rules take to be written: iptables-restore's time grows with their square.
func writes(l classic.Layout, services int) time.Duration {
	n := time.Duration(services)
	if l == classic.NFTables {
		return n * 2 * time.Millisecond
	}
	return n*500*time.Microsecond + n*n*70*time.Nanosecond
}

// between is about how long a block takes beside its traffic.
const between = 5 * time.Millisecond

// planned is how long a round of these operations is to take, in all arms and others.
func (r *stage) planned(operations []operation, others ...*pair) (d time.Duration) {
	pairs := append(others, &pair{arm: armDirect}, &pair{arm: armAgain}, &pair{arm: armDirect})
	for _, n := range r.counts {
		for _, m := range r.modes {
			pairs = append(pairs, &pair{arm: m, services: n})
		}
		for _, l := range r.layouts {
			pairs = append(pairs, &pair{arm: l.String(), services: n})
		}
	}
	for _, o := range operations {
		if o.tried {
			d += o.takes + between
		}
		for _, p := range pairs {
			if len(o.targets(p)) > 0 {
				d += o.takes + between
			}
		}
	}
	return d
}

// positions of the Service that is connected to, among those of its arm, by the name that measures have for them.
const (
	first  = "first"
	middle = "middle"
	last   = "last"
	none   = "none" // traffic to no Service, through a node that has some
)

// service gives which Service that is.
func service(position string, services int) int {
	return map[string]int{first: 0, middle: services / 2, last: services - 1}[position]
}

// prepare writes the clusters.
func (r *stage) prepare(ctx context.Context) error {
	for _, arm := range []string{armDirect, armAgain} {
		if _, err := r.pair(ctx, arm, 0); err != nil {
			return err
		}
	}
	for _, n := range r.counts {
		w, err := newWorld(n, service(first, n), service(middle, n), service(last, n))
		if err != nil {
			return err
		}
		f, err := w.write(r.tmp, 1000)
		if err != nil {
			return err
		}
		r.worlds, r.folders = append(r.worlds, w), append(r.folders, f)
	}
	return nil
}

// resyncPeriod is how often kube-proxy of 2019 wrote everything again.
const resyncPeriod = 30 * time.Second

// resyncs is how often rules are written again: only those of 2019 ever were.
func (r *stage) resyncs(l classic.Layout, services int) int {
	switch {
	case l != classic.IPTables19 || r.again == 0:
		return 0
	case services == r.most():
		return r.again
	}
	return 1
}

// install writes kube-proxy's rules into a pair of their own, and again, to see what that costs.
func (r *stage) install(ctx context.Context, l classic.Layout, i int) error {
	w := r.worlds[i]
	p, err := r.pair(ctx, l.String(), w.services)
	if err != nil {
		return err
	}
	c := classic.FromParts(w.parts)
	began := time.Now()
	err = p.node.Do(func() error { return write(ctx, l, c) })
	if err != nil {
		return fmt.Errorf("write %s of %d Services: %w", l, w.services, err)
	}
	if err := r.add(result.Block{Arm: p.arm, Params: params(p.services)}, "load", float64(time.Since(began))); err != nil {
		return err
	}
	again := classic.Rules{Layout: l, Variant: classic.Legacy, Cluster: c}
	for i := range r.resyncs(l, w.services) {
		before := children()
		if err := p.node.Do(func() error { return again.Resync(ctx) }); err != nil {
			return fmt.Errorf("write %s of %d Services again: %w", l, w.services, err)
		}
		used := children() - before
		if err := r.add(result.Block{Arm: p.arm, Round: i, Params: params(p.services), Wall: used}, "resync", float64(used)/float64(resyncPeriod)); err != nil {
			return err
		}
	}
	return nil
}

// write writes a layout's rules into the calling thread's network namespace. Those of nftables go in pieces: the kernel's time
// for one transaction grows with its square.
func write(ctx context.Context, l classic.Layout, c *classic.Cluster) error {
	if l != classic.NFTables {
		_, err := classic.Install(ctx, l, classic.Legacy, c)
		return err
	}
	const piece = 20000
	for lines := range slices.Chunk(slices.Collect(strings.Lines(l.Text(c))), piece) {
		if err := l.Restore(ctx, classic.NFT, strings.Join(lines, "")); err != nil {
			return err
		}
	}
	return nil
}

// children is the processor time of commands that this process has waited for.
func children() time.Duration {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_CHILDREN, &ru) != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// start starts an agent.
func (r *stage) start(ctx context.Context, mode string, i int) error {
	n, took, err := r.staff(ctx, mode, mode, r.folders[i])
	if err != nil {
		return err
	}
	r.nodes = append(r.nodes, n)
	return r.add(result.Block{Arm: mode, Params: params(n.services), Wall: took}, "load", float64(took))
}
