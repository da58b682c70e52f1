package bpf

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Sizes is how much there is room for.
type Sizes struct {
	Frontends, Pools, Slots uint32
	Flows                   uint32 // entries of each of the two maps of flows; 0: DefaultFlows
}

// DefaultFlows is how many entries each map of flows has unless its size is given.
const DefaultFlows = 1 << 17

// The objects, each read once: that takes milliseconds.
var (
	forSockets = sync.OnceValues(loadService)
	forPackets = sync.OnceValues(loadPackets)
)

// spec gives an object's maps and programs, with maps of those sizes.
func spec(object func() (*ebpf.CollectionSpec, error), s Sizes) (*ebpf.CollectionSpec, error) {
	c, err := object()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	c = c.Copy()
	c.Maps[serviceMapFrontends].MaxEntries = s.Frontends
	if m := c.Maps[packetsMapPermitted]; m != nil {
		m.MaxEntries = s.Frontends
	}
	if m := c.Maps[packetsMapUnmatched]; m != nil {
		m.MaxEntries = s.Frontends + mostRanges // each ClusterIP has a frontend
	}
	c.Maps[serviceMapPools].MaxEntries = s.Pools
	c.Maps[serviceMapSlots].MaxEntries = s.Slots
	for _, name := range []string{packetsMapDestinations, packetsMapSources} {
		if m := c.Maps[name]; m != nil {
			m.MaxEntries = cmp.Or(s.Flows, DefaultFlows)
		}
	}
	return c, nil
}

// mostRanges is how many prefixes of ServiceCIDRs fit.
const mostRanges = 1 << 13

// mapSpecs gives the maps of all objects, which share those of one name.
func mapSpecs(s Sizes) (map[string]*ebpf.MapSpec, error) {
	sockets, err := spec(forSockets, s)
	if err != nil {
		return nil, err
	}
	packets, err := spec(forPackets, s)
	if err != nil {
		return nil, err
	}
	all := packets.Maps
	maps.Copy(all, sockets.Maps)
	maps.DeleteFunc(all, func(name string, _ *ebpf.MapSpec) bool { return !own(name) })
	return all, nil
}

// own says whether a map is one that agents share: not the programs' constants.
func own(name string) bool { return name[0] != '.' }

// layoutPrefix begins the names of layouts.
const layoutPrefix = "maps-"

// Layout names the form of the maps, by a digest of names, types and sizes: programs can't use maps of another.
func Layout(s Sizes) (string, error) {
	all, err := mapSpecs(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(all)) {
		m := all[n]
		fmt.Fprintf(h, "%s %v %d %d %d %d %99v %99v\n", n, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Key, m.Value) // 99: the names of all fields
	}
	return layoutPrefix + hex.EncodeToString(h.Sum(nil)[:5]), nil
}

// Maps are the programs' maps, opened.
type Maps struct {
	// The kernel's memory of arrays.
	Pools []Pool
	Slots []Slot
	Names []Name // TCP connections: those whose cookie isn't 0
	// Changes is to be counted up when frontends or pools have changed: flows are looked at again.
	Changes *uint32

	folder string
	traced *serviceTrace
	uses   *uses
	sizes  Sizes
	named  map[string]*ebpf.Map
	mapped [][]byte

	flowsOf string // the folder of these maps where the maps of flows were made, maybe beside some of another size; or ""
}

// traffic is the maps that packets and sockets write. They don't go with a layout: an upgrade finds what it needs to go on.
var traffic = map[string]bool{
	serviceMapAffinity: true, serviceMapConnected: true, serviceMapHomes: true, serviceMapNamed: true, serviceMapPeers: true,
	serviceMapNames: true, serviceMapLoads: true, serviceMapCounted: true, packetsMapDestinations: true, packetsMapSources: true, packetsMapFragments: true, packetsMapPorts: true, packetsMapAddresses: true,
	packetsMapFlNodeUdp: true, packetsMapPackets: true, packetsMapQuestion: true, packetsMapLanes: true,
}

// stateFolder is where the traffic's maps are, beside the layouts' folders.
const stateFolder = "state"

// pin gives the path of a map's pin. The name of one of the traffic's says of what form it is.
func pin(folder string, m *ebpf.MapSpec) string {
	if !traffic[m.Name] {
		return filepath.Join(folder, m.Name)
	}
	form := sha256.Sum256(fmt.Append(nil, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Key, m.Value))
	return filepath.Join(filepath.Dir(folder), stateFolder, m.Name+"-"+hex.EncodeToString(form[:4]))
}

// CreateMaps makes the maps of a layout, pinned in a folder. What is there already is opened: the traffic's maps, and those of
// an attempt that ended halfway.
func CreateMaps(folder string, s Sizes) (*Maps, error) {
	for _, f := range []string{folder, filepath.Join(filepath.Dir(folder), stateFolder)} {
		if err := MakeFolder(f); err != nil {
			return nil, err
		}
	}
	recall, resized := false, false
	m, err := newMaps(folder, s, func(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
		held, err := openMap(path, m)
		if !Absent(err) {
			return held, err
		}
		if err := drop(path); err != nil { // another's
			return nil, err
		}
		made, err := ebpf.NewMap(m)
		if err != nil {
			return nil, explain(err)
		}
		if err := made.Pin(path); err != nil {
			made.Close()
			return nil, err
		}
		recall = recall || m.Name == packetsMapPorts || m.Name == packetsMapAddresses
		resized = resized || m.Name == packetsMapDestinations || m.Name == packetsMapSources
		return made, nil
	})
	if err != nil {
		return nil, err
	}
	m.uses.recall = recall
	if resized {
		m.flowsOf = folder
	}
	if err := m.Recall(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// OpenMaps opens the maps of a layout pinned in a folder. Where there are none, not all, or others in their place, the
// error is Absent.
func OpenMaps(folder string, s Sizes) (*Maps, error) { return newMaps(folder, s, openMap) }

// openMap opens a pinned map. One of another type, size or flags, which no version of ours pins there, is an ErrForm.
func openMap(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
	held, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, err
	}
	if err := m.Compatible(held); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s: %w", ErrForm, path, err), held.Close())
	}
	return held, nil
}

func newMaps(folder string, s Sizes, open func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*Maps, error) {
	all, err := mapSpecs(s)
	state := filepath.Join(filepath.Dir(folder), stateFolder)
	if err := errors.Join(err, checkFolder(folder), checkFolder(state)); err != nil {
		return nil, err
	}
	m := &Maps{folder: folder, sizes: s, named: map[string]*ebpf.Map{}}
	for n, ms := range all {
		held, err := open(pin(folder, ms), ms)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("bpf: map %s: %w", n, err), m.Close())
		}
		m.named[n] = held
	}
	return m, m.mapMemory()
}

// RemoveMaps removes the maps of a layout; with the last layout, also the traffic's, and else those of these that no layout of
// this version has.
func RemoveMaps(folder string, s Sizes) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("bpf: remove maps: %w", err)
	}
	above := filepath.Dir(folder)
	if others, _ := filepath.Glob(filepath.Join(above, layoutPrefix+"*")); len(others) == 0 {
		return RemoveFolder(filepath.Join(above, stateFolder))
	}
	all, err := mapSpecs(s)
	if err != nil {
		return err
	}
	ours := map[string]bool{}
	for _, m := range all {
		ours[pin(folder, m)] = true
	}
	held, _ := filepath.Glob(filepath.Join(above, stateFolder, "*"))
	for _, path := range held {
		if ours[path] {
			continue
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("bpf: remove maps: %w", err)
		}
	}
	return nil
}

// load loads an object's programs to work on the maps.
func (m *Maps) load(c *ebpf.CollectionSpec) (*ebpf.Collection, error) {
	ours := map[string]*ebpf.Map{}
	for n := range c.Maps {
		if own(n) {
			ours[n] = m.named[n]
		}
	}
	return ebpf.NewCollectionWithOptions(c, ebpf.CollectionOptions{MapReplacements: ours})
}

// serve says whether a program that uses maps of those IDs works on these: all but one, its constants, must be ours.
func (m *Maps) serve(program []ebpf.MapID) bool {
	ours := map[ebpf.MapID]bool{}
	for _, n := range m.named {
		if i, err := n.Info(); err == nil {
			if id, ok := i.ID(); ok {
				ours[id] = true
			}
		}
	}
	others := 0
	for _, id := range program {
		if !ours[id] {
			others++
		}
	}
	return others <= 1
}

// mapMemory maps the arrays.
func (m *Maps) mapMemory() error {
	pools, err := m.memory(serviceMapPools, unsafe.Sizeof(Pool{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	slots, err := m.memory(serviceMapSlots, unsafe.Sizeof(Slot{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	names, err := m.memory(serviceMapNames, unsafe.Sizeof(Name{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	traced, err := m.memory(serviceMapTraced, unsafe.Sizeof(serviceTrace{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	m.traced = (*serviceTrace)(unsafe.Pointer(&traced[0]))
	ports, err := m.memory(packetsMapPorts, unsafe.Sizeof(packetsUses{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	addresses, err := m.memory(packetsMapAddresses, unsafe.Sizeof(packetsUses{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	changes, err := m.memory(packetsMapChanges, unsafe.Sizeof(*m.Changes))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	m.uses = &uses{ports: (*packetsUses)(unsafe.Pointer(&ports[0])),
		addresses: (*packetsUses)(unsafe.Pointer(&addresses[0]))}
	m.Changes = (*uint32)(unsafe.Pointer(&changes[0]))
	m.Names = unsafe.Slice((*Name)(unsafe.Pointer(&names[0])), m.named[serviceMapNames].MaxEntries())
	m.Pools = unsafe.Slice((*Pool)(unsafe.Pointer(&pools[0])), m.sizes.Pools)
	m.Slots = unsafe.Slice((*Slot)(unsafe.Pointer(&slots[0])), m.sizes.Slots)
	return nil
}

func (m *Maps) memory(name string, each uintptr) ([]byte, error) {
	page := uintptr(os.Getpagesize())
	size := (uintptr(m.named[name].MaxEntries())*each + page - 1) &^ (page - 1)
	b, err := unix.Mmap(m.named[name].FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("bpf: map the memory of map %s: %w", name, err)
	}
	m.mapped = append(m.mapped, b)
	return b, nil
}

// IsLayout says whether a name is one that Layout gives, in any version.
func IsLayout(name string) bool { return strings.HasPrefix(name, layoutPrefix) }

// Close gives the maps back. Pinned, they stay.
func (m *Maps) Close() error {
	var errs []error
	for _, b := range m.mapped {
		errs = append(errs, unix.Munmap(b))
	}
	for _, n := range m.named {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	m.mapped, m.named, m.traced, m.Pools, m.Slots, m.Names, m.uses, m.Changes = nil, nil, nil, nil, nil, nil, nil, nil
	return errors.Join(errs...)
}

// Slot is one of an extent.
type Slot [24]byte

// Header gives the slot as a header.
func (s *Slot) Header() *Header { return (*Header)(unsafe.Pointer(s)) }

// Backend gives the slot as a backend.
func (s *Slot) Backend() *Backend { return (*Backend)(unsafe.Pointer(s)) }

// Choices gives the slot as indices.
func (s *Slot) Choices() *[12]uint16 { return (*[12]uint16)(unsafe.Pointer(s)) }

// PutFrontends sets frontends.
func (m *Maps) PutFrontends(keys []Entry, values []Frontend) error {
	if len(keys) == 0 {
		return nil
	}
	if _, err := m.named[serviceMapFrontends].BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("bpf: write %d frontends: %w", len(keys), err)
	}
	return nil
}

// Full says whether an error is that a map has no room for more.
func Full(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) }

// DeleteFrontends removes frontends. What isn't there is no error.
func (m *Maps) DeleteFrontends(keys []Entry) error {
	if len(keys) == 0 {
		return nil
	}
	f := m.named[serviceMapFrontends]
	if _, err := f.BatchDelete(keys, nil); err == nil {
		return nil
	}
	for _, k := range keys { // a batch ends at the first that isn't there
		if err := f.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: delete a frontend: %w", err)
		}
	}
	return nil
}

// batch is how many elements are read at once.
const batch = 4096

// all reads a hash map whole.
func all[K, V any](m *ebpf.Map, take func(K, V)) error {
	keys, values := make([]K, batch), make([]V, batch)
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		for i := range n {
			take(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bpf: read %v: %w", m, err)
		}
	}
}

// Frontend reads one; false where there is none.
func (m *Maps) Frontend(k Entry) (f Frontend, known bool, err error) {
	err = m.named[serviceMapFrontends].Lookup(k, &f)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return f, false, nil
	}
	if err != nil {
		return f, false, fmt.Errorf("bpf: read a frontend: %w", err)
	}
	return f, true, nil
}

// Frontends reads every frontend.
func (m *Maps) Frontends(take func(Entry, Frontend)) error {
	return all(m.named[serviceMapFrontends], take)
}

// PutPlace says what an address of a prefix is.
func (m *Maps) PutPlace(p netip.Prefix, is uint32) error {
	if err := m.named[serviceMapPlaces].Put(prefixKey(p), is); err != nil {
		return fmt.Errorf("bpf: write prefix %s into map places, which has room for %d: %w", p, m.named[serviceMapPlaces].MaxEntries(), err)
	}
	return nil
}

// DeletePlace forgets a prefix.
func (m *Maps) DeletePlace(p netip.Prefix) error {
	if err := m.named[serviceMapPlaces].Delete(prefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s: %w", p, err)
	}
	return nil
}

// prefixKey gives a prefix among 128 bits, whatever its family.
func prefixKey(p netip.Prefix) (k servicePrefix) {
	k.Length = uint32(p.Bits() + 128 - p.Addr().BitLen())
	k.Address.Word = Words(p.Masked().Addr())
	return k
}

// Places reads every prefix.
func (m *Maps) Places(take func(netip.Prefix, uint32)) error {
	return places(m.named[serviceMapPlaces], take)
}

func places(m *ebpf.Map, take func(netip.Prefix, uint32)) error {
	var k servicePrefix
	var v uint32
	i := m.Iterate()
	for i.Next(&k, &v) {
		a := Addr(k.Address.Word)
		take(netip.PrefixFrom(a, int(k.Length)-128+a.BitLen()), v)
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read prefixes: %w", err)
	}
	return nil
}

// PutPodInterfaces has what comes in by interfaces of that name, or with a prefix of that, count as pods'. "" is none.
func (m *Maps) PutPodInterfaces(name string, prefix bool) error {
	var i serviceInterfaces
	for at := range min(len(name), len(i.Name)-1) {
		i.Name[at] = int8(name[at])
	}
	if i.Length = uint32(len(name)); name != "" && !prefix {
		i.Length++
	}
	if err := m.named[serviceMapPodInterfaces].Put(uint32(0), i); err != nil {
		return fmt.Errorf("bpf: write the interfaces of pods: %w", err)
	}
	return m.forgetHomes()
}

// forgetHomes has the programs look again where namespaces send from, and by which interface.
func (m *Maps) forgetHomes() error {
	var keys []serviceHome
	homes := m.named[serviceMapHomes]
	if err := all(homes, func(k serviceHome, _ serviceAddressOf) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := homes.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget a namespace's address: %w", err)
		}
	}
	return nil
}

// PodInterfaces reads what PutPodInterfaces wrote.
func (m *Maps) PodInterfaces() (name string, prefix bool, err error) {
	var i serviceInterfaces
	if err := m.named[serviceMapPodInterfaces].Lookup(uint32(0), &i); err != nil {
		return "", false, fmt.Errorf("bpf: read the interfaces of pods: %w", err)
	}
	var b []byte
	for _, c := range i.Name {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b), len(b) > 0 && int(i.Length) == len(b), nil
}

// Permit is a frontend that lets in clients of a prefix.
type Permit struct {
	Entry  Entry
	Client netip.Prefix
}

// entryBits is how long an entry is, which a permit's prefix begins with.
const entryBits = 8 * uint32(unsafe.Sizeof(Entry{}))

func (p Permit) key() (k packetsPermit) {
	k.Length = entryBits + uint32(p.Client.Bits()+128-p.Client.Addr().BitLen())
	k.Entry = packetsEntry(p.Entry)
	k.Client.Word = Words(p.Client.Masked().Addr())
	return k
}

// What becomes of packets to a prefix that match no frontend.
const (
	UnmatchedReject = uint32(packetsUnmatchedActionUNMATCHED_REJECT)
	UnmatchedDrop   = uint32(packetsUnmatchedActionUNMATCHED_DROP)
)

// PutUnmatched says what becomes of packets to a prefix that match no frontend.
func (m *Maps) PutUnmatched(p netip.Prefix, action uint32, isNew bool) error {
	if isNew {
		m.enterNetwork(p)
	}
	if err := m.named[packetsMapUnmatched].Put(prefixKey(p), action); err != nil {
		return fmt.Errorf("bpf: write prefix %s into map unmatched: %w", p, err)
	}
	return nil
}

// DeleteUnmatched undoes PutUnmatched.
func (m *Maps) DeleteUnmatched(p netip.Prefix) error {
	if err := m.named[packetsMapUnmatched].Delete(prefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s from map unmatched: %w", p, err)
	}
	m.exitNetwork(p)
	return nil
}

// Unmatched reads every prefix of PutUnmatched, and has packets there looked at.
func (m *Maps) Unmatched(take func(netip.Prefix, uint32)) error {
	return places(m.named[packetsMapUnmatched], func(p netip.Prefix, action uint32) {
		m.enterNetwork(p)
		take(p, action)
	})
}

// PutPermit lets clients in.
func (m *Maps) PutPermit(p Permit) error {
	if err := m.named[packetsMapPermitted].Put(p.key(), uint32(1)); err != nil {
		return fmt.Errorf("bpf: let %s in: %w", p.Client, err)
	}
	return nil
}

// DeletePermit lets clients in no more.
func (m *Maps) DeletePermit(p Permit) error {
	if err := m.named[packetsMapPermitted].Delete(p.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: let %s in no more: %w", p.Client, err)
	}
	return nil
}

// Permits reads who is let in.
func (m *Maps) Permits(take func(Permit)) error {
	var k packetsPermit
	var v uint32
	i := m.named[packetsMapPermitted].Iterate()
	for i.Next(&k, &v) {
		a := Addr(k.Client.Word)
		take(Permit{Entry(k.Entry), netip.PrefixFrom(a, int(k.Length-entryBits)-128+a.BitLen())})
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read permitted clients: %w", err)
	}
	return nil
}

// Connected reads the connected UDP sockets, by cookie.
func (m *Maps) Connected(take func(uint64, Connected)) error {
	return all(m.named[serviceMapConnected], take)
}

// Loads reads how many sockets are open, by endpoint.
func (m *Maps) Loads(take func(Endpoint, Load)) error {
	return all(m.named[serviceMapLoads], take)
}

// Open reads one: 0 where there is none.
func (m *Maps) Open(e Endpoint) (n uint64, err error) {
	var l Load
	err = m.named[serviceMapLoads].Lookup(e, &l)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("bpf: read an endpoint's open sockets: %w", err)
	}
	return l.Open, nil
}

// DeleteLoads forgets endpoints' open sockets; those that are open then never count again.
func (m *Maps) DeleteLoads(keys []Endpoint) error {
	for _, k := range keys {
		if err := m.named[serviceMapLoads].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget an endpoint's open sockets: %w", err)
		}
	}
	return nil
}

// forgetSockets forgets how many sockets are open, and what those of TCP are connected to: some may have been closed unseen.
func (m *Maps) forgetSockets() error {
	clear(m.Names)
	var keys []Endpoint
	err := m.Loads(func(e Endpoint, _ Load) { keys = append(keys, e) })
	return errors.Join(err, m.DeleteLoads(keys))
}

// Absent reports whether an error is that maps are not there, not all, or others in their place (ErrForm).
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrForm) }
