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

// Sizes are the capacities of maps.
type Sizes struct {
	Frontends, Pools, Slots uint32
	Flows                   uint32 // entries of each of the two maps of flows; 0: DefaultFlows
}

// DefaultFlows is the size of each NAT map unless it is given.
const DefaultFlows = 1 << 17

// The objects, each parsed once, in milliseconds.
var (
	forSockets = sync.OnceValues(loadService)
	forDevices = sync.OnceValues(loadDevice)
)

// spec returns an object's maps and programs, with maps of those sizes.
func spec(object func() (*ebpf.CollectionSpec, error), s Sizes) (*ebpf.CollectionSpec, error) {
	c, err := object()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	c = c.Copy()
	c.Maps[serviceMapFlServices].MaxEntries = s.Frontends
	if m := c.Maps[deviceMapFlAllowedSrc]; m != nil {
		m.MaxEntries = s.Frontends
	}
	if m := c.Maps[deviceMapFlUnmatched]; m != nil {
		m.MaxEntries = s.Frontends + mostRanges // each ClusterIP has a frontend
	}
	c.Maps[serviceMapFlPools].MaxEntries = s.Pools
	c.Maps[serviceMapFlBackends].MaxEntries = s.Slots
	for _, name := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
		if m := c.Maps[name]; m != nil {
			m.MaxEntries = cmp.Or(s.Flows, DefaultFlows)
		}
	}
	return c, nil
}

// mostRanges is how many prefixes of ServiceCIDRs fit.
const mostRanges = 1 << 13

// mapSpecs returns the maps of all objects, which share those of one name.
func mapSpecs(s Sizes) (map[string]*ebpf.MapSpec, error) {
	sockets, err := spec(forSockets, s)
	if err != nil {
		return nil, err
	}
	packets, err := spec(forDevices, s)
	if err != nil {
		return nil, err
	}
	all := packets.Maps
	maps.Copy(all, sockets.Maps)
	maps.DeleteFunc(all, func(name string, _ *ebpf.MapSpec) bool { return !own(name) })
	return all, nil
}

// own reports whether a map is one that agents share: not the programs' constants.
func own(name string) bool { return name[0] != '.' }

// layoutPrefix begins the names of layouts.
const layoutPrefix = "maps-"

// Layout returns a name for the form of the maps, by a digest of names, types and sizes: programs can't use maps of
// another.
func Layout(s Sizes) (string, error) {
	all, err := mapSpecs(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(all)) {
		m := all[n]
		fmt.Fprintf(
			h,
			"%s %v %d %d %d %d %99v %99v\n",
			n,
			m.Type,
			m.KeySize,
			m.ValueSize,
			m.MaxEntries,
			m.Flags,
			m.Key,
			m.Value,
		) // 99: the names of all fields
	}
	return layoutPrefix + hex.EncodeToString(h.Sum(nil)[:5]), nil
}

// Maps are the programs' maps, opened.
type Maps struct {
	// The kernel's memory of arrays.
	Pools     []Pool
	Slots     []Slot
	PeerNames []PeerName // TCP connections: those whose cookie isn't 0
	// Changes is incremented when frontends or pools have changed: flows are checked again.
	Changes *uint32

	folder   string
	traced   *serviceTrace
	portBits *portBits
	sizes    Sizes
	named    map[string]*ebpf.Map
	mapped   [][]byte

	flowsOf string // the folder of these maps where the maps of flows were made, maybe beside some of another size; or ""
}

// stateFolder is the folder of state maps, beside the layouts' folders.
const stateFolder = "state"

// pin returns the path of a map's pin. The name of a state map's says of what form it is.
func pin(folder string, m *ebpf.MapSpec) string {
	name := pinNames[m.Name]
	if !state[m.Name] {
		return filepath.Join(folder, name)
	}
	form := sha256.Sum256(fmt.Appendf(nil, "%v %d %d %d %d %s %s",
		m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, typeName(m.Key), typeName(m.Value)))
	return filepath.Join(filepath.Dir(folder), stateFolder, name+"-"+hex.EncodeToString(form[:4]))
}

// CreateMaps creates the maps of a layout, pinned in a folder. Existing ones are opened: state maps, and those of an
// attempt that ended halfway.
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
		recall = recall || m.Name == deviceMapFlPortBits || m.Name == deviceMapFlAddrBits
		resized = resized || m.Name == deviceMapFlNatDst || m.Name == deviceMapFlNatSrc
		return made, nil
	})
	if err != nil {
		return nil, err
	}
	m.portBits.recall = recall
	if resized {
		m.flowsOf = folder
	}
	if err := m.Recall(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// OpenMaps opens the maps of a layout pinned in a folder. If there are none, not all, or other ones, the error is
// Absent.
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
	return m, m.mapArrays()
}

// RemoveMaps removes the maps of a layout; with the last layout, also the state maps, and else those of these that no
// layout of this version has.
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

// serve reports whether a program that uses maps of those IDs works on these: all but one, its constants, must be
// ours.
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

// mapArrays maps the arrays into memory.
func (m *Maps) mapArrays() error {
	pools, err := m.mapArray(serviceMapFlPools, unsafe.Sizeof(Pool{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	slots, err := m.mapArray(serviceMapFlBackends, unsafe.Sizeof(Slot{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	names, err := m.mapArray(serviceMapFlPeerNames, unsafe.Sizeof(PeerName{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	traced, err := m.mapArray(serviceMapFlTrace, unsafe.Sizeof(serviceTrace{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	m.traced = (*serviceTrace)(unsafe.Pointer(&traced[0]))
	ports, err := m.mapArray(deviceMapFlPortBits, unsafe.Sizeof(devicePortBits{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	addresses, err := m.mapArray(deviceMapFlAddrBits, unsafe.Sizeof(devicePortBits{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	changes, err := m.mapArray(deviceMapFlChanges, unsafe.Sizeof(*m.Changes))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	m.portBits = &portBits{ports: (*devicePortBits)(unsafe.Pointer(&ports[0])),
		addresses: (*devicePortBits)(unsafe.Pointer(&addresses[0]))}
	m.Changes = (*uint32)(unsafe.Pointer(&changes[0]))
	m.PeerNames = unsafe.Slice((*PeerName)(unsafe.Pointer(&names[0])), m.named[serviceMapFlPeerNames].MaxEntries())
	m.Pools = unsafe.Slice((*Pool)(unsafe.Pointer(&pools[0])), m.sizes.Pools)
	m.Slots = unsafe.Slice((*Slot)(unsafe.Pointer(&slots[0])), m.sizes.Slots)
	return nil
}

func (m *Maps) mapArray(name string, each uintptr) ([]byte, error) {
	page := uintptr(os.Getpagesize())
	size := (uintptr(m.named[name].MaxEntries())*each + page - 1) &^ (page - 1)
	b, err := unix.Mmap(m.named[name].FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("bpf: map the memory of map %s: %w", name, err)
	}
	m.mapped = append(m.mapped, b)
	return b, nil
}

// IsLayout reports whether a name is one that Layout returns, in any version.
func IsLayout(name string) bool { return strings.HasPrefix(name, layoutPrefix) }

// Close closes the maps. Pinned, they stay.
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
	m.mapped, m.named, m.traced, m.Changes = nil, nil, nil, nil
	m.Pools, m.Slots, m.PeerNames, m.portBits = nil, nil, nil, nil
	return errors.Join(errs...)
}

// Slot is one of an extent.
type Slot [24]byte

// Header returns the slot as a header.
func (s *Slot) Header() *Header { return (*Header)(unsafe.Pointer(s)) }

// Backend returns the slot as a backend.
func (s *Slot) Backend() *Backend { return (*Backend)(unsafe.Pointer(s)) }

// Choices returns the slot as indices.
func (s *Slot) Choices() *[12]uint16 { return (*[12]uint16)(unsafe.Pointer(s)) }

// PutFrontends sets frontends.
func (m *Maps) PutFrontends(keys []Entry, values []Frontend) error {
	if len(keys) == 0 {
		return nil
	}
	if _, err := m.named[serviceMapFlServices].BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("bpf: write %d frontends: %w", len(keys), err)
	}
	return nil
}

// Full reports whether an error is that a map is full.
func Full(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) }

// DeleteFrontends removes frontends. What isn't there is no error.
func (m *Maps) DeleteFrontends(keys []Entry) error {
	if len(keys) == 0 {
		return nil
	}
	f := m.named[serviceMapFlServices]
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

// batch is the number of elements read at once.
const batch = 4096

// all reads a whole hash map.
func all[K, V any](m *ebpf.Map, yield func(K, V)) error {
	keys, values := make([]K, batch), make([]V, batch)
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		for i := range n {
			yield(keys[i], values[i])
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
	err = m.named[serviceMapFlServices].Lookup(k, &f)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return f, false, nil
	}
	if err != nil {
		return f, false, fmt.Errorf("bpf: read a frontend: %w", err)
	}
	return f, true, nil
}

// Frontends reads every frontend.
func (m *Maps) Frontends(yield func(Entry, Frontend)) error {
	return all(m.named[serviceMapFlServices], yield)
}

// PutPrefix sets the flags of a prefix.
func (m *Maps) PutPrefix(p netip.Prefix, is uint32) error {
	if err := m.named[serviceMapFlPrefixes].Put(prefixKey(p), is); err != nil {
		return fmt.Errorf(
			"bpf: write prefix %s into map fl_prefixes, which has room for %d: %w",
			p,
			m.named[serviceMapFlPrefixes].MaxEntries(),
			err,
		)
	}
	return nil
}

// DeletePrefix deletes a prefix.
func (m *Maps) DeletePrefix(p netip.Prefix) error {
	if err := m.named[serviceMapFlPrefixes].Delete(prefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s: %w", p, err)
	}
	return nil
}

// prefixKey returns a prefix among 128 bits, whatever its family.
func prefixKey(p netip.Prefix) (k servicePrefix) {
	k.Length = uint32(p.Bits() + 128 - p.Addr().BitLen())
	k.Address.Word = Words(p.Masked().Addr())
	return k
}

// Prefixes reads every prefix.
func (m *Maps) Prefixes(yield func(netip.Prefix, uint32)) error {
	return eachPrefix(m.named[serviceMapFlPrefixes], yield)
}

func eachPrefix(m *ebpf.Map, yield func(netip.Prefix, uint32)) error {
	var k servicePrefix
	var v uint32
	i := m.Iterate()
	for i.Next(&k, &v) {
		a := Addr(k.Address.Word)
		yield(netip.PrefixFrom(a, int(k.Length)-128+a.BitLen()), v)
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read prefixes: %w", err)
	}
	return nil
}

// PutPodInterfaces has packets from interfaces of that name, or with a prefix of that, count as pods'. "" is none.
func (m *Maps) PutPodInterfaces(name string, prefix bool) error {
	var i servicePodInterfaces
	for at := range min(len(name), len(i.Name)-1) {
		i.Name[at] = int8(name[at])
	}
	if i.Length = uint32(len(name)); name != "" && !prefix {
		i.Length++
	}
	if err := m.named[serviceMapFlPodIfaces].Put(uint32(0), i); err != nil {
		return fmt.Errorf("bpf: write the interfaces of pods: %w", err)
	}
	return m.forgetNamespaces()
}

// forgetNamespaces clears the cached addresses of namespaces.
func (m *Maps) forgetNamespaces() error {
	var keys []serviceNetnsKey
	namespaces := m.named[serviceMapFlNetnsAddrs]
	if err := all(namespaces, func(k serviceNetnsKey, _ serviceNetnsAddr) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := namespaces.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget a namespace's address: %w", err)
		}
	}
	return nil
}

// PodInterfaces reads what PutPodInterfaces wrote.
func (m *Maps) PodInterfaces() (name string, prefix bool, err error) {
	var i servicePodInterfaces
	if err := m.named[serviceMapFlPodIfaces].Lookup(uint32(0), &i); err != nil {
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

// AllowedSource is an allowed source range of a frontend.
type AllowedSource struct {
	Entry  Entry
	Client netip.Prefix
}

// entryBits is the length of an entry, with which the prefix of an allowed source range begins.
const entryBits = 8 * uint32(unsafe.Sizeof(Entry{}))

func (p AllowedSource) key() (k deviceAllowedSource) {
	k.Length = entryBits + uint32(p.Client.Bits()+128-p.Client.Addr().BitLen())
	k.Entry = deviceEntry(p.Entry)
	k.Client.Word = Words(p.Client.Masked().Addr())
	return k
}

// What happens to packets to a prefix that match no frontend.
const (
	UnmatchedReject = uint32(deviceUnmatchedActionUNMATCHED_REJECT)
	UnmatchedDrop   = uint32(deviceUnmatchedActionUNMATCHED_DROP)
)

// PutUnmatched sets what happens to packets to a prefix that match no frontend.
func (m *Maps) PutUnmatched(p netip.Prefix, action uint32, isNew bool) error {
	if isNew {
		m.enterNetwork(p)
	}
	if err := m.named[deviceMapFlUnmatched].Put(prefixKey(p), action); err != nil {
		return fmt.Errorf("bpf: write prefix %s into map fl_unmatched: %w", p, err)
	}
	return nil
}

// DeleteUnmatched undoes PutUnmatched.
func (m *Maps) DeleteUnmatched(p netip.Prefix) error {
	if err := m.named[deviceMapFlUnmatched].Delete(prefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s from map fl_unmatched: %w", p, err)
	}
	m.exitNetwork(p)
	return nil
}

// Unmatched reads every prefix of PutUnmatched, and sets their bits.
func (m *Maps) Unmatched(yield func(netip.Prefix, uint32)) error {
	return eachPrefix(m.named[deviceMapFlUnmatched], func(p netip.Prefix, action uint32) {
		m.enterNetwork(p)
		yield(p, action)
	})
}

// PutAllowedSource adds an allowed source range.
func (m *Maps) PutAllowedSource(p AllowedSource) error {
	if err := m.named[deviceMapFlAllowedSrc].Put(p.key(), uint32(1)); err != nil {
		return fmt.Errorf("bpf: let %s in: %w", p.Client, err)
	}
	return nil
}

// DeleteAllowedSource removes one.
func (m *Maps) DeleteAllowedSource(p AllowedSource) error {
	if err := m.named[deviceMapFlAllowedSrc].Delete(p.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: let %s in no more: %w", p.Client, err)
	}
	return nil
}

// AllowedSources reads the allowed source ranges.
func (m *Maps) AllowedSources(yield func(AllowedSource)) error {
	var k deviceAllowedSource
	var v uint32
	i := m.named[deviceMapFlAllowedSrc].Iterate()
	for i.Next(&k, &v) {
		a := Addr(k.Client.Word)
		yield(AllowedSource{Entry(k.Entry), netip.PrefixFrom(a, int(k.Length-entryBits)-128+a.BitLen())})
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read permitted clients: %w", err)
	}
	return nil
}

// Connected reads the connected UDP sockets, by cookie.
func (m *Maps) Connected(yield func(uint64, Connected)) error {
	return all(m.named[serviceMapFlUdpPeers], yield)
}

// Loads reads how many sockets are open, by endpoint.
func (m *Maps) Loads(yield func(Endpoint, Load)) error {
	return all(m.named[serviceMapFlOpenSockets], yield)
}

// Open reads one: 0 where there is none.
func (m *Maps) Open(e Endpoint) (n uint64, err error) {
	var l Load
	err = m.named[serviceMapFlOpenSockets].Lookup(e, &l)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("bpf: read an endpoint's open sockets: %w", err)
	}
	return l.Open, nil
}

// DeleteLoads deletes endpoints' counts of open sockets; sockets that are open then are never counted again.
func (m *Maps) DeleteLoads(keys []Endpoint) error {
	for _, k := range keys {
		if err := m.named[serviceMapFlOpenSockets].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget an endpoint's open sockets: %w", err)
		}
	}
	return nil
}

// forgetSockets clears the counts of open sockets, and the peer names of TCP: some sockets may have been closed
// unseen.
func (m *Maps) forgetSockets() error {
	clear(m.PeerNames)
	var keys []Endpoint
	err := m.Loads(func(e Endpoint, _ Load) { keys = append(keys, e) })
	return errors.Join(err, m.DeleteLoads(keys))
}

// Absent reports whether an error is that maps are not there, not all, or others in their place (ErrForm).
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrForm) }
