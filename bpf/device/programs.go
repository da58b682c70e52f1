package device

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
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

// program names a program, and its pin behind bpf.ProgramPrefix.
func (w direction) program(header uint32) string { return fmt.Sprintf("%s-%d", w.name, header) }

// Programs are the programs for packets at devices.
type Programs struct {
	digest string
	by     map[string]*ebpf.Program // by direction.program
}

// Options are the programs' constants, but for the length of a device's header.
type Options struct {
	// nodes pass original destinations to each other, so that a backend's node answers the client directly
	DSR         bool
	ReversePath bool // a flow begins only if the route back to its source leads to the device that its packet came from
	// the pod network is Fairlead's own: programs masquerade what pods send out of the ranges of MasqueradeRanges, and
	// the hook of its source validation doesn't keep the fast path off
	PodNetwork bool
}

// Digest returns a digest of those programs with these constants and maps of these sizes.
func Digest(s service.Sizes, o Options) (string, error) {
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
func (m *Maps) LoadForDevices(o Options, lengths ...uint32) (*Programs, error) {
	digest, err := Digest(m.sizes, o)
	if err != nil {
		return nil, err
	}
	p := &Programs{digest: digest, by: map[string]*ebpf.Program{}}
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
		return nil, fmt.Errorf("bpf: load the programs for packets: %w", bpf.Explain(err))
	}
	return p, nil
}

// load loads the programs for one length of headers.
func (p *Programs) load(m *Maps, o Options, header uint32) (*ebpf.Collection, error) {
	c, err := spec(m.sizes)
	if err != nil {
		return nil, err
	}
	constants := map[string]uint32{"l2_len": header, "dsr": bpf.Flag(o.DSR), "reverse_path": bpf.Flag(o.ReversePath),
		"pod_network": bpf.Flag(o.PodNetwork)}
	for name, value := range constants {
		if err := c.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	delete(c.Programs, fastPathName)
	delete(c.Programs, hookProgram)
	for _, w := range directions {
		c.Programs[w.name].Name = w.programName(header, p.digest)
	}
	return m.named.Load(c)
}

// Pin pins the programs in a folder, in place of those there for the same devices, for devices that are to come.
func (p *Programs) Pin(folder string) error {
	if err := bpf.MakeFolder(folder); err != nil {
		return err
	}
	for name, program := range p.by {
		path := filepath.Join(folder, bpf.ProgramPrefix+name)
		if program.IsPinned() {
			continue
		}
		if err := bpf.Unpin(path); err != nil {
			return fmt.Errorf("bpf: pin program %s: %w", name, err)
		}
		if err := program.Pin(path); err != nil {
			return fmt.Errorf("bpf: pin program %s: %w", name, err)
		}
	}
	return nil
}

// Unpin removes the programs in the folder for devices that these are not for.
func (p *Programs) Unpin(folder string) (err error) {
	for _, w := range directions {
		for _, header := range headers {
			if name := w.program(header); p.by[name] == nil {
				err = errors.Join(err, bpf.Unpin(filepath.Join(folder, bpf.ProgramPrefix+name)))
			}
		}
	}
	return err
}

// OpenPrograms opens what Pin has pinned. Where there is nothing, or half of a pair, the error is an
// fs.ErrNotExist.
func OpenPrograms(folder string) (*Programs, error) {
	p := &Programs{by: map[string]*ebpf.Program{}}
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
func (p *Programs) open(folder string, header uint32) error {
	var errs []error
	absent := 0
	for _, w := range directions {
		program, err := ebpf.LoadPinnedProgram(filepath.Join(folder, bpf.ProgramPrefix+w.program(header)), nil)
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
func (p *Programs) Digest() string { return p.digest }

// Add loads programs for those devices that there are none for yet, to work on the maps in the folder.
func (p *Programs) Add(devices []Device, folder string, s service.Sizes, o Options) error {
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
func (p *Programs) Close() {
	for _, program := range p.by {
		program.Close()
	}
}

// Attached returns the digest of the programs for packets that are pinned in the folder, "" where there are none,
// and a description of the difference where they, or those at devices, are not all of one digest, attached, and at
// work on these maps (nil: any).
func Attached(folder string, m *Maps) (digest string, err error) {
	p, err := OpenPrograms(folder)
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
			if m != nil && !m.named.Serves(ids) {
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
		case !strings.HasSuffix(bpf.ProgramName(i.Program), "_"+digest):
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
	m, err := bpf.Pinned[uint32, uint32](filepath.Join(maps, pinNames[deviceMapFlPods]))
	if m == nil {
		return err
	}
	defer m.Close()
	leave, err := bpf.ProgramID(filepath.Join(links, bpf.ProgramPrefix+directions[0].program(headers[0])))
	if err != nil {
		return err
	}
	wanted, gone := map[uint32]bool{}, []uint32{}
	for _, d := range devices {
		if d.Pod {
			wanted[uint32(d.Index)] = true
		}
	}
	err = bpf.ReadAll(m, func(index, id uint32) {
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
	if err != nil && !bpf.Full(err) {
		return fmt.Errorf("bpf: map %s: %w", deviceMapFlPods, err)
	}
	return nil
}

// WriteUplinks has the map of devices by which other Nodes are reached, in a folder of maps, hold these indices.
func WriteUplinks(maps string, devices map[int]bool) error {
	m, err := bpf.Pinned[uint32, uint32](filepath.Join(maps, pinNames[deviceMapFlUplinks]))
	if m == nil {
		return err
	}
	defer m.Close()
	var gone []uint32
	err = bpf.ReadAll(m, func(index, _ uint32) {
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

// Runs returns the statistics of the programs that are pinned in the folder, if there are some.
func Runs(folder string) (runs []bpf.Run, err error) {
	p, err := OpenPrograms(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, w := range directions {
		for _, header := range headers {
			name := w.program(header)
			if p.by[name] == nil {
				continue
			}
			r, err := bpf.RunOf(name, p.by[name])
			if err != nil {
				return nil, err
			}
			runs = append(runs, r)
		}
	}
	return runs, nil
}
