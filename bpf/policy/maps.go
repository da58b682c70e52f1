package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Sizes are the capacities of the maps of network policies. Only Flows is allocated at once.
type Sizes struct {
	Subjects, Ports, Ranges, Peers, Nets, Verdicts uint32
	Flows                                          uint32
}

// forPolicies returns the object of network policies, parsed once.
var forPolicies = sync.OnceValues(loadPolicy)

// state is the maps that packets write: an upgrade finds what it needs to go on.
var state = map[string]bool{
	policyMapFlFlows: true, policyMapFlFragments: true, policyMapFlPolicyState: true, policyMapFlPolicyCount: true,
	policyMapFlDenials: true, policyMapFlDenialDue: true, policyMapFlRecorded: true, policyMapFlRecording: true,
}

// spec returns the object's maps and program, with maps of those sizes.
func spec(s Sizes) (*ebpf.CollectionSpec, error) {
	c, err := forPolicies()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the object of network policies: %w", err)
	}
	c = c.Copy()
	for name, n := range map[string]uint32{
		policyMapFlSubjects: s.Subjects, policyMapFlPolicyPorts: s.Ports, policyMapFlPortRanges: s.Ranges,
		policyMapFlPeers: s.Peers, policyMapFlPeerNets: s.Nets, policyMapFlVerdicts: s.Verdicts, policyMapFlFlows: s.Flows,
	} {
		c.Maps[name].MaxEntries = n
	}
	return c, nil
}

// Layout returns a name for the form of the maps of facts.
func Layout(s Sizes) (string, error) {
	c, err := spec(s)
	if err != nil {
		return "", err
	}
	facts := map[string]*ebpf.MapSpec{}
	for n, m := range c.Maps {
		if bpf.Shared(n) && !state[n] {
			facts[n] = m
		}
	}
	return bpf.LayoutName(facts), nil
}

// pin returns the path of a map's pin. Flows of any size have one name: those that are there stay.
func pin(folder string, m *ebpf.MapSpec) string {
	if !state[m.Name] {
		return filepath.Join(folder, m.Name)
	}
	size := m.MaxEntries
	if m.Name == policyMapFlFlows {
		size = 0
	}
	return bpf.StatePin(folder, m.Name, m, size)
}

// Maps are the maps of network policies, opened.
type Maps struct {
	NewFlows bool // no program had them before

	sizes  Sizes
	named  bpf.MapSet
	tables [tables]rawTable
	mapped [][]byte
	state  *policyPolicyState
}

// CreateMaps creates the maps of a layout, pinned in a folder. Those that are pinned already are opened.
func CreateMaps(folder string, s Sizes) (*Maps, error) {
	if err := bpf.MakeFolders(folder); err != nil {
		return nil, err
	}
	flows := false
	m, err := newMaps(folder, s, func(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
		held, err := openMap(path, m)
		if !bpf.Absent(err) {
			return held, err
		}
		made, err := bpf.CreateMap(path, m)
		if err != nil {
			return nil, err
		}
		flows = flows || m.Name == policyMapFlFlows
		return made, nil
	})
	if err == nil {
		m.NewFlows = flows
	}
	return m, err
}

// OpenMaps opens the maps of a layout pinned in a folder. If there are none, not all, or other ones, the error is
// Absent.
func OpenMaps(folder string, s Sizes) (*Maps, error) {
	return newMaps(folder, s, openMap)
}

// openMap opens a pinned map; flows of any size.
func openMap(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
	if m.Name == policyMapFlFlows {
		held, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return nil, err
		}
		m.MaxEntries = held.MaxEntries()
		held.Close()
	}
	return bpf.OpenMap(path, m)
}

func newMaps(folder string, s Sizes,
	open func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*Maps, error) {
	c, err := spec(s)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(c.Maps, func(name string, _ *ebpf.MapSpec) bool { return !bpf.Shared(name) })
	named, err := bpf.OpenSet(folder, c.Maps, pin, open)
	if err != nil {
		return nil, err
	}
	m := &Maps{sizes: s, named: named}
	m.sizes.Flows = m.named[policyMapFlFlows].MaxEntries()
	for i := range m.tables {
		m.tables[i] = Table(i).open(m.named)
	}
	state, err := bpf.Memory[policyPolicyState](named, policyMapFlPolicyState, &m.mapped)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.state = &state[0]
	return m, nil
}

// Close closes the maps. Pinned, they stay.
func (m *Maps) Close() error {
	err := errors.Join(bpf.Unmap(m.mapped), m.named.Close())
	m.mapped, m.state, m.named = nil, nil, nil
	return err
}

// Flows returns how many flows fit.
func (m *Maps) Flows() uint32 { return m.sizes.Flows }

// Reevaluate has each flow evaluated again at its next packet.
func (m *Maps) Reevaluate() { atomic.AddUint32(&m.state.Generation, 1) }

// Flag is a flag of what the programs do.
type Flag uint32

// The flags.
const (
	// Cut: connections that are no longer allowed are cut.
	Cut = Flag(policyPolicyFlagPOLICY_CUT)
	// Writing: peers and rulesets are changing, so what a peer table decides otherwise isn't trusted for a peer.
	Writing = Flag(policyPolicyFlagPOLICY_WRITING)
	// Changing: entries are being written, so what is decided meanwhile isn't final.
	Changing = Flag(policyPolicyFlagPOLICY_CHANGING)
	// Check: there are pods' devices, and what comes in by them is checked.
	Check = Flag(policyPolicyFlagPOLICY_SOURCES)
)

// Set sets a flag, or clears it.
func (m *Maps) Set(f Flag, on bool) {
	if on {
		atomic.OrUint32(&m.state.Flags, uint32(f))
	} else {
		atomic.AndUint32(&m.state.Flags, ^uint32(f))
	}
}

// Has reports whether a flag is set.
func (m *Maps) Has(f Flag) bool { return atomic.LoadUint32(&m.state.Flags)&uint32(f) != 0 }

// Install has connections picked up for that long that are older than the programs.
func (m *Maps) Install(d time.Duration) {
	atomic.StoreUint64(&m.state.InstallUntil, uint64(bpf.Now()+d))
}

// RemoveMaps removes the maps of a layout; with the last layout, also what packets have written.
func RemoveMaps(folder string) error {
	_, err := bpf.RemoveLayout(folder)
	return err
}

// ticksPerSecond returns how often the kernel's timer ticks (CONFIG_HZ): the resolution of its coarse clocks.
func ticksPerSecond() (uint32, error) {
	var t unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		return 0, fmt.Errorf("bpf: read the resolution of the kernel's coarse clock: %w", err)
	}
	return uint32((time.Second.Nanoseconds() + t.Nano()/2) / t.Nano()), nil
}

// Digest returns a digest of the program on maps of these sizes.
func Digest(s Sizes) (string, error) {
	layout, err := Layout(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(_PolicyBytes)
	fmt.Fprint(h, layout)
	return hex.EncodeToString(h.Sum(nil)[:4]), nil
}

// programPrefix begins the name of the program; its digest follows.
const programPrefix = "fl_po_"

// Load loads the program to work on the maps.
func (m *Maps) Load() (*Program, error) {
	hooks, err := m.load("policy", nil)
	if err != nil || bpf.ProbeDevices() != nil {
		return &Program{program: hooks}, err
	}
	p := &Program{program: hooks}
	i, err := hooks.Info()
	if err == nil {
		id, _ := i.ID()
		p.path, err = m.load("policy_fast_path", map[string]uint32{"hook_program": uint32(id)})
	}
	if err != nil {
		return nil, errors.Join(err, hooks.Close())
	}
	return p, nil
}

// load loads one of the object's programs with other constants than their defaults.
func (m *Maps) load(name string, constants map[string]uint32) (*ebpf.Program, error) {
	c, err := spec(m.sizes)
	if err != nil {
		return nil, err
	}
	digest, err := Digest(m.sizes)
	if err != nil {
		return nil, err
	}
	hz, err := ticksPerSecond()
	if err != nil {
		return nil, err
	}
	err = c.Variables["ticks_per_second"].Set(hz)
	for constant, value := range constants {
		err = errors.Join(err, c.Variables[constant].Set(value))
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: set the program's constants: %w", err)
	}
	maps.DeleteFunc(c.Programs, func(n string, _ *ebpf.ProgramSpec) bool { return n != name })
	c.Programs[name].Name = programPrefix + digest
	l, err := m.named.Load(c)
	if err != nil {
		return nil, fmt.Errorf("bpf: load the program of network policies: %w", bpf.Explain(err))
	}
	defer l.Close()
	return l.DetachProgram(name), nil
}

// DefaultFlows returns how many flows there is space for unless it is said: as many as connection tracking may
// have (nf_conntrack_max), but no more than a hundredth of the memory is enough for.
func DefaultFlows() uint32 {
	const most, flow, least = 1 << 18, 120, 1 << 12
	n := uint64(most)
	if b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max"); err == nil {
		if max, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32); err == nil && max > 0 {
			n = max
		}
	}
	var i unix.Sysinfo_t
	if err := unix.Sysinfo(&i); err == nil {
		n = min(n, uint64(i.Totalram)*uint64(i.Unit)/100/flow)
	}
	return uint32(max(n, least))
}

// ForgetFlows removes all flows: packets in mid-stream of open connections are evaluated as those of unknown ones.
func (m *Maps) ForgetFlows() error {
	var keys []policyTuple
	flows := m.named[policyMapFlFlows]
	if err := bpf.ReadAll(flows, func(k policyTuple, _ policyPolicyFlow) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := flows.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget a flow: %w", err)
		}
	}
	return nil
}
