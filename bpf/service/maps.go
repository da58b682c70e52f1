package service

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Sizes are the capacities of Services' maps, those of bpf/device included.
type Sizes struct {
	Frontends, Pools, Slots uint32
	Flows                   uint32 // entries of each of the two maps of flows; 0: DefaultFlows
}

// DefaultFlows is the size of each NAT map unless it is given.
const DefaultFlows = 1 << 17

// forSockets returns the object, parsed once, in milliseconds.
var forSockets = sync.OnceValues(loadService)

// spec returns the object's maps and programs, with maps of those sizes.
func spec(s Sizes) (*ebpf.CollectionSpec, error) {
	c, err := forSockets()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	c = c.Copy()
	s.Set(c.Maps)
	return c, nil
}

// Set sets the sizes of Services' maps among those of an object.
func (s Sizes) Set(specs map[string]*ebpf.MapSpec) {
	specs[serviceMapFlServices].MaxEntries = s.Frontends
	specs[serviceMapFlPools].MaxEntries = s.Pools
	specs[serviceMapFlBackends].MaxEntries = s.Slots
}

// Specs returns the maps of the object, of those sizes.
func Specs(s Sizes) (map[string]*ebpf.MapSpec, error) {
	c, err := spec(s)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(c.Maps, func(name string, _ *ebpf.MapSpec) bool { return !bpf.Shared(name) })
	return c.Maps, nil
}

// pinNames are the names of maps' pins. They stay as they were when maps had other names, so that an upgrade and a
// downgrade find each other's maps.
var pinNames = map[string]string{
	serviceMapFlServices:    "frontends",
	serviceMapFlPools:       "pools",
	serviceMapFlBackends:    "slots",
	serviceMapFlPrefixes:    "places",
	serviceMapFlPodIfaces:   "pod_interfaces",
	serviceMapFlAffinity:    "affinity",
	serviceMapFlPeerNames:   "names",
	serviceMapFlSkPeer:      "named",
	serviceMapFlUdpPeers:    "connected",
	serviceMapFlSkFlows:     "peers",
	serviceMapFlOpenSockets: "loads",
	serviceMapFlSkCounted:   "counted",
	serviceMapFlNetnsAddrs:  "homes",
	serviceMapFlTrace:       "traced",
	serviceMapFlEvents:      "events",
	serviceMapFlPortBits:    "ports",
}

// state is the maps that packets and sockets write: they don't go with a layout, and an upgrade finds what it needs to
// go on.
var state = map[string]bool{
	serviceMapFlAffinity: true, serviceMapFlUdpPeers: true, serviceMapFlNetnsAddrs: true, serviceMapFlSkPeer: true,
	serviceMapFlSkFlows: true, serviceMapFlPeerNames: true, serviceMapFlOpenSockets: true,
	serviceMapFlSkCounted: true, serviceMapFlPortBits: true,
}

// Pin returns the path of a map's pin. The name of a state map's says of what form it is.
func Pin(folder string, m *ebpf.MapSpec) string {
	if state[m.Name] {
		return bpf.StatePin(folder, pinNames[m.Name], m, m.MaxEntries)
	}
	return filepath.Join(folder, pinNames[m.Name])
}

// Maps are Services' maps, opened: those of the programs for sockets.
type Maps struct {
	// The kernel's memory of arrays.
	Pools     []Pool
	Slots     []Slot
	PeerNames []PeerName // TCP connections: those whose cookie isn't 0

	folder string
	layout string
	sizes  Sizes
	named  bpf.MapSet
	traced *serviceTrace
	mapped [][]byte
}

// NewMaps returns maps that are opened, the programs' among them, of a layout in a folder. After an error they are
// closed.
func NewMaps(named bpf.MapSet, folder, layout string, s Sizes) (*Maps, error) {
	m := &Maps{named: named, folder: folder, layout: layout, sizes: s}
	if err := m.mapArrays(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// mapArrays maps the arrays into memory.
func (m *Maps) mapArrays() (err error) {
	if m.Pools, err = bpf.Memory[Pool](m.named, serviceMapFlPools, &m.mapped); err != nil {
		return err
	}
	if m.Slots, err = bpf.Memory[Slot](m.named, serviceMapFlBackends, &m.mapped); err != nil {
		return err
	}
	if m.PeerNames, err = bpf.Memory[PeerName](m.named, serviceMapFlPeerNames, &m.mapped); err != nil {
		return err
	}
	traced, err := bpf.Memory[serviceTrace](m.named, serviceMapFlTrace, &m.mapped)
	if err != nil {
		return err
	}
	m.traced = &traced[0]
	return nil
}

// Close closes the maps. Pinned, they stay.
func (m *Maps) Close() error {
	err := errors.Join(bpf.Unmap(m.mapped), m.named.Close())
	*m = Maps{}
	return err
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
	return bpf.ReadAll(m.named[serviceMapFlServices], yield)
}

// PutPrefix sets the flags of a prefix.
func (m *Maps) PutPrefix(p netip.Prefix, is uint32) error {
	if err := m.named[serviceMapFlPrefixes].Put(PrefixKey(p), is); err != nil {
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
	if err := m.named[serviceMapFlPrefixes].Delete(PrefixKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("bpf: delete prefix %s: %w", p, err)
	}
	return nil
}

// PrefixKey returns a prefix among 128 bits, whatever its family.
func PrefixKey(p netip.Prefix) (k servicePrefix) {
	k.Length = uint32(p.Bits() + 128 - p.Addr().BitLen())
	k.Address.Word = bpf.Words(p.Masked().Addr())
	return k
}

// Prefixes reads every prefix.
func (m *Maps) Prefixes(yield func(netip.Prefix, uint32)) error {
	return EachPrefix(m.named[serviceMapFlPrefixes], yield)
}

func EachPrefix(m *ebpf.Map, yield func(netip.Prefix, uint32)) error {
	var k servicePrefix
	var v uint32
	i := m.Iterate()
	for i.Next(&k, &v) {
		a := bpf.Addr(k.Address.Word)
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
	if err := bpf.ReadAll(namespaces, func(k serviceNetnsKey, _ serviceNetnsAddr) { keys = append(keys, k) }); err != nil {
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

// Connected reads the connected UDP sockets, by cookie.
func (m *Maps) Connected(yield func(uint64, Connected)) error {
	return bpf.ReadAll(m.named[serviceMapFlUdpPeers], yield)
}

// Loads reads how many sockets are open, by endpoint.
func (m *Maps) Loads(yield func(Endpoint, Load)) error {
	return bpf.ReadAll(m.named[serviceMapFlOpenSockets], yield)
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

// PrefixesIn reads the prefixes in a folder of maps: see Maps.Prefixes.
func PrefixesIn(maps string, yield func(netip.Prefix, uint32)) error {
	m, err := bpf.Pinned[servicePrefix, uint32](filepath.Join(maps, pinNames[serviceMapFlPrefixes]))
	if m == nil {
		return err
	}
	defer m.Close()
	return EachPrefix(m, yield)
}

// Empty removes all frontends from the map in a folder of maps. It returns false where there is none.
func Empty(folder string) (there bool, err error) {
	frontends, err := bpf.Pinned[Entry, Frontend](filepath.Join(folder, pinNames[serviceMapFlServices]))
	if frontends == nil {
		return false, err
	}
	defer frontends.Close()
	var keys []Entry
	if err := bpf.ReadAll(frontends, func(k Entry, _ Frontend) { keys = append(keys, k) }); err != nil {
		return true, err
	}
	for _, k := range keys {
		if err := frontends.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return true, fmt.Errorf("bpf: delete a frontend: %w", err)
		}
	}
	return true, nil
}
