package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane"
	serviceplane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
)

// tableEntries is how many entries of Maglev's table the plane wants for each backend.
const tableEntries = 1000

// schedulers are those that the plane has.
var schedulers = model.SchedulersOf(model.Random, model.RoundRobin, model.WeightedRoundRobin, model.LeastConnections,
	model.WeightedLeastConnections, model.ShortestExpectedDelay, model.SourceHash, model.DestinationHash, model.Maglev)

// noDevices is what follows where this kernel can't serve packets at devices.
const noDevices = "this kernel has no programs at devices (Linux 6.7)"

// Capabilities returns what the plane supports on this kernel, together with a fallback plane for what it Leaves.
func Capabilities() model.Capabilities {
	c := model.Capabilities{
		Name:       "ebpf",
		Schedulers: schedulers,
		Capacity:   model.Capacity{TableEntriesPerBackend: tableEntries, TableEntriesPerSlot: choicesPerSlot},
		Long: []model.Remark{{ID: "fragments",
			Text:  "fragmented datagrams to an entry at its endpoint's own address are lost",
			About: ownFragments}},
		Unmatched: []model.Remark{{ID: "sctp", Text: "programs at devices look at TCP and UDP alone",
			About: &model.Packets{Unmatched: true, Protocols: []model.Protocol{model.SCTP}}}},
		Remarks: remarks,
	}
	if !Packets() {
		c.NoDirect = noDevices
		c.Unmatched = []model.Remark{{ID: "no-devices", Text: noDevices, About: &model.Packets{Unmatched: true}}}
	}
	return c
}

// Missing returns what this kernel lacks that the plane can do without, and what follows.
func Missing() []string { return bpf.Lacks() }

// ownFragments are the datagrams in fragments that are lost.
var ownFragments = &model.Packets{Protocols: []model.Protocol{model.UDP}, OwnAddress: true}

var remarks = []model.Remark{
	{ID: "unmatched", Text: "SCTP and ICMP to a ClusterIP that match no port of it pass. On kernels before 6.7, so does " +
		"all that matches no port there, and what is for unallocated addresses of ServiceCIDRs."},
	{ID: "fragments", Text: "With externalIPs Any, fragmented UDP datagrams to a Service at its own endpoint's address " +
		"are lost.",
		About: ownFragments},
	{ID: "translated-once", Text: "Clients on the node are translated once, at connect(); other packets at the node's " +
		"devices (Linux 6.7 or later). SCTP, and on older kernels all packets, go through nftables.",
		About: serviceplane.Over(model.SCTP)},
	{ID: "udp-closed", Text: "When a UDP endpoint goes, connected sockets of clients on the node that used it are " +
		"closed: they read ECONNABORTED and must connect again.",
		About: &model.Packets{Protocols: []model.Protocol{model.UDP},
			Origins: model.OriginsOf(model.FromNode, model.FromPod)}},
	{ID: "remote-udp", Text: "A UDP flow to a node port at another node's address stays with the node that translates " +
		"it while its endpoint serves, also where the other one does for new flows, such as after a change of " +
		"externalTrafficPolicy.",
		About: &model.Packets{Protocols: []model.Protocol{model.UDP}, NodePorts: true,
			Origins: model.OriginsOf(model.FromNode, model.FromPod)}},
	{ID: "container", Text: "In a container the agent needs the node's cgroup file system (cgroup namespace of " +
		"the host) and BPF file system (/sys/fs/bpf): programs attached to its own cgroup serve no other."},
	{ID: "connections", Text: "Schedulers by connections count the sockets of clients on the node, from connect() until " +
		"they are closed. Of more than 8 endpoints they take the better of two random ones.",
		About: serviceplane.Scheduled(model.LeastConnections, model.WeightedLeastConnections, model.ShortestExpectedDelay)},
}

// Options are the options of a plane.
type Options struct {
	Cgroup     string        // folder of the cgroup that holds the node's clients; "": cgroup.Node
	Sizes      service.Sizes // zero: DefaultSizes
	CloseTCP   bool          // close clients' TCP connections to an endpoint that goes, too
	NoFastPath bool          // packets to pods never bypass the host stack
	// NoReversePathCheck lets packets begin flows whatever device they come from.
	NoReversePathCheck bool
	// Policies has network policies see what a pod sends to itself by way of a Service: it is translated at the pod's
	// device, not at connect().
	Policies bool
	// PodNetwork has the programs at devices do what dataplane/network/masquerade writes, and evaluate packets in the
	// fast path while dataplane/network/guard has its hook.
	PodNetwork bool
}

// DefaultSizes have space for 40,000 pools of 10 backends. All maps use 70 MiB of kernel memory at once, of which 40
// are for the NAT entries of 131,072 flows; a frontend adds 96 bytes. Of that, a pool has 40 bytes and 24 for its
// header and each backend, by fours; Maglev's table uses 2 KiB for up to 10 backends, 20 KiB for up to 100, 128 KiB
// for more.
var DefaultSizes = SizesFor(DefaultMapEntries)

// DefaultMapEntries is the number of slots unless it is given: see SizesFor.
const DefaultMapEntries = 1 << 19

// DefaultFlows is the size of each of the two NAT maps unless it is given.
const DefaultFlows = service.DefaultFlows

// SizesFor returns sizes by the number of slots: a slot for each pool and each of its backends, more for schedulers
// with a table; and an eighth as many pools, frontends, and allowed source ranges.
func SizesFor(slots uint32) service.Sizes {
	return service.Sizes{Frontends: max(slots/8, 64), Pools: max(slots/8, 64), Slots: max(slots, 512), Flows: DefaultFlows}
}

// Capacity returns how many frontends, pools and source ranges, and how many slots, Services may use: a sixteenth is
// left for new versions of pools, which are written beside the old ones.
func (o Options) Capacity() (frontends, slots int) {
	s := cmp.Or(o.Sizes, DefaultSizes)
	return int(s.Frontends - s.Frontends/16), int(s.Slots - s.Slots/16)
}

// moreEntries is the advice where maps are full.
const moreEntries = "give more with --ebpf-map-entries"

// Plane writes facts into the maps of one node. It implements dataplane.Plane[model.ServicePart, Key, string],
// dataplane.Watcher, dataplane.Cleaner and dataplane.Drainer.
type Plane struct {
	Options
	identity

	maps     *device.Maps // nil where there are none of our layout
	grace    *bpf.Grace
	pools    map[uint64]uint32 // index of each pool held, by ID
	index    *space            // of pools
	slots    *space
	departed []service.Endpoint // endpoints that left their pools and may have open sockets counted, see loads.go

	hooked  atomic.Bool // the hooks are as wanted, unless others changed that
	warn    func(text string)
	writers *bpf.Writers
	devices *devices
}

// identity is by what a plane's state in the kernel is found.
type identity struct {
	folder string // for all that is pinned
	node   uint64 // the cookie of the node's network namespace
	layout string // name of the maps' folder
	sizes  string // in words
	digest string // of the programs
}

var (
	_ dataplane.Plane[model.ServicePart, Key, string] = (*Plane)(nil)
	_ dataplane.Watcher                               = (*Plane)(nil)
	_ dataplane.Cleaner                               = (*Plane)(nil)
	_ dataplane.Drainer                               = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace. Nothing is in the kernel before the first Write.
func New() (*Plane, error) { return Open(Options{}) }

// Open is New, with options.
func Open(o Options) (_ *Plane, err error) {
	if err := bpf.Probe(); err != nil {
		return nil, err
	}
	p := &Plane{Options: o}
	if p.Sizes == (service.Sizes{}) {
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
	p.writers = bpf.NewWriters(p.folder)
	if p.layout, err = device.Layout(p.Sizes); err != nil {
		return nil, err
	}
	p.sizes = fmt.Sprintf("%d frontends, %d pools, %d slots, %d flows", p.Sizes.Frontends, p.Sizes.Pools, p.Sizes.Slots,
		p.Sizes.Flows)
	if p.digest, err = service.Digest(p.layout, p.programs()); err != nil {
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
func (p *Plane) deviceOptions(direct bool) device.Options {
	return device.Options{DSR: direct, ReversePath: !p.NoReversePathCheck, PodNetwork: p.PodNetwork}
}

// programs returns the programs' options.
func (p *Plane) programs() service.Options {
	return service.Options{Node: p.node, Cgroup: p.Cgroup, OwnByPackets: p.Policies}
}

// Close closes the plane's handles. The kernel keeps what was written, and the hooks stay.
func (p *Plane) Close() error {
	p.writers.Close()
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

// OnWarning sets a function that is called with what an operator should know and no fact says. It comes before the
// first Read.
func (p *Plane) OnWarning(report func(text string)) { p.warn = report }

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
	digest, err := service.Attached(p.linksFolder(), p.sockets())
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
	m, err := device.OpenMaps(p.mapsFolder(), p.Sizes)
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
	err = m.Frontends(func(k service.Entry, v service.Frontend) {
		facts = append(facts, fact(entryKey(k), heldValue(v, names)))
		p.maps.Enter(k)
	})
	if err != nil {
		return nil, err
	}
	err = m.AllowedSources(func(t device.AllowedSource) {
		facts = append(facts, fact(allowedSourceKey(entry(entryKey(t.Entry)), t.Client), ""))
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
	err = m.Prefixes(readPrefixes(&facts))
	return facts, err
}

// sockets returns the maps of the programs for sockets, nil where there are none of our layout.
func (p *Plane) sockets() *service.Maps {
	if p.maps == nil {
		return nil
	}
	return p.maps.Maps
}

// begin starts to work on maps of which nothing is known.
func (p *Plane) begin(m *device.Maps) {
	p.maps = m
	p.pools = map[uint64]uint32{}
	p.index = newSpace("pools", p.Sizes.Pools, p.grace.Wait)
	p.slots = newSpace("slots for backends", p.Sizes.Slots, p.grace.Wait)
	p.departed = nil
}

// readPools adds the pools and their fallback origins, and learns which slots are in use. Of two pools with one ID,
// which no version writes, the first counts.
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
		for o := model.FromNode; o <= model.FromExternal; o++ {
			if pool.Fallback&(1<<o) != 0 {
				facts = append(facts, Fact{Key: fallbackKey(pool.Id, o)})
			}
		}
	}
	p.index.fill(indices)
	p.slots.fill(extents)
	return facts
}

// rounded returns the size to which extents are rounded up, so that there are fewer different ones.
func rounded(size uint32) uint32 { return (size + 3) &^ 3 }

func entryKey(k service.Entry) Key {
	return frontendKey(
		model.Entry{Addr: bpf.Addr(k.Address.Word), Port: bpf.Port(k.Port), Protocol: model.Protocol(k.Protocol)},
	)
}

// heldValue returns the value of a frontend's fact as the kernel holds it.
func heldValue(v service.Frontend, names map[uint32]uint64) string {
	b := binary.BigEndian.AppendUint64(nil, names[v.Internal])
	return string(append(binary.BigEndian.AppendUint64(b, names[v.External]), v.Fallback, v.ByOrigin, v.Drop, v.Masquerade,
		v.Restricted, v.Dsr, byte(b2i(v.NodePort&service.NodePortRemote != 0)),
		byte(b2i(v.NodePort&service.NodeAddress != 0))))
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	if err := p.forget(); err != nil {
		return err
	}
	p.hooked.Store(false)
	if err := service.Detach(p.linksFolder()); err != nil {
		return err
	}
	if err := p.detachDevices(); err != nil {
		return err
	}
	return bpf.RemoveFolder(p.folder)
}

// Drain implements dataplane.Drainer: no socket is translated any more, and of packets at devices only those of open
// connections.
func (p *Plane) Drain(ctx context.Context) (connections int, err error) {
	if err := p.forget(); err != nil {
		return 0, err
	}
	p.hooked.Store(false)
	if err := service.Detach(p.linksFolder()); err != nil {
		return 0, err
	}
	connections, err = device.Drain(p.folder)
	// connections that can't be counted can't be awaited
	if connections == 0 && err == nil || errors.Is(err, bpf.ErrForm) {
		return 0, p.Clean(ctx)
	}
	return connections, err
}
