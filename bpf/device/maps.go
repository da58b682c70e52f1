package device

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
)

// forDevices returns the object, parsed once, in milliseconds.
var forDevices = sync.OnceValues(loadDevice)

// spec returns the object's maps and programs, with maps of those sizes.
func spec(s service.Sizes) (*ebpf.CollectionSpec, error) {
	c, err := forDevices()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the programs' object: %w", err)
	}
	c = c.Copy()
	s.Set(c.Maps)
	c.Maps[deviceMapFlAllowedSrc].MaxEntries = s.Frontends
	c.Maps[deviceMapFlUnmatched].MaxEntries = s.Frontends + mostRanges // each ClusterIP has a frontend
	for _, name := range []string{deviceMapFlNatDst, deviceMapFlNatSrc} {
		c.Maps[name].MaxEntries = cmp.Or(s.Flows, service.DefaultFlows)
	}
	return c, nil
}

// mostRanges is how many prefixes of ServiceCIDRs fit.
const mostRanges = 1 << 13

// mapSpecs returns the maps of this object and of that for sockets, which share those of one name.
func mapSpecs(s service.Sizes) (map[string]*ebpf.MapSpec, error) {
	sockets, err := service.Specs(s)
	if err != nil {
		return nil, err
	}
	packets, err := spec(s)
	if err != nil {
		return nil, err
	}
	all := packets.Maps
	maps.Copy(all, sockets)
	maps.DeleteFunc(all, func(name string, _ *ebpf.MapSpec) bool { return !bpf.Shared(name) })
	return all, nil
}

// Layout returns a name for the form of the maps, by a digest of names, types and sizes: programs can't use maps of
// another.
func Layout(s service.Sizes) (string, error) {
	all, err := mapSpecs(s)
	if err != nil {
		return "", err
	}
	return bpf.LayoutName(all), nil
}

// pinNames are the names of the pins of the maps that the programs for sockets haven't: see bpf/service.
var pinNames = map[string]string{
	deviceMapFlNatDst:      "destinations",
	deviceMapFlNatSrc:      "sources",
	deviceMapFlAddrBits:    "addresses",
	deviceMapFlNodeUdp:     "fl_node_udp",
	deviceMapFlFragments:   "fragments",
	deviceMapFlPackets:     "packets",
	deviceMapFlLookup:      "question",
	deviceMapFlRoutes:      "lanes",
	deviceMapFlPolicyCalls: "fl_policy_calls",
	deviceMapFlPods:        "pods",
	deviceMapFlHooks:       "fl_hooks",
	deviceMapFlUplinks:     "uplinks",
	deviceMapFlAllowedSrc:  "permitted",
	deviceMapFlUnmatched:   "unmatched",
	deviceMapFlChanges:     "changes",
	deviceMapFlMasqRanges:  "fl_masq_ranges",
}

// state is the maps among them that packets write, and those that the planes of policies and of the pod network write.
var state = map[string]bool{
	deviceMapFlNatDst: true, deviceMapFlNatSrc: true, deviceMapFlFragments: true, deviceMapFlAddrBits: true,
	deviceMapFlNodeUdp: true, deviceMapFlPackets: true, deviceMapFlLookup: true, deviceMapFlRoutes: true,
	deviceMapFlPolicyCalls: true, deviceMapFlMasqRanges: true,
}

// pin returns the path of a map's pin. The name of a state map's says of what form it is.
func pin(folder string, m *ebpf.MapSpec) string {
	name, ours := pinNames[m.Name]
	switch {
	case !ours:
		return service.Pin(folder, m)
	case state[m.Name]:
		return bpf.StatePin(folder, name, m, m.MaxEntries)
	}
	return filepath.Join(folder, name)
}

// The structs of ip.h and device.h.
type (
	Tuple    = deviceTuple
	NatEntry = deviceNatEntry
)

// Maps are all of Services' maps, opened: those of the programs for sockets, and of those for packets at devices.
type Maps struct {
	*service.Maps
	// Changes is incremented when frontends or pools have changed: flows are checked again.
	Changes *uint32

	portBits *portBits
	sizes    service.Sizes
	named    bpf.MapSet
	mapped   [][]byte

	flowsOf string // the folder of these maps where the maps of flows were made, maybe beside some of another size; or ""
}

// CreateMaps creates the maps of a layout, pinned in a folder. Those that are pinned already are opened:
// state maps, and those of an attempt that ended halfway.
func CreateMaps(folder string, s service.Sizes) (*Maps, error) {
	if err := bpf.MakeFolders(folder); err != nil {
		return nil, err
	}
	recall, resized := false, false
	m, err := newMaps(folder, s, func(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
		held, err := bpf.OpenMap(path, m)
		if !bpf.Absent(err) {
			return held, err
		}
		made, err := bpf.CreateMap(path, m)
		if err != nil {
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
func OpenMaps(folder string, s service.Sizes) (*Maps, error) { return newMaps(folder, s, bpf.OpenMap) }

func newMaps(folder string, s service.Sizes, open func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*Maps, error) {
	all, err := mapSpecs(s)
	if err != nil {
		return nil, err
	}
	named, err := bpf.OpenSet(folder, all, pin, open)
	if err != nil {
		return nil, err
	}
	of, err := service.NewMaps(named, folder, bpf.LayoutName(all), s)
	if err != nil {
		return nil, err
	}
	m := &Maps{Maps: of, sizes: s, named: named}
	if err := m.mapArrays(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// mapArrays maps the arrays into memory.
func (m *Maps) mapArrays() error {
	ports, err := bpf.Memory[devicePortBits](m.named, deviceMapFlPortBits, &m.mapped)
	if err != nil {
		return err
	}
	addresses, err := bpf.Memory[devicePortBits](m.named, deviceMapFlAddrBits, &m.mapped)
	if err != nil {
		return err
	}
	changes, err := bpf.Memory[uint32](m.named, deviceMapFlChanges, &m.mapped)
	if err != nil {
		return err
	}
	m.portBits, m.Changes = &portBits{ports: &ports[0], addresses: &addresses[0]}, &changes[0]
	return nil
}

// Close closes the maps. Pinned, they stay.
func (m *Maps) Close() error {
	err := errors.Join(bpf.Unmap(m.mapped), m.Maps.Close())
	*m = Maps{Maps: m.Maps}
	return err
}

// RemoveMaps removes the maps of a layout; with the last layout, also the state maps, and else those of these that no
// layout of this version has.
func RemoveMaps(folder string, s service.Sizes) error {
	if last, err := bpf.RemoveLayout(folder); last || err != nil {
		return err
	}
	all, err := mapSpecs(s)
	if err != nil {
		return err
	}
	ours := map[string]bool{}
	for _, m := range all {
		ours[pin(folder, m)] = true
	}
	held, _ := filepath.Glob(filepath.Join(filepath.Dir(folder), bpf.StateFolder, "*"))
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
