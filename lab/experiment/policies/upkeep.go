package policies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// eventRate is how many labels change in a second.
const eventRate = 100

// addUpkeep adds the steps that measure changes. Each leaves nothing behind.
func (r *trial) addUpkeep(l *experiment.Plan) {
	p := r.profile
	for _, e := range r.grid.Engines {
		l.Add(fmt.Sprintf("changing labels of %s pods, %s", experiment.Thousands(p.Large.Pods), e.Name),
			time.Duration(p.Large.Pods)*60*time.Microsecond+time.Duration(p.Events)*time.Second/eventRate,
			func(ctx context.Context) error { return r.relabelPods(ctx, e) })
		l.Add("changing labels of namespaces, "+e.Name, time.Duration(p.Wide.Pods)*60*time.Microsecond+
			time.Duration(p.Relabelled)*25*time.Millisecond,
			func(ctx context.Context) error { return r.relabelNamespaces(ctx, e) })
		if e.Name != "iptables" { // which has every peer in a set of each peer table: twenty million elements
			l.Times(p.Writes, fmt.Sprintf("writing %s peers, %s", experiment.Thousands(p.Peers), e.Name),
				time.Duration(p.Peers)*20*time.Microsecond, func(ctx context.Context, i int) error { return r.write(ctx, e, i) })
		}
		if !e.Marked {
			continue // which cuts a connection at its next packet
		}
		for _, n := range p.Flows {
			l.Times(p.Cuts, fmt.Sprintf("cutting %s connections, %s", experiment.Thousands(n), e.Name),
				200*time.Millisecond+time.Duration(n)*12*time.Microsecond,
				func(ctx context.Context, i int) error { return r.cut(ctx, e, n, i) })
		}
	}
}

// within calls f with an engine at work in a namespace, which it removes, with all memory that f took.
func (r *trial) within(ctx context.Context, what string, e mode.Engine,
	f func(context.Context, *testbed.Enforcer) error) (err error) {
	ns, err := testbed.NewNamespace(r.bed.Name + "-upkeep")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)); debug.FreeOSMemory() }()
	return r.enforced(ctx, ns, what, e, f)
}

// enforced calls f with an engine at work in a namespace, and for no longer than the profile's patience, if it has any.
func (r *trial) enforced(ctx context.Context, ns *netns.Namespace, what string, e mode.Engine,
	f func(context.Context, *testbed.Enforcer) error) (err error) {
	x, err := r.bed.Enforce(ns, e)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Stop()) }()
	if r.profile.Patience == 0 {
		return f(ctx, x)
	}
	most := r.bed.Within(r.profile.Patience)
	limited, stop := context.WithTimeout(ctx, most)
	defer stop()
	if err = f(limited, x); err != nil && limited.Err() != nil && ctx.Err() == nil {
		r.out.Remark(fmt.Sprintf("Left out: %s, by %s, took longer than %v.", what, e.Name, most))
		return nil
	}
	return err
}

// decide makes the policies of a cluster. It returns what the resolver took.
func decide(c *generate.PolicyCluster) (p *policy.Resolver, change model.Change[model.PolicyPart], spent time.Duration,
	heap float64) {
	changes := testbed.Put(c.Objects...)
	before := heapInUse()
	spent = -processorTime()
	p = policy.New(policy.Config{Node: generate.PolicyNode})
	change = p.Apply(changes)
	spent += processorTime()
	heap = heapInUse() - before
	runtime.KeepAlive(changes)
	return p, change, spent, heap
}

// heapInUse returns the bytes of live objects.
func heapInUse() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// processorTime returns what this process has had of processors.
func processorTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// relabelPods changes pods' labels at a rate, half of them of pods on the node, and records the times from when each
// was to change until what follows is in the kernel.
func (r *trial) relabelPods(ctx context.Context, e mode.Engine) error {
	return r.within(ctx, "changes of pods' labels", e, func(ctx context.Context, x *testbed.Enforcer) error {
		size := r.profile.Large
		c := generate.NewPolicyCluster(size)
		p, change, spent, heap := decide(c)
		if err := errors.Join(r.out.AddValue(result.Block{Arm: e.Name}, "resolve", float64(spent)),
			r.out.AddValue(result.Block{Arm: e.Name}, "heap", heap)); err != nil {
			return err
		}
		if _, err := x.Apply(ctx, change); err != nil {
			return err
		}
		begun, elapsed := time.Now(), make([]int64, 0, r.profile.Events)
		for i := range r.profile.Events {
			pod := r.bed.Rand.IntN(size.Here)
			if i%2 == 1 {
				pod = size.Here + r.bed.Rand.IntN(size.Pods-size.Here)
			}
			o := c.Relabelled(pod)
			at := begun.Add(time.Duration(i) * time.Second / eventRate)
			if err := testbed.Sleep(ctx, time.Until(at)); err != nil {
				return err
			}
			if err := apply(ctx, p, x, o); err != nil {
				return err
			}
			elapsed = append(elapsed, int64(time.Since(at)))
		}
		return r.addBlocks(e, "label", elapsed)
	})
}

// addBlocks records times of changes in blocks, so that quantiles have intervals.
func (r *trial) addBlocks(e mode.Engine, measure string, elapsed []int64) error {
	const each = 30
	i := 0
	for part := range slices.Chunk(elapsed, each) {
		if err := r.out.AddTimes(result.Block{Arm: e.Name, Round: i}, measure, part); err != nil {
			return err
		}
		i++
	}
	return nil
}

// apply resolves an object and waits until what follows is in the kernel.
func apply(ctx context.Context, p *policy.Resolver, x *testbed.Enforcer, o source.Object) error {
	c := p.Apply(testbed.Put(o))
	if len(c.Put)+len(c.Del) == 0 {
		return nil
	}
	_, err := x.Apply(ctx, c)
	return err
}

// relabelNamespaces moves one namespace after another to another team, which ClusterNetworkPolicies select.
func (r *trial) relabelNamespaces(ctx context.Context, e mode.Engine) error {
	return r.within(ctx, "changes of namespaces' labels", e, func(ctx context.Context, x *testbed.Enforcer) error {
		size := r.profile.Wide
		c := generate.NewPolicyCluster(size)
		p, change, _, _ := decide(c)
		if _, err := x.Apply(ctx, change); err != nil {
			return err
		}
		var elapsed []int64
		for range r.profile.Relabelled {
			o := c.Namespace(r.bed.Rand.IntN(size.Namespaces), "prod")
			o.Labels["team"] = fmt.Sprintf("team-%d", r.bed.Rand.IntN(50))
			begun := time.Now()
			if err := apply(ctx, p, x, o); err != nil {
				return err
			}
			elapsed = append(elapsed, int64(time.Since(begun)))
		}
		return r.addBlocks(e, "namespace", elapsed)
	})
}

// tables is the number of peer tables of a first write, each of which decides about as many identities.
const tables, identities = 200, 100

// peers returns what so many peers of 100 identities come to, about which each of 200 peer tables decides.
func peers(n int) []model.PolicyPart {
	ruleset := &model.Ruleset{ID: 1}
	l := []model.PolicyPart{&model.PolicyNode{}, ruleset,
		&model.Subject{Addr: testbed.ServerPod, In: [2]*model.Ruleset{nil, ruleset}}}
	drop := model.Decision{Verdict: model.VerdictDrop}
	of := make([]*model.Identity, identities)
	for i := range of {
		of[i] = &model.Identity{ID: uint64(1 + i)}
	}
	for i := range tables {
		t := &model.PeerTable{ID: uint64(1 + i), Default: model.VerdictDrop, Otherwise: drop}
		port := uint16(1000 + 2*i)
		ruleset.Ports = append(ruleset.Ports, model.PortEntry{Protocol: model.TCP, First: port, Last: port, PeerTable: t})
		l = append(l, t)
		for _, id := range of {
			l = append(l, &model.PeerVerdict{PeerTable: t, Identity: id, Decision: model.Decision{
				Verdict: model.VerdictAccept}})
		}
		ruleset.Default = model.PortEntry{PeerTable: t}
	}
	for i := range n {
		a := generate.EndpointAddress(1<<16 + i)
		l = append(l, &model.Peer{Range: model.Range{First: a, Last: a}, Identity: of[i%identities]})
	}
	return l
}

// write has an engine write peers for the first time.
func (r *trial) write(ctx context.Context, e mode.Engine, round int) error {
	return r.within(ctx, "the first write of many peers", e, func(ctx context.Context, x *testbed.Enforcer) error {
		elapsed, err := x.Apply(ctx, model.Change[model.PolicyPart]{Put: peers(r.profile.Peers)})
		if err != nil {
			return err
		}
		return r.out.AddValue(result.Block{Arm: e.Name, Round: round, Wall: elapsed}, "write", float64(elapsed))
	})
}

// cutMeasure returns the measure of so many connections that are cut.
func cutMeasure(connections int) string { return fmt.Sprint("cut-", connections) }

// cut withdraws the permission of connections, and measures how long it takes until all are cut.
func (r *trial) cut(ctx context.Context, e mode.Engine, connections, round int) (err error) {
	p, err := testbed.NewPodPair(ctx, r.bed.Name+"-cut")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if err := sysctl.Set(p.Near, sysctl.Setting{Name: "-net/netfilter/nf_conntrack_udp_timeout",
		Value: "3600"}); err != nil {
		return err
	}
	return r.enforced(ctx, p.Near, "cutting", e, func(ctx context.Context, x *testbed.Enforcer) error {
		objects := r.grid.Objects(1)
		allow := objects[len(objects)-1]
		everything := slices.Clone(objects)
		everything[len(objects)-1] = experiment.AllowEverything(allow)
		resolver, change, err := testbed.DecidePolicies(testbed.NodeName, everything)
		if err != nil {
			return err
		}
		if _, err := x.Cut(ctx, change); err != nil {
			return err
		}
		if err := p.Far.Do(func() error { return open(connections) }); err != nil {
			return err
		}
		elapsed, err := x.Cut(ctx, resolver.Apply(testbed.Put(allow)))
		if s := x.Revoker.Cuts(); err == nil && s.Marked < connections*9/10 {
			err = fmt.Errorf("%d of %d connections were cut: %s", s.Marked, connections, s.Problem)
		}
		if err != nil {
			return err
		}
		return r.out.AddValue(result.Block{Arm: e.Name, Round: round, Wall: elapsed}, cutMeasure(connections),
			float64(elapsed))
	})
}

// open sends a datagram to so many pairs of ports of the server's pod, each of which connection tracking takes for a
// connection.
func open(connections int) error {
	for sent := 0; sent < connections; {
		c, err := net.ListenUDP("udp4", nil)
		if err != nil {
			return err
		}
		for port := 1000; port < 60_000 && sent < connections; port++ {
			if _, err := c.WriteToUDPAddrPort([]byte("word"), netip.AddrPortFrom(testbed.ServerPod,
				uint16(port))); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				return errors.Join(err, c.Close())
			}
			sent++
		}
		if err := c.Close(); err != nil {
			return err
		}
	}
	return nil
}
