package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Options are the options of a plane.
type Options struct {
	Sizes policy.Sizes // a field that is zero stands for the same field of DefaultSizes
	// for how long after the program is attached connections are picked up that are older; 0: a minute; negative: none
	// are
	Installing time.Duration
}

// DefaultSizes are more than the bounds of resolve/policy let policies come to. Empty, they use 32 MiB; flows are in
// addition: as many as connection tracking may have, 120 bytes each.
var DefaultSizes = policy.Sizes{Subjects: 1 << 12, Ports: 1 << 19, Ranges: 1 << 20, Peers: 1 << 19, Nets: 1 << 20,
	Verdicts: 1<<20 + 1<<16}

// installing is the default of Options.Installing.
const installing = time.Minute

// Plane writes facts into the maps of one network namespace. It implements dataplane.Plane[model.PolicyPart, Key,
// string], dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	sizes  policy.Sizes
	older  time.Duration // for how long after the program is attached older connections are picked up
	folder string        // for all that is pinned
	pins   device.Folders
	layout string // name of the maps' folder
	digest string // of the program
	ns     *netns.Namespace

	writers *bpf.Writers
	grace   *bpf.Grace
	maps    *policy.Maps  // nil where there are none of our layout
	remade  chan struct{} // closed and made anew when maps are made
	mu      sync.Mutex    // of remade
	hooked  atomic.Bool   // the program is attached, unless others changed that
}

var (
	_ dataplane.Plane[model.PolicyPart, Key, string] = (*Plane)(nil)
	_ dataplane.Cleaner                              = (*Plane)(nil)
	_ dataplane.Watcher                              = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace. Nothing is in the kernel before the first Write.
func New() (*Plane, error) { return Open(Options{}) }

// Open is New, with options.
func Open(o Options) (_ *Plane, err error) {
	if err := policy.Probe(); err != nil {
		return nil, err
	}
	s, d := o.Sizes, DefaultSizes
	p := &Plane{remade: make(chan struct{}), older: cmp.Or(o.Installing, installing), sizes: policy.Sizes{
		Subjects: cmp.Or(s.Subjects, d.Subjects), Ports: cmp.Or(s.Ports, d.Ports), Ranges: cmp.Or(s.Ranges, d.Ranges),
		Peers: cmp.Or(s.Peers, d.Peers), Nets: cmp.Or(s.Nets, d.Nets), Verdicts: cmp.Or(s.Verdicts, d.Verdicts),
		Flows: cmp.Or(s.Flows, policy.DefaultFlows()),
	}}
	if p.pins, err = device.CurrentFolders(); err != nil {
		return nil, err
	}
	p.folder = p.pins.Policies
	p.writers = bpf.NewWriters(p.folder)
	if p.layout, err = policy.Layout(p.sizes); err != nil {
		return nil, err
	}
	if p.digest, err = policy.Digest(p.sizes); err != nil {
		return nil, err
	}
	if p.ns, err = netns.Current(); err != nil {
		return nil, err
	}
	if p.grace, err = bpf.NewGrace(); err != nil {
		return nil, errors.Join(err, p.ns.Close())
	}
	return p, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	p.writers.Close()
	p.grace.Close()
	return errors.Join(p.forget(), p.ns.Close())
}

// forget closes the maps.
func (p *Plane) forget() error {
	if p.maps == nil {
		return nil
	}
	defer func() { p.maps = nil }()
	return p.maps.Close()
}

func (p *Plane) mapsFolder() string  { return filepath.Join(p.folder, p.layout) }
func (p *Plane) hooksFolder() string { return policy.Hooks(p.pins.Policies) }

func (p *Plane) mapsFact() Fact {
	return Fact{Key: Key{KindMaps, p.layout}, Value: fmt.Sprintf("%d subjects, %d peers, %d verdicts", p.sizes.Subjects,
		p.sizes.Peers, p.sizes.Verdicts)}
}

func (p *Plane) hooksFact() Fact { return Fact{Key: Key{Kind: KindHooks}, Value: p.digest} }

// Read implements dataplane.Plane. Of maps of another layout it returns that they exist, no more: they aren't wanted,
// so they are removed when everything else is true.
func (p *Plane) Read(context.Context) (facts []Fact, err error) {
	if err := p.forget(); err != nil {
		return nil, err
	}
	p.writers.Listen()
	list, err := os.ReadDir(p.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ebpf: look for maps of network policies: %w", err)
	}
	for _, e := range list {
		switch n := e.Name(); {
		case n == p.layout:
			if facts, err = p.readMaps(facts); err != nil {
				return nil, err
			}
		case bpf.IsLayout(n):
			facts = append(facts, Fact{Key: Key{KindMaps, n}, Value: "of another layout"})
		}
	}
	digest, err := policy.Attached(p.hooksFolder(), p.maps)
	if p.maps == nil && digest != "" {
		digest += ", on other maps"
	}
	p.hooked.Store(digest == p.digest)
	if err == nil && digest == p.digest {
		var apart bool
		if apart, err = p.pins.NeedsJoin(); apart {
			digest += ", not in the fast path"
		}
	}
	if err != nil || digest == "" {
		return facts, err
	}
	return append(facts, Fact{Key: Key{Kind: KindHooks}, Value: digest}), nil
}

// readMaps adds what the maps of our layout hold.
func (p *Plane) readMaps(facts []Fact) ([]Fact, error) {
	m, err := policy.OpenMaps(p.mapsFolder(), p.sizes)
	if bpf.Absent(err) {
		return append(facts, Fact{Key: Key{KindMaps, p.layout}, Value: "some are missing"}), nil
	}
	if err != nil {
		return nil, err
	}
	p.maps = m
	facts = append(facts, p.mapsFact())
	if m.Has(policy.Cut) {
		facts = append(facts, Fact{Key: Key{Kind: KindCut}})
	}
	if m.Has(policy.Check) {
		facts = append(facts, Fact{Key: Key{Kind: KindCheck}})
	}
	if m.Has(policy.Writing) || m.Has(policy.Changing) {
		facts = append(facts, Fact{Key: Key{Kind: KindIncomplete}})
	}
	err = m.Entries(func(e policy.Entry) { facts = append(facts, factOf(e)) })
	return facts, err
}

// PolicyPackets returns how many packets had each event since the maps were made, nil where there are none: denied,
// audited, cut, unknown_pod, forged, unparsed, incomplete; flow counts connections, redirected those packets that the
// fast path evaluated, unlogged events that Denials lacks. It may be called at any time.
func (p *Plane) PolicyPackets() (map[string]uint64, error) {
	counts, err := policy.Counts(p.mapsFolder())
	if counts == nil {
		return nil, err
	}
	named := map[string]uint64{}
	for e, n := range counts {
		named[e.String()] = n
	}
	return named, nil
}

// CountLookups has the program at the hooks count its lookups in maps while body runs, for measurements. Packets take
// the host stack then. body calls counted for what has been counted until then.
func (p *Plane) CountLookups(ctx context.Context, body func(counted func() (policy.Lookups, error)) error) (err error) {
	if p.maps == nil {
		if _, err := p.Read(ctx); err != nil {
			return err
		}
	}
	if p.maps == nil || !p.hooked.Load() {
		return errors.New("ebpf: count lookups: the program of network policies is not attached")
	}
	err = policy.Replace(ctx, p.hooksFolder(), func() error {
		program, err := p.maps.LoadCounting()
		if err != nil {
			return err
		}
		defer program.Close()
		return p.ns.Do(func() error { return program.Attach(p.hooksFolder()) })
	})
	if err == nil {
		err = body(p.maps.Lookups)
	}
	// No context: whatever happens, nothing counts in the end.
	return errors.Join(err, policy.Replace(context.WithoutCancel(ctx), p.hooksFolder(), func() error {
		return p.attach(p.hooksFact())
	}))
}

// Connections calls yield with the source and destination of each open connection's first packet. It may be called at
// any time.
func (p *Plane) Connections(yield func(source, destination netip.Addr)) error {
	return policy.Flows(p.mapsFolder(), yield)
}

// Denials calls yield with both ends of each packet that was dropped as a new connection, also for its source (forged
// is the device that it came in by), or would be by audited policies, until ctx ends, and then with those that are
// pending. Protocols without ports have ports 0. It may be called at any time, once at a time.
func (p *Plane) Denials(ctx context.Context, yield func(src, dst netip.AddrPort, protocol model.Protocol, audited bool,
	forged string)) error {
	report := func(d policy.Denial) {
		if d.Event == policy.CutFlow {
			return
		}
		protocol := model.Protocol(d.Protocol)
		if !slices.Contains([]model.Protocol{model.TCP, model.UDP, model.SCTP}, protocol) {
			d.Source, d.Dest = netip.AddrPortFrom(d.Source.Addr(), 0), netip.AddrPortFrom(d.Dest.Addr(), 0)
		}
		if d.Event != policy.Forged {
			d.Device = ""
		}
		yield(d.Source, d.Dest, protocol, d.Event == policy.Audited, d.Device)
	}
	for {
		p.mu.Lock()
		remade := p.remade
		p.mu.Unlock()
		round, end := context.WithCancel(ctx)
		go func() {
			defer end()
			select {
			case <-remade:
			case <-round.Done():
			}
		}()
		err := policy.Denials(round, p.mapsFolder(), report)
		if errors.Is(err, fs.ErrNotExist) { // before the first Write
			err = nil
			<-round.Done()
		}
		end()
		if err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// mapsMade has Denials read the maps that were made.
func (p *Plane) mapsMade() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.remade)
	p.remade = make(chan struct{})
}

// Watch implements dataplane.Watcher: it signals when pins of hooks are removed, and when another plane writes (see
// bpf.Writers).
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	signals := make(chan struct{}, 1)
	signal := func(other bool) {
		digest, err := policy.Attached(p.hooksFolder(), nil)
		if !other && (!p.hooked.Load() || err == nil && digest == p.digest) {
			return
		}
		select {
		case signals <- struct{}{}:
		default:
		}
	}
	ended, err := p.writers.Watch(ctx, []string{p.hooksFolder()}, signal)
	if errors.Is(err, fs.ErrNotExist) { // there will be one to watch when the hooks are there again
		defer close(signals)
		signal(false)
		return signals, nil
	}
	if err != nil {
		return nil, err
	}
	go func() {
		defer close(signals)
		<-ended
	}()
	return signals, nil
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	if err := p.forget(); err != nil {
		return err
	}
	if err := p.detach(); err != nil {
		return err
	}
	return bpf.RemoveFolder(p.folder)
}
