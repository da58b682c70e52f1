package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane"
	deviceplane "fairlead.dev/fairlead/dataplane/device"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
)

// Packets reports whether this kernel can serve packets at devices. Where it can't, all that socket hooks leave is
// left to a fallback plane.
func Packets() bool { return bpf.ProbeDevices() == nil }

// Redirects reports whether this kernel's programs at devices can have packets to pods bypass the host stack.
func Redirects() bool { return Packets() && !bpf.Preempts() }

// Leaves reports whether a frontend's clients are left to a fallback plane: all of SCTP, whose checksum covers what
// no program reaches, and whatever isn't translated at a socket where the kernel can't serve packets.
func Leaves(f *model.Frontend) bool {
	return !Packets() || f.Entry.Protocol != model.TCP && f.Entry.Protocol != model.UDP
}

// devices is the part of the plane that is about the node's devices: the programs for packets, and their attachments.
type devices struct {
	attachments *deviceplane.Plane
	ns          *netns.Namespace // the node's
	conn        *link.Conn
	folder      string // of the plane
	sizes       service.Sizes
	maps        string                    // the folder of the maps that the programs work on
	digests     map[device.Options]string // of the programs with each of their options
	fastPath    bool                      // packets to pods may bypass the host stack

	mu      sync.Mutex
	loaded  bool                       // the programs are as wanted, unless others changed that
	options device.Options             // of those that are loaded
	wanted  map[deviceplane.Key]string // attachments that were read or written
}

// openDevices opens that part of a plane in the calling thread's network namespace.
func openDevices(p *Plane) (*devices, error) {
	digests := map[device.Options]string{}
	for _, direct := range []bool{false, true} {
		o := p.deviceOptions(direct)
		digest, err := device.Digest(p.Sizes, o)
		if err != nil {
			return nil, err
		}
		digests[o] = digest
	}
	d := &devices{folder: p.folder, maps: p.mapsFolder(), sizes: p.Sizes, digests: digests,
		fastPath: !p.NoFastPath && Redirects(), wanted: map[deviceplane.Key]string{}}
	var err error
	if d.attachments, err = deviceplane.Open(d.links()); err != nil {
		return nil, err
	}
	d.attachments.Programs = d.programs
	if d.ns, err = netns.Current(); err != nil {
		return nil, errors.Join(err, d.attachments.Close())
	}
	if d.conn, err = link.Dial(d.ns); err != nil {
		return nil, errors.Join(err, d.ns.Close(), d.attachments.Close())
	}
	return d, nil
}

func (d *devices) close() {
	d.conn.Close()
	d.ns.Close()
	d.attachments.Close()
}

// links returns the folder where programs and links to devices are pinned.
func (d *devices) links() string { return filepath.Join(d.folder, devicesName) }

// put loads the programs to work on maps, pins them for the devices that are to have them, and has those that have
// other programs of ours call these.
func (d *devices) put(m *device.Maps, o device.Options) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.list()
	if err != nil {
		return err
	}
	programs, err := m.LoadForDevices(o, device.Headers(list)...) // the verifier is slow: only for devices that exist
	if err != nil {
		return err
	}
	defer programs.Close()
	if err := d.writeUplinks(o); err != nil {
		return err
	}
	if err := d.loopback(); err != nil { // first: with the programs' pins all of it counts as done
		return err
	}
	if err := errors.Join(programs.Pin(d.links()), programs.Unpin(d.links())); err != nil {
		return err
	}
	// The flows that another version's programs began until now, and those until these are attached.
	if err := errors.Join(m.Recall(), d.attachments.Update(programs), m.Recall()); err != nil {
		return err
	}
	d.loaded, d.options = true, o
	return errors.Join(d.joinPolicies(), d.writePods(list), d.writeHooks())
}

// joinPolicies has the fast path evaluate network policies, where the engine ebpf has its program in the kernel.
func (d *devices) joinPolicies() error {
	return d.ns.Do(func() error {
		f, err := device.CurrentFolders()
		if err != nil {
			return err
		}
		return f.Join()
	})
}

// list returns the node's devices.
func (d *devices) list() ([]device.Device, error) {
	devices, err := d.attachments.Devices()
	return slices.Collect(maps.Values(devices)), err
}

// programs opens the pinned programs, and loads and pins those for devices that are missing.
func (d *devices) programs(list []device.Device) (*device.Programs, error) {
	p, err := device.OpenPrograms(d.links())
	if err != nil {
		return nil, err
	}
	if p.Digest() != d.digests[d.options] {
		err = fmt.Errorf(
			"ebpf: programs at devices are %q, no longer %q",
			p.Digest(),
			d.digests[d.options],
		) // another plane's
	} else {
		err = errors.Join(p.Add(list, d.maps, d.sizes, d.options), p.Pin(d.links()))
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// writePods has the programs know the pods among devices whose packets may bypass the host stack.
func (d *devices) writePods(list []device.Device) error {
	list = slices.Clone(list)
	for i := range list {
		list[i].Pod = list[i].Pod && d.fastPath
	}
	return device.WritePods(d.maps, d.links(), list)
}

// refresh has the programs know pods and uplinks as they are now.
func (d *devices) refresh() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.loaded {
		return nil
	}
	list, err := d.list()
	if err != nil {
		return err
	}
	return errors.Join(d.writePods(list), d.writeUplinks(d.options), d.writeHooks())
}

// writeHooks has the programs know the functions of netfilter's hooks that are there now.
func (d *devices) writeHooks() error {
	return d.ns.Do(func() error { return device.WriteHooks(d.maps) })
}

// writeUplinks has the programs know the devices by which other Nodes are reached: tunnels, and those that the routes
// to Nodes' addresses lead to. Of addresses in one block of 256 (IPv6: one /64), one that is reached stands for all.
func (d *devices) writeUplinks(o device.Options) error {
	if !o.DSR || !o.ReversePath {
		return nil
	}
	list, err := d.conn.Devices()
	if err != nil {
		return err
	}
	routes, err := netlink.OpenIn(d.ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer routes.Close()
	uplinks, known, own := map[int]bool{}, map[netip.Prefix]bool{}, map[int]bool{0: true}
	for _, i := range list {
		if i.Tunnel {
			uplinks[i.Index] = true
		}
		own[i.Index] = own[i.Index] || i.Loopback
	}
	var errs []error
	err = service.PrefixesIn(d.maps, func(r netip.Prefix, is uint32) {
		block := netip.PrefixFrom(r.Addr(), r.Addr().BitLen()/4*3).Masked()
		if r.Addr().Is6() {
			block = netip.PrefixFrom(r.Addr(), 64).Masked()
		}
		if is&service.Nodes == 0 || known[block] {
			return
		}
		path, _, err := route.To(routes, r.Addr())
		if errs = append(errs, err); err != nil || own[path.Dev] {
			return
		}
		uplinks[path.Dev], known[block] = true, true
	})
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	return device.WriteUplinks(d.maps, uplinks)
}

// nodesChanged has the programs know other Nodes' devices anew where prefixes were written.
func (p *Plane) nodesChanged(w *writes) error {
	if len(w.put[KindPrefix]) == 0 {
		return nil
	}
	p.devices.mu.Lock()
	defer p.devices.mu.Unlock()
	return p.devices.writeUplinks(p.devices.options)
}

// lost reports whether programs or attachments are not as they were written, and that is not our own doing.
func (d *devices) lost() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.loaded {
		return false
	}
	digest, err := device.Attached(d.links(), nil)
	if err != nil || digest != d.digests[d.options] {
		return true
	}
	held, err := d.attachments.Read(context.Background())
	if err != nil {
		return true
	}
	now := map[deviceplane.Key]string{}
	for _, f := range held {
		now[f.Key] = f.Value
	}
	if maps.Equal(now, d.wanted) {
		return false
	}
	devices, err := d.attachments.Devices()
	for k, v := range d.wanted {
		if _, is := devices[k.Index]; is && now[k] != v {
			return true
		}
	}
	return err != nil
}

// remove detaches the programs.
func (d *devices) remove() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.loaded = false
	if err := d.attachments.Clean(context.Background()); err != nil {
		return err
	}
	clear(d.wanted)
	if err := os.RemoveAll(d.links()); err != nil {
		return fmt.Errorf("ebpf: remove the programs for packets: %w", err)
	}
	return d.restore()
}

// with returns the options of this version's programs of that digest, if it is one of theirs.
func (d *devices) with(digest string) (o device.Options, ours bool) {
	for o, is := range d.digests {
		if is == digest {
			return o, true
		}
	}
	return o, false
}

// readDevices adds the facts of the programs for packets and of their attachments.
func (p *Plane) readDevices(facts []Fact) ([]Fact, error) {
	d := p.devices
	d.mu.Lock()
	defer d.mu.Unlock()
	held, err := d.attachments.Read(context.Background())
	if err != nil {
		return facts, err
	}
	clear(d.wanted)
	for _, f := range held {
		d.wanted[f.Key] = f.Value
		facts = append(facts, attachment(f))
	}
	digest, err := device.Attached(d.links(), p.maps)
	if err != nil || digest == "" {
		return facts, err
	}
	if p.maps == nil {
		digest += ", with other maps"
	}
	d.options, d.loaded = d.with(digest)
	return append(facts, fact(devicesKey, digest)), nil
}

// attachment returns a fact of dataplane/device as one of this plane.
func attachment(f deviceplane.Fact) Fact {
	b := binary.BigEndian.AppendUint32(nil, uint32(f.Key.Index))
	return fact(Key{KindAttachment, string(append(b, byte(f.Key.Rank())))}, f.Value)
}

// attachmentOf is the inverse of attachment.
func attachmentOf(f Fact) deviceplane.Fact {
	return deviceplane.Fact{Key: attachmentKey(f.Key), Value: f.Value}
}

func attachmentKey(k Key) deviceplane.Key {
	b := []byte(k.Name)
	return deviceplane.Key{Index: int(binary.BigEndian.Uint32(b)), Ingress: b[4] == 1}
}

// putAttachments attaches the programs to devices.
func (p *Plane) putAttachments(w *writes) error {
	facts := w.put[KindAttachment]
	if err := p.held(facts); err != nil || len(facts) == 0 {
		return err
	}
	return errors.Join(p.devices.attach(facts, nil), p.maps.Recall(), p.devices.refresh())
}

// deleteAttachments detaches them.
func (p *Plane) deleteAttachments(w *writes) error {
	var facts []Fact
	w.gone(KindAttachment, func(f Fact) error {
		facts = append(facts, f)
		return nil
	})
	if len(facts) == 0 {
		return nil
	}
	return errors.Join(p.devices.attach(nil, facts), p.devices.refresh())
}

// attach writes attachments. The error names those that were refused.
func (d *devices) attach(put, del []Fact) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var puts, dels []deviceplane.Fact
	for _, f := range put {
		puts = append(puts, attachmentOf(f))
		d.wanted[attachmentKey(f.Key)] = f.Value
	}
	for _, f := range del {
		dels = append(dels, attachmentOf(f))
		delete(d.wanted, attachmentKey(f.Key))
	}
	err := d.attachments.Write(context.Background(), puts, dels)
	r, ok := errors.AsType[*dataplane.Refused[deviceplane.Key]](err)
	if !ok {
		return err
	}
	refused := map[Key]error{}
	for k, reason := range r.Facts {
		delete(d.wanted, k)
		refused[attachment(deviceplane.Fact{Key: k}).Key] = reason
	}
	return &dataplane.Refused[Key]{Facts: refused}
}

// UsesDevices reports whether the node's devices are parts of the plane: the kernel has programs there.
func (p *Plane) UsesDevices() bool { return Packets() }

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

// detachDevices removes all attachments and programs at devices.
func (p *Plane) detachDevices() error { return p.devices.remove() }

// watchDevices has the programs know pods and uplinks as devices come and go, until ctx ends; then it closes the
// channel. It calls signal where attachments are lost, or an error leaves something to repair.
func (p *Plane) watchDevices(ctx context.Context, signal func(other bool)) (<-chan struct{}, error) {
	ended := make(chan struct{})
	changes, err := link.WatchDevices(ctx, p.devices.ns, link.Changed)
	if err != nil {
		return nil, err
	}
	go func() {
		defer close(ended)
		tick, search := time.NewTicker(rebuildEvery), time.NewTicker(hooksEvery)
		defer tick.Stop()
		defer search.Stop()
		signal(p.devices.refresh() != nil)
		for {
			select {
			case _, more := <-changes:
				if !more {
					return
				}
			case <-search.C:
				if p.devices.writeHooks() != nil {
					signal(true)
				}
				continue
			case <-tick.C:
				if p.devices.rebuild() != nil {
					signal(true)
				}
			}
			signal(p.devices.refresh() != nil)
		}
	}()
	return ended, nil
}

// rebuildEvery is how often the bits of ports that flows use are rebuilt; hooksEvery, how often functions of
// netfilter's hooks are looked for that weren't there before.
const rebuildEvery, hooksEvery = 3 * time.Minute, 30 * time.Second

// rebuild clears the bits of ports that flows no longer use.
func (d *devices) rebuild() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.loaded {
		return nil
	}
	err := device.RebuildPortBits(d.maps, d.sizes)
	if bpf.Absent(err) {
		return nil
	}
	return err
}

// render returns the facts of a device: none where the kernel has no programs at devices.
func (d *devices) render(l *model.Link) (facts []Fact) {
	if !Packets() {
		return nil
	}
	for _, f := range d.attachments.Render(l) {
		facts = append(facts, attachment(f))
	}
	return facts
}
