package ebpf

import (
	"fmt"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/device"
	serviceplane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/nfhooks"
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
		r, err := device.ReadFastPath(d.maps, list, d.podNetwork)
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
		f = &serviceplane.FastPath{Devices: []string{}, AllReasons: texts(device.SlowReasons),
			IPv4: familyFastPath(unix.AF_INET, r.IPv4),
			IPv6: familyFastPath(unix.AF_INET6, r.IPv6)}
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

// familyFastPath returns the fast path of a family, with the names of netfilter's hooks where these keep it off.
func familyFastPath(family uint8, reasons []device.SlowReason) serviceplane.FamilyFastPath {
	f := serviceplane.FamilyFastPath{Enabled: len(reasons) == 0, Reasons: texts(reasons), Hooks: []string{}}
	if slices.Contains(reasons, device.SlowNetfilter) {
		names, _ := nfhooks.Forwarding(family) // before Linux 5.14, or without CONFIG_NETFILTER_NETLINK_HOOK: none
		f.Hooks = append(f.Hooks, names...)
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
