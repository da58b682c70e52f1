// Package device is the plane of what is attached to the node's network devices: exactly one program of ours stands at
// a device and direction (bpf/device/device.c). Services, policies and the pod network own its maps; the attachments
// are here.
//
// A fact is a device and direction, attached:
//
//	egress of device 3     a tcx link pinned as devices/leave-3
//	ingress of device 3    a tcx link pinned as devices/arrive-3
//
// Whoever owns the maps loads the programs and pins them beside the links (Programs), and has what is attached call
// others (Update). Attaching holds the kernel's RTNL lock, and is expedited (docs/adr/0020).
package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// Key names a device and a direction.
type Key struct {
	Index   int
	Ingress bool
}

// Rank implements dataplane.Key: replies are translated before what they reply to.
func (k Key) Rank() int {
	if k.Ingress {
		return 1
	}
	return 0
}

// String returns such as "ingress of device 3".
func (k Key) String() string {
	if k.Ingress {
		return fmt.Sprint("ingress of device ", k.Index)
	}
	return fmt.Sprint("egress of device ", k.Index)
}

// Values of facts. No part needs what others have detached, though its pin is there.
const (
	attached = "attached"
	detached = "detached"
)

// Fact is a fact of this plane.
type Fact = dataplane.Fact[Key, string]

// Plane attaches programs to the devices of one network namespace. It implements dataplane.Plane[*model.Link, Key,
// string] and dataplane.Cleaner.
type Plane struct {
	// Programs opens the programs for devices, loading those that are missing.
	Programs func(devices []device.Device) (*device.Programs, error)

	folder string // of pins
	ns     *netns.Namespace
	conn   *link.Conn
}

var (
	_ dataplane.Plane[*model.Link, Key, string] = (*Plane)(nil)
	_ dataplane.Cleaner                         = (*Plane)(nil)
)

// Open opens the plane of the calling thread's network namespace, whose pins are in a folder.
func Open(folder string) (*Plane, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	conn, err := link.Dial(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &Plane{folder: folder, ns: ns, conn: conn}, nil
}

// Close closes the plane's handles. What is attached stays.
func (p *Plane) Close() error {
	p.conn.Close()
	return p.ns.Close()
}

// Render implements dataplane.Plane. Of the loopback device only egress is handled: what enters there has left there.
func (p *Plane) Render(l *model.Link) []Fact {
	facts := []Fact{{Key: Key{Index: l.Index}, Value: attached}}
	if !l.Loopback {
		facts = append(facts, Fact{Key: Key{Index: l.Index, Ingress: true}, Value: attached})
	}
	return facts
}

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) (facts []Fact, err error) {
	list, err := device.Attachments(p.folder)
	for _, a := range list {
		f := Fact{Key: Key{Index: a.Index, Ingress: a.Ingress}, Value: attached}
		if a.Detached {
			f.Value = detached
		}
		facts = append(facts, f)
	}
	return facts, err
}

// Devices returns the namespace's devices, by index.
func (p *Plane) Devices() (map[int]device.Device, error) {
	all, err := p.conn.Devices()
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	devices := map[int]device.Device{}
	for _, d := range all {
		devices[d.Index] = device.Device{Index: d.Index, Header: uint32(d.Header), Own: d.Loopback, Pod: d.Pod}
	}
	return devices, nil
}

// Write implements dataplane.Plane. Of devices that are gone nothing is attached, and that is no error. Egress comes
// before ingress, and of each the oldest device, which leads to other nodes, last: a flow that begins at one device
// needs the programs at the others.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	stays := map[Key]bool{}
	for _, f := range put {
		stays[f.Key] = true
	}
	if err := p.put(put); err != nil {
		return err
	}
	for _, f := range del {
		if stays[f.Key] {
			continue
		}
		if err := device.Detach(p.folder, f.Key.Index, f.Key.Ingress); err != nil {
			return err
		}
	}
	return nil
}

// put attaches the programs of facts. Those that fail are refused, the others not.
func (p *Plane) put(put []Fact) error {
	if len(put) == 0 {
		return nil
	}
	devices, err := p.Devices()
	if err != nil {
		return err
	}
	put = slices.SortedFunc(slices.Values(put), func(a, b Fact) int {
		return cmp.Or(cmp.Compare(a.Key.Rank(), b.Key.Rank()), cmp.Compare(b.Key.Index, a.Key.Index))
	})
	var list []device.Device
	for _, f := range put {
		if d, is := devices[f.Key.Index]; is {
			list = append(list, d)
		}
	}
	if len(list) == 0 {
		return nil
	}
	programs, err := p.Programs(list)
	if err != nil {
		return err
	}
	defer programs.Close()
	refused := map[Key]error{}
	err = p.do(func() error {
		for _, f := range put {
			d, is := devices[f.Key.Index]
			if !is {
				continue
			}
			if err := programs.AttachDevice(p.folder, d, f.Key.Ingress); err != nil {
				refused[f.Key] = err
			}
		}
		return nil
	})
	if err == nil && len(refused) > 0 {
		return &dataplane.Refused[Key]{Facts: refused}
	}
	return err
}

// do calls f in the namespace, while waits of the kernel are expedited.
func (p *Plane) do(f func() error) error {
	return p.ns.Do(func() error { return bpf.Expedited(f) })
}

// Update has all that is attached call other programs.
func (p *Plane) Update(programs *device.Programs) error {
	devices, err := p.Devices()
	if err != nil {
		return err
	}
	list, err := device.Attachments(p.folder)
	if err != nil {
		return err
	}
	return p.do(func() error { return programs.Update(p.folder, devices, list) })
}

// Clean implements dataplane.Cleaner.
func (p *Plane) Clean(context.Context) error {
	list, err := device.Attachments(p.folder)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range list {
		errs = append(errs, device.Detach(p.folder, a.Index, a.Ingress))
	}
	return errors.Join(errs...)
}
