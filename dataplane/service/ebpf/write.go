package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/sockets"
	"fairlead.dev/fairlead/model"
)

// writes is what one Write is to do, by kinds of facts.
type writes struct {
	put, del [KindHooks + 1][]Fact
	stays    map[Key]bool // keys that are put, where any are deleted: those in del too only change their value
	was      map[Key]bool // keys that are deleted
}

func sorted(put, del []Fact) *writes {
	w := &writes{was: make(map[Key]bool, len(del))}
	if len(del) > 0 {
		w.stays = make(map[Key]bool, len(put))
	}
	for _, f := range put {
		w.put[f.Key.Kind] = append(w.put[f.Key.Kind], f)
		if len(del) > 0 {
			w.stays[f.Key] = true
		}
	}
	for _, f := range del {
		w.del[f.Key.Kind] = append(w.del[f.Key.Kind], f)
		w.was[f.Key] = true
	}
	return w
}

// gone calls f with each fact of a kind that goes for good.
func (w *writes) gone(k Kind, f func(Fact) error) error {
	for _, d := range w.del[k] {
		if w.stays[d.Key] {
			continue
		}
		if err := f(d); err != nil {
			return err
		}
	}
	return nil
}

// Write implements dataplane.Plane. Each fact becomes true at once; the hooks' one after another, and all or none.
// Other planes are informed of the first after each Read: before, since the writer may be killed, and after, since
// they may have read in between.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	w := sorted(put, del)
	if err := p.makeMaps(w); err != nil {
		return err
	}
	return p.writers.Write(func() error { return p.write(w) })
}

// write does all steps but the first.
func (p *Plane) write(w *writes) error {
	for _, step := range []func(*writes) error{
		p.putPrefixes, p.putInterfaces, p.putPools, p.putFallbacks, p.putAllowedSources, p.putFrontends,
		p.putUnmatched, p.putDevices, p.putAttachments, p.nodesChanged, p.attach,
		p.detach, p.deleteAttachments, p.deleteDevices, p.deleteUnmatched, p.deleteFrontends, p.deleteAllowedSources,
		p.deleteFallbacks, p.deletePools, p.deletePrefixes, p.deleteInterfaces, p.countChange,
		p.removeMaps, p.closeSockets, p.forgetLoads,
	} {
		if err := step(w); err != nil {
			return cmp.Or(p.follow(w, err), err)
		}
	}
	return nil
}

// makeMaps creates the maps, or opens those that exist. The remains of incomplete ones are removed first.
func (p *Plane) makeMaps(w *writes) error {
	for _, f := range w.del[KindMaps] {
		if f.Key.Name == p.layout && w.stays[f.Key] {
			if err := p.dropMaps(f.Key.Name); err != nil {
				return err
			}
		}
	}
	if p.maps != nil {
		return nil
	}
	if len(w.put[KindMaps]) == 0 {
		_, err := p.readMaps(nil) // a plane that writes before it has read
		return err
	}
	if k := w.put[KindMaps][0].Key; k.Name != p.layout {
		return fmt.Errorf("ebpf: %s: this version's maps are %s", k, p.layout)
	}
	m, err := device.CreateMaps(p.mapsFolder(), p.Sizes)
	if err != nil {
		return err
	}
	p.writers.Listen()
	p.begin(m)
	p.readPools(nil) // none, unless an attempt ended halfway
	return p.readLoads()
}

// dropMaps removes maps of a layout.
func (p *Plane) dropMaps(layout string) error {
	if layout == p.layout {
		if err := p.forget(); err != nil {
			return err
		}
	}
	return device.RemoveMaps(filepath.Join(p.folder, layout), p.Sizes)
}

// removeMaps removes maps that are not wanted.
func (p *Plane) removeMaps(w *writes) error {
	return w.gone(KindMaps, func(f Fact) error { return p.dropMaps(f.Key.Name) })
}

// held returns an error if there are no maps to write to.
func (p *Plane) held(facts []Fact) error {
	if p.maps == nil && len(facts) > 0 {
		return fmt.Errorf("ebpf: no maps to write %s to", facts[0].Key)
	}
	return nil
}

func (p *Plane) putPrefixes(w *writes) error {
	facts := w.put[KindPrefix]
	if err := p.held(facts); err != nil {
		return err
	}
	for _, f := range facts {
		if err := p.maps.PutPrefix(prefixOf(f.Key), binary.BigEndian.Uint32([]byte(f.Value))); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plane) deletePrefixes(w *writes) error {
	if p.maps == nil {
		return nil
	}
	return w.gone(KindPrefix, func(f Fact) error { return p.maps.DeletePrefix(prefixOf(f.Key)) })
}

func (p *Plane) putInterfaces(w *writes) error {
	facts := w.put[KindInterfaces]
	if err := p.held(facts); err != nil {
		return err
	}
	return each(facts, func(f Fact) error {
		i := f.Body.(model.Interfaces)
		return p.maps.PutPodInterfaces(i.Name, i.Prefix)
	})
}

func (p *Plane) deleteInterfaces(w *writes) error {
	if p.maps == nil {
		return nil
	}
	return w.gone(KindInterfaces, func(Fact) error { return p.maps.PutPodInterfaces("", false) })
}

// readInterfaces adds the fact of the interfaces of pods, if there are some.
func readInterfaces(m *device.Maps, facts []Fact) ([]Fact, error) {
	var i model.Interfaces
	var err error
	if i.Name, i.Prefix, err = m.PodInterfaces(); err != nil || i.Name == "" {
		return facts, err
	}
	return append(facts, fact(interfacesKey, i.String())), nil
}

// readPrefixes returns a function that adds prefixes to facts.
func readPrefixes(facts *[]Fact) func(netip.Prefix, uint32) {
	return func(r netip.Prefix, is uint32) {
		*facts = append(*facts, fact(prefixKey(r), string(binary.BigEndian.AppendUint32(nil, is))))
	}
}

func (p *Plane) putPools(w *writes) error {
	facts := w.put[KindPool]
	if err := p.held(facts); err != nil {
		return err
	}
	return each(facts, func(f Fact) error { return p.putPool(poolID(f.Key), f.Value) })
}

// putPool writes a pool beside what is there of it, then makes it true with one word.
func (p *Plane) putPool(id uint64, value string) error {
	e, err := newExtent(readPool(value))
	if err != nil {
		return err
	}
	size := rounded(e.size())
	at, err := p.slots.allocate(size)
	if err != nil {
		return fmt.Errorf("%w; %s", err, moreEntries)
	}
	e.write(id, p.maps.Slots[at:at+size])
	if counts(e.Pool.Scheduler) {
		p.maps.CountSockets()
	}
	i, known := p.pools[id]
	if !known {
		if i, err = p.index.allocate(1); err != nil {
			p.slots.release(at, size)
			return fmt.Errorf("%w; %s", err, moreEntries)
		}
		p.pools[id] = i
		p.maps.Pools[i] = service.Pool{Id: id, Next: rand.Uint32()} // so that nodes don't all begin with the same backend
	}
	p.release(p.maps.Pools[i].Lead(at, e.fast()))
	return nil
}

// release frees an extent that no pool refers to any more.
func (p *Plane) release(extent uint32) {
	if extent == 0 || extent >= p.Sizes.Slots {
		return
	}
	if size := extentSize(p.maps.Slots[extent:]); size > 0 {
		p.slots.release(extent, rounded(size))
	}
}

func (p *Plane) deletePools(w *writes) error {
	return w.gone(KindPool, func(f Fact) error {
		id := poolID(f.Key)
		i, known := p.pools[id]
		if p.maps == nil || !known {
			return nil
		}
		p.release(p.maps.Pools[i].Lead(0, 0))
		delete(p.pools, id)
		p.index.release(i, 1)
		return nil
	})
}

func (p *Plane) putFallbacks(w *writes) error {
	if err := p.held(w.put[KindFallback]); err != nil {
		return err
	}
	return each(w.put[KindFallback], func(f Fact) error {
		i, known := p.pools[poolID(f.Key)]
		if !known {
			return errNoPool
		}
		atomic.OrUint32(&p.maps.Pools[i].Fallback, uint32(f.Key.Name[8]))
		return nil
	})
}

func (p *Plane) deleteFallbacks(w *writes) error {
	return w.gone(KindFallback, func(f Fact) error {
		if i, known := p.pools[poolID(f.Key)]; known && p.maps != nil {
			atomic.AndUint32(&p.maps.Pools[i].Fallback, ^uint32(f.Key.Name[8]))
		}
		return nil
	})
}

func (p *Plane) putFrontends(w *writes) error {
	facts := w.put[KindFrontend]
	if err := p.held(facts); err != nil || len(facts) == 0 {
		return err
	}
	keys, values := make([]service.Entry, len(facts)), make([]service.Frontend, len(facts))
	for i, f := range facts {
		var ok bool
		if keys[i], values[i], ok = p.heldFrontend(f); !ok {
			return p.putEachFrontend(w)
		}
	}
	for i, f := range facts {
		if !w.was[f.Key] {
			p.maps.Enter(keys[i])
		}
	}
	err := p.maps.PutFrontends(keys, values)
	if !bpf.Full(err) {
		return err
	}
	for i, f := range facts {
		if !w.was[f.Key] {
			p.maps.Exit(keys[i])
		}
	}
	return p.putEachFrontend(w)
}

// putEachFrontend puts frontends one by one, to learn which are refused.
func (p *Plane) putEachFrontend(w *writes) error {
	return each(w.put[KindFrontend], func(f Fact) error {
		key, value, ok := p.heldFrontend(f)
		if !ok {
			return errNoPool
		}
		if !w.was[f.Key] {
			p.maps.Enter(key) // packets may come at once
		}
		err := p.maps.PutFrontends([]service.Entry{key}, []service.Frontend{value})
		if err != nil && !w.was[f.Key] {
			p.maps.Exit(key)
		}
		return p.full("fl_services", err)
	})
}

// errNoPool is the error of a fact that refers to a pool that was refused.
var errNoPool = errors.New("ebpf: its pool isn't there")

// heldFrontend returns a frontend as the kernel holds it, if its pools are there.
func (p *Plane) heldFrontend(f Fact) (k service.Entry, v service.Frontend, ok bool) {
	b := []byte(f.Value)
	inside, ok := p.pools[binary.BigEndian.Uint64(b)]
	outside, ok2 := p.pools[binary.BigEndian.Uint64(b[8:])]
	v = service.Frontend{
		Internal:   inside,
		External:   outside,
		Fallback:   b[16],
		ByOrigin:   b[17],
		Drop:       b[18],
		Masquerade: b[19],
		Restricted: b[20],
		Dsr:        b[21],
	}
	if entry(f.Key).AnyAddr() {
		v.NodePort = service.NodePort
	}
	if b[22] != 0 {
		v.NodePort |= service.NodePortRemote
	}
	if b[23] != 0 {
		v.NodePort |= service.NodeAddress
	}
	v.Fast = fast(v)
	return heldEntry(f.Key), v, ok && ok2
}

// fast returns the origins of clients on the node that connect_fast serves, though it may have to distinguish pods
// from others.
func fast(f service.Frontend) uint8 {
	if f.NodePort != 0 {
		return 0
	}
	return uint8(model.OriginsOf(model.FromNode, model.FromPod) &^ model.Origins(f.Fallback))
}

// full adds the advice to the error of a full map with as many entries as there may be frontends.
func (p *Plane) full(name string, err error) error {
	if !bpf.Full(err) {
		return err
	}
	return fmt.Errorf("ebpf: the map %s is full, with room for %d: %s: %w", name, p.Sizes.Frontends, moreEntries, err)
}

func (p *Plane) deleteFrontends(w *writes) error {
	if p.maps == nil {
		return nil
	}
	var keys []service.Entry
	w.gone(KindFrontend, func(f Fact) error {
		keys = append(keys, heldEntry(f.Key))
		return nil
	})
	if err := p.maps.DeleteFrontends(keys); err != nil {
		return err
	}
	for _, k := range keys {
		p.maps.Exit(k)
	}
	return nil
}

func (p *Plane) putUnmatched(w *writes) error {
	if err := p.held(w.put[KindUnmatched]); err != nil {
		return err
	}
	return each(w.put[KindUnmatched], func(f Fact) error {
		action := binary.BigEndian.Uint32([]byte(f.Value))
		return p.full("fl_unmatched", p.maps.PutUnmatched(prefixOf(f.Key), action, !w.was[f.Key]))
	})
}

func (p *Plane) deleteUnmatched(w *writes) error {
	if p.maps == nil {
		return nil
	}
	return w.gone(KindUnmatched, func(f Fact) error { return p.maps.DeleteUnmatched(prefixOf(f.Key)) })
}

func (p *Plane) putAllowedSources(w *writes) error {
	if err := p.held(w.put[KindAllowedSource]); err != nil {
		return err
	}
	return each(
		w.put[KindAllowedSource],
		func(f Fact) error { return p.full("fl_allowed_src", p.maps.PutAllowedSource(heldAllowedSource(f.Key))) },
	)
}

func (p *Plane) deleteAllowedSources(w *writes) error {
	if p.maps == nil {
		return nil
	}
	return w.gone(KindAllowedSource, func(f Fact) error { return p.maps.DeleteAllowedSource(heldAllowedSource(f.Key)) })
}

// heldAllowedSource returns an allowed source range as the kernel holds it.
func heldAllowedSource(k Key) device.AllowedSource {
	e, r := allowedSource(k)
	return device.AllowedSource{Entry: heldEntry(frontendKey(e)), Client: r}
}

// countChange has the endpoints of UDP flows checked again, each at its next packet, once frontends or pools have
// changed.
func (p *Plane) countChange(w *writes) error {
	changed := 0
	for k := KindPool; k <= KindFrontend; k++ {
		changed += len(w.put[k]) + len(w.del[k])
	}
	if changed > 0 && p.maps != nil {
		atomic.AddUint32(p.maps.Changes, 1)
	}
	return nil
}

// heldEntry returns a frontend's key as the kernel holds it.
func heldEntry(k Key) service.Entry {
	e := entry(k)
	held := service.Entry{Port: bpf.Port(e.Port), Protocol: uint8(e.Protocol)}
	held.Address.Word = bpf.Words(e.Addr)
	return held
}

// attach loads the programs and has the hooks call them.
func (p *Plane) attach(w *writes) error {
	facts := w.put[KindHooks]
	if err := p.held(facts); err != nil || len(facts) == 0 {
		return err
	}
	if f := facts[0]; f.Value != p.digest {
		return fmt.Errorf("ebpf: hooks %s: this version's are %s", f.Value, p.digest)
	}
	programs, err := p.maps.Load(p.programs())
	if err != nil {
		return err
	}
	defer programs.Close()
	if err := programs.Attach(p.linksFolder(), p.Cgroup); err != nil {
		return err
	}
	p.hooked.Store(true)
	return nil
}

func (p *Plane) detach(w *writes) error {
	return w.gone(KindHooks, func(Fact) error {
		p.hooked.Store(false)
		return service.Detach(p.linksFolder())
	})
}

// member is a backend of a pool.
type member struct {
	pool uint64
	at   netip.AddrPort
}

// closeSockets closes connected sockets whose endpoint is gone. Those of UDP would send into the void without an
// error, where no pool of their entry has the endpoint, whichever of them assigned it. TCP connections end by
// themselves: one is closed only with CloseTCP, and where its own pool lost the endpoint.
func (p *Plane) closeSockets(w *writes) error {
	gone := w.lost(func(v *model.Pool) bool { return v.Protocol == model.UDP || p.CloseTCP })
	if len(gone) == 0 || p.maps == nil {
		return nil
	}
	lost := map[netip.AddrPort]bool{} // by any pool
	for m := range gone {
		lost[m.at] = true
	}
	udp, tcp, pools := sockets.Names{}, sockets.Names{}, map[uint32]*model.Pool{}
	var errs []error
	errs = append(errs, p.maps.Connected(func(cookie uint64, c service.Connected) {
		entry, at := c.Flow.Entry, addrPort(c.Flow.Backend.Address.Word, c.Flow.Backend.Port)
		if !lost[at] {
			return
		}
		stays, err := p.stays(addrPort(entry.Address.Word, entry.Port), at, pools)
		if errs = append(errs, err); !stays && err == nil {
			udp.Add(c.Namespace, cookie, at)
		}
	}))
	if p.CloseTCP {
		for _, n := range p.maps.PeerNames {
			if at := addrPort(n.Backend.Word, n.BackendPort); n.Cookie != 0 && gone[member{n.Pool, at}] {
				tcp.Add(n.Namespace, n.Cookie, at)
			}
		}
	}
	_, err := sockets.Close(unix.IPPROTO_UDP, udp)
	_, err2 := sockets.Close(unix.IPPROTO_TCP, tcp)
	return errors.Join(append(errs, err, err2)...)
}

func addrPort(words [4]uint32, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(bpf.Addr(words), bpf.Port(port))
}

// stays reports whether a UDP flow to an entry stays with the endpoint at. pools holds those read so far, by index.
func (p *Plane) stays(entry, at netip.AddrPort, pools map[uint32]*model.Pool) (bool, error) {
	k := model.Entry{Addr: entry.Addr(), Port: entry.Port(), Protocol: model.UDP}
	f, known, err := p.maps.Frontend(heldEntry(frontendKey(k)))
	if !known && err == nil {
		if k.Addr = netip.IPv6Unspecified(); entry.Addr().Is4() {
			k.Addr = netip.IPv4Unspecified()
		}
		f, known, err = p.maps.Frontend(heldEntry(frontendKey(k)))
	}
	if !known || err != nil {
		return false, err
	}
	for _, i := range []uint32{f.Internal, f.External} {
		if pools[i] == nil {
			pools[i] = &model.Pool{}
			if at := p.maps.Pools[i].Extent; at != 0 && at < p.Sizes.Slots {
				if value, size := readExtent(p.maps.Slots[at:]); size > 0 {
					pools[i] = readPool(value)
				}
			}
		}
		if pools[i].Serves(at) {
			return true, nil
		}
	}
	return false, nil
}

// lost returns the endpoints that pools have lost, of those pools for which of returns true, called with what
// precedes the backends.
func (w *writes) lost(of func(*model.Pool) bool) map[member]bool {
	gone := map[member]bool{}
	each := func(f Fact, is bool) {
		if len(f.Value) < poolHead || !of(readPool(f.Value[:poolHead])) {
			return
		}
		v := readPool(f.Value)
		for _, b := range slices.Concat(v.Backends, v.Unselected) {
			if k := (member{poolID(f.Key), b.Addr}); is {
				gone[k] = true
			} else {
				delete(gone, k)
			}
		}
	}
	for _, f := range w.del[KindPool] {
		each(f, true)
	}
	if len(gone) == 0 {
		return nil
	}
	for _, f := range w.put[KindPool] {
		each(f, false)
	}
	return gone
}
