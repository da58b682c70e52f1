package bpf

import (
	"crypto/sha256"
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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Device is a network device whose packets programs handle.
type Device struct {
	Index  int
	Header uint32 // length of its link-layer header, in bytes
	Pod    bool   // a veth whose other end is in another network namespace: a pod's
	Own    bool   // the loopback device: only egress is handled, since what enters there has left there
}

// headers are the lengths of link-layer headers that there can be programs for.
var headers = []uint32{14, 0}

// Headers returns the lengths of the devices' link-layer headers, each once.
func Headers(devices []Device) (l []uint32) {
	for _, d := range devices {
		if !slices.Contains(l, d.Header) {
			l = append(l, d.Header)
		}
	}
	return l
}

// direction is a hook of a device at which one of our programs is attached.
type direction struct {
	name, short string
	attach      ebpf.AttachType
}

// directions are all of them; those that translate back come before those that translate.
var directions = []direction{{"leave", "o", ebpf.AttachTCXEgress}, {"arrive", "i", ebpf.AttachTCXIngress}}

// directions returns those at which the device's packets are handled.
func (d Device) directions() []direction {
	if d.Own {
		return directions[:1]
	}
	return directions
}

// pin returns the path of a link's pin.
func (d Device) pin(folder string, w direction) string {
	return filepath.Join(folder, fmt.Sprintf("%s-%d", w.name, d.Index))
}

// programPrefix begins the names of pinned programs, which have no link of their own.
const programPrefix = "program-"

// program names a program, and its pin behind programPrefix.
func (w direction) program(header uint32) string { return fmt.Sprintf("%s-%d", w.name, header) }

// DevicePrograms are the programs for packets at devices.
type DevicePrograms struct {
	digest string
	by     map[string]*ebpf.Program // by direction.program
}

// DeviceOptions are the programs' constants, but for the length of a device's header.
type DeviceOptions struct {
	// nodes pass original destinations to each other, so that a backend's node answers the client directly
	DSR         bool
	ReversePath bool // a flow begins only if the route back to its source leads to the device that its packet came from
	// the pod network is Fairlead's own: programs masquerade what pods send out of the ranges of MasqueradeRanges, and
	// the hook of its source validation doesn't keep the fast path off
	PodNetwork bool
}

// DeviceDigest returns a digest of those programs with these constants and maps of these sizes.
func DeviceDigest(s Sizes, o DeviceOptions) (string, error) {
	layout, err := Layout(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(_DeviceBytes)
	fmt.Fprint(h, layout, o)
	return fmt.Sprintf("%x", h.Sum(nil)[:4]), nil
}

// programName is what bpftool shows, such as fl_ie_deadbeef; of 15 bytes one could not tell whether the kernel cut it.
func (w direction) programName(header uint32, digest string) string {
	return fmt.Sprintf("fl_%s%x_%s", w.short, header, digest)
}

// LoadForDevices loads the programs for packets to work on maps, for link-layer headers of these lengths.
func (m *Maps) LoadForDevices(o DeviceOptions, lengths ...uint32) (*DevicePrograms, error) {
	digest, err := DeviceDigest(m.sizes, o)
	if err != nil {
		return nil, err
	}
	p := &DevicePrograms{digest: digest, by: map[string]*ebpf.Program{}}
	var (
		loading sync.WaitGroup
		mu      sync.Mutex // for by and errs
		errs    []error
	)
	// at once: most of the time is the verifier's, which runs on as many processors as there are
	for _, header := range lengths {
		loading.Go(func() {
			c, err := p.load(m, o, header)
			mu.Lock()
			defer mu.Unlock()
			if errs = append(errs, err); err != nil {
				return
			}
			for _, w := range directions {
				p.by[w.program(header)] = c.DetachProgram(w.name)
			}
			c.Close()
		})
	}
	loading.Wait()
	if err := errors.Join(errs...); err != nil {
		p.Close()
		return nil, fmt.Errorf("bpf: load the programs for packets: %w", explain(err))
	}
	return p, nil
}

// load loads the programs for one length of headers.
func (p *DevicePrograms) load(m *Maps, o DeviceOptions, header uint32) (*ebpf.Collection, error) {
	c, err := spec(forDevices, m.sizes)
	if err != nil {
		return nil, err
	}
	constants := map[string]uint32{"l2_len": header, "dsr": b2u(o.DSR), "reverse_path": b2u(o.ReversePath),
		"pod_network": b2u(o.PodNetwork)}
	for name, value := range constants {
		if err := c.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	delete(c.Programs, fastPathName)
	for _, w := range directions {
		c.Programs[w.name].Name = w.programName(header, p.digest)
	}
	return m.load(c)
}

func b2u(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// Pin pins the programs in a folder, in place of those there for the same devices, for devices that are to come.
func (p *DevicePrograms) Pin(folder string) error {
	if err := MakeFolder(folder); err != nil {
		return err
	}
	for name, program := range p.by {
		path := filepath.Join(folder, programPrefix+name)
		if program.IsPinned() {
			continue
		}
		if err := drop(path); err != nil {
			return fmt.Errorf("bpf: pin program %s: %w", name, err)
		}
		if err := program.Pin(path); err != nil {
			return fmt.Errorf("bpf: pin program %s: %w", name, err)
		}
	}
	return nil
}

// Unpin removes the programs in the folder for devices that these are not for.
func (p *DevicePrograms) Unpin(folder string) (err error) {
	for _, w := range directions {
		for _, header := range headers {
			if name := w.program(header); p.by[name] == nil {
				err = errors.Join(err, drop(filepath.Join(folder, programPrefix+name)))
			}
		}
	}
	return err
}

// drop removes a file that may be gone.
func drop(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// OpenDevicePrograms opens what Pin has pinned. Where there is nothing, or half of a pair, the error is an
// fs.ErrNotExist.
func OpenDevicePrograms(folder string) (*DevicePrograms, error) {
	p := &DevicePrograms{by: map[string]*ebpf.Program{}}
	for _, header := range headers {
		if err := p.open(folder, header); err != nil {
			p.Close()
			return nil, fmt.Errorf("bpf: open the programs for packets: %w", err)
		}
	}
	for _, program := range p.by {
		if i, err := program.Info(); err == nil {
			_, p.digest, _ = strings.Cut(strings.TrimPrefix(i.Name, "fl_"), "_")
		}
	}
	if len(p.by) == 0 {
		return nil, fmt.Errorf("bpf: open the programs for packets: %w", fs.ErrNotExist)
	}
	return p, nil
}

// open opens the pinned programs for a length of headers: all directions', or none.
func (p *DevicePrograms) open(folder string, header uint32) error {
	var errs []error
	absent := 0
	for _, w := range directions {
		program, err := ebpf.LoadPinnedProgram(filepath.Join(folder, programPrefix+w.program(header)), nil)
		if err == nil {
			p.by[w.program(header)] = program
			continue
		}
		if errs = append(errs, err); errors.Is(err, fs.ErrNotExist) {
			absent++
		}
	}
	if absent == len(directions) {
		return nil
	}
	return errors.Join(errs...)
}

// Digest returns the digest of the programs.
func (p *DevicePrograms) Digest() string { return p.digest }

// Add loads programs for those devices that there are none for yet, to work on the maps in the folder.
func (p *DevicePrograms) Add(devices []Device, folder string, s Sizes, o DeviceOptions) error {
	has := func(h uint32) bool { return p.by[directions[0].program(h)] != nil }
	missing := slices.DeleteFunc(Headers(devices), has)
	if len(missing) == 0 {
		return nil
	}
	m, err := OpenMaps(folder, s)
	if err != nil {
		return err
	}
	defer m.Close()
	more, err := m.LoadForDevices(o, missing...)
	if err != nil {
		return err
	}
	maps.Copy(p.by, more.by)
	return nil
}

// Close closes the programs; pinned or attached, they stay.
func (p *DevicePrograms) Close() {
	for _, program := range p.by {
		program.Close()
	}
}

// AtDevices returns the digest of the programs for packets that are pinned in the folder, "" where there are none,
// and a description of the difference where they, or those at devices, are not all of one digest, attached, and at
// work on these maps (nil: any).
func AtDevices(folder string, m *Maps) (digest string, err error) {
	p, err := OpenDevicePrograms(folder)
	if errors.Is(err, fs.ErrNotExist) {
		left := 0
		err = pins(folder, func(string, direction, int) { left++ })
		if left > 0 {
			return "programs are missing", err
		}
		return "", err
	}
	if err != nil {
		return "", err
	}
	defer p.Close()
	for _, w := range directions {
		for _, header := range headers {
			program := p.by[w.program(header)]
			if program == nil {
				continue // no device had such a header
			}
			i, err := program.Info()
			if err != nil {
				return "", fmt.Errorf("bpf: read a program: %w", err)
			}
			ids, _ := i.MapIDs()
			_, d, _ := strings.Cut(strings.TrimPrefix(i.Name, "fl_"), "_")
			if m != nil && !m.serve(ids) {
				return w.name + " works on other maps", nil
			}
			if i.Name != w.programName(header, d) || digest != "" && d != digest {
				return w.name + " has another program", nil
			}
			digest = d
		}
	}
	wrong := ""
	err = pins(folder, func(path string, w direction, index int) {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			wrong = path + " is no link"
			return
		}
		defer l.Close()
		i, err := l.Info()
		switch {
		case err != nil || i.TCX() == nil:
			wrong = path + " is no link to a device"
		case i.TCX().Ifindex == 0:
			// the device is gone, or others detached it: whoever attaches anew repairs that
		case !strings.HasSuffix(programName(i.Program), "_"+digest):
			wrong = fmt.Sprintf("%s has another program at device %d", w.name, index)
		}
	})
	if wrong != "" {
		return wrong, err
	}
	return digest, err
}

// WritePods has the map of pods' devices, in a folder of maps, hold those of the devices that are some, as far as
// they fit: to others packets use the host stack. The programs there are those pinned in the folder of links.
func WritePods(maps, links string, devices []Device) error {
	m, err := pinned[uint32, uint32](filepath.Join(maps, pinNames[deviceMapFlPods]))
	if m == nil {
		return err
	}
	defer m.Close()
	leave, err := programID(filepath.Join(links, programPrefix+directions[0].program(headers[0])))
	if err != nil {
		return err
	}
	wanted, gone := map[uint32]bool{}, []uint32{}
	for _, d := range devices {
		if d.Pod {
			wanted[uint32(d.Index)] = true
		}
	}
	err = all(m, func(index, id uint32) {
		if !wanted[index] {
			gone = append(gone, index)
		} else if id == leave {
			delete(wanted, index)
		}
	})
	for _, i := range gone {
		err = errors.Join(err, m.Delete(i))
	}
	for i := range wanted {
		if err == nil {
			err = m.Put(i, leave)
		}
	}
	if err != nil && !Full(err) {
		return fmt.Errorf("bpf: map %s: %w", deviceMapFlPods, err)
	}
	return nil
}

// WriteUplinks has the map of devices by which other Nodes are reached, in a folder of maps, hold these indices.
func WriteUplinks(maps string, devices map[int]bool) error {
	m, err := pinned[uint32, uint32](filepath.Join(maps, pinNames[deviceMapFlUplinks]))
	if m == nil {
		return err
	}
	defer m.Close()
	var gone []uint32
	err = all(m, func(index, _ uint32) {
		if !devices[int(index)] {
			gone = append(gone, index)
		}
	})
	for _, i := range gone {
		err = errors.Join(err, m.Delete(i))
	}
	for i := range devices {
		err = errors.Join(err, m.Put(uint32(i), uint32(1)))
	}
	if err != nil {
		return fmt.Errorf("bpf: write map %s: %w", deviceMapFlUplinks, err)
	}
	return nil
}

// PrefixesIn reads the prefixes in a folder of maps: see Maps.Prefixes.
func PrefixesIn(maps string, yield func(netip.Prefix, uint32)) error {
	m, err := pinned[servicePrefix, uint32](filepath.Join(maps, pinNames[serviceMapFlPrefixes]))
	if m == nil {
		return err
	}
	defer m.Close()
	return eachPrefix(m, yield)
}

// programID returns the ID of a pinned program, 0 where there is none.
func programID(path string) (uint32, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: open a program: %w", err)
	}
	defer p.Close()
	i, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("bpf: read a program: %w", err)
	}
	id, _ := i.ID()
	return uint32(id), nil
}

// ProbeDevices checks the kernel for what the programs for packets need besides, and returns an error that names what
// is missing.
var ProbeDevices = sync.OnceValue(func() error {
	var errs []error
	need := func(err error, what string) {
		if err != nil {
			errs = append(errs, fmt.Errorf("bpf: this kernel lacks %s: %w", what, err))
		}
	}
	need(features.HaveProgramType(ebpf.SchedCLS), "programs at devices (4.1)")
	need(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnSkcLookupTcp), "the look-up of sockets (5.2)")
	need(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnKtimeGetCoarseNs), "a coarse clock (5.11)")
	if major, minor := release(); major < 6 || major == 6 && minor < 7 {
		errs = append(
			errs,
			fmt.Errorf(
				"bpf: Linux %d.%d lacks links to devices (6.6) and source addresses in look-ups of routes (6.7)",
				major,
				minor,
			),
		)
	}
	return errors.Join(errs...)
})

// Preempts reports whether this kernel's work on packets may be preempted by other such work (PREEMPT_RT): then what
// programs store by processor may change while they read it.
func Preempts() bool {
	var u unix.Utsname
	return unix.Uname(&u) != nil || strings.Contains(unix.ByteSliceToString(u.Version[:]), "PREEMPT_RT")
}

// release returns the kernel's version.
func release() (major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	}
	return major, minor
}
