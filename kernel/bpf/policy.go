package bpf

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// PolicySizes are the capacities of the maps of network policies. Only Flows is allocated at once.
type PolicySizes struct {
	Subjects, Ports, Ranges, Peers, Nets, Verdicts uint32
	Flows                                          uint32
}

// forPolicies returns the object of network policies, parsed once.
var forPolicies = sync.OnceValues(loadPolicy)

// policyFolder begins the name of the folder of network policies, beside those of Services.
const policyFolder = "policy-"

// PolicyFolder returns the folder for the network policies of the calling thread's network namespace.
func PolicyFolder() (string, error) {
	path, _, err := Folder()
	return filepath.Join(filepath.Dir(path), policyFolder+filepath.Base(path)), err
}

// policyState is the maps that packets write: an upgrade finds what it needs to go on.
var policyState = map[string]bool{
	policyMapFlFlows: true, policyMapFlFragments: true, policyMapFlPolicyState: true, policyMapFlPolicyCount: true,
	policyMapFlDenials: true, policyMapFlDenialDue: true, policyMapFlRecorded: true, policyMapFlRecording: true,
}

// policySpec returns the object's maps and program, with maps of those sizes.
func policySpec(s PolicySizes) (*ebpf.CollectionSpec, error) {
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

// PolicyLayout returns a name for the form of the maps of facts.
func PolicyLayout(s PolicySizes) (string, error) {
	c, err := policySpec(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, n := range slices.Sorted(maps.Keys(c.Maps)) {
		if m := c.Maps[n]; own(n) && !policyState[n] {
			fmt.Fprintf(h, "%s %v %d %d %d %d %99v %99v\n", n, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags, m.Key,
				m.Value)
		}
	}
	return layoutPrefix + hex.EncodeToString(h.Sum(nil)[:5]), nil
}

// policyPin returns the path of a map's pin. Flows of any size have one name: those that are there stay.
func policyPin(folder string, m *ebpf.MapSpec) string {
	if !policyState[m.Name] {
		return filepath.Join(folder, m.Name)
	}
	size := m.MaxEntries
	if m.Name == policyMapFlFlows {
		size = 0
	}
	form := sha256.Sum256(fmt.Appendf(nil, "%v %d %d %d %d %s %s", m.Type, m.KeySize, m.ValueSize, size, m.Flags,
		typeName(m.Key), typeName(m.Value)))
	return filepath.Join(filepath.Dir(folder), stateFolder, m.Name+"-"+hex.EncodeToString(form[:4]))
}

// PolicyMaps are the maps of network policies, opened.
type PolicyMaps struct {
	sizes  PolicySizes
	named  map[string]*ebpf.Map
	tables [policyTables]rawTable
	mapped []byte
	state  *policyPolicyState
}

// CreatePolicyMaps creates the maps of a layout, pinned in a folder. Existing ones are opened.
func CreatePolicyMaps(folder string, s PolicySizes) (*PolicyMaps, error) {
	for _, f := range []string{folder, filepath.Join(filepath.Dir(folder), stateFolder)} {
		if err := MakeFolder(f); err != nil {
			return nil, err
		}
	}
	return newPolicyMaps(folder, s, func(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
		held, err := openPolicyMap(path, m)
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
			return nil, errors.Join(err, made.Close())
		}
		return made, nil
	})
}

// OpenPolicyMaps opens the maps of a layout pinned in a folder. If there are none, not all, or other ones, the error is
// Absent.
func OpenPolicyMaps(folder string, s PolicySizes) (*PolicyMaps, error) {
	return newPolicyMaps(folder, s, openPolicyMap)
}

// openPolicyMap opens a pinned map; flows of any size.
func openPolicyMap(path string, m *ebpf.MapSpec) (*ebpf.Map, error) {
	if m.Name == policyMapFlFlows {
		held, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return nil, err
		}
		m.MaxEntries = held.MaxEntries()
		held.Close()
	}
	return openMap(path, m)
}

func newPolicyMaps(folder string, s PolicySizes,
	open func(string, *ebpf.MapSpec) (*ebpf.Map, error)) (*PolicyMaps, error) {
	c, err := policySpec(s)
	state := filepath.Join(filepath.Dir(folder), stateFolder)
	if err := errors.Join(err, checkFolder(folder), checkFolder(state)); err != nil {
		return nil, err
	}
	m := &PolicyMaps{sizes: s, named: map[string]*ebpf.Map{}}
	for n, spec := range c.Maps {
		if !own(n) {
			continue
		}
		held, err := open(policyPin(folder, spec), spec)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("bpf: map %s: %w", n, err), m.Close())
		}
		m.named[n] = held
	}
	m.sizes.Flows = m.named[policyMapFlFlows].MaxEntries()
	for i := range m.tables {
		m.tables[i] = PolicyTable(i).open(m.named)
	}
	m.mapped, err = unix.Mmap(m.named[policyMapFlPolicyState].FD(), 0, os.Getpagesize(),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: map the memory of map %s: %w", policyMapFlPolicyState, err), m.Close())
	}
	m.state = (*policyPolicyState)(unsafe.Pointer(&m.mapped[0]))
	return m, nil
}

// Close closes the maps. Pinned, they stay.
func (m *PolicyMaps) Close() error {
	var errs []error
	if m.mapped != nil {
		errs = append(errs, unix.Munmap(m.mapped))
	}
	for _, n := range m.named {
		errs = append(errs, n.Close())
	}
	m.mapped, m.state, m.named = nil, nil, nil
	return errors.Join(errs...)
}

// Flows returns how many flows fit.
func (m *PolicyMaps) Flows() uint32 { return m.sizes.Flows }

// Reevaluate has each flow evaluated again at its next packet.
func (m *PolicyMaps) Reevaluate() { atomic.AddUint32(&m.state.Generation, 1) }

// PolicyFlag is a flag of what the programs do.
type PolicyFlag uint32

// The flags.
const (
	// PolicyCut: connections that are no longer allowed are cut.
	PolicyCut = PolicyFlag(policyPolicyFlagPOLICY_CUT)
	// PolicyWriting: peers and rulesets are changing, so what a peer table decides otherwise isn't trusted for a peer.
	PolicyWriting = PolicyFlag(policyPolicyFlagPOLICY_WRITING)
	// PolicyChanging: entries are being written, so what is decided meanwhile isn't final.
	PolicyChanging = PolicyFlag(policyPolicyFlagPOLICY_CHANGING)
)

// Set sets a flag, or clears it.
func (m *PolicyMaps) Set(f PolicyFlag, on bool) {
	if on {
		atomic.OrUint32(&m.state.Flags, uint32(f))
	} else {
		atomic.AndUint32(&m.state.Flags, ^uint32(f))
	}
}

// Has reports whether a flag is set.
func (m *PolicyMaps) Has(f PolicyFlag) bool { return atomic.LoadUint32(&m.state.Flags)&uint32(f) != 0 }

// Install has connections picked up for that long that are older than the programs.
func (m *PolicyMaps) Install(d time.Duration) {
	atomic.StoreUint64(&m.state.InstallUntil, uint64(Now()+d))
}

// RemovePolicyMaps removes the maps of a layout; with the last layout, also what packets have written.
func RemovePolicyMaps(folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("bpf: remove maps: %w", err)
	}
	above := filepath.Dir(folder)
	if others, _ := filepath.Glob(filepath.Join(above, layoutPrefix+"*")); len(others) == 0 {
		return RemoveFolder(filepath.Join(above, stateFolder))
	}
	return nil
}

// serve reports whether a program that uses maps of those IDs works on these: all but one, its constants, must be ours.
func (m *PolicyMaps) serve(program []ebpf.MapID) bool { return (&Maps{named: m.named}).serve(program) }

// ticksPerSecond returns how often the kernel's timer ticks (CONFIG_HZ): the resolution of its coarse clocks.
func ticksPerSecond() (uint32, error) {
	var t unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		return 0, fmt.Errorf("bpf: read the resolution of the kernel's coarse clock: %w", err)
	}
	return uint32((time.Second.Nanoseconds() + t.Nano()/2) / t.Nano()), nil
}

// PolicyDigest returns a digest of the program on maps of these sizes.
func PolicyDigest(s PolicySizes) (string, error) {
	layout, err := PolicyLayout(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(_PolicyBytes)
	fmt.Fprint(h, layout)
	return hex.EncodeToString(h.Sum(nil)[:4]), nil
}

// policyProgram begins the name of the program; its digest follows.
const policyProgram = "fl_po_"

// LoadPolicy loads the program to work on the maps.
func (m *PolicyMaps) LoadPolicy() (*PolicyProgram, error) {
	hooks, err := m.loadPolicy("policy", nil)
	if err != nil || ProbeDevices() != nil {
		return &PolicyProgram{program: hooks}, err
	}
	p := &PolicyProgram{program: hooks}
	i, err := hooks.Info()
	if err == nil {
		id, _ := i.ID()
		p.path, err = m.loadPolicy("policy_fast_path", map[string]uint32{"hook_program": uint32(id)})
	}
	if err != nil {
		return nil, errors.Join(err, hooks.Close())
	}
	return p, nil
}

// loadPolicy loads one of the object's programs with other constants than their defaults.
func (m *PolicyMaps) loadPolicy(name string, constants map[string]uint32) (*ebpf.Program, error) {
	c, err := policySpec(m.sizes)
	if err != nil {
		return nil, err
	}
	digest, err := PolicyDigest(m.sizes)
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
	c.Programs[name].Name = policyProgram + digest
	l, err := ebpf.NewCollectionWithOptions(c, ebpf.CollectionOptions{MapReplacements: m.named})
	if err != nil {
		return nil, fmt.Errorf("bpf: load the program of network policies: %w", explain(err))
	}
	defer l.Close()
	return l.DetachProgram(name), nil
}

// DefaultPolicyFlows returns how many flows there is space for unless it is said: as many as connection tracking may
// have (nf_conntrack_max), but no more than a hundredth of the memory is enough for.
func DefaultPolicyFlows() uint32 {
	const most, flow, least = 1 << 18, 112, 1 << 12
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
func (m *PolicyMaps) ForgetFlows() error {
	var keys []policyTuple
	flows := m.named[policyMapFlFlows]
	if err := all(flows, func(k policyTuple, _ policyPolicyFlow) { keys = append(keys, k) }); err != nil {
		return err
	}
	for _, k := range keys {
		if err := flows.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: forget a flow: %w", err)
		}
	}
	return nil
}
