package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Packets says whether this kernel can serve packets at devices. Where it can't, all that sockets leave is left to a plane that
// stands behind.
func Packets() bool { return bpf.ProbeDevices() == nil }

// Leaves says that a frontend's clients are left to a plane that stands behind this one: all of SCTP, whose checksum covers
// what no program reaches, and whatever isn't translated at a socket where the kernel can't serve packets.
func Leaves(f *model.Frontend) bool {
	return !Packets() || f.Entry.Protocol != model.TCP && f.Entry.Protocol != model.UDP
}

// passes returns why packets of a protocol that match no frontend pass.
func passes(p model.Protocol) string {
	switch {
	case !Packets():
		return direct()
	case p != model.TCP && p != model.UDP:
		return "programs at devices look at TCP and UDP alone"
	}
	return ""
}

// long returns why datagrams in fragments are lost, or "".
func long(f *model.Frontend) string {
	if f == nil || f.Entry.Protocol != model.UDP {
		return ""
	}
	for _, p := range []*model.Pool{f.Inside.Pool, f.Outside.Pool} {
		if slices.ContainsFunc(p.Backends, func(b model.Backend) bool { return b.Addr.Addr() == f.Entry.Addr }) {
			return "fragmented datagrams to an entry at its endpoint's own address are lost"
		}
	}
	return ""
}

// direct says why nodes of backends can't answer clients, or "": it takes programs at devices.
func direct() string {
	if Packets() {
		return ""
	}
	return "this kernel has no programs at devices (Linux 6.7)"
}

// devices is the part of the plane that stands at the node's devices.
type devices struct {
	ns      *netns.Namespace // the node's
	conn    *link.Conn
	folder  string // of the plane
	sizes   bpf.Sizes
	maps    string                       // the folder of the maps that the programs work on
	digests map[bpf.DeviceOptions]string // of the programs with each of their options
	hand    bool                         // packets may be handed over to pods

	mu       sync.Mutex
	attached bool              // the programs are as wanted, unless others changed that
	options  bpf.DeviceOptions // of those that are attached
	behind   error             // why some device has no program yet; nil: none is known
}

// openDevices opens that part of a plane in the calling thread's network namespace.
func openDevices(p *Plane) (*devices, error) {
	digests := map[bpf.DeviceOptions]string{}
	for _, direct := range []bool{false, true} {
		o := p.deviceOptions(direct)
		digest, err := bpf.DeviceDigest(p.Sizes, o)
		if err != nil {
			return nil, err
		}
		digests[o] = digest
	}
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	conn, err := link.Dial(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &devices{ns: ns, conn: conn, folder: p.folder, maps: p.mapsFolder(), sizes: p.Sizes, digests: digests, hand: !p.NoShortcut && !bpf.Preempts()}, nil
}

func (d *devices) close() {
	d.conn.Close()
	d.ns.Close()
}

// links gives the folder where programs and links to devices are pinned.
func (d *devices) links() string { return filepath.Join(d.folder, devicesName) }

// list gives the node's devices as the programs' loader knows them.
func (d *devices) list() (l []bpf.Device, err error) {
	all, err := d.conn.Devices()
	for _, i := range all {
		l = append(l, bpf.Device{Index: i.Index, Header: uint32(i.Header), Own: i.Loopback, Pod: i.Pod && d.hand})
	}
	return l, err
}

// put loads the programs to work on maps, attaches them to every device, and keeps them for those that are to come.
func (d *devices) put(m *bpf.Maps, o bpf.DeviceOptions) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.list()
	if err != nil {
		return err
	}
	programs, err := m.LoadForDevices(o, bpf.Headers(list)...) // the verifier takes its time: for no device that isn't there
	if err != nil {
		return err
	}
	defer programs.Close()
	if list, err = d.list(); err != nil { // others have come meanwhile
		return err
	}
	if err := programs.Add(list, d.maps, d.sizes, o); err != nil {
		return err
	}
	if err := d.keepUplinks(o); err != nil {
		return err
	}
	if err := d.loopback(); err != nil { // first: with the programs' pins all of it counts as done
		return err
	}
	if err := errors.Join(programs.Pin(d.links()), programs.Unpin(d.links())); err != nil {
		return err
	}
	if err := m.Recall(); err != nil { // what began until now, by another version's programs, and below, until these were attached
		return err
	}
	if err := errors.Join(d.attach(programs, list), m.Recall()); err != nil {
		return err
	}
	if err := bpf.KeepPods(d.maps, d.links(), list); err != nil {
		return err
	}
	d.attached, d.options, d.behind = true, o, nil
	return bpf.Sweep(d.links(), list)
}

// attach attaches programs to devices.
func (d *devices) attach(programs *bpf.DevicePrograms, list []bpf.Device) error {
	return d.ns.Do(func() error { return programs.Attach(d.links(), list...) })
}

// follow attaches the programs to devices that have come, and where somebody detached them, and gives up the links to those that
// have gone.
func (d *devices) follow() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.attached {
		return nil
	}
	defer func() { d.behind = err }()
	list, err := d.list()
	if err != nil {
		return err
	}
	detached, err := bpf.Detached(d.links())
	if err != nil {
		return err
	}
	lacking := bpf.Lacking(d.links(), list)
	for _, i := range list {
		if detached[i.Index] {
			lacking = append(lacking, i)
		}
	}
	if len(lacking) > 0 {
		if digest, err := bpf.AtDevices(d.links(), nil); err != nil || digest != d.digests[d.options] {
			return errors.Join(err, fmt.Errorf("ebpf: programs at devices are %q, no more %s", digest, d.digests[d.options])) // another plane's
		}
		programs, err := bpf.OpenDevicePrograms(d.links())
		if err != nil {
			return err
		}
		defer programs.Close()
		if err := programs.Add(lacking, d.maps, d.sizes, d.options); err != nil {
			return err
		}
		if err := programs.Pin(d.links()); err != nil {
			return err
		}
		if err := d.attach(programs, lacking); err != nil {
			return err
		}
	}
	return errors.Join(bpf.KeepPods(d.maps, d.links(), list), d.keepUplinks(d.options), bpf.Sweep(d.links(), list))
}

// keepUplinks has the programs know the devices by which other Nodes are reached: tunnels, and those that the routes to
// Nodes' addresses lead to. Of addresses in one block of 256 (IPv6: one /64), one that is reached stands for all.
func (d *devices) keepUplinks(o bpf.DeviceOptions) error {
	if !o.Direct || !o.ReversePath {
		return nil
	}
	list, err := d.conn.Devices()
	if err != nil {
		return err
	}
	uplinks, known, own := map[int]bool{}, map[netip.Prefix]bool{}, map[int]bool{0: true}
	for _, i := range list {
		if i.Tunnel {
			uplinks[i.Index] = true
		}
		own[i.Index] = own[i.Index] || i.Loopback
	}
	var errs []error
	err = bpf.PlacesIn(d.maps, func(r netip.Prefix, is uint32) {
		block := netip.PrefixFrom(r.Addr(), r.Addr().BitLen()/4*3).Masked()
		if r.Addr().Is6() {
			block = netip.PrefixFrom(r.Addr(), 64).Masked()
		}
		if is&bpf.Nodes == 0 || known[block] {
			return
		}
		device, err := d.conn.DeviceTo(r.Addr())
		if errs = append(errs, err); err != nil || own[device] {
			return
		}
		uplinks[device], known[block] = true, true
	})
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	return bpf.KeepUplinks(d.maps, uplinks)
}

// nodesChanged has the programs know other Nodes' devices anew where prefixes were written.
func (p *Plane) nodesChanged(w *writes) error {
	if len(w.put[KindPlace]) == 0 {
		return nil
	}
	p.devices.mu.Lock()
	defer p.devices.mu.Unlock()
	return p.devices.keepUplinks(p.devices.options)
}

// lost says whether the programs are not as they were written, and that is not our own doing.
func (d *devices) lost() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.attached {
		return false
	}
	digest, err := bpf.AtDevices(d.links(), nil)
	return err != nil || digest != d.digests[d.options]
}

// remove detaches the programs.
func (d *devices) remove() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attached = false
	if err := os.RemoveAll(d.links()); err != nil {
		return fmt.Errorf("ebpf: detach from devices: %w", err)
	}
	return d.restore()
}

// ours are settings of the loopback device, where a packet of the node itself comes in again when its destination was changed:
// its source is the node's, or even a loopback address. Packets from elsewhere don't come that way.
var ours = []string{"accept_local", "route_localnet"}

func setting(name string) string { return "ipv4/conf/lo/" + name }

// changed gives the folder that stands for a setting that was changed by us.
func (d *devices) changed(name string) string { return filepath.Join(d.folder, "lo-"+name) }

// loopback makes the settings, and notes which were not so.
func (d *devices) loopback() error {
	for _, name := range ours {
		now, err := link.Get(d.ns, setting(name))
		if err != nil {
			return err
		}
		if now == "1" {
			continue
		}
		if err := os.MkdirAll(d.changed(name), 0o700); err != nil {
			return fmt.Errorf("ebpf: note that a setting is changed: %w", err)
		}
		if err := link.Set(d.ns, link.Setting{Name: setting(name), Value: "1"}); err != nil {
			return err
		}
	}
	return nil
}

// restore undoes what loopback changed.
func (d *devices) restore() error {
	for _, name := range ours {
		err := os.Remove(d.changed(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("ebpf: note that a setting is as before: %w", err)
		}
		if err := link.Set(d.ns, link.Setting{Name: setting(name), Value: "0"}); err != nil {
			return err
		}
	}
	return nil
}

// with gives the options of this version's programs of that digest, if it is one of theirs.
func (d *devices) with(digest string) (o bpf.DeviceOptions, ours bool) {
	for o, is := range d.digests {
		if is == digest {
			return o, true
		}
	}
	return o, false
}

// readDevices adds the fact of the programs at devices.
func (p *Plane) readDevices(facts []Fact) ([]Fact, error) {
	p.devices.mu.Lock()
	defer p.devices.mu.Unlock()
	digest, err := bpf.AtDevices(p.devices.links(), p.maps)
	if err != nil || digest == "" {
		return facts, err
	}
	if p.maps == nil {
		digest += ", with other maps"
	}
	o, ours := p.devices.with(digest)
	if p.devices.attached, p.devices.options = ours, o; ours && p.devices.behind != nil {
		digest += ", not at all devices" // to be put again
	}
	return append(facts, fact(devicesKey, digest)), nil
}

func (p *Plane) putDevices(w *writes) error {
	facts := w.put[KindDevices]
	if err := p.held(facts); err != nil || len(facts) == 0 {
		return err
	}
	o, ours := p.devices.with(facts[0].Value)
	if !ours {
		return fmt.Errorf("ebpf: programs at devices %s: this version's are %v", facts[0].Value, p.devices.digests)
	}
	return p.devices.put(p.maps, o)
}

func (p *Plane) deleteDevices(w *writes) error {
	return w.gone(KindDevices, func(Fact) error { return p.devices.remove() })
}

// leaveDevices removes whatever is at devices.
func (p *Plane) leaveDevices() error { return p.devices.remove() }

// watchDevices follows devices that come and go until ctx ends, then it closes the channel. What can't be done is told to whoever
// repairs.
func (p *Plane) watchDevices(ctx context.Context, tell func()) (<-chan struct{}, error) {
	ended := make(chan struct{})
	changes, err := link.WatchDevices(ctx, p.devices.ns)
	if err != nil {
		return nil, err
	}
	follow := func() {
		if p.devices.follow() != nil {
			tell()
		}
	}
	go func() {
		defer close(ended)
		tick := time.NewTicker(rebuildEvery)
		defer tick.Stop()
		follow()
		for {
			select {
			case _, more := <-changes:
				if !more {
					return
				}
			case <-tick.C:
				if p.devices.rebuild() != nil {
					tell()
				}
			}
			follow()
		}
	}()
	return ended, nil
}

// rebuildEvery is how often the bits of ports that flows use are rebuilt.
const rebuildEvery = 3 * time.Minute

// rebuild clears the bits of ports that flows no longer use.
func (d *devices) rebuild() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.attached {
		return nil
	}
	err := bpf.RebuildUses(d.maps, d.sizes)
	if bpf.Absent(err) {
		return nil
	}
	return err
}
