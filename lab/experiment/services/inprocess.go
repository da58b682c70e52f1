package services

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/source"
)

// timedPlane is a plane that keeps how long its reads and writes took.
type timedPlane struct {
	*nftables.Plane
	clock func() time.Duration
	mu    sync.Mutex
	now   tally
}

// tally is what a plane did.
type tally struct {
	read, write         time.Duration
	reads, writes, puts int
}

func (t *timedPlane) Read(ctx context.Context) ([]nftables.Fact, error) {
	begin := t.clock()
	facts, err := t.Plane.Read(ctx)
	t.add(tally{read: t.clock() - begin, reads: 1})
	return facts, err
}

func (t *timedPlane) Write(ctx context.Context, put, del []nftables.Fact) error {
	begin := t.clock()
	err := t.Plane.Write(ctx, put, del)
	t.add(tally{write: t.clock() - begin, writes: 1, puts: len(put)})
	return err
}

func (t *timedPlane) add(a tally) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &t.now
	n.read, n.write = n.read+a.read, n.write+a.write
	n.reads, n.writes, n.puts = n.reads+a.reads, n.writes+a.writes, n.puts+a.puts
}

// reset returns the tally so far and begins another.
func (t *timedPlane) reset() tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.now
	t.now = tally{}
	return n
}

// inProcess is a mode's loops at work in a network namespace, in this process.
type inProcess struct {
	arm   string
	clock func() time.Duration
	plane *timedPlane // nil: planes of which the whole alone is measured
	loops []reconcile.Runner[model.ServicePart]
	check func(context.Context) error // has the plane read what is in the kernel
	halt  func()                      // ends the loops
}

func newInProcess(b *testbed.Testbed, ns *netns.Namespace) (*inProcess, error) {
	var plane *nftables.Plane
	err := ns.Do(func() (err error) {
		plane, err = nftables.New()
		return err
	})
	if err != nil {
		return nil, err
	}
	c := &inProcess{arm: experiment.ArmNFTables, clock: b.Clock, plane: &timedPlane{Plane: plane, clock: b.Clock}}
	l := reconcile.New(c.plane, reconcile.Options[model.ServicePart]{Owner: model.OwnerOf})
	c.check = l.Check
	c.run(l)
	return c, nil
}

// run runs loops, until halt.
func (c *inProcess) run(loops ...reconcile.Runner[model.ServicePart]) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, l := range loops {
		running.Go(func() { l.Run(ctx) })
	}
	c.loops = loops
	c.halt = func() {
		cancel()
		running.Wait()
	}
}

// stop ends the loops and closes their planes.
func (c *inProcess) stop() (err error) {
	c.halt()
	for _, l := range c.loops {
		err = errors.Join(err, l.Close())
	}
	return err
}

// did returns what the plane did since the last call.
func (c *inProcess) did() tally {
	if c.plane == nil {
		return tally{}
	}
	return c.plane.reset()
}

// applied is what it took until a change was true in the kernel.
type applied struct {
	did                tally
	wall, user, system time.Duration
	sent               float64 // bytes that this process wrote, most of them to the kernel's netlink
}

// apply passes a change to the loop and waits until it is in the kernel.
func (c *inProcess) apply(ctx context.Context, put, del []model.ServicePart) (t applied, err error) {
	c.did()
	before, sent, begin := usage(), written(), c.clock()
	err = c.sync(ctx, put, del)
	t.wall = c.clock() - begin
	after := usage()
	t.user, t.system, t.sent = after.user-before.user, after.system-before.system, written()-sent
	t.did = c.did()
	return t, err
}

// sync passes a change to the loops and waits until it is in the kernel.
func (c *inProcess) sync(ctx context.Context, put, del []model.ServicePart) (err error) {
	for _, l := range c.loops {
		l.Change(put, del)
	}
	for _, l := range c.loops {
		err = errors.Join(err, l.Sync(ctx))
	}
	return err
}

// addAllocated records what f allocates in this process, of so many operations: how many objects and bytes each.
func (r *trial) addAllocated(b result.Block, of string, operations int, f func() error) error {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := f()
	runtime.ReadMemStats(&after)
	if err != nil {
		return err
	}
	b.Counters, b.Ops = nil, 0
	return errors.Join(
		r.out.AddValue(b, of+suffixObjects, float64(after.Mallocs-before.Mallocs)/float64(operations)),
		r.out.AddValue(b, of+suffixBytes, float64(after.TotalAlloc-before.TotalAlloc)/float64(operations)))
}

type usages struct{ user, system time.Duration }

// usage is the processor time of this process.
func usage() usages {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return usages{}
	}
	return usages{time.Duration(ru.Utime.Nano()), time.Duration(ru.Stime.Nano())}
}

// written is how many bytes this process has passed to write(2), sockets included (proc_pid_io(5), wchar).
func written() (n float64) {
	b, _ := os.ReadFile("/proc/self/io")
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "wchar:"); ok {
			fmt.Sscan(rest, &n)
		}
	}
	return n
}

// probe programs one Service in a namespace of its own, to learn whether this kernel can.
func (r *trial) probe(ctx context.Context) (err error) {
	ns, err := testbed.NewNamespace(r.bed.Name + "-probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	w, err := testbed.Decide(1)
	if err != nil {
		return err
	}
	c, err := newInProcess(r.bed, ns)
	if err == nil {
		defer c.stop()
		limited, stop := context.WithTimeout(ctx, r.bed.Within(30*time.Second))
		defer stop()
		if r.exact { // its clock jumps over the time that a busy host takes to deliver the kernel's modules
			limited = ctx
		}
		_, err = c.apply(limited, w.Parts, nil)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("%w\nThe kernel must have nf_tables with NAT (CONFIG_NF_TABLES, NF_TABLES_INET, NFT_NAT, "+
			"NFT_NUMGEN, NFT_FIB_INET, NF_CONNTRACK): load the modules with `modprobe -a nf_tables nft_chain_nat nft_nat "+
			"nft_numgen nft_fib_inet nf_conntrack`, or measure on a stock kernel of Debian, Ubuntu or Fedora", err)
	}
	return err
}

// cold measures a cold sync and a restart with that number of Services.
func (r *trial) cold(ctx context.Context, round int, w *testbed.Decided) (err error) {
	ns, err := testbed.NewNamespace(r.bed.Name + "-cold")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	for _, again := range []bool{false, true} {
		c, err := newInProcess(r.bed, ns)
		if err != nil {
			return err
		}
		if err := errors.Join(r.sync(ctx, round, w, c, again), c.stop()); err != nil {
			return fmt.Errorf("sync %d Services: %w", w.Cluster.Services, err)
		}
	}
	return nil
}

// sync has new loops make all parts true: in an empty kernel, or, again, in one where they are true already.
func (r *trial) sync(ctx context.Context, round int, w *testbed.Decided, c *inProcess, again bool) error {
	defer r.withoutGC()()
	runtime.GC()
	of, t := "cold", applied{}
	if again {
		of = "restart"
	}
	if err := r.addAllocated(result.Block{Arm: c.arm, Round: round,
		Params: testbed.ServiceParams(w.Cluster.Services)}, of, 1, func() (err error) {
		t, err = c.apply(ctx, w.Parts, nil)
		return err
	}); err != nil {
		return err
	}
	b := result.Block{Arm: c.arm, Round: round, Params: testbed.ServiceParams(w.Cluster.Services),
		Wall: t.wall, Counters: map[string]float64{
			"facts": float64(t.did.puts), "transactions": float64(t.did.writes), "netlink_bytes": t.sent,
			"user": float64(t.user), "system": float64(t.system)}}
	if c.plane == nil {
		b.Counters = nil
		return r.out.AddValue(b, of, float64(t.wall))
	}
	if !again {
		kernel := b
		kernel.Counters = nil
		return errors.Join(r.out.AddValue(b, of, float64(t.wall)),
			r.out.AddValue(kernel, "cold-kernel", float64(t.did.write)))
	}
	if t.did.writes > 0 {
		return fmt.Errorf("everything was in the kernel, and still %d facts were written", t.did.puts)
	}
	return r.out.AddValue(b, of, float64(t.wall))
}

// changing is a loop with a cluster to make changes in.
type changing struct {
	world   *testbed.Decided
	loop    *inProcess
	ns      *netns.Namespace
	service int // whose endpoint is replaced at present; -1: none
}

// change decides what to replace one endpoint of a Service by another, or to put the one back that was replaced last.
func (r *trial) change(c *changing) (put, del []model.ServicePart) {
	s := c.world.Cluster.Slice(max(0, c.service))
	if c.service < 0 {
		c.service = r.bed.Rand.IntN(c.world.Cluster.Services)
		k := r.bed.Rand.IntN(testbed.Endpoints)
		s = c.world.Cluster.With(c.service, k, testbed.Spare(c.service, k))
	} else {
		c.service = -1
	}
	d := c.world.Resolver.Apply([]source.Change{{Key: source.KeyOf(s), Object: s}})
	return d.Services.Put, d.Services.Del
}

// prepareChanges fills a network namespace each for the least and the greatest number of Services.
func (r *trial) prepareChanges(ctx context.Context) error {
	r.bed.Defer(r.endChanges)
	for i, w := range r.worlds {
		if w.Cluster.Services != r.profile.few() && w.Cluster.Services != r.profile.most() {
			continue
		}
		ns, err := testbed.NewNamespace(fmt.Sprintf("%s-change%d", r.bed.Name, i))
		if err != nil {
			return err
		}
		c, err := newInProcess(r.bed, ns)
		if err != nil {
			return errors.Join(err, testbed.RemoveNamespace(ns))
		}
		r.changing = append(r.changing, &changing{w, c, ns, -1})
		if _, err = c.apply(ctx, w.Parts, nil); err == nil {
			err = c.check(ctx) // a loop reads once more after its first sync: not while we measure
		}
		if err != nil {
			return fmt.Errorf("sync %d Services: %w", w.Cluster.Services, err)
		}
	}
	return nil
}

// batches measures a batch of single changes at each of the two numbers of Services, in random order.
func (r *trial) batches(ctx context.Context, round int) error {
	runtime.GC()
	for _, i := range r.bed.Rand.Perm(len(r.changing)) {
		c := r.changing[i]
		if err := r.batch(ctx, round, c, r.profile.Batch); err != nil {
			return fmt.Errorf("change an endpoint of %d Services: %w", c.world.Cluster.Services, err)
		}
	}
	return nil
}

func (r *trial) batch(ctx context.Context, round int, c *changing, changes int) error {
	defer r.withoutGC()()
	var kernel, wall []int64
	begin, counters := time.Now(), map[string]float64{}
	for range changes {
		put, del := r.change(c)
		t, err := c.loop.apply(ctx, put, del)
		if err != nil {
			return err
		}
		kernel, wall = append(kernel, int64(t.did.write)), append(wall, int64(t.wall))
		counters["facts"] += float64(t.did.puts)
		counters["transactions"] += float64(t.did.writes)
		counters["netlink_bytes"] += t.sent
		counters["user"] += float64(t.user)
		counters["system"] += float64(t.system)
	}
	b := result.Block{Arm: c.loop.arm, Round: round, Params: testbed.ServiceParams(c.world.Cluster.Services),
		Start: begin, Wall: time.Since(begin), Counters: counters}
	whole := b
	whole.Counters = nil
	if c.loop.plane != nil {
		if err := r.out.AddTimes(b, "change", kernel); err != nil {
			return err
		}
	}
	if err := r.out.AddTimes(whole, "change-whole", wall); err != nil {
		return err
	}
	return r.allocatedByChange(ctx, c, b)
}

// allocatedByChange records what a change and the one that undoes it allocate, a half each. They aren't timed: to read
// what is allocated slows what comes next.
func (r *trial) allocatedByChange(ctx context.Context, c *changing, b result.Block) error {
	put, del := r.change(c)
	back, gone := r.change(c)
	return r.addAllocated(b, "change", 2, func() error {
		return errors.Join(c.loop.sync(ctx, put, del), c.loop.sync(ctx, back, gone))
	})
}
