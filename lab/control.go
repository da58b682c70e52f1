package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// timed is a plane that keeps how long its reads and writes took.
type timed struct {
	*nftables.Plane
	mu  sync.Mutex
	now tally
}

// tally is what a plane did.
type tally struct {
	read, write         time.Duration
	reads, writes, puts int
}

func (t *timed) Read(ctx context.Context) ([]nftables.Fact, error) {
	begin := time.Now()
	facts, err := t.Plane.Read(ctx)
	t.add(tally{read: time.Since(begin), reads: 1})
	return facts, err
}

func (t *timed) Write(ctx context.Context, put, del []nftables.Fact) error {
	begin := time.Now()
	err := t.Plane.Write(ctx, put, del)
	t.add(tally{write: time.Since(begin), writes: 1, puts: len(put)})
	return err
}

func (t *timed) add(a tally) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &t.now
	n.read, n.write = n.read+a.read, n.write+a.write
	n.reads, n.writes, n.puts = n.reads+a.reads, n.writes+a.writes, n.puts+a.puts
}

// take gives the tally and begins another.
func (t *timed) take() tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.now
	t.now = tally{}
	return n
}

// world is a cluster that was decided for the node, in this process.
type world struct {
	*cluster
	resolver *resolve.Resolver
	parts    []model.Part
}

func newWorld(services int, connected ...int) (*world, error) {
	w := &world{cluster: newCluster(services, connected...), resolver: resolve.New(resolve.Config{Node: nodeName, Addresses: []netip.Addr{nodeAddr}})}
	w.parts = w.resolver.Apply(w.changes()).Put
	if p := w.resolver.Problems(); len(p) > 0 {
		return nil, fmt.Errorf("decide %d Services: %s", services, p[0])
	}
	return w, nil
}

// control is a loop at work in a network namespace, in this process.
type control struct {
	plane *timed
	loop  *reconcile.Loop[model.Part, nftables.Key, string]
	stop  func() error
}

func newControl(ns *netns.Namespace) (*control, error) {
	var plane *nftables.Plane
	err := ns.Do(func() (err error) {
		plane, err = nftables.New()
		return err
	})
	if err != nil {
		return nil, err
	}
	c := &control{plane: &timed{Plane: plane}}
	c.loop = reconcile.New(c.plane, reconcile.Options[model.Part]{Owner: agent.Owner})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		c.loop.Run(ctx)
		close(done)
	}()
	c.stop = func() error {
		cancel()
		<-done
		return plane.Close()
	}
	return c, nil
}

// told is what it took until a change was true in the kernel.
type told struct {
	tally
	wall, user, system time.Duration
	sent               float64 // bytes that this process wrote, most of them to the kernel's netlink
}

// tell tells the loop of a change and waits until it is true.
func (c *control) tell(ctx context.Context, put, del []model.Part) (t told, err error) {
	c.plane.take()
	before, sent, begin := usage(), written(), time.Now()
	c.loop.Change(put, del)
	err = c.loop.Sync(ctx)
	t.wall = time.Since(begin)
	after := usage()
	t.user, t.system, t.sent = after.user-before.user, after.system-before.system, written()-sent
	t.tally = c.plane.take()
	return t, err
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
func (r *services) probe(ctx context.Context) (err error) {
	ns, err := newSpace(r.id + "-probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.drop(ns)) }()
	w, err := newWorld(1)
	if err != nil {
		return err
	}
	c, err := newControl(ns)
	if err == nil {
		defer c.stop()
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		_, err = c.tell(ctx, w.parts, nil)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("%w\nThe kernel must have nf_tables with NAT (CONFIG_NF_TABLES, NF_TABLES_INET, NFT_NAT, NFT_NUMGEN, NFT_FIB_INET, NF_CONNTRACK): "+
			"load the modules with `modprobe -a nf_tables nft_chain_nat nft_nat nft_numgen nft_fib_inet nf_conntrack`, or measure on a stock kernel of Debian, Ubuntu or Fedora", err)
	}
	return err
}

// cold measures a cold sync and a restart with that number of Services.
func (r *services) cold(ctx context.Context, round int, w *world) (err error) {
	ns, err := newSpace(r.id + "-cold")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.drop(ns)) }()
	for _, again := range []bool{false, true} {
		if err := r.sync(ctx, round, w, ns, again); err != nil {
			return fmt.Errorf("sync %d Services: %w", w.services, err)
		}
	}
	return nil
}

// sync has a new loop make all parts true: in an empty kernel, or, again, in one where they are true already.
func (r *services) sync(ctx context.Context, round int, w *world, ns *netns.Namespace, again bool) error {
	c, err := newControl(ns)
	if err != nil {
		return err
	}
	defer c.stop()
	runtime.GC()
	t, err := c.tell(ctx, w.parts, nil)
	if err != nil {
		return err
	}
	b := result.Block{Arm: armNFT, Round: round, Params: params(w.services), Wall: t.wall, Counters: map[string]float64{
		"facts": float64(t.puts), "transactions": float64(t.writes), "netlink_bytes": t.sent, "user": float64(t.user), "system": float64(t.system)}}
	if !again {
		kernel := b
		kernel.Counters = nil
		return errors.Join(r.add(b, "cold", float64(t.wall)), r.add(kernel, "cold-kernel", float64(t.write)))
	}
	if t.writes > 0 {
		return fmt.Errorf("everything was in the kernel, and still %d facts were written", t.puts)
	}
	return r.add(b, "restart", float64(t.wall))
}

// changing is a loop with a cluster to make changes in.
type changing struct {
	*world
	*control
	ns      *netns.Namespace
	service int // whose endpoint is replaced at present; -1: none
}

// change replaces one endpoint of a Service, or puts the one back that was replaced last.
func (r *services) change(ctx context.Context, c *changing) (told, error) {
	s := c.slice(max(0, c.service))
	if c.service < 0 {
		c.service = r.rand.IntN(c.services)
		k := r.rand.IntN(endpoints)
		s = c.with(c.service, k, spare(c.service, k))
	} else {
		c.service = -1
	}
	d := c.resolver.Apply([]source.Change{{Key: source.KeyOf(s), Object: s}})
	return c.tell(ctx, d.Put, d.Del)
}

// prepareChanges fills a network namespace each for the least and the greatest number of Services.
func (r *services) prepareChanges(ctx context.Context) error {
	r.later(r.endChanges)
	for i, w := range r.worlds {
		if w.services != r.Profile.few() && w.services != r.Profile.most() {
			continue
		}
		ns, err := newSpace(fmt.Sprintf("%s-change%d", r.id, i))
		if err != nil {
			return err
		}
		c, err := newControl(ns)
		if err != nil {
			return errors.Join(err, r.drop(ns))
		}
		r.changing = append(r.changing, &changing{w, c, ns, -1})
		if _, err = c.tell(ctx, w.parts, nil); err == nil {
			err = c.loop.Check(ctx) // a loop reads once more after its first sync: not while we measure
		}
		if err != nil {
			return fmt.Errorf("sync %d Services: %w", w.services, err)
		}
	}
	return nil
}

// batches measures a batch of single changes at each of the two numbers of Services, in random order.
func (r *services) batches(ctx context.Context, round int) error {
	runtime.GC()
	for _, i := range r.rand.Perm(len(r.changing)) {
		c := r.changing[i]
		if err := r.batch(ctx, round, c); err != nil {
			return fmt.Errorf("change an endpoint of %d Services: %w", c.services, err)
		}
	}
	return nil
}

func (r *services) batch(ctx context.Context, round int, c *changing) error {
	var kernel, wall []int64
	begin, counters := time.Now(), map[string]float64{}
	for range r.Profile.Batch {
		t, err := r.change(ctx, c)
		if err != nil {
			return err
		}
		kernel, wall = append(kernel, int64(t.write)), append(wall, int64(t.wall))
		counters["facts"] += float64(t.puts)
		counters["transactions"] += float64(t.writes)
		counters["netlink_bytes"] += t.sent
		counters["user"] += float64(t.user)
		counters["system"] += float64(t.system)
	}
	b := result.Block{Arm: armNFT, Round: round, Params: params(c.services), Start: begin, Wall: time.Since(begin), Counters: counters}
	whole := b
	whole.Counters = nil
	return errors.Join(r.addTimes(b, "change", kernel), r.addTimes(whole, "change-whole", wall))
}
