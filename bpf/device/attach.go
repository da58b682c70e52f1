package device

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
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
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
func (p *Programs) Attach(folder string, devices ...Device) error {
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
func (p *Programs) AttachDevice(folder string, d Device, ingress bool) error {
	return p.attach(folder, d, directionOf(ingress))
}

func (p *Programs) attach(folder string, d Device, w direction) error {
	err := p.attachLink(folder, d, w)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("bpf: attach %s to device %d: %w", w.name, d.Index, bpf.Explain(err))
	}
	return nil
}

// attachLink attaches a program, or has the link that is there call it.
func (p *Programs) attachLink(folder string, d Device, w direction) error {
	pin, program := d.pin(folder, w), p.by[w.program(d.Header)]
	if program == nil {
		return fmt.Errorf("no program is loaded for a header of %d bytes", d.Header)
	}
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer l.Close()
		if ifindex(l) == d.Index {
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

// ifindex returns the index of the device to which a link is attached, 0 where it isn't any more.
func ifindex(l link.Link) int {
	i, err := l.Info()
	if err != nil || i.TCX() == nil {
		return 0
	}
	return int(i.TCX().Ifindex)
}

// Update has attachments at devices call these programs, in place of others of ours.
func (p *Programs) Update(folder string, devices map[int]Device, attached []Attachment) error {
	for _, a := range attached {
		if d, is := devices[a.Index]; is && !a.Detached {
			if err := p.AttachDevice(folder, d, a.Ingress); err != nil {
				return err
			}
		}
	}
	return nil
}

// Detach detaches our program from a device and direction. What is gone is no error.
func Detach(folder string, index int, ingress bool) error {
	w := directionOf(ingress)
	if err := bpf.Unpin(Device{Index: index}.pin(folder, w)); err != nil {
		return fmt.Errorf("bpf: detach %s from device %d: %w", w.name, index, err)
	}
	return nil
}

// Attachments returns what the links that are pinned in the folder stand for.
func Attachments(folder string) (l []Attachment, err error) {
	err = pins(folder, func(path string, w direction, index int) {
		a := Attachment{Index: index, Ingress: w.name == directions[1].name, Detached: true}
		if held, err := link.LoadPinnedLink(path, nil); err == nil {
			a.Detached = ifindex(held) != index
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
