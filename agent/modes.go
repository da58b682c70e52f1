package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/ipvs"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Mode is a way of carrying Service traffic: a data plane, or several that share the work.
type Mode struct {
	service.Abilities
	planes  []opener                   // each stands behind the next
	tracked func(*model.Frontend) bool // whose flows the kernel's connection tracking has, if Tracked; nil: all
}

// modes are all there are. A new service plane is a line here.
var modes = []Mode{
	alone(nftables.Abilities, nftables.New),
	alone(iptables.Abilities, iptables.New),
	alone(iptables.AbilitiesOf(iptables.Legacy), func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.Legacy) }),
	alone(iptables.AbilitiesOf(iptables.NFT), func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.NFT) }),
	alone(ipvs.Abilities, ipvs.New),
	alone(userspace.Abilities, userspace.New),
	before(ebpf.Abilities, ebpf.New, nftables.Abilities, nftables.New, ebpf.Leaves).holds(ebpf.Options{}),
}

// alone makes a mode of one plane.
func alone[K dataplane.Key, V comparable, P plane[K, V]](a service.Abilities, open func() (P, error)) Mode {
	return Mode{Abilities: a, planes: []opener{opens(a, open, nil)}}
}

// before makes a mode of a plane and one behind it, which serves the frontends that the first leaves. It has the first's
// schedulers; the second is told what stands in for those that it can't do. Of all else it can do what both can.
func before[K, L dataplane.Key, V, W comparable, P plane[K, V], Q plane[L, W]](a service.Abilities, first func() (P, error), b service.Abilities, second func() (Q, error), leaves func(*model.Frontend) bool) Mode {
	both := a
	both.Behind = b.Schedulers
	both.Tracked, both.HidesAll, both.Ends = a.Tracked || b.Tracked, a.HidesAll || b.HidesAll, a.Ends || b.Ends
	both.Notes = slices.Concat(a.Notes, b.Notes)
	both.Cannot, both.Long = either(a.Cannot, b.Cannot), either(a.Long, b.Long)
	limited := func() (plane[L, W], error) {
		p, err := second()
		if err != nil {
			return nil, err
		}
		return within(p, b.Schedulers), nil
	}
	return Mode{both, []opener{opens(b, limited, leaves), opens(a, first, nil)}, leaves}
}

// either gives the first reason that one of two gives, nil where neither could.
func either(a, b func(*model.Frontend) string) func(*model.Frontend) string {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return func(f *model.Frontend) string { return cmp.Or(a(f), b(f)) }
}

// Default is the mode of those who choose none.
const Default = "nftables"

// Modes gives all modes.
func Modes() []Mode { return modes }

// ModeOf gives a mode by its name; "" is Default.
func ModeOf(name string) (Mode, error) {
	var names []string
	for _, m := range modes {
		if m.Name == name || name == "" && m.Name == Default {
			return m, nil
		}
		names = append(names, m.Name)
	}
	return Mode{}, fmt.Errorf("invalid mode %q: use one of %s", name, strings.Join(names, ", "))
}

// Resolve tells a resolver's configuration what the mode can do.
func (m Mode) Resolve(c resolve.Config) resolve.Config {
	c.Plane, c.Schedulers, c.Behind, c.HidesAll, c.Cannot = m.Name, m.Schedulers, m.Behind, m.HidesAll, m.Cannot
	c.NotDirect = m.NotDirect()
	c.TableEntriesPerBackend, c.TableEntriesPerSlot = m.Table, m.PerSlot
	c.Limits.Total = c.Limits.Total.Within(resolve.DefaultLimits.Total, resolve.Bounds{Frontends: m.Frontends,
		Slots: m.Slots})
	return c
}

// Scheduler gives the scheduler that clients of an origin are served by where a pool has s: those from outside, whom a mode's first
// plane never serves, by what its second can do.
func (m Mode) Scheduler(o model.Origin, s model.Scheduler) model.Scheduler {
	if o == model.FromOutside && m.Behind != 0 {
		return m.Behind.Instead(s)
	}
	return s
}

// loop is a reconcile.Loop of any plane for services.
type loop interface {
	Change(put, del []model.Part)
	Run(context.Context) error
	Hold(until <-chan struct{})
	Served() <-chan struct{}
	Serving() (serving bool, why string)
	Sync(context.Context) error
	Status() reconcile.Status
	audit(context.Context, *Audit) error
	Clean(context.Context) error
	retire(context.Context) (connections int, err error)
	Close() error
	merge(map[uint64]ebpf.Count) (map[uint64]ebpf.Count, error)
	packets() (*ebpf.PacketCounts, error)
	fastPath() (*ebpf.FastPath, error)
	refused() *userspace.Refused
	counted() (*iptables.Counted, error)
	affinity() ([]service.AffinityUse, error)
}

// opener makes a plane's loop for the calling thread's network namespace.
type opener struct {
	name    string
	open    func(*slog.Logger) (loop, error)
	retires bool // the plane is a dataplane.Retirer
}

// plane is what a service plane must be.
type plane[K dataplane.Key, V comparable] interface {
	dataplane.Plane[model.Part, K, V]
	dataplane.Cleaner
	Close() error
}

// DefaultRoom is how many slots the maps of the mode ebpf have where nobody says.
const DefaultRoom = ebpf.DefaultRoom

// DefaultFlows is the size of each map of flows of the mode ebpf unless it is given.
const DefaultFlows = ebpf.DefaultFlows

// EBPF gives the mode with what its plane ebpf, if it has one, is told.
func (m Mode) EBPF(o ebpf.Options) Mode {
	m = with(m, ebpf.Abilities, func() (*ebpf.Plane, error) { return ebpf.Open(o) })
	if m.Name == ebpf.Abilities.Name {
		m = m.holds(o)
	}
	return m
}

// holds returns the mode with the capacity of its maps.
func (m Mode) holds(o ebpf.Options) Mode {
	m.Frontends, m.Slots = o.Capacity()
	return m
}

// IPVS gives the mode with what its plane ipvs, if it has one, is told.
func (m Mode) IPVS(o ipvs.Options) Mode {
	return with(m, ipvs.Abilities, func() (*ipvs.Plane, error) { return ipvs.Open(o) })
}

// with gives the mode with another way of opening one of its planes.
func with[K dataplane.Key, V comparable, P plane[K, V]](m Mode, a service.Abilities, open func() (P, error)) Mode {
	m.planes = slices.Clone(m.planes)
	for i, p := range m.planes {
		if p.name == a.Name {
			m.planes[i] = opens(a, open, nil)
		}
	}
	return m
}

// limited is a plane that is told what stands in for schedulers that it can't do.
type limited[K dataplane.Key, V comparable] struct {
	plane[K, V]
	schedulers model.Schedulers
}

// Render implements dataplane.Plane.
func (l limited[K, V]) Render(p model.Part) []dataplane.Fact[K, V] {
	return l.plane.Render(service.Within(l.schedulers, p))
}

// within limits a plane; one that watches still does.
func within[K dataplane.Key, V comparable](p plane[K, V], s model.Schedulers) plane[K, V] {
	l := limited[K, V]{p, s}
	if w, ok := p.(dataplane.Watcher); ok {
		return struct {
			limited[K, V]
			dataplane.Watcher
		}{l, w}
	}
	return l
}

// served is a plane and its loop.
type served[K dataplane.Key, V comparable] struct {
	plane[K, V]
	*reconcile.Loop[model.Part, K, V]
}

// opens gives the opener of a plane that has those abilities and is told of the frontends that it takes, nil for all.
func opens[K dataplane.Key, V comparable, P plane[K, V]](a service.Abilities, open func() (P, error), takes func(*model.Frontend) bool) opener {
	_, retires := any(*new(P)).(dataplane.Retirer)
	return opener{a.Name, func(log *slog.Logger) (loop, error) {
		p, err := open()
		if err != nil {
			return nil, err
		}
		log = log.With("plane", a.Name)
		if w, ok := any(p).(warner); ok {
			w.OnWarning(func(text string) { log.Warn(text) })
		}
		l := reconcile.New(p, reconcile.Options[model.Part]{Owner: Owner, Group: serviceOf, Base: isNode, Weight: weigh,
			Log: log, MaxFacts: a.Batch})
		return &partial{loop: served[K, V]{p, l}, share: share{takes: takes}}, nil
	}, retires}
}

// retire cleans the plane, later if connections need it still.
func (s served[K, V]) retire(ctx context.Context) (connections int, err error) {
	if r, ok := s.plane.(dataplane.Retirer); ok {
		return r.Retire(ctx)
	}
	return 0, s.Clean(ctx)
}

// counter is a plane that knows what became of pools' clients, by the pools' IDs, and of packets at the node's devices, nil where
// it serves none. Its methods may be called at any time.
type counter interface {
	Counts() (map[uint64]ebpf.Count, error)
	Packets() (*ebpf.PacketCounts, error)
	FastPath() (*ebpf.FastPath, error)
}

// warner is a plane that reports what its operator should know and no fact says. Its reports come at any time.
type warner interface {
	OnWarning(report func(text string))
}

// bounded is a plane that refuses connections beyond a bound and counts them. It may be asked at any time.
type bounded interface{ Refused() userspace.Refused }

// refused returns how many connections the plane refused beyond a bound; nil where it has none.
func (s served[K, V]) refused() *userspace.Refused {
	if b, ok := s.plane.(bounded); ok {
		r := b.Refused()
		return &r
	}
	return nil
}

// ruleCounter is a plane that counts packets that its rules match. It may be asked at any time.
type ruleCounter interface {
	Counted() (*iptables.Counted, error)
}

// counted returns what the plane's rules counted; nil where they count nothing.
func (s served[K, V]) counted() (*iptables.Counted, error) {
	if c, ok := s.plane.(ruleCounter); ok {
		return c.Counted()
	}
	return nil, nil
}

// affine is a plane that has capacity for so many session affinity entries and no more. It may be asked at any time.
type affine interface {
	Affinity() ([]service.AffinityUse, error)
}

// affinity returns how much of its capacity for session affinity the plane uses; nil where it has no limit.
func (s served[K, V]) affinity() ([]service.AffinityUse, error) {
	if a, ok := s.plane.(affine); ok {
		return a.Affinity()
	}
	return nil, nil
}

// merge adds what the plane counted.
func (s served[K, V]) merge(to map[uint64]ebpf.Count) (map[uint64]ebpf.Count, error) {
	c, ok := s.plane.(counter)
	if !ok {
		return to, nil
	}
	counts, err := c.Counts()
	if to != nil {
		maps.Copy(counts, to)
	}
	return counts, err
}

// packets gives what became of packets at the node's devices, nil where the plane counts none.
func (s served[K, V]) packets() (*ebpf.PacketCounts, error) {
	if c, ok := s.plane.(counter); ok {
		return c.Packets()
	}
	return nil, nil
}

// fastPath returns whether packets for pods are redirected past the node's stack, nil where the plane has no programs
// at devices.
func (s served[K, V]) fastPath() (*ebpf.FastPath, error) {
	if c, ok := s.plane.(counter); ok {
		return c.FastPath()
	}
	return nil, nil
}

// audit adds to a what the plane holds against what it was told.
func (s served[K, V]) audit(ctx context.Context, a *Audit) error {
	p, err := s.Plan(ctx)
	if err != nil {
		return err
	}
	if a.Counts, err = s.merge(a.Counts); err != nil {
		return err
	}
	if packets, err := s.packets(); err != nil {
		return err
	} else if packets != nil {
		a.Packets = packets
	}
	if path, err := s.fastPath(); err != nil {
		return err
	} else if path != nil {
		a.FastPath = path
	}
	missing := map[K]bool{}
	for _, f := range p.Put {
		missing[f.Key] = true
		a.Put = append(a.Put, fmt.Sprint(f.Key))
	}
	for _, f := range p.Del {
		a.Del = append(a.Del, fmt.Sprint(f.Key))
	}
	a.Wanted += p.Held + len(p.Put)
	a.Held += p.Held + len(p.Del)
	a.lacks = append(a.lacks, func(part model.Part) (lacking, of int) {
		for _, f := range s.Render(part) {
			of++
			if missing[f.Key] {
				lacking++
			}
		}
		return lacking, of
	})
	return nil
}
