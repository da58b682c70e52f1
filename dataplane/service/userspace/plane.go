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
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/model"
)

// Plane proxies the traffic of one network namespace, the node's. It implements dataplane.Plane[model.ServicePart, Key,
// string], dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	node    *netns.Namespace
	loops   []*loop
	view    atomic.Pointer[view]
	signals chan struct{} // holds one when something is to be looked at
	routed  atomic.Bool   // pods are known by routes
	descriptors
	bounds bounds // of one frontend and one client
	allow  atomic.Pointer[allow]

	netlink  *netlink.Socket // for routes and rules
	released *netlink.Socket // for rules of connections that outlive their frontend: loops wait for no Write

	mu sync.Mutex
	written
}

// allow reports whether a client may connect to a backend.
type allow func(p model.Protocol, client, backend netip.AddrPort) bool

// Restrict has the plane connect a client only to a backend for which reach reports true, which may be called from any
// goroutine: no other hook sees both, since the plane connects from the node's address.
func (p *Plane) Restrict(reach func(p model.Protocol, client, backend netip.AddrPort) bool) {
	f := allow(reach)
	p.allow.Store(&f)
}

// Cut ends the connections and flows between a client and a backend for which denied reports true, those of TCP with
// resets at both ends. It may be called from any goroutine, and calls denied from others.
func (p *Plane) Cut(denied func(p model.Protocol, client, backend netip.AddrPort) bool) {
	p.inLoops(true, func(l *loop) {
		for c := range l.conns {
			if c.backend != nil && denied(model.TCP, c.from, c.backend.addr) {
				c.abort()
			}
		}
		for _, line := range l.flows {
			for f := line.first; f != nil; {
				next := f.next
				if denied(model.UDP, f.client, f.backend.addr) {
					f.close()
				}
				f = next
			}
		}
	})
}

// allows reports whether a client may connect to a backend.
func (p *Plane) allows(protocol model.Protocol, client, backend netip.AddrPort) bool {
	f := p.allow.Load()
	return f == nil || (*f)(protocol, client, backend)
}

// descriptors counts the file descriptors of this plane.
type descriptors struct {
	open   atomic.Int64 // of connections and flows
	steady atomic.Int64 // of fronts and pipes
	limit  int64        // of both
}

// written is what Write made true, under Plane's mutex; loops see parts of it alone.
type written struct {
	privateNetns *privateNetns
	voices       voices // of privateNetns
	text         string // the node's fact, "" without one
	nodeModel    *model.ServiceNode
	pools        map[uint64]*pool
	texts        map[uint64]string // of pools told
	fronts       map[model.Entry]*front
	users        map[uint64]map[*front]bool // of pools
	roundRobin   int                        // which loop gets the next UDP socket
}

var (
	_ dataplane.Plane[model.ServicePart, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                               = (*Plane)(nil)
	_ dataplane.Cleaner                               = (*Plane)(nil)
)

// view is what tells where clients are.
type view struct {
	own  map[netip.Addr]bool
	pods []origin
}

// origin is a range of clients. Of several that hold a client, the first counts; what is in none is outside.
type origin struct {
	netip.Prefix
	internal bool
}

// internal reports whether an address is the node's own or a pod's.
func (v *view) internal(a netip.Addr) bool {
	if v.own[a] || a.IsLoopback() {
		return true
	}
	i := slices.IndexFunc(v.pods, func(o origin) bool { return o.Contains(a) })
	return i >= 0 && v.pods[i].internal
}

// origins returns the same as ranges.
func (v *view) origins() []origin {
	l := []origin{{netip.MustParsePrefix("127.0.0.0/8"), true}, {netip.MustParsePrefix("::1/128"), true}}
	for _, a := range slices.SortedFunc(maps.Keys(v.own), netip.Addr.Compare) {
		l = append(l, origin{netip.PrefixFrom(a, a.BitLen()), true})
	}
	return append(l, v.pods...)
}

// noNode stands for the node before its fact is written, and after it has gone.
var noNode = &model.ServiceNode{Node: &model.Node{}}

// podsOf returns where pods are: in the node's ranges, or where the main routing table leads to by their interfaces.
// A client comes into the netns by the netns's own interface, so the one that it came to the node by is not to be seen
// there.
func podsOf(n *model.ServiceNode, routes func() ([]route.Reach, error)) (l []origin, err error) {
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
	for last > 0 && !l[last-1].internal {
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
	p := &Plane{signals: make(chan struct{}, 1), written: written{nodeModel: noNode, pools: map[uint64]*pool{},
		texts:  map[uint64]string{},
		fronts: map[model.Entry]*front{}, users: map[uint64]map[*front]bool{}, voices: voices{-1, -1}}}
	p.view.Store(&view{})
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("userspace: %w", err), p.Close())
		}
	}()
	if p.node, err = netns.Current(); err != nil {
		return nil, err
	}
	if p.netlink, err = netlink.Open(unix.NETLINK_ROUTE, 0); err != nil {
		return nil, err
	}
	if p.released, err = netlink.Open(unix.NETLINK_ROUTE, 0); err != nil {
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

// Close ends all connections and returns everything back. What the kernel keeps of rules leads nowhere then.
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
		f.sockets = nil
	}
	p.voices.close()
	p.voices = voices{-1, -1}
	var errs []error
	for _, c := range []*netlink.Socket{p.netlink, p.released} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if p.privateNetns != nil {
		errs = append(errs, p.privateNetns.ns.Close())
	}
	if p.node != nil {
		errs = append(errs, p.node.Close())
	}
	return errors.Join(errs...)
}

// crowded reports whether there are no more file descriptors for connections and flows.
func (p *Plane) crowded() bool { return p.open.Load()+p.steady.Load() >= p.limit }

// signal has Watch tell that something is to be looked at.
func (p *Plane) signal() {
	select {
	case p.signals <- struct{}{}:
	default:
	}
}

// Watch implements dataplane.Watcher. What it tells of: addresses of the node that come or go, rules and routes of ours
// that others change, the way into the netns, and frontends that find no file descriptors.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	events, err := p.events(ctx)
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
			netlink.Signal(out)
		}
	}()
	return out, nil
}

// events sends what the kernel notifies of, until ctx ends; then it closes the channel.
func (p *Plane) events(ctx context.Context) (events <-chan struct{}, err error) {
	err = p.node.Do(func() error {
		s, err := netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
		if err != nil {
			return err
		}
		defer s.Close()
		if err := s.Ignore(p.netlink.Port()); err != nil {
			return err
		}
		events, err = s.Watch(ctx, false, p.concerns)
		return err
	})
	return events, err
}

// concerns reports whether a notification is about something that Read or look would find changed.
func (p *Plane) concerns(m netlink.Message) bool {
	if r, ok := route.Of(m); ok {
		return r.Owner == Owner || p.routed.Load() && r.IsMain()
	}
	if r, ok := rule.Of(m); ok {
		return r.Owner == Owner
	}
	return link.IsAddress(m) || link.NameIn(m) == Veth
}

// Read implements dataplane.Plane. A front whose sockets are not as they should be, or that finds no file descriptors,
// is not as wanted.
func (p *Plane) Read(context.Context) ([]Fact, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.refresh(); err != nil {
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

// amiss returns what is not as it should be with a front.
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
		facts = append(facts, Fact{Key: Key{Kind: KindNetns}, Value: there})
	}
	tableRoutes, err := route.List(p.netlink, Owner)
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	acceptors := p.acceptors()
	for _, w := range tableRoutes {
		k := Key{Kind: KindRoute, Entry: model.Entry{Addr: w.To.Addr(), Port: uint16(w.Table),
			Protocol: model.Protocol(w.Table >> 16)}}
		switch {
		case w.Table>>24 != tables>>24:
			continue
		case w.Table == tableUnmatched && w.Type == route.Blackhole:
			k = Key{Kind: KindUnallocated, Entry: model.Entry{Addr: w.To.Addr(), Port: uint16(w.To.Bits())}}
			facts = append(facts, Fact{Key: k, Value: there})
			continue
		case w.Table == tableUnmatched:
			k = Key{Kind: KindClusterIP, Entry: model.Entry{Addr: w.To.Addr()}}
		case w.Table == tables:
			k = Key{Kind: KindReach, Entry: model.Entry{Addr: w.To.Addr()}}
		case w.Table == tableNode:
			if w.Dev == dev {
				delete(acceptors, w.To.Addr())
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
		if len(acceptors) > 0 {
			f.Value += ", not at its addresses"
		}
		facts = append(facts, f)
	}
	return p.readRules(facts)
}

// readRules adds the rules. One behind that for local addresses is not as wanted.
func (p *Plane) readRules(facts []Fact) ([]Fact, error) {
	rules, err := rule.List(p.netlink, 0)
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
			k := Key{Kind: KindRule, Entry: model.Entry{Addr: every.Addr, Port: r.ToPort.First,
				Protocol: model.Protocol(r.Protocol)}}
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

// entrance returns the index of the way into the netns; 0 if there is none.
func (p *Plane) entrance() (dev int) {
	if p.privateNetns == nil || p.privateNetns.dev == 0 {
		return 0
	}
	c, err := link.Dial(p.node)
	if err != nil {
		return 0
	}
	defer c.Close()
	if dev, err = c.Index(Veth); err != nil || dev != p.privateNetns.dev {
		return 0
	}
	return dev
}

// fragmentRules leads fragments of datagrams, which have no port to be told by, to their table; not those that come
// from the netns itself.
func fragmentRules(six bool) []rule.Rule {
	udp := uint8(model.UDP)
	return []rule.Rule{
		{Owner: Owner, Priority: priorityForeign, Six: six},
		{Owner: Owner, Priority: priorityFragments, Six: six, Protocol: udp, Table: tables},
		{Owner: Owner, Priority: priorityWhole, Six: six, Protocol: udp, ToPort: rule.PortRange{First: 1, Last: 65534},
			Goto: priorityForeign},
		{Owner: Owner, Priority: priorityBack, Six: six, Input: Veth, Goto: priorityForeign},
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
	p.nodeModel = noNode
	err := p.settle(all)
	b := route.NewBatch()
	for _, owner := range []uint8{Owner, ownerDetained} {
		rules, e := rule.List(p.netlink, owner)
		routes, e2 := route.List(p.netlink, owner)
		err = errors.Join(err, e, e2)
		rule.Delete(b, rules...)
		route.Delete(b, routes...)
	}
	return errors.Join(err, p.netlink.Apply(b), p.resetNetns())
}

// resetNetns removes the way into the netns. Its sockets stay.
func (p *Plane) resetNetns() error {
	c, err := link.Dial(p.node)
	if err != nil {
		return err
	}
	defer c.Close()
	if p.privateNetns != nil {
		p.privateNetns.dev = 0
	}
	return shut(c)
}
