package ebpf

import (
	"fmt"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	serviceplane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// FastPath reports whether packets for pods are redirected; nil where no programs are at devices. It may be called at
// any time.
func (p *Plane) FastPath() (f *serviceplane.FastPath, err error) {
	d := p.devices
	if d == nil {
		return nil, nil
	}
	all, err := d.conn.Devices()
	if err != nil {
		return nil, err
	}
	list := []device.Device{}
	for _, i := range all {
		list = append(list, device.Device{Index: i.Index, Header: uint32(i.Header), Own: i.Loopback, Pod: i.Pod})
	}
	err = d.ns.Do(func() error {
		r, err := device.ReadFastPath(d.maps, list, p.PodNetwork)
		if r == nil {
			return err
		}
		forwards, err := sysctl.Get(d.ns, "net/ipv4/ip_forward")
		if err != nil {
			return err
		}
		if forwards != "1" {
			r.IPv4 = append(r.IPv4, device.SlowForwarding)
		}
		hooks, err := device.ReadHooks(d.maps, p.PodNetwork)
		if err != nil {
			return err
		}
		f = &serviceplane.FastPath{Devices: []string{}, AllReasons: texts(device.SlowReasons),
			IPv4: familyFastPath(unix.AF_INET, r.IPv4, hooks),
			IPv6: familyFastPath(unix.AF_INET6, r.IPv6, hooks)}
		for _, i := range r.Devices {
			if device, err := net.InterfaceByIndex(i); err == nil { // else it is gone
				f.Devices = append(f.Devices, device.Name)
			}
		}
		slices.Sort(f.Devices)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ebpf: read the fast path: %w", err)
	}
	return f, nil
}

// familyFastPath returns the fast path of a family, with netfilter's hooks where these keep it off.
func familyFastPath(family uint8, reasons []device.SlowReason, hooks []device.Hook) serviceplane.FamilyFastPath {
	f := serviceplane.FamilyFastPath{Enabled: len(reasons) == 0, Reasons: texts(reasons), Hooks: []serviceplane.Hook{}}
	if !slices.Contains(reasons, device.SlowNetfilter) {
		return f
	}
	for _, h := range device.Acting(hooks, family) {
		owner, command := h.Owner()
		hook := serviceplane.Hook{Name: h.String(), Owner: owner, Command: command}
		if !slices.Contains(f.Hooks, hook) { // a function may be at several points of the stack
			f.Hooks = append(f.Hooks, hook)
		}
	}
	return f
}

func texts(reasons []device.SlowReason) []string {
	l := make([]string, len(reasons))
	for i, r := range reasons {
		l[i] = string(r)
	}
	return l
}
