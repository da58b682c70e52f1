package bpf

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Device is a network device whose packets programs see.
type Device struct {
	Index  int
	Header uint32 // length of its link-layer header, in bytes
	Pod    bool   // a veth whose other end is in another network namespace: a pod's
	Own    bool   // the loopback device: only what leaves is looked at, since what comes in there left there
}

// headers are the lengths of link-layer headers that there can be programs for.
var headers = []uint32{14, 0}

// Headers gives the lengths of the devices' link-layer headers, each once.
func Headers(devices []Device) (l []uint32) {
	for _, d := range devices {
		if !slices.Contains(l, d.Header) {
			l = append(l, d.Header)
		}
	}
	return l
}

// direction is a place at a device where one of our programs is called.
type direction struct {
	name, short string
	attach      ebpf.AttachType
}

// directions are all there are; who translates back comes before who translates.
var directions = []direction{{"leave", "o", ebpf.AttachTCXEgress}, {"arrive", "i", ebpf.AttachTCXIngress}}

// directions gives those at which the device's packets are seen.
func (d Device) directions() []direction {
	if d.Own {
		return directions[:1]
	}
	return directions
}

// pin gives the path of a link's pin.
func (d Device) pin(folder string, w direction) string {
	return filepath.Join(folder, fmt.Sprintf("%s-%d", w.name, d.Index))
}

// programPrefix begins the names of pinned programs, which have no link of their own.
const programPrefix = "program-"

func (w direction) program(header uint32) string { return fmt.Sprintf("%s-%d", w.name, header) }

// DevicePrograms are the programs for packets at devices.
type DevicePrograms struct {
	digest string
	by     map[string]*ebpf.Program // by direction.program
}

// DeviceOptions are the programs' constants, but for the length of a device's header.
type DeviceOptions struct {
	Direct      bool // nodes tell each other of entries, so that a backend's node answers the client itself
	ReversePath bool // a flow begins only if the route back to its source leads to the device that its packet came in by
}

// DeviceDigest stands for those programs with these constants and maps of these sizes.
func DeviceDigest(s Sizes, o DeviceOptions) (string, error) {
	layout, err := Layout(s)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(_PacketsBytes)
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
	for _, header := range lengths { // at once: most of the time is the verifier's, which runs on as many processors as there are
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

// load loads the programs for one length of header.
func (p *DevicePrograms) load(m *Maps, o DeviceOptions, header uint32) (*ebpf.Collection, error) {
	c, err := spec(forPackets, m.sizes)
	if err != nil {
		return nil, err
	}
	if err := c.Variables["head"].Set(header); err != nil {
		return nil, err
	}
	for name, is := range map[string]bool{"direct": o.Direct, "reverse_path": o.ReversePath} {
		if !is {
			continue
		}
		if err := c.Variables[name].Set(uint32(1)); err != nil {
			return nil, err
		}
	}
	delete(c.Programs, fastPathName)
	for _, w := range directions {
		c.Programs[w.name].Name = w.programName(header, p.digest)
	}
	return m.load(c)
}

// Pin keeps the programs in a folder, in place of those there for the same devices, for devices that are to come.
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

// Unpin gives up the programs in the folder for devices that these are not for.
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

// OpenDevicePrograms opens what Pin has kept. Where there is nothing, or half of a pair, the error is an fs.ErrNotExist.
func OpenDevicePrograms(folder string) (*DevicePrograms, error) {
	p := &DevicePrograms{by: map[string]*ebpf.Program{}}
	err := fs.ErrNotExist
	for _, header := range headers {
		var errs [2]error
		for i, w := range directions {
			var program *ebpf.Program
			if program, errs[i] = ebpf.LoadPinnedProgram(filepath.Join(folder, programPrefix+w.program(header)), nil); errs[i] == nil {
				p.by[w.program(header)] = program
			}
		}
		none := errors.Is(errs[0], fs.ErrNotExist) && errors.Is(errs[1], fs.ErrNotExist)
		if wrong := errors.Join(errs[:]...); wrong != nil && !none {
			p.Close()
			return nil, fmt.Errorf("bpf: open the programs for packets: %w", wrong)
		}
		if !none {
			err = nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: open the programs for packets: %w", err)
	}
	return p, nil
}

// Add loads programs for those devices that there are none for yet, to work on the maps in the folder.
func (p *DevicePrograms) Add(devices []Device, folder string, s Sizes, o DeviceOptions) error {
	missing := slices.DeleteFunc(Headers(devices), func(h uint32) bool { return p.by[directions[0].program(h)] != nil })
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

// Close gives the programs back; pinned or attached, they stay.
func (p *DevicePrograms) Close() {
	for _, program := range p.by {
		program.Close()
	}
}

// Attach has the kernel call the programs for devices of the calling thread's network namespace, before anybody else's,
// in place of those whose links are pinned in the folder. They pass on what they see: programs of others are called
// after them. Programs for what leaves come first, then those for what arrives, those of the oldest device, which
// leads to other nodes, last: a flow that begins at one device needs them at the others. A device that is gone is no
// error.
func (p *DevicePrograms) Attach(folder string, devices ...Device) error {
	devices = slices.SortedFunc(slices.Values(devices), func(a, b Device) int { return cmp.Compare(b.Index, a.Index) })
	for _, w := range directions {
		for _, d := range devices {
			if !slices.Contains(d.directions(), w) {
				continue
			}
			err := p.attach(folder, d, w)
			if err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("bpf: attach %s to device %d: %w", w.name, d.Index, explain(err))
			}
		}
	}
	return nil
}

func (p *DevicePrograms) attach(folder string, d Device, w direction) error {
	pin, program := d.pin(folder, w), p.by[w.program(d.Header)]
	if program == nil {
		return fmt.Errorf("no program is loaded for a header of %d bytes", d.Header)
	}
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer l.Close()
		if device(l) == d.Index {
			return l.Update(program)
		}
		if err := os.Remove(pin); err != nil {
			return err
		}
	}
	l, err := attachTCX(link.TCXOptions{Interface: d.Index, Program: program, Attach: w.attach, Anchor: link.Head()})
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(pin)
}

// attachTCX attaches a program where it may still be by a link that was given up: the kernel detaches those in the background
// (kernel/bpf/syscall.c, bpf_link_put), and takes no program twice.
func attachTCX(o link.TCXOptions) (l link.Link, err error) {
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if l, err = link.AttachTCX(o); !errors.Is(err, unix.EEXIST) || time.Now().After(end) {
			return l, err
		}
	}
}

// device gives the index of the device to which a link is attached, 0 where it isn't any more.
func device(l link.Link) int {
	i, err := l.Info()
	if err != nil || i.TCX() == nil {
		return 0
	}
	return int(i.TCX().Ifindex)
}

// links calls f with each link to a device whose pin is in the folder, and the index in the pin's name.
func links(folder string, f func(path string, w direction, index int)) error {
	list, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("bpf: look for links to devices: %w", err)
	}
	for _, e := range list {
		for _, w := range directions {
			number, ok := strings.CutPrefix(e.Name(), w.name+"-")
			if index, err := strconv.Atoi(number); ok && err == nil {
				f(filepath.Join(folder, e.Name()), w, index)
			}
		}
	}
	return nil
}

// Sweep removes links to devices other than these: the devices are gone.
func Sweep(folder string, devices []Device) error {
	now := map[int]bool{}
	for _, d := range devices {
		now[d.Index] = true
	}
	var errs []error
	err := links(folder, func(path string, _ direction, index int) {
		if !now[index] {
			errs = append(errs, os.Remove(path))
		}
	})
	return errors.Join(append(errs, err)...)
}

// Lacking gives the devices that programs are not attached to.
func Lacking(folder string, devices []Device) (lacking []Device) {
	for _, d := range devices {
		for _, w := range d.directions() {
			if _, err := os.Lstat(d.pin(folder, w)); err != nil {
				lacking = append(lacking, d)
				break
			}
		}
	}
	return lacking
}

// AtDevices gives the digest of the programs for packets that are pinned in the folder, "" where there are none, and in words
// what is wrong where they, or those at devices, are not all of one digest, attached, and at work on these maps (nil:
// whichever).
func AtDevices(folder string, m *Maps) (digest string, err error) {
	p, err := OpenDevicePrograms(folder)
	if errors.Is(err, fs.ErrNotExist) {
		left := 0
		err = links(folder, func(string, direction, int) { left++ })
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
	err = links(folder, func(path string, w direction, index int) {
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
			// the device is gone, or somebody detached it: whoever attaches anew to devices that are there sees to that
		case !strings.HasSuffix(programName(i.Program), "_"+digest):
			wrong = fmt.Sprintf("%s has another program at device %d", w.name, index)
		}
	})
	if wrong != "" {
		return wrong, err
	}
	return digest, err
}

// KeepPods has the map of pods' devices, in a folder of maps, hold those of the devices that are some, as far as there is room: to others
// packets go through the node's stack. The programs there are those pinned in the folder of links.
func KeepPods(maps, links string, devices []Device) error {
	m, err := pinned[uint32, uint32](filepath.Join(maps, packetsMapPods))
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
		return fmt.Errorf("bpf: map %s: %w", packetsMapPods, err)
	}
	return nil
}

// KeepUplinks has the map of devices by which other Nodes are reached, in a folder of maps, hold these indices.
func KeepUplinks(maps string, devices map[int]bool) error {
	m, err := pinned[uint32, uint32](filepath.Join(maps, packetsMapUplinks))
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
		return fmt.Errorf("bpf: write map %s: %w", packetsMapUplinks, err)
	}
	return nil
}

// PlacesIn reads the prefixes in a folder of maps: see Maps.Places.
func PlacesIn(maps string, take func(netip.Prefix, uint32)) error {
	m, err := pinned[servicePrefix, uint32](filepath.Join(maps, serviceMapPlaces))
	if m == nil {
		return err
	}
	defer m.Close()
	return places(m, take)
}

// programID gives the ID of a pinned program, 0 where there is none.
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

// Detached gives the links to devices, by index, that are attached no more, though pinned.
func Detached(folder string) (gone map[int]bool, err error) {
	gone = map[int]bool{}
	err = links(folder, func(path string, _ direction, index int) {
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			gone[index] = gone[index] || device(l) != index
			l.Close()
		}
	})
	return gone, err
}

// ProbeDevices asks the kernel for what the programs for packets need besides, and gives an error that names what it lacks.
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
		errs = append(errs, fmt.Errorf("bpf: Linux %d.%d lacks links to devices (6.6) and source addresses in look-ups of routes (6.7)", major, minor))
	}
	return errors.Join(errs...)
})

// Preempts says whether this kernel is one whose work on packets may be preempted by other such work (PREEMPT_RT): then what programs keep by
// processor may change while they read it.
func Preempts() bool {
	var u unix.Utsname
	return unix.Uname(&u) != nil || strings.Contains(unix.ByteSliceToString(u.Version[:]), "PREEMPT_RT")
}

// release gives the kernel's version.
func release() (major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	}
	return major, minor
}
