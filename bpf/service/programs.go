package service

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// hook is a cgroup hook at which one of our programs is attached.
type hook struct {
	name, short string
	attach      ebpf.AttachType
}

// hooks are all of them, in the order in which they are attached: those that translate back come before those that
// translate.
var hooks = []hook{
	{"release", "re", ebpf.AttachCgroupInetSockRelease},
	{"recvmsg4", "r4", ebpf.AttachCGroupUDP4Recvmsg}, {"recvmsg6", "r6", ebpf.AttachCGroupUDP6Recvmsg},
	{"getpeername4", "p4", ebpf.AttachCgroupInet4GetPeername}, {"getpeername6", "p6", ebpf.AttachCgroupInet6GetPeername},
	{"sendmsg4", "s4", ebpf.AttachCGroupUDP4Sendmsg}, {"sendmsg6", "s6", ebpf.AttachCGroupUDP6Sendmsg},
	{"connect4", "c4", ebpf.AttachCGroupInet4Connect}, {"connect6", "c6", ebpf.AttachCGroupInet6Connect},
}

// Options are the programs' constants, and the cgroup whose sockets they see.
type Options struct {
	Node   uint64 // the cookie of the node's network namespace
	Cgroup string // folder
	// OwnByPackets leaves a socket whose backend is the client itself to the programs at devices.
	OwnByPackets bool
}

// Digest returns a digest of the programs on maps of a layout, with these constants.
func Digest(layout string, o Options) (string, error) {
	cgroup, err := cgroupID(o.Cgroup)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(_ServiceBytes)
	fmt.Fprint(h, layout, o.Node, cgroup, o.OwnByPackets)
	return fmt.Sprintf("%x", h.Sum(nil)[:4]), nil
}

// cgroupID returns a cgroup's number, as links have it: its folder's inode.
func cgroupID(path string) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return 0, fmt.Errorf("bpf: cgroup %s: %w", path, err)
	}
	return s.Ino, nil
}

// programName is what bpftool shows; the kernel stores 15 bytes.
func (h hook) programName(digest string) string { return "fl_" + h.short + "_" + digest }

// Programs are loaded programs, not yet attached.
type Programs struct {
	digest string
	by     map[string]*ebpf.Program
	maps   *Maps
}

// Load loads the programs to work on maps.
func (m *Maps) Load(o Options) (*Programs, error) {
	digest, err := Digest(m.layout, o)
	if err != nil {
		return nil, err
	}
	c, err := spec(m.sizes)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(c.Variables["node_namespace"].Set(o.Node),
		c.Variables["own_by_packets"].Set(bpf.Flag(o.OwnByPackets))); err != nil {
		return nil, fmt.Errorf("bpf: set the programs' constants: %w", err)
	}
	for _, h := range hooks {
		c.Programs[h.name].Name = h.programName(digest)
	}
	all, err := m.named.Load(c)
	if err != nil {
		return nil, fmt.Errorf("bpf: load the programs: %w", bpf.Explain(err))
	}
	p := &Programs{digest: digest, by: map[string]*ebpf.Program{}, maps: m}
	for _, h := range hooks {
		p.by[h.name] = all.DetachProgram(h.name)
	}
	all.Close()
	return p, nil
}

// Close closes the programs; attached, they stay.
func (p *Programs) Close() {
	for _, prog := range p.by {
		prog.Close()
	}
}

// Attach attaches the programs to a cgroup, in place of those whose links are pinned in the folder. Each of the hooks
// changes over at once, and stays attached when this process ends. After an error nothing is attached that was not
// before.
func (p *Programs) Attach(folder, cgroup string) (err error) {
	if err := bpf.MakeFolder(folder); err != nil {
		return err
	}
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	var made []string
	defer func() {
		if err != nil {
			err = errors.Join(append([]error{err}, remove(folder, made)...)...)
		}
	}()
	for _, h := range hooks {
		was, err := h.attach1(p.by[h.name], folder, cgroup, id)
		if err != nil {
			return fmt.Errorf("bpf: attach %s to cgroup %s: %w", h.name, cgroup, bpf.Explain(err))
		}
		if err := h.pinProgram(p.by[h.name], folder); err != nil {
			return err
		}
		if was {
			continue
		}
		made = append(made, h.name)
		if h.name == "release" {
			if err := p.maps.forgetSockets(); err != nil {
				return err
			}
		}
	}
	return nil
}

// attach1 attaches one program; was reports whether it replaced another.
func (h hook) attach1(p *ebpf.Program, folder, cgroup string, id uint64) (was bool, err error) {
	pin := filepath.Join(folder, h.name)
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer l.Close()
		if at(l) == id {
			return true, l.Update(p)
		}
		if err := os.Remove(pin); err != nil {
			return true, err
		}
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: h.attach, Program: p})
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: programs are attached there that allow no others beside them: %s; detach them with "+
				"`bpftool cgroup detach`, or end whoever attached them", err, strings.Join(h.others(cgroup), ", "))
		}
		return false, err
	}
	defer l.Close()
	return false, l.Pin(pin)
}

// pinProgram pins a program beside its link: opening the program of a link by its ID needs CAP_SYS_ADMIN.
func (h hook) pinProgram(p *ebpf.Program, folder string) error {
	path := filepath.Join(folder, bpf.ProgramPrefix+h.name)
	if p.IsPinned() {
		return nil
	}
	err := bpf.Unpin(path)
	if err == nil {
		err = p.Pin(path)
	}
	if err != nil {
		return fmt.Errorf("bpf: pin program %s: %w", h.name, err)
	}
	return nil
}

// program returns the name of the program of that ID and the maps that it uses: the one that is pinned in the folder,
// or any.
func (h hook) program(folder string, id ebpf.ProgramID) (name string, maps []ebpf.MapID) {
	p, err := ebpf.LoadPinnedProgram(filepath.Join(folder, bpf.ProgramPrefix+h.name), nil)
	if err != nil {
		return bpf.ProgramOf(id)
	}
	defer p.Close()
	i, err := p.Info()
	if err != nil {
		return "?", nil
	}
	if its, _ := i.ID(); its != id {
		return bpf.ProgramOf(id)
	}
	maps, _ = i.MapIDs()
	return i.Name, maps
}

// at returns the cgroup to which a link is attached, 0 where it isn't any more.
func at(l link.Link) uint64 {
	i, err := l.Info()
	if err != nil || i.Cgroup() == nil {
		return 0
	}
	return i.Cgroup().CgroupId
}

// others returns the names of the programs that are attached to a cgroup beside ours.
func (h hook) others(cgroup string) (names []string) {
	f, err := os.Open(cgroup)
	if err != nil {
		return nil
	}
	defer f.Close()
	list, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: h.attach})
	if err != nil {
		return nil
	}
	for _, a := range list.Programs {
		if n := bpf.ProgramName(a.ID); !strings.HasPrefix(n, "fl_") {
			names = append(names, fmt.Sprintf("program %d (%s)", a.ID, n))
		}
	}
	return names
}

// remove removes links: those that translate before those that translate back.
func remove(folder string, names []string) (errs []error) {
	for _, n := range slices.Backward(names) {
		if err := os.Remove(filepath.Join(folder, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("bpf: detach %s: %w", n, err))
		}
		if err := bpf.Unpin(filepath.Join(folder, bpf.ProgramPrefix+n)); err != nil {
			errs = append(errs, fmt.Errorf("bpf: unpin program %s: %w", n, err))
		}
	}
	return errs
}

// Detach detaches the programs whose links are pinned in the folder, and removes it.
func Detach(folder string) error {
	var names []string
	for _, h := range hooks {
		names = append(names, h.name)
	}
	if errs := remove(folder, names); len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("bpf: remove links: %w", err)
	}
	return nil
}

// Attached returns the digest of the programs whose links are pinned in the folder, "" where there are none, and a
// description of the difference where they are not all of one digest, attached, and at work on these maps (nil: any).
func Attached(folder string, m *Maps) (string, error) {
	digest, missing := "", 0
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(filepath.Join(folder, h.name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			missing++
			continue
		}
		if err != nil {
			return "", fmt.Errorf("bpf: read link %s: %w", h.name, err)
		}
		i, err := l.Info()
		here := at(l) != 0
		l.Close()
		if err != nil {
			return "", fmt.Errorf("bpf: read link %s: %w", h.name, err)
		}
		name, maps := h.program(folder, i.Program)
		d, ours := strings.CutPrefix(name, "fl_"+h.short+"_")
		switch {
		case m != nil && ours && !m.named.Serves(maps):
			return h.name + " works on other maps", nil
		case !here:
			return h.name + " is detached", nil
		case !ours, digest != "" && d != digest:
			return h.name + " has another program", nil
		}
		digest = d
	}
	switch {
	case missing == len(hooks):
		return "", nil
	case missing > 0:
		return fmt.Sprintf("%d hooks are missing", missing), nil
	}
	return digest, nil
}

// Runs returns the statistics of the programs whose links are pinned in the folder.
func Runs(folder string) (runs []bpf.Run, err error) {
	for _, h := range hooks {
		p, err := hooked(filepath.Join(folder, h.name))
		if err != nil {
			return nil, fmt.Errorf("bpf: open the program of %s: %w", h.name, err)
		}
		r, err := bpf.RunOf(h.name, p)
		if err != nil {
			return nil, err
		}
		runs = append(runs, r)
	}
	return runs, nil
}

// hooked opens the program that a pinned link leads to.
func hooked(pin string) (*ebpf.Program, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	i, err := l.Info()
	if err != nil {
		return nil, err
	}
	return ebpf.NewProgramFromID(i.Program)
}
