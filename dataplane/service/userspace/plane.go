package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Plane carries the traffic of one network namespace, the node's. It implements dataplane.Plane[model.Part, Key, string],
// dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	node    *netns.Namespace
	loops   []*loop
	view    atomic.Pointer[view]
	signals chan struct{} // holds one when something is to be looked at
	routed  atomic.Bool   // pods are known by routes
	open    atomic.Int64  // file descriptors of connections and flows
	steady  atomic.Int64  // and those of fronts and pipes
	limit   int64         // of both
	bounds  bounds        // of one frontend and one client

	keep   sync.Mutex
	keeper *link.Policy // for rules of connections that outlive their frontend

	mu     sync.Mutex // for what follows; loops only see what they are given
	policy *link.Policy
	room   *room
	voices voices // the room's
	text   string // the node's fact, "" without one
	told   model.Node
	pools  map[uint64]*pool
	texts  map[uint64]string // of pools told
	fronts map[model.Entry]*front
	users  map[uint64]map[*front]bool // of pools
	turn   int                        // which loop gets the next UDP socket
}

var (
	_ dataplane.Plane[model.Part, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                        = (*Plane)(nil)
	_ dataplane.Cleaner                        = (*Plane)(nil)
)

// view is what tells where clients are.
type view struct {
	own  map[netip.Addr]bool
	pods []origin
}

// origin is a range of clients. Of several that hold a client, the first counts; what is in none is outside.
type origin struct {
	netip.Prefix
	inside bool
}

// inside reports whether an address is the node's own or a pod's.
func (v *view) inside(a netip.Addr) bool {
	if v.own[a] || a.IsLoopback() {
		return true
	}
	i := slices.IndexFunc(v.pods, func(o origin) bool { return o.Contains(a) })
	return i >= 0 && v.pods[i].inside
}

// origins returns the same as ranges.
func (v *view) origins() []origin {
	l := []origin{{netip.MustParsePrefix("127.0.0.0/8"), true}, {netip.MustParsePrefix("::1/128"), true}}
	for _, a := range slices.SortedFunc(maps.Keys(v.own), netip.Addr.Compare) {
		l = append(l, origin{netip.PrefixFrom(a, a.BitLen()), true})
	}
	return append(l, v.pods...)
}

// podsOf returns where pods are: in the node's ranges, or where the main routing table leads to by their interfaces.
// A client comes into the room by the room's own interface, so the one that it came to the node by is not to be seen
// there.
func podsOf(n *model.Node, routes func() ([]link.Reach, error)) (l []origin, err error) {
	for _, r := range n.Pods {
		l = append(l, origin{r, true})
	}
	if n.PodInterfaces.Name == "" {
		return l, nil
	}
	reached, err := routes()
	for _, r := range reached {
		l = append(l, origin{r.To, n.PodInterfaces.Has(r.Interface)})
	}
	last := len(l) // what is behind the last that is inside needs no naming
	for last > 0 && !l[last-1].inside {
		last--
	}
	return l[:last], err
}

// reserve is how many file descriptors are left to the rest of the process.
const reserve = 512

// threads is the largest number of loops.
const threads = 8

// New opens the plane of the calling thread's network namespace. Nothing is written before Write.
func New() (_ *Plane, err error) {
	p := &Plane{signals: make(chan struct{}, 1), pools: map[uint64]*pool{}, texts: map[uint64]string{}, fronts: map[model.Entry]*front{},
		users: map[uint64]map[*front]bool{}, voices: voices{-1, -1}}
	p.view.Store(&view{})
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("userspace: %w", err), p.Close())
		}
	}()
	if p.node, err = netns.Current(); err != nil {
		return nil, err
	}
	if p.policy, err = link.DialPolicy(); err != nil {
		return nil, err
	}
	if p.keeper, err = link.DialPolicy(); err != nil {
		return nil, err
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return nil, fmt.Errorf("limit of file descriptors: %w", err)
	}
	if r.Cur < r.Max {
		r.Cur = r.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
			return nil, fmt.Errorf("raise the limit of file descriptors to %d: %w", r.Max, err)
		}
	}
	p.limit = int64(min(r.Cur, 1<<40)) - reserve
	p.bounds.set(p.limit)
	for range min(runtime.GOMAXPROCS(0), threads) {
		l, err := newLoop(p.node, &p.steady)
		if err != nil {
			return nil, fmt.Errorf("start a loop: %w", err)
		}
		p.loops = append(p.loops, l)
	}
	return p, nil
}

// Close ends all connections and gives everything back. What the kernel keeps of rules leads nowhere then.
func (p *Plane) Close() error {
	for _, l := range p.loops {
		l.close()
	}
	p.loops = nil
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.fronts {
		for _, s := range f.sockets {
			unix.Close(s.fd)
		}
	}
	p.voices.close()
	var errs []error
	for _, c := range []*link.Policy{p.policy, p.keeper} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if p.room != nil {
		errs = append(errs, p.room.ns.Close())
	}
	if p.node != nil {
		errs = append(errs, p.node.Close())
	}
	return errors.Join(errs...)
}

// crowded says whether there are no more file descriptors for connections and flows.
func (p *Plane) crowded() bool { return p.open.Load()+p.steady.Load() >= p.limit }

// signal has Watch tell that something is to be looked at.
func (p *Plane) signal() {
	select {
	case p.signals <- struct{}{}:
	default:
	}
}

// Watch implements dataplane.Watcher. What it tells of: addresses of the node that come or go, rules and routes of ours that
// others change, the way into the room, and frontends that find no file descriptors.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	var events <-chan struct{}
	err := p.node.Do(func() (err error) {
		events, err = p.policy.Watch(ctx, Owner, Veth, p.routed.Load)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	out := make(chan struct{}, 1)
	out <- struct{}{} // what came between the last Read and now
	go func() {
		defer close(out)
		for {
			select {
			case _, ok := <-events:
				if !ok {
					return
				}
			case <-p.signals:
			}
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out, nil
}

// Read implements dataplane.Plane. A front whose sockets are not as they should be, or that finds no file descriptors, is not
// as wanted.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.look(); err != nil {
		return nil, err
	}
	var facts []Fact
	for id, text := range p.texts {
		facts = append(facts, Fact{Key: Key{Kind: KindPool, Pool: id}, Value: text})
	}
	for e, f := range p.fronts {
		facts = append(facts, Fact{Key: Key{Kind: KindFrontend, Entry: e}, Value: f.text + p.amiss(f)})
	}
	return p.readKernel(facts)
}

// amiss says what is not as it should be with a front.
func (p *Plane) amiss(f *front) string {
	if f.hungry.Load() != 0 {
		return ", without file descriptors"
	}
	want, program, err := p.want(f)
	if err != nil || len(want) != len(f.sockets) {
		return ", not at its addresses"
	}
	for _, at := range want {
		if s := f.socket(at); s == nil || !slices.Equal(s.program, program) {
			return ", not at its addresses"
		}
	}
	return ""
}

// readKernel adds what the kernel holds.
func (p *Plane) readKernel(facts []Fact) ([]Fact, error) {
	dev := p.entrance()
	if dev != 0 {
		facts = append(facts, Fact{Key: Key{Kind: KindRoom}, Value: there})
	}
	ways, err := p.policy.Ways(Owner)
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	takers := p.takers()
	for _, w := range ways {
		k := Key{Kind: KindRoute, Entry: model.Entry{Addr: w.To.Addr(), Port: uint16(w.Table), Protocol: model.Protocol(w.Table >> 16)}}
		switch {
		case w.Table>>24 != tables>>24:
			continue
		case w.Table == tableUnmatched && w.Blackhole:
			k = Key{Kind: KindUnallocated, Entry: model.Entry{Addr: w.To.Addr(), Port: uint16(w.To.Bits())}}
			facts = append(facts, Fact{Key: k, Value: there})
			continue
		case w.Table == tableUnmatched:
			k = Key{Kind: KindClusterIP, Entry: model.Entry{Addr: w.To.Addr()}}
		case w.Table == tables:
			k = Key{Kind: KindReach, Entry: model.Entry{Addr: w.To.Addr()}}
		case w.Table == tableNode:
			if w.Dev == dev {
				delete(takers, w.To.Addr())
			}
			continue
		}
		f := Fact{Key: k, Value: there}
		if w.Dev != dev {
			f.Value = "elsewhere"
		}
		facts = append(facts, f)
	}
	if p.text != "" {
		f := Fact{Key: Key{Kind: KindNode}, Value: p.text}
		if len(takers) > 0 {
			f.Value += ", not at its addresses"
		}
		facts = append(facts, f)
	}
	return p.readRules(facts)
}

// readRules adds the rules. One behind that for local addresses is not as wanted.
func (p *Plane) readRules(facts []Fact) ([]Fact, error) {
	rules, err := p.policy.Rules(0)
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	value := [2]string{there, there}
	parts := [2]int{}
	for _, r := range rules {
		six := b2i(r.Six)
		every := model.Entry{Addr: [2]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[six]}
		if isLocal(r) {
			value[six] = "too late"
		}
		if r.Owner != Owner {
			continue
		}
		if r.Priority == priorityPort {
			k := Key{Kind: KindRule, Entry: model.Entry{Addr: every.Addr, Port: r.ToPort.First, Protocol: model.Protocol(r.Protocol)}}
			if r.Table == tableNode {
				k.Kind = KindNodePort
			}
			facts = append(facts, Fact{Key: k, Value: value[six]})
		} else if r.Priority == priorityUnmatched {
			facts = append(facts, Fact{Key: Key{Kind: KindUnmatched, Entry: every}, Value: there})
		} else if parts[six]++; parts[six] == len(fragmentRules(r.Six)) {
			facts = append(facts, Fact{Key: Key{Kind: KindFragments, Entry: every}, Value: there})
		}
	}
	return facts, nil
}

// entrance gives the index of the way into the room; 0 if there is none.
func (p *Plane) entrance() (dev int) {
	if p.room == nil || p.room.dev == 0 {
		return 0
	}
	c, err := link.Dial(p.node)
	if err != nil {
		return 0
	}
	defer c.Close()
	if dev, err = c.Index(Veth); err != nil || dev != p.room.dev {
		return 0
	}
	return dev
}

// fragmentRules leads fragments of datagrams, which have no port to be told by, to their table; not those that come from the
// room itself.
func fragmentRules(six bool) []link.Rule {
	udp := uint8(model.UDP)
	return []link.Rule{
		{Owner: Owner, Priority: priorityOthers, Six: six},
		{Owner: Owner, Priority: priorityFragments, Six: six, Protocol: udp, Table: tables},
		{Owner: Owner, Priority: priorityWhole, Six: six, Protocol: udp, ToPort: link.PortRange{First: 1, Last: 65534}, Goto: priorityOthers},
		{Owner: Owner, Priority: priorityBack, Six: six, Input: Veth, Goto: priorityOthers},
	}
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := slices.Collect(maps.Values(p.fronts))
	clear(p.fronts)
	clear(p.users)
	clear(p.texts)
	clear(p.pools)
	p.text = ""
	p.told = model.Node{}
	err := p.settle(all)
	var changes []link.Change
	for _, owner := range []uint8{Owner, ownerKept} {
		rules, e := p.policy.Rules(owner)
		ways, e2 := p.policy.Ways(owner)
		err = errors.Join(err, e, e2)
		for i := range rules {
			changes = append(changes, link.Change{Rule: &rules[i], Gone: true})
		}
		for i := range ways {
			changes = append(changes, link.Change{Way: &ways[i], Gone: true})
		}
	}
	return errors.Join(err, p.policy.Apply(changes), p.leaveRoom())
}

// leaveRoom removes the way into the room. Its sockets stay.
func (p *Plane) leaveRoom() error {
	c, err := link.Dial(p.node)
	if err != nil {
		return err
	}
	defer c.Close()
	if p.room != nil {
		p.room.dev = 0
	}
	return shut(c)
}
