package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Attachment is a device and a direction at which a program of ours is attached, or was.
type Attachment struct {
	Index    int
	Ingress  bool
	Detached bool // its link is there, but attached no more
}

// directionOf returns ingress or egress.
func directionOf(ingress bool) direction {
	if ingress {
		return directions[1]
	}
	return directions[0]
}

// Attach attaches the programs to devices of the calling thread's network namespace, as the first, in place of those
// whose links are pinned in the folder. They pass on the packets: other programs are called after them. Programs for
// egress come first, then those for ingress, those of the oldest device, which leads to other nodes, last: a flow that
// begins at one device needs them at the others. A device that is gone is no error.
func (p *DevicePrograms) Attach(folder string, devices ...Device) error {
	devices = slices.SortedFunc(slices.Values(devices), func(a, b Device) int { return cmp.Compare(b.Index, a.Index) })
	for _, w := range directions {
		for _, d := range devices {
			if !slices.Contains(d.directions(), w) {
				continue
			}
			if err := p.attach(folder, d, w); err != nil {
				return err
			}
		}
	}
	return nil
}

// AttachDevice is Attach for one device and direction.
func (p *DevicePrograms) AttachDevice(folder string, d Device, ingress bool) error {
	return p.attach(folder, d, directionOf(ingress))
}

func (p *DevicePrograms) attach(folder string, d Device, w direction) error {
	err := p.attachLink(folder, d, w)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("bpf: attach %s to device %d: %w", w.name, d.Index, explain(err))
	}
	return nil
}

// attachLink attaches a program, or has the link that is there call it.
func (p *DevicePrograms) attachLink(folder string, d Device, w direction) error {
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

// attachTCX attaches a program that may still be attached by a link that was closed: the kernel detaches those in the
// background (kernel/bpf/syscall.c, bpf_link_put), and attaches no program twice.
func attachTCX(o link.TCXOptions) (l link.Link, err error) {
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if l, err = link.AttachTCX(o); !errors.Is(err, unix.EEXIST) || time.Now().After(end) {
			return l, err
		}
	}
}

// device returns the index of the device to which a link is attached, 0 where it isn't any more.
func device(l link.Link) int {
	i, err := l.Info()
	if err != nil || i.TCX() == nil {
		return 0
	}
	return int(i.TCX().Ifindex)
}

// Update has attachments at devices call these programs, in place of others of ours.
func (p *DevicePrograms) Update(folder string, devices map[int]Device, attached []Attachment) error {
	for _, a := range attached {
		if d, is := devices[a.Index]; is && !a.Detached {
			if err := p.AttachDevice(folder, d, a.Ingress); err != nil {
				return err
			}
		}
	}
	return nil
}

// DetachDevice detaches our program from a device and direction. What is gone is no error.
func DetachDevice(folder string, index int, ingress bool) error {
	w := directionOf(ingress)
	if err := drop(Device{Index: index}.pin(folder, w)); err != nil {
		return fmt.Errorf("bpf: detach %s from device %d: %w", w.name, index, err)
	}
	return nil
}

// Attachments returns what the links that are pinned in the folder stand for.
func Attachments(folder string) (l []Attachment, err error) {
	err = pins(folder, func(path string, w direction, index int) {
		a := Attachment{Index: index, Ingress: w.name == directions[1].name, Detached: true}
		if held, err := link.LoadPinnedLink(path, nil); err == nil {
			a.Detached = device(held) != index
			held.Close()
		}
		l = append(l, a)
	})
	return l, err
}

// pins calls f with the pin of each link to a device in the folder, and the index in its name.
func pins(folder string, f func(path string, w direction, index int)) error {
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

// expeditedFiles are where the setting may be by which all waits for an RCU grace period are expedited: as a
// container has it, and as a host.
var expeditedFiles = []string{"/run/fairlead/rcu_expedited", "/sys/kernel/rcu_expedited"}

// expeditedMark is the folder, in that of all pins, that marks the setting as ours while it is set.
const expeditedMark = "rcu-expedited"

// expediting is held while the setting is ours.
var expediting sync.Mutex

// Expedited calls f while the kernel expedites waits for an RCU grace period, as it does by itself for most that hold
// the RTNL lock (synchronize_net). Attaching by tcx waits for one under that lock, but not so (tcx_entry_sync): it is
// held for a tenth of the time then. Where the setting can't be written, as in a container whose sysfs is read-only,
// f is called all the same. One call waits for another.
func Expedited(f func() error) error {
	expediting.Lock()
	defer expediting.Unlock()
	file := expeditedFiles[len(expeditedFiles)-1]
	if _, err := os.Lstat(expeditedFiles[0]); err == nil {
		file = expeditedFiles[0]
	}
	return expedited(file, filepath.Join(base(), expeditedMark), f)
}

// expedited is Expedited, with the setting's file and the folder that marks it as ours.
func expedited(file, mark string, f func() error) error {
	was, err := os.ReadFile(file)
	if err != nil {
		return f()
	}
	if _, err := os.Lstat(mark); err != nil && strings.TrimSpace(string(was)) != "0" {
		return f() // it is set, and not by us
	}
	if err := os.Mkdir(mark, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return f()
	}
	if err := os.WriteFile(file, []byte("1"), 0); err != nil {
		return errors.Join(f(), drop(mark))
	}
	defer func() {
		if os.WriteFile(file, []byte("0"), 0) == nil {
			drop(mark)
		}
	}()
	return f()
}
