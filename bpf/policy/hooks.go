package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// hook is a hook of netfilter at which the program is attached.
type hook struct {
	name   string
	family link.NetfilterProtocolFamily
	number link.NetfilterInetHook
}

// hooks are all of them, in the order in which they are attached: what the node itself sends is seen before its
// answers are.
var hooks = []hook{
	{"output4", link.NetfilterProtoIPv4, link.NetfilterInetLocalOut},
	{"output6", link.NetfilterProtoIPv6, link.NetfilterInetLocalOut},
	{"input4", link.NetfilterProtoIPv4, link.NetfilterInetLocalIn},
	{"input6", link.NetfilterProtoIPv6, link.NetfilterInetLocalIn},
	{"forward4", link.NetfilterProtoIPv4, link.NetfilterInetForward},
	{"forward6", link.NetfilterProtoIPv6, link.NetfilterInetForward},
}

// Priorities at a hook, from the one of netfilter's filter tables on. No two programs may have the same one.
const (
	firstPriority = 0
	lastPriority  = 49
)

// Names of pins beside those of links.
const (
	Pinned     = "program"   // at netfilter's hooks
	PathPinned = "fast_path" // what the programs at devices call
	nextPin    = "next"      // of what is to replace another
)

// Folder returns the folder for the network policies of the calling thread's network namespace, beside that of
// Services.
func Folder() (string, error) {
	path, _, err := bpf.Folder()
	return filepath.Join(filepath.Dir(path), "policy-"+filepath.Base(path)), err
}

// Hooks returns the folder for links to the hooks of netfilter, and the programs, in the folder of network policies.
func Hooks(folder string) string { return filepath.Join(folder, "hooks") }

// Program is the loaded program of network policies: at netfilter's hooks, and in the fast path.
type Program struct {
	program *ebpf.Program
	path    *ebpf.Program // nil where the kernel has no programs at devices
}

// Close closes the program; attached, it stays.
func (p *Program) Close() error {
	if p.path == nil {
		return p.program.Close()
	}
	return errors.Join(p.program.Close(), p.path.Close())
}

// Attach attaches the program to the hooks of the calling thread's network namespace, in place of one whose links are
// pinned in the folder: the new one is attached before the old one is detached, and both decide alike. After an error
// nothing is attached that was not before, unless it replaced another.
func (p *Program) Attach(folder string) (err error) {
	if err := bpf.MakeFolder(folder); err != nil {
		return err
	}
	var made []string
	defer func() {
		if err != nil {
			err = errors.Join(err, detach(made))
		}
	}()
	for _, h := range hooks {
		pin := filepath.Join(folder, h.name)
		_, known := os.Lstat(pin)
		if err := h.attach(p.program, folder, pin); err != nil {
			return fmt.Errorf("bpf: attach network policies at %s: %w", h.name, bpf.Explain(err))
		}
		if known != nil {
			made = append(made, pin)
		}
	}
	err = pinAs(p.program, folder, Pinned)
	if err == nil && p.path != nil {
		err = pinAs(p.path, folder, PathPinned)
	}
	if err != nil {
		return fmt.Errorf("bpf: pin the program of network policies: %w", err)
	}
	return nil
}

// pinAs pins a program in the folder, in place of one of that name.
func pinAs(p *ebpf.Program, folder, name string) error {
	next := filepath.Join(folder, nextPin)
	return errors.Join(bpf.Unpin(next), p.Pin(next), os.Rename(next, filepath.Join(folder, name)))
}

// attach attaches the program at a hook and pins the link, in place of the one that is there.
func (h hook) attach(p *ebpf.Program, folder, pin string) error {
	next := filepath.Join(folder, nextPin)
	if err := bpf.Unpin(next); err != nil {
		return err
	}
	o := link.NetfilterOptions{Program: p, ProtocolFamily: h.family, Hook: h.number, Priority: firstPriority}
	l, err := link.AttachNetfilter(o)
	for errors.Is(err, unix.EBUSY) && o.Priority < lastPriority {
		o.Priority++
		l, err = link.AttachNetfilter(o)
	}
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Pin(next); err != nil {
		return err
	}
	return os.Rename(next, pin)
}

// detach detaches what is pinned. What isn't there is no error.
func detach(pins []string) error {
	var errs []error
	for _, pin := range pins {
		if err := bpf.Unpin(pin); err != nil {
			errs = append(errs, fmt.Errorf("bpf: detach network policies: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Detach detaches the program whose links are pinned in the folder, and removes it.
func Detach(folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("bpf: detach network policies: %w", err)
	}
	return nil
}

// Attached returns the digest of the program whose links are pinned in the folder, "" where there are none, and a
// description of the difference where they are not all of one program that works on these maps (nil: any).
func Attached(folder string, m *Maps) (string, error) {
	p, err := ebpf.LoadPinnedProgram(filepath.Join(folder, Pinned), nil)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("bpf: open the program of network policies: %w", err)
	}
	id, digest := ebpf.ProgramID(0), "another program"
	if err == nil {
		defer p.Close()
		i, err := p.Info()
		if err != nil {
			return "", fmt.Errorf("bpf: read the program of network policies: %w", err)
		}
		id, _ = i.ID()
		maps, _ := i.MapIDs()
		d, ours := strings.CutPrefix(i.Name, programPrefix)
		if digest = d; !ours || m != nil && !m.named.Serves(maps) {
			digest = "a program on other maps"
		}
	}
	missing := 0
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
		l.Close()
		if err != nil {
			return "", fmt.Errorf("bpf: read link %s: %w", h.name, err)
		}
		if i.Program != id {
			digest = h.name + " has another program"
		}
	}
	switch missing {
	case len(hooks):
		return "", nil
	case 0:
		return digest, nil
	}
	return fmt.Sprintf("%d hooks are missing", missing), nil
}
