package bpf

import (
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
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Sizes is how much there is room for.
type Sizes struct{ Frontends, Pools, Slots uint32 }

// spec gives the maps and programs, with maps of those sizes.
func spec(s Sizes) (*ebpf.CollectionSpec, error) {
	c, err := loadService()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	c.Maps[serviceMapFrontends].MaxEntries = s.Frontends
	c.Maps[serviceMapPools].MaxEntries = s.Pools
	c.Maps[serviceMapCounts].MaxEntries = s.Pools
	c.Maps[serviceMapSlots].MaxEntries = s.Slots
	return c, nil
}

// own says whether a map is one that agents share: not the programs' constants.
func own(name string) bool { return name[0] != '.' }

// Layout names the form of the maps: maps of another can't be used by these programs. It is "64k-…": the size, then a
// digest of names, types and sizes.
func Layout(s Sizes) (string, error) {
	c, err := spec(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(c.Maps)) {
		if m := c.Maps[n]; own(n) {
			fmt.Fprintln(h, n, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Key, m.Value)
		}
	}
	return "maps-" + hex.EncodeToString(h.Sum(nil)[:5]), nil
}

// Maps are the programs' maps, opened.
type Maps struct {
	// The kernel's memory of arrays. Counts goes with Pools.
	Pools  []Pool
	Counts []Count
	Slots  []Slot
	Recent []Name // TCP connections: some may have ended

	sizes  Sizes
	named  map[string]*ebpf.Map
	mapped [][]byte
}

// CreateMaps makes empty maps, pinned in a folder. What is there already of an attempt that ended halfway is opened.
func CreateMaps(folder string, s Sizes) (*Maps, error) {
	if err := MakeFolder(folder); err != nil {
		return nil, err
	}
	c, err := spec(s)
	if err != nil {
		return nil, err
	}
	m := &Maps{sizes: s, named: map[string]*ebpf.Map{}}
	for n, ms := range c.Maps {
		if !own(n) {
			continue
		}
		ms.Pinning = ebpf.PinByName
		if m.named[n], err = ebpf.NewMapWithOptions(ms, ebpf.MapOptions{PinPath: folder}); err != nil {
			return nil, errors.Join(fmt.Errorf("bpf: make map %s: %w", n, explain(err)), m.Close())
		}
	}
	return m, m.mapMemory()
}

// OpenMaps opens the maps pinned in a folder. Where there are none, or not all, the error is fs.ErrNotExist.
func OpenMaps(folder string, s Sizes) (*Maps, error) {
	c, err := spec(s)
	if err != nil {
		return nil, err
	}
	m := &Maps{sizes: s, named: map[string]*ebpf.Map{}}
	for n := range c.Maps {
		if !own(n) {
			continue
		}
		if m.named[n], err = ebpf.LoadPinnedMap(filepath.Join(folder, n), nil); err != nil {
			delete(m.named, n)
			return nil, errors.Join(fmt.Errorf("bpf: open map %s: %w", n, err), m.Close())
		}
	}
	return m, m.mapMemory()
}

// among says whether one of the maps is among those, by ID.
func (m *Maps) among(ids []ebpf.MapID) bool {
	for _, n := range m.named {
		if i, err := n.Info(); err == nil {
			if id, ok := i.ID(); ok && slices.Contains(ids, id) {
				return true
			}
		}
	}
	return false
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
	counts, err := m.memory(serviceMapCounts, unsafe.Sizeof(Count{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	recent, err := m.memory(serviceMapRecent, unsafe.Sizeof(Name{}))
	if err != nil {
		return errors.Join(err, m.Close())
	}
	m.Recent = unsafe.Slice((*Name)(unsafe.Pointer(&recent[0])), m.named[serviceMapRecent].MaxEntries())
	m.Counts = unsafe.Slice((*Count)(unsafe.Pointer(&counts[0])), m.sizes.Pools)
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
	m.mapped, m.named, m.Pools, m.Counts, m.Slots, m.Recent = nil, nil, nil, nil, nil, nil
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
		return fmt.Errorf("bpf: write %d frontends: %w", len(keys), full(err))
	}
	return nil
}

// full names the way out of a map that is full.
func full(err error) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: the map is full", err)
	}
	return err
}

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

// Frontends reads every frontend.
func (m *Maps) Frontends(take func(Entry, Frontend)) error {
	return all(m.named[serviceMapFrontends], take)
}

// PutPlace says what an address of a prefix is.
func (m *Maps) PutPlace(p netip.Prefix, is uint32) error {
	if err := m.named[serviceMapPlaces].Put(prefixKey(p), is); err != nil {
		return fmt.Errorf("bpf: write prefix %s: %w", p, full(err))
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
	var k servicePrefix
	var v uint32
	i := m.named[serviceMapPlaces].Iterate()
	for i.Next(&k, &v) {
		a := Addr(k.Address.Word)
		take(netip.PrefixFrom(a, int(k.Length)-128+a.BitLen()), v)
	}
	if err := i.Err(); err != nil {
		return fmt.Errorf("bpf: read prefixes: %w", err)
	}
	return nil
}

// Connected reads the connected UDP sockets, by cookie.
func (m *Maps) Connected(take func(uint64, Connected)) error {
	return all(m.named[serviceMapConnected], take)
}

// Absent says whether an error is that maps are not there, or not all.
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
