package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Device is a network device of this node, and what the node's routes lead to by it.
type Device struct {
	Name   string
	Peer   bool           // one end of a pair, whose other end is in another network namespace: perhaps a pod's
	Bridge bool           // a bridge
	Hosts  []netip.Addr   // by routes to a single address on its link
	Links  []netip.Prefix // by other routes to its link
	Behind []netip.Prefix // by next hops there
	// Bypass is the setting of the kernel by which what a bridge forwards between its ports doesn't pass netfilter, of
	// IPv4 and IPv6; "": it does, or the device is no bridge.
	Bypass [2]string
}

// equal reports whether d and o say the same.
func (d *Device) equal(o *Device) bool {
	if d == nil || o == nil {
		return d == o
	}
	return d.Name == o.Name && d.Peer == o.Peer && d.Bridge == o.Bridge && d.Bypass == o.Bypass &&
		slices.Equal(d.Hosts, o.Hosts) && slices.Equal(d.Links, o.Links) && slices.Equal(d.Behind, o.Behind)
}

// The reasons of problems of devices that are not one pod's alone.
const (
	BridgeNotFiltered = "BridgeNotFiltered" // policies between pods of a bridge don't hold
	SourcesNotChecked = "SourcesNotChecked" // pods may send from addresses of others
)

// devices is by which devices pods are reached.
type devices struct {
	routed       map[string]*Device
	entries      map[netip.Addr]string    // the device of each host; those of several devices are left out
	parts        map[string]*model.Device // by name
	dirtyDevices map[string]struct{}
	ranges       []netip.Prefix     // of the node's pods, as the parts know them
	bridged      map[string]*[2]int // how many addresses of pods are reached by a bridge, by family
}

func newDevices() devices {
	return devices{routed: map[string]*Device{}, entries: map[netip.Addr]string{}, parts: map[string]*model.Device{},
		dirtyDevices: map[string]struct{}{}, bridged: map[string]*[2]int{}}
}

// SetDevices replaces Config.Devices. The next change has what follows from it.
func (r *Resolver) SetDevices(l []Device) {
	was, entered, bridges := r.routed, r.entries, false
	r.routed, r.entries = make(map[string]*Device, len(l)), entriesOf(l)
	for i := range l {
		r.routed[l[i].Name] = &l[i]
	}
	compare := func(a, b map[string]*Device) {
		for name, d := range a {
			if o := b[name]; !d.equal(o) {
				r.dirtyDevices[name] = struct{}{}
				bridges = bridges || d.Bridge
			}
		}
	}
	compare(was, r.routed)
	compare(r.routed, was)
	dirty := func(a netip.Addr) {
		if x := r.addressAt(a); x != nil && entered[a] != r.entries[a] {
			r.dirty(x)
		}
	}
	for a := range entered {
		dirty(a)
	}
	for a := range r.entries {
		dirty(a)
	}
	if bridges {
		r.staleProblems = true
		for x := range r.addresses.all() {
			if x.has().subject != nil {
				r.dirty(x)
			}
		}
	}
}

// entriesOf returns the device by which each host is reached. Hosts that several devices lead to are left out.
func entriesOf(l []Device) map[netip.Addr]string {
	entries, twice := map[netip.Addr]string{}, []netip.Addr(nil)
	for _, d := range l {
		for _, a := range d.Hosts {
			if _, there := entries[a]; there {
				twice = append(twice, a)
			}
			entries[a] = d.Name
		}
	}
	for _, a := range twice {
		delete(entries, a)
	}
	return entries
}

// familyOf returns 0 for IPv4 and 1 for IPv6.
func familyOf(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// bridgeOf returns the bridge by which a pod's address is reached, nil if by none.
func (r *Resolver) bridgeOf(a netip.Addr) (bridge *Device) {
	if name, there := r.entries[a]; there {
		if d := r.routed[name]; d.Bridge {
			return d
		}
		return nil
	}
	longest := -1
	for _, d := range r.routed {
		if !d.Bridge {
			continue
		}
		for _, p := range d.Links {
			if p.Contains(a) && (p.Bits() > longest || p.Bits() == longest && d.Name < bridge.Name) {
				bridge, longest = d, p.Bits()
			}
		}
	}
	return bridge
}

// updateBridge counts x as reached by a bridge, nil for none, and returns the name of one that bypasses netfilter.
func (r *Resolver) updateBridge(x *address, d *Device) (bypassed string) {
	name, family := "", familyOf(x.Addr)
	if d != nil {
		if name = d.Name; d.Bypass[family] != "" {
			bypassed = name
		}
	}
	if x.has().bridge == name {
		return bypassed
	}
	count := func(bridge string, n int) {
		if bridge == "" {
			return
		}
		if r.bridged[bridge] == nil {
			r.bridged[bridge] = &[2]int{}
		}
		r.bridged[bridge][family] += n
		r.staleProblems = true
	}
	count(x.has().bridge, -1)
	count(name, 1)
	x.set().bridge = name
	return bypassed
}

// updateDevices works out the parts of devices, given the ranges of the node's pods.
func (r *Resolver) updateDevices(ranges []netip.Prefix) {
	if !slices.Equal(r.ranges, ranges) {
		r.ranges = ranges
		for name := range r.routed {
			r.dirtyDevices[name] = struct{}{}
		}
	}
	for name := range r.dirtyDevices {
		was, now := r.parts[name], r.deviceAt(r.routed[name])
		if was.Equal(now) {
			continue
		}
		if delete(r.parts, name); was != nil {
			r.del(was)
		}
		if now != nil {
			r.parts[name] = now
			r.put(now)
		}
	}
	r.dirtyDevices = emptied(r.dirtyDevices)
}

// deviceAt returns the part of a device, nil if it isn't one pod's alone: what the node's routes lead to by it may come
// in by it, and nothing else. A pod that isn't known is one by its address.
func (r *Resolver) deviceAt(d *Device) *model.Device {
	if d == nil || !d.Peer || r.config.Audit {
		return nil
	}
	part, pods := &model.Device{Name: d.Name}, false
	for _, a := range d.Hosts {
		part.Sources = append(part.Sources, netip.PrefixFrom(a, a.BitLen()))
		if r.entries[a] != d.Name {
			continue
		}
		pods = pods || slices.ContainsFunc(r.ranges, func(p netip.Prefix) bool { return p.Contains(a) })
		if x := r.addressAt(a); x != nil && x.has().subject != nil {
			pod := x.rare.subject.Pod
			if part.Pod != "" && part.Pod != pod {
				return nil
			}
			part.Pod, pods = pod, true
		}
	}
	if !pods {
		return nil
	}
	part.Sources = disjoint(slices.Concat(part.Sources, d.Links, d.Behind))
	return part
}

// disjoint returns prefixes that hold the same addresses, sorted, none of which is in another.
func disjoint(l []netip.Prefix) (out []netip.Prefix) {
	slices.SortFunc(l, netip.Prefix.Compare) // a shorter one comes before those that it holds
	for _, p := range l {
		if n := len(out); n == 0 || !out[n-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}

// problems returns what doesn't hold for pods that share a bridge.
func (v *devices) problems(node string) (l []source.Problem) {
	add := func(reason, format string, args ...any) {
		l = append(l, source.Problem{Object: source.Key{Kind: source.Node, Name: node}, Reason: reason,
			Message: fmt.Sprintf(format, args...)})
	}
	for name, count := range v.bridged {
		d := v.routed[name]
		if d == nil || *count == [2]int{} {
			continue
		}
		var why []string
		for family, n := range count {
			if n > 0 && d.Bypass[family] != "" {
				why = append(why, d.Bypass[family])
			}
		}
		if len(why) > 0 {
			add(BridgeNotFiltered, "policies between pods on bridge %s are not enforced: it forwards without netfilter "+
				"(%s); load the module br_netfilter and set both settings to 1", name, strings.Join(why, "; "))
		}
		add(SourcesNotChecked, "pods on bridge %s share it: one that may send raw packets (CAP_NET_RAW) can pass for "+
			"another one, or for any other host; take that capability from them, or connect each by a device of its own", name)
	}
	return l
}
