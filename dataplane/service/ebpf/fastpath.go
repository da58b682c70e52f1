package ebpf

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/nfhooks"
)

// SlowReasons are the reasons for which packets for pods stay on the node's stack.
var SlowReasons = bpf.SlowReasons

// FastPath is whether packets for pods are redirected past the node's stack, and what keeps them there.
type FastPath struct {
	IPv4    FamilyFastPath `json:"ipv4"`
	IPv6    FamilyFastPath `json:"ipv6"`
	Devices []string       `json:"excludedDevices"` // at which another program, a queue or a tap sees packets
}

// FamilyFastPath is the fast path of one family.
type FamilyFastPath struct {
	Enabled bool             `json:"enabled"`
	Reasons []bpf.SlowReason `json:"reasons"` // why not
	Hooks   []string         `json:"hooks"`   // of netfilter, such as "table ip nat chain POSTROUTING"
}

// String returns "on", or "off" and why.
func (f FamilyFastPath) String() string {
	if f.Enabled {
		return "on"
	}
	words := make([]string, len(f.Reasons))
	for i, r := range f.Reasons {
		words[i] = string(r)
		if r == bpf.SlowNetfilter && len(f.Hooks) > 0 {
			words[i] += fmt.Sprintf(" (%s)", strings.Join(f.Hooks, ", "))
		}
	}
	return "off: " + strings.Join(words, ", ")
}

// FastPath reports whether packets for pods are redirected; nil where no programs are at devices. It may be called at
// any time.
func (p *Plane) FastPath() (f *FastPath, err error) {
	d := p.devices
	if d == nil {
		return nil, nil
	}
	all, err := d.conn.Devices()
	if err != nil {
		return nil, err
	}
	list := []bpf.Device{}
	for _, i := range all {
		list = append(list, bpf.Device{Index: i.Index, Header: uint32(i.Header), Own: i.Loopback, Pod: i.Pod})
	}
	err = d.ns.Do(func() error {
		r, err := bpf.ReadFastPath(d.maps, list)
		if r == nil {
			return err
		}
		forwards, err := link.Get(d.ns, "ipv4/ip_forward")
		if err != nil {
			return err
		}
		if forwards != "1" {
			r.IPv4 = append(r.IPv4, bpf.SlowForwarding)
		}
		f = &FastPath{Devices: []string{}, IPv4: familyFastPath(unix.AF_INET, r.IPv4),
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
func familyFastPath(family uint8, reasons []bpf.SlowReason) FamilyFastPath {
	f := FamilyFastPath{Enabled: len(reasons) == 0, Reasons: append([]bpf.SlowReason{}, reasons...), Hooks: []string{}}
	if slices.Contains(reasons, bpf.SlowNetfilter) {
		names, _ := nfhooks.Forwarding(family) // before Linux 5.14, or without CONFIG_NETFILTER_NETLINK_HOOK: none
		f.Hooks = append(f.Hooks, names...)
	}
	return f
}
