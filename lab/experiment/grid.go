package experiment

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
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
)

// Grid is the arms that experiments by number of Services share: direct, twice; kube-proxy's rules; our modes.
type Grid struct {
	bed     *testbed.Testbed
	out     *result.Writer
	Counts  []int // numbers of Services, rising
	again   int   // full writes of kube-proxy's rules of 2019 at the greatest number, one at the others; 0: none
	Modes   []string
	Layouts []classic.Layout
	Cannot  []testbed.Unable
	Folders []*testbed.Folder // by number of Services
	worlds  []*testbed.Decided
	nodes   []*testbed.Node
}

// NewGrid returns the grid of those layouts and modes that this machine can run: of all modes, or of those named,
// unless the user chose some.
func NewGrid(ctx context.Context, b *testbed.Testbed, o Options, counts []int, again int, layouts []classic.Layout,
	modes ...string) (*Grid, error) {
	if err := CheckServices(counts); err != nil {
		return nil, err
	}
	s := &Grid{bed: b, Counts: counts, again: again}
	var err error
	if s.Modes, s.Cannot, err = b.FindModes(ctx, o.Modes, modes...); err != nil {
		return nil, err
	}
	if layouts, err = o.ChosenLayouts(layouts); err != nil {
		return nil, err
	}
	for _, l := range layouts {
		if err := tryLayout(ctx, b, l); err != nil {
			if o.Layouts != nil {
				return nil, fmt.Errorf("layout %s can't be written here: %w", l, err)
			}
			s.Cannot = append(s.Cannot, testbed.Unable{Name: l.String(), Why: testbed.Brief(err.Error())})
			continue
		}
		s.Layouts = append(s.Layouts, l)
	}
	return s, nil
}

// NoLayouts among Options.Layouts, alone, is none of them.
const NoLayouts = "none"

// ChosenLayouts returns those of the layouts that the user named, or all of them.
func (o Options) ChosenLayouts(layouts []classic.Layout) (l []classic.Layout, err error) {
	if o.Layouts == nil {
		return layouts, nil
	}
	if len(o.Layouts) == 0 {
		return nil, fmt.Errorf("--layouts: choose of %s, or %s alone", strings.Join(LayoutNames(layouts), ", "), NoLayouts)
	}
	if slices.Equal(o.Layouts, []string{NoLayouts}) {
		return nil, nil
	}
	for _, name := range o.Layouts {
		i := slices.IndexFunc(layouts, func(l classic.Layout) bool { return l.String() == name })
		if i < 0 || slices.Contains(l, layouts[i]) {
			return nil, fmt.Errorf("--layouts %q: choose of %s, each once, or %s alone", name,
				strings.Join(LayoutNames(layouts), ", "), NoLayouts)
		}
		l = append(l, layouts[i])
	}
	return l, nil
}

// LayoutNames returns the names of layouts.
func LayoutNames(layouts []classic.Layout) (l []string) {
	for _, layout := range layouts {
		l = append(l, layout.String())
	}
	return l
}

// tryLayout writes one Service's rules in a namespace of their own.
func tryLayout(ctx context.Context, b *testbed.Testbed, l classic.Layout) (err error) {
	ns, err := testbed.NewNamespace(b.Name + "-try")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	w, err := testbed.Decide(1)
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		return write(ctx, l, classic.FromParts(w.Parts))
	})
}

// Most returns the greatest number of Services.
func (r *Grid) Most() int { return slices.Max(r.Counts) }

// AddSteps adds the steps that make the grid: namespaces, manifests, rules and agents. Their blocks go to out.
func (r *Grid) AddSteps(l *Plan, out *result.Writer) {
	r.out = out
	l.Add("writing manifests", time.Duration(r.Most())*30*time.Microsecond, r.prepare)
	for _, layout := range r.Layouts {
		for i, n := range r.Counts {
			l.Add(fmt.Sprintf("writing %s of %s Services", layout, Thousands(n)),
				writes(layout, n)*time.Duration(1+r.resyncs(layout, n)), func(ctx context.Context) error {
					return r.install(ctx, layout, i)
				})
		}
	}
	for _, mode := range r.Modes {
		each := 300 * time.Microsecond
		if strings.HasPrefix(mode, "iptables") { // whose commands take longer
			each *= 2
		}
		for i, n := range r.Counts {
			l.Add(fmt.Sprintf("starting %s of %s Services", mode, Thousands(n)), time.Second/2+time.Duration(n)*each,
				func(ctx context.Context) error {
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

// Planned is how long a round of these operations is to take, in all arms and others.
func (r *Grid) Planned(operations []testbed.Operation, others ...*testbed.Pair) (d time.Duration) {
	pairs := append(others, &testbed.Pair{Arm: testbed.ArmDirect}, &testbed.Pair{Arm: testbed.ArmAgain},
		&testbed.Pair{Arm: testbed.ArmDirect})
	for _, n := range r.Counts {
		for _, m := range r.Modes {
			pairs = append(pairs, &testbed.Pair{Arm: m, Services: n})
		}
		for _, l := range r.Layouts {
			pairs = append(pairs, &testbed.Pair{Arm: l.String(), Services: n})
		}
	}
	for _, o := range operations {
		if o.Warmup {
			d += o.Planned + between
		}
		for _, p := range pairs {
			if len(o.Targets(p)) > 0 {
				d += o.Planned + between
			}
		}
	}
	return d
}

// positions of the Service that is connected to, among those of its arm, by the name that measures have for them.
const (
	First  = "first"
	Middle = "middle"
	Last   = "last"
	None   = "none" // traffic to no Service, through a node that has some
)

// ServiceAt returns which of so many Services is at a position.
func ServiceAt(position string, services int) int {
	return map[string]int{First: 0, Middle: services / 2, Last: services - 1}[position]
}

// prepare writes the clusters.
func (r *Grid) prepare(ctx context.Context) error {
	for _, arm := range []string{testbed.ArmDirect, testbed.ArmAgain} {
		if _, err := r.bed.AddPair(ctx, arm, 0); err != nil {
			return err
		}
	}
	for _, n := range r.Counts {
		w, err := testbed.Decide(n, ServiceAt(First, n), ServiceAt(Middle, n), ServiceAt(Last, n))
		if err != nil {
			return err
		}
		f, err := w.Cluster.Write(r.bed.Dir, 1000)
		if err != nil {
			return err
		}
		r.worlds, r.Folders = append(r.worlds, w), append(r.Folders, f)
	}
	return nil
}

// resyncPeriod is how often kube-proxy of 2019 wrote everything again.
const resyncPeriod = 30 * time.Second

// resyncs is how often rules are written again: only those of 2019 ever were.
func (r *Grid) resyncs(l classic.Layout, services int) int {
	switch {
	case l != classic.IPTables19 || r.again == 0:
		return 0
	case services == r.Most():
		return r.again
	}
	return 1
}

// install writes kube-proxy's rules into a pair of their own, and again, to see what that costs.
func (r *Grid) install(ctx context.Context, l classic.Layout, i int) error {
	w := r.worlds[i]
	p, err := r.bed.AddPair(ctx, l.String(), w.Cluster.Services)
	if err != nil {
		return err
	}
	c := classic.FromParts(w.Parts)
	began := r.bed.Clock()
	err = p.Near.Do(func() error { return write(ctx, l, c) })
	if err != nil {
		return fmt.Errorf("write %s of %d Services: %w", l, w.Cluster.Services, err)
	}
	if err := r.out.AddValue(result.Block{Arm: p.Arm, Params: testbed.ServiceParams(p.Services)}, "load",
		float64(r.bed.Clock()-began)); err != nil {
		return err
	}
	again := classic.Rules{Layout: l, Variant: classic.Legacy, Cluster: c}
	for i := range r.resyncs(l, w.Cluster.Services) {
		before := children()
		if err := p.Near.Do(func() error { return again.Resync(ctx) }); err != nil {
			return fmt.Errorf("write %s of %d Services again: %w", l, w.Cluster.Services, err)
		}
		used := children() - before
		if err := r.out.AddValue(result.Block{Arm: p.Arm, Round: i, Params: testbed.ServiceParams(p.Services), Wall: used},
			"resync", float64(used)/float64(resyncPeriod)); err != nil {
			return err
		}
	}
	return nil
}

// write writes a layout's rules into the calling thread's network namespace. Those of nftables go in pieces: the
// kernel's time for one transaction grows with its square.
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
func (r *Grid) start(ctx context.Context, mode string, i int) error {
	n, elapsed, err := r.bed.StartNode(ctx, mode, mode, r.Folders[i])
	if err != nil {
		return err
	}
	r.nodes = append(r.nodes, n)
	return r.out.AddValue(result.Block{Arm: mode, Params: testbed.ServiceParams(n.Pair.Services), Wall: elapsed}, "load",
		float64(elapsed))
}

// CheckServices returns an error where numbers of Services can't be measured.
func CheckServices(counts []int) error {
	if len(counts) == 0 || !slices.IsSorted(counts) || len(slices.Compact(slices.Clone(counts))) < len(counts) {
		return fmt.Errorf("numbers of Services %v: give at least one, each once, rising, such as 1,10,100", counts)
	}
	for _, n := range counts {
		if n < 1 {
			return fmt.Errorf("numbers of Services %v: %d is none", counts, n)
		}
		if err := generate.Check(n, testbed.Endpoints); err != nil {
			return fmt.Errorf("numbers of Services %v: %w", counts, err)
		}
	}
	return nil
}

// LoadMeasure is the time to program the kernel of an arm.
var LoadMeasure = result.Measure{ID: "load", Title: "first full write", Unit: "s", Stat: result.Value,
	Text: "kube-proxy's rules: the commands' time, which for nft-classic are given them in pieces; modes: from " +
		"the start of `fairlead run` until all is in the kernel",
	Counted: "kube-proxy's rules: what the commands execute, and this process to run them; modes: what the agent does, " +
		"from its start until all is in the kernel"}

// NodesOf returns the nodes that agents of a mode serve.
func (r *Grid) NodesOf(mode string) (l []*testbed.Node) {
	for _, n := range r.nodes {
		if n.Mode == mode {
			l = append(l, n)
		}
	}
	return l
}
