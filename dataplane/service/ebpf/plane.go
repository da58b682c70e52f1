package ebpf

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
)

// Abilities is what the plane can do, together with one behind it for what it Leaves.
var Abilities = service.Abilities{
	Name:  "ebpf",
	Table: 1000, PerSlot: choicesPerSlot,
	Lacks:  bpf.Lacks,
	Direct: direct, Unmatched: passes, Long: long,
	Schedulers: model.SchedulersOf(model.Random, model.RoundRobin, model.WeightedRoundRobin, model.LeastConnections,
		model.WeightedLeastConnections, model.ShortestExpectedDelay, model.SourceHash, model.DestinationHash, model.Maglev),
	Summary: "eBPF: translation at connect() for clients on the node, at network devices for all others, without " +
		"connection tracking",
	Needs: "eBPF with BTF and a cgroup v2 hierarchy; Linux 6.7 for packets at devices, else nf_tables",
	Notes: []service.Note{
		{Text: "SCTP and ICMP to a ClusterIP that match no port of it pass. On kernels before 6.7, so does all that matches no " +
			"port there, and what is for unallocated addresses of ServiceCIDRs."},
		{Text: "With externalIPs Any, fragmented UDP datagrams to a Service at its own endpoint's address are lost.",
			Concerns: func(f *model.Frontend, _ model.Origin) bool { return long(f) != "" }},
		{Text: "Clients on the node are translated once, at connect(); other packets at the node's devices (Linux 6.7 or later). " +
			"SCTP, and on older kernels all packets, go through nftables.", Concerns: service.Over(model.SCTP)},
		{Text: "When a UDP endpoint goes, connected sockets of clients on the node that used it are closed: they read " +
			"ECONNABORTED and must connect again.", Concerns: func(f *model.Frontend, o model.Origin) bool {
			return f.Entry.Protocol == model.UDP && o != model.FromOutside
		}},
		{Text: "In a container the agent needs the node's cgroup file system (cgroup namespace of the host) and BPF file system " +
			"(/sys/fs/bpf): programs attached to its own cgroup serve no other."},
		{Text: "Schedulers by connections count the sockets of clients on the node, from connect() until they are closed. Of " +
			"more than 8 endpoints they take the better of two random ones.",
			Concerns: service.Scheduled(model.SchedulersOf(model.LeastConnections, model.WeightedLeastConnections,
				model.ShortestExpectedDelay))},
	},
}

// Options are what a plane may be told.
type Options struct {
	Cgroup     string    // folder of the cgroup that holds the node's clients; "": cgroup.Node
	Sizes      bpf.Sizes // zero: DefaultSizes
	CloseTCP   bool      // close clients' TCP connections to an endpoint that goes, too
	NoShortcut bool      // no packet is handed over to a pod past the node's stack
	// NoReversePathCheck has packets begin flows whatever device they come in by.
	NoReversePathCheck bool
}

// DefaultSizes have room for 40,000 pools of 10 backends. All maps take 70 MiB of the kernel's memory at once, of which 40 are for
// the ways of 131,072 flows; a frontend adds 96 bytes. Of that, a pool has 40 bytes and 24 for its header and each backend, by fours; Maglev's table takes 2 KiB for up
// to 10 backends, 20 KiB for up to 100, 128 KiB for more.
var DefaultSizes = Room(DefaultRoom)

// DefaultRoom is how many slots there are unless somebody says: see Room.
const DefaultRoom = 1 << 19

// DefaultFlows is how many entries each of the two maps of flows has unless its size is given.
const DefaultFlows = bpf.DefaultFlows

// Room gives sizes by the number of slots: a slot for each pool and each of its backends, more for schedulers with a table; and
// an eighth as many pools, frontends, and sources that frontends let in.
func Room(slots uint32) bpf.Sizes {
	return bpf.Sizes{Frontends: max(slots/8, 64), Pools: max(slots/8, 64), Slots: max(slots, 512), Flows: DefaultFlows}
}

// Capacity returns how many frontends, pools and source ranges, and how many slots, Services may take of the maps: a
// sixteenth is left for new versions of pools, which are written beside the old ones.
func (o Options) Capacity() (frontends, slots int) {
	s := cmp.Or(o.Sizes, DefaultSizes)
	return int(s.Frontends - s.Frontends/16), int(s.Slots - s.Slots/16)
}

// roomier is the way out of full maps.
const roomier = "give more with --ebpf-map-entries"

// Plane writes facts into the maps of one node. It implements dataplane.Plane[model.Part, Key, string], dataplane.Watcher,
// dataplane.Cleaner and dataplane.Retirer.
type Plane struct {
	Options
	folder string // for all that is pinned
	node   uint64 // the cookie of the node's network namespace
	layout string // name of the maps' folder
	sizes  string // in words
	digest string // of the programs

	maps  *bpf.Maps // nil where there are none of our layout
	grace *bpf.Grace
	pools map[uint64]uint32 // index of each pool held, by ID
	index *space            // of pools
	slots *space
	leave []bpf.Endpoint // that left their pools and may have open sockets counted, see loads.go

	id        string      // of this plane, among those of the node
	announced bool        // others know that we write
	hooked    atomic.Bool // the hooks are as wanted, unless others changed that
	warn      func(text string)
	events    events
	devices   *devices
}

var (
	_ dataplane.Plane[model.Part, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                        = (*Plane)(nil)
	_ dataplane.Cleaner                        = (*Plane)(nil)
	_ dataplane.Retirer                        = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace. Nothing is in the kernel before the first Write.
func New() (*Plane, error) { return Open(Options{}) }

// Open is New, with options.
func Open(o Options) (_ *Plane, err error) {
	if err := bpf.Probe(); err != nil {
		return nil, err
	}
	p := &Plane{Options: o, id: rand.Text()}
	if p.Sizes == (bpf.Sizes{}) {
		p.Sizes = DefaultSizes
	}
	p.Sizes.Flows = cmp.Or(p.Sizes.Flows, DefaultFlows)
	if p.Cgroup == "" {
		if p.Cgroup, err = cgroup.Node(); err != nil {
			return nil, err
		}
	}
	if p.folder, p.node, err = bpf.Folder(); err != nil {
		return nil, err
	}
	if p.layout, err = bpf.Layout(p.Sizes); err != nil {
		return nil, err
	}
	p.sizes = fmt.Sprintf("%d frontends, %d pools, %d slots, %d flows", p.Sizes.Frontends, p.Sizes.Pools, p.Sizes.Slots,
		p.Sizes.Flows)
	if p.digest, err = bpf.Digest(p.Sizes, p.programs()); err != nil {
		return nil, err
	}
	if p.devices, err = openDevices(p); err != nil {
		return nil, err
	}
	if p.grace, err = bpf.NewGrace(); err != nil {
		p.devices.close()
		return nil, err
	}
	return p, nil
}

// deviceOptions returns the options of the programs for packets.
func (p *Plane) deviceOptions(direct bool) bpf.DeviceOptions {
	return bpf.DeviceOptions{Direct: direct, ReversePath: !p.NoReversePathCheck}
}

// programs gives the programs' options.
func (p *Plane) programs() bpf.Options {
	return bpf.Options{Node: p.node, Cgroup: p.Cgroup}
}

// Close gives up the plane's handles. The kernel keeps what was written, and the hooks stay.
func (p *Plane) Close() error {
	p.events.close()
	p.grace.Close()
	p.devices.close()
	return p.forget()
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
func (p *Plane) linksFolder() string { return filepath.Join(p.folder, linksName) }

// OnWarning has report called with what an operator should know and no fact says. It comes before the first Read.
func (p *Plane) OnWarning(report func(text string)) { p.warn = report }

// Read implements dataplane.Plane. Of maps of another layout it tells that they are there, no more: nobody wants them, so
// they go when all else is true.
func (p *Plane) Read(context.Context) (facts []Fact, err error) {
	p.announced = false
	if err := p.forget(); err != nil {
		return nil, err
	}
	p.listen()
	list, err := os.ReadDir(p.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ebpf: look for maps: %w", err)
	}
	for _, e := range list {
		switch n := e.Name(); {
		case n == p.layout:
			if facts, err = p.readMaps(facts); err != nil {
				return nil, err
			}
		case bpf.IsLayout(n):
			facts = append(facts, fact(Key{KindMaps, n}, "of another layout"))
		}
	}
	if facts, err = p.readDevices(facts); err != nil {
		return nil, err
	}
	digest, err := bpf.Attached(p.linksFolder(), p.maps)
	if err != nil || digest == "" {
		return facts, err
	}
	if p.maps == nil {
		digest += ", with other maps"
	}
	p.hooked.Store(digest == p.digest)
	return append(facts, fact(hooksKey, digest)), nil
}

// readMaps adds what the maps of our layout hold.
func (p *Plane) readMaps(facts []Fact) ([]Fact, error) {
	m, err := bpf.OpenMaps(p.mapsFolder(), p.Sizes)
	if errors.Is(err, bpf.ErrForm) && p.warn != nil {
		p.warn("pinned maps are not ours and are made anew: " + err.Error())
	}
	if bpf.Absent(err) {
		return append(facts, fact(Key{KindMaps, p.layout}, "some are missing")), nil
	}
	if err != nil {
		return nil, err
	}
	p.begin(m)
	facts = append(facts, fact(Key{KindMaps, p.layout}, p.sizes))
	facts = p.readPools(facts)
	names := make(map[uint32]uint64, len(p.pools))
	for id, i := range p.pools {
		names[i] = id
	}
	err = m.Frontends(func(k bpf.Entry, v bpf.Frontend) {
		facts = append(facts, fact(entryKey(k), heldValue(v, names)))
		p.maps.Enter(k)
	})
	if err != nil {
		return nil, err
	}
	err = m.Permits(func(t bpf.Permit) {
		facts = append(facts, fact(permitKey(entry(entryKey(t.Entry)), t.Client), ""))
	})
	if err != nil {
		return nil, err
	}
	if err := p.readLoads(); err != nil {
		return nil, err
	}
	if facts, err = readInterfaces(m, facts); err != nil {
		return nil, err
	}
	err = m.Unmatched(func(r netip.Prefix, action uint32) { facts = append(facts, unmatched(r, action)) })
	if err != nil {
		return nil, err
	}
	err = m.Places(readPlaces(&facts))
	return facts, err
}

// begin starts to work on maps of which nothing is known.
func (p *Plane) begin(m *bpf.Maps) {
	p.maps = m
	p.pools = map[uint64]uint32{}
	p.index = newSpace("pools", p.Sizes.Pools, p.grace.Wait)
	p.slots = newSpace("slots for backends", p.Sizes.Slots, p.grace.Wait)
	p.leave = nil
}

// readPools adds the pools and who is left to others, and learns which places are taken. Of two pools with one ID, which
// nobody makes, the first counts.
func (p *Plane) readPools(facts []Fact) []Fact {
	var indices, extents []span
	for i := range p.maps.Pools {
		pool := &p.maps.Pools[i]
		if pool.Extent == 0 {
			continue
		}
		value, size := "", uint32(0)
		if pool.Extent < p.Sizes.Slots {
			value, size = readExtent(p.maps.Slots[pool.Extent:])
		}
		if _, twice := p.pools[pool.Id]; twice || i == 0 {
			continue
		}
		p.pools[pool.Id] = uint32(i)
		indices = append(indices, span{uint32(i), 1})
		if size > 0 {
			extents = append(extents, span{pool.Extent, rounded(size)})
		}
		facts = append(facts, fact(poolKey(pool.Id), value))
		for o := model.FromNode; o <= model.FromOutside; o++ {
			if pool.Leave&(1<<o) != 0 {
				facts = append(facts, Fact{Key: leftKey(pool.Id, o)})
			}
		}
	}
	p.index.fill(indices)
	p.slots.fill(extents)
	return facts
}

// rounded gives the size to which extents are rounded up, so that there are fewer different ones.
func rounded(size uint32) uint32 { return (size + 3) &^ 3 }

func entryKey(k bpf.Entry) Key {
	return frontendKey(model.Entry{Addr: bpf.Addr(k.Address.Word), Port: bpf.Port(k.Port), Protocol: model.Protocol(k.Protocol)})
}

// heldValue gives the value of a frontend's fact as the kernel holds it.
func heldValue(v bpf.Frontend, names map[uint32]uint64) string {
	b := binary.BigEndian.AppendUint64(nil, names[v.Inside])
	return string(append(binary.BigEndian.AppendUint64(b, names[v.Outside]), v.Leave, v.Ask, v.Drop, v.Hide, v.Some, v.Direct))
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	if err := p.forget(); err != nil {
		return err
	}
	p.hooked.Store(false)
	if err := bpf.Detach(p.linksFolder()); err != nil {
		return err
	}
	if err := p.leaveDevices(); err != nil {
		return err
	}
	return bpf.RemoveFolder(p.folder)
}

// Retire implements dataplane.Retirer: no socket is translated any more, and of packets at devices those whose connections have ways.
func (p *Plane) Retire(ctx context.Context) (connections int, err error) {
	if err := p.forget(); err != nil {
		return 0, err
	}
	p.hooked.Store(false)
	if err := bpf.Detach(p.linksFolder()); err != nil {
		return 0, err
	}
	connections, err = bpf.Retire(p.folder)
	if connections == 0 && err == nil || errors.Is(err, bpf.ErrForm) { // who can't say who is there can't wait for them
		return 0, p.Clean(ctx)
	}
	return connections, err
}
