package attachment

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Plane writes facts into one network namespace, and the insides of pods. It implements
// dataplane.Plane[model.NetworkPart, Key, Value], dataplane.Joiner, dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	ns      *netns.Namespace
	s       *netlink.Socket
	devices atomic.Pointer[map[int]link.Veth] // those of pods' routes, by interface index, as first read or last written
}

var (
	_ dataplane.Plane[model.NetworkPart, Key, Value] = (*Plane)(nil)
	_ dataplane.Joiner[model.NetworkPart]            = (*Plane)(nil)
	_ dataplane.Watcher                              = (*Plane)(nil)
	_ dataplane.Cleaner                              = (*Plane)(nil)
)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	p := &Plane{ns: ns, s: s}
	p.devices.Store(&map[int]link.Veth{})
	return p, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error { return errors.Join(p.s.Close(), p.ns.Close()) }

// own returns this package's devices by interface index, but those that are released. For Watch it records those not
// known yet, with the node's own child of the uplink: what others change of a known one, Watch has to report.
func (p *Plane) own() (map[int]link.Veth, error) {
	all, err := link.Veths(p.s, "")
	if err != nil {
		return nil, err
	}
	known, watched := *p.devices.Load(), map[int]link.Veth{}
	for index, v := range all {
		own := strings.HasPrefix(v.Alias, alias) && v.Group != link.ReleasedGroup
		if !own {
			delete(all, index)
		}
		if own || isChild(v) {
			if was := known[index]; was.Name == v.Name {
				v = was
			}
			watched[index] = v
		}
	}
	p.devices.Store(&watched)
	return all, nil
}

// isChild reports whether a device is the node's own child of the uplink.
func isChild(v link.Veth) bool { return v.Kind == link.KindIPVLAN && v.Name == model.ChildDevice }

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) (l []Fact, err error) {
	devices, err := p.own()
	if err != nil {
		return nil, err
	}
	for _, v := range devices {
		f := Fact{Key: Key{Kind: KindDevice, Device: v.Name}, Value: Value{Alias: v.Alias, MAC: v.MAC, MTU: v.MTU}}
		switch {
		case !v.Up:
			f.Value.Other = "down"
		case v.Group != link.PodGroup || !v.NoARP:
			f.Value.Other = fmt.Sprintf("of group %d, ARP %t", v.Group, !v.NoARP)
		}
		l = append(l, f)
	}
	settings, err := p.settings(devices)
	if err != nil {
		return nil, err
	}
	buckets, err := link.Buckets(p.s)
	if err != nil {
		return nil, err
	}
	for _, t := range buckets {
		if v, own := devices[t.Dev]; own {
			l = append(l, Fact{Key: Key{Kind: KindLimit, Device: v.Name}, Value: Value{Rate: t.Rate}})
		}
	}
	neighbours, err := link.Neighbours(p.s, 0)
	if err != nil {
		return nil, err
	}
	for _, n := range neighbours {
		if v, own := devices[n.Dev]; own {
			l = append(l, Fact{Key: Key{Kind: KindNeighbour, Device: v.Name, Addr: n.Addr}, Value: Value{MAC: n.MAC}})
		}
	}
	watched := *p.devices.Load()
	routes, err := route.List(p.s, Protocol)
	seen := map[netip.Addr]bool{}
	for _, r := range routes {
		f := Fact{Key: Key{Kind: KindRoute, Addr: r.To.Addr()}, Value: Value{Device: watched[r.Dev].Name}}
		if !r.IsMain() || r.Via.IsValid() || !r.To.IsSingleIP() {
			f.Value.Other = r.String()
		}
		if !seen[f.Key.Addr] {
			l = append(l, f)
		}
		seen[f.Key.Addr] = true
	}
	return append(l, settings...), err
}

// acceptRA returns the name of the setting by which a device learns from router advertisements.
func acceptRA(device string) string { return "net/ipv6/conf/" + device + "/accept_ra" }

// settings reads the devices' settings. Where the kernel has no IPv6, its are as wanted.
func (p *Plane) settings(devices map[int]link.Veth) (l []Fact, err error) {
	err = p.ns.Do(func() error {
		for _, v := range devices {
			var other []string
			if n, err := sysctl.Number(acceptRA(v.Name)); err == nil && n != 0 {
				other = append(other, fmt.Sprintf("accept_ra %d", n))
			}
			if n, err := sysctl.Number(network.Forwarding(v.Name)); err == nil && n == 0 {
				other = append(other, "forwarding off")
			}
			l = append(l, Fact{Key: Key{Kind: KindSetting, Device: v.Name}, Value: Value{Other: strings.Join(other, ", ")}})
		}
		return nil
	})
	return l, err
}

// Write implements dataplane.Plane.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	w := &writer{Plane: p, held: map[Key]bool{}, put: map[Key]bool{}, made: map[string]link.Veth{}}
	for _, f := range del {
		w.held[f.Key] = true
	}
	for kind := KindDevice; kind <= KindRoute; kind++ {
		for _, f := range put {
			if f.Key.Kind == kind {
				w.put[f.Key] = true
				w.make(f)
			}
		}
		if err := w.Run(p.s); err != nil {
			return err
		}
		if kind == KindDevice {
			if err := w.find(slices.Concat(put, del)); err != nil {
				return err
			}
		}
	}
	for kind := int(KindRoute); kind >= int(KindDevice); kind-- {
		for _, f := range del {
			if int(f.Key.Kind) == kind && !w.put[f.Key] {
				w.remove(f)
			}
		}
	}
	return w.Run(p.s)
}

// writer is one Write.
type writer struct {
	*Plane
	network.Batch[Key]
	held, put map[Key]bool
	made      map[string]link.Veth // devices that are put, by name
	index     map[string]int       // of devices, by name
}

// find reads the interface indexes of facts' devices, and records for Watch those that were made or are not known.
func (w *writer) find(facts []Fact) error {
	w.index = map[string]int{}
	watched := maps.Clone(*w.devices.Load())
	for _, f := range facts {
		name := f.Key.Device + f.Value.Device
		if _, known := w.index[name]; known {
			continue
		}
		index, v, err := link.VethNamed(w.s, name)
		if err != nil {
			return err
		}
		w.index[name] = index
		if index == 0 {
			continue
		}
		if made, is := w.made[name]; is {
			made.Kind = v.Kind
			watched[index] = made
		} else if _, known := watched[index]; !known {
			watched[index] = v
		}
	}
	w.devices.Store(&watched)
	return nil
}

// forget has Watch forget a device.
func (w *writer) forget(name string) {
	watched := maps.Clone(*w.devices.Load())
	delete(watched, w.index[name])
	w.devices.Store(&watched)
}

// make makes a fact true, or adds the requests that do.
func (w *writer) make(f Fact) {
	dev := w.index[f.Key.Device+f.Value.Device]
	if f.Key.Kind != KindDevice && dev == 0 {
		w.Refuse(f.Key, fmt.Errorf("%s: device %s is gone", f.Key, f.Key.Device+f.Value.Device))
		return
	}
	switch f.Key.Kind {
	case KindDevice:
		if err := w.device(f); err != nil {
			w.Refuse(f.Key, err)
		}
	case KindSetting:
		err := sysctl.Set(w.ns, sysctl.Setting{Name: "-" + acceptRA(f.Key.Device), Value: "0"},
			sysctl.Setting{Name: network.Forwarding(f.Key.Device), Value: "1"})
		if err != nil {
			w.Refuse(f.Key, err)
		}
	case KindLimit:
		w.Add(f.Key, func(b *netlink.Batch) { link.PutBuckets(b, link.Bucket{Dev: dev, Rate: f.Value.Rate}) })
	case KindNeighbour:
		w.Add(f.Key, func(b *netlink.Batch) {
			link.PutNeighbours(b, link.Neighbour{Dev: dev, Addr: f.Key.Addr, MAC: f.Value.MAC})
		})
	case KindRoute:
		if a, is := f.Body.(*model.Attachment); is {
			if err := w.child(a, dev); err != nil {
				w.Refuse(f.Key, err)
				return
			}
		}
		w.Add(f.Key, func(b *netlink.Batch) { route.Put(b, route.Route{Owner: Protocol, To: host(f.Key.Addr), Dev: dev}) })
	}
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// device changes a device that is there, or makes a pair.
func (w *writer) device(f Fact) error {
	v := link.Veth{Kind: link.KindVeth, Name: f.Key.Device, Alias: f.Value.Alias, MAC: f.Value.MAC, MTU: f.Value.MTU,
		Group: link.PodGroup, NoARP: true, Up: true}
	defer func() { w.made[v.Name] = v }()
	if w.held[f.Key] {
		w.Add(f.Key, func(b *netlink.Batch) { link.ChangeVeth(b, v) })
		return nil
	}
	a, is := f.Body.(*model.Attachment)
	if !is {
		return fmt.Errorf("%s: its attachment is not known", f.Key)
	}
	if a.Kind == model.Netkit {
		v.Kind = link.KindNetkit
	}
	return makePair(w.s, v, a)
}

// remove adds the requests that make a fact untrue. A device is released: the end of the pod's namespace takes it
// along, or link.DeleteReleased does.
func (w *writer) remove(f Fact) {
	dev := w.index[f.Key.Device]
	switch f.Key.Kind {
	case KindDevice:
		w.forget(f.Key.Device)
		w.Add(f.Key, func(b *netlink.Batch) { link.Release(b, f.Key.Device) })
	case KindLimit:
		if dev != 0 {
			w.Add(f.Key, func(b *netlink.Batch) { link.DeleteBuckets(b, link.Bucket{Dev: dev}) })
		}
	case KindNeighbour:
		if dev != 0 {
			w.Add(f.Key, func(b *netlink.Batch) {
				link.DeleteNeighbours(b, link.Neighbour{Dev: dev, Addr: f.Key.Addr, MAC: f.Value.MAC})
			})
		}
	case KindRoute:
		w.Add(f.Key, func(b *netlink.Batch) { route.Delete(b, route.Route{Owner: Protocol, To: host(f.Key.Addr)}) })
	}
}

// groups are the notifications of what this plane writes on the node.
var groups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_TC}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return network.Watch(ctx, p.ns, p.s, groups, p.concerns)
}

// concerns reports whether a notification may be about a fact.
func (p *Plane) concerns(m netlink.Message) bool {
	devices := *p.devices.Load()
	switch m.Type {
	case unix.RTM_NEWLINK:
		was, own := devices[link.IndexIn(m)]
		now, _ := link.VethOf(m)
		return own && now != was // else what the pod's end does, such as coming up
	case unix.RTM_DELLINK:
		_, own := devices[link.IndexIn(m)]
		return own
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		_, own := devices[link.NeighbourDevice(m)]
		return own
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC:
		_, own := devices[link.QueueDevice(m)]
		return own
	case unix.RTM_NEWNETCONF:
		index, off := link.ForwardingOff(m)
		_, own := devices[index]
		return off && (own || index == link.AllDevices)
	}
	return network.ConcernsRoutes(m, Protocol)
}

// Clean implements dataplane.Cleaner. Pods lose their network.
func (p *Plane) Clean(context.Context) error {
	devices, err := p.own()
	if err != nil {
		return err
	}
	if err := link.DeleteReleased(p.s, func(v link.Veth) bool { return strings.HasPrefix(v.Alias, alias) }); err != nil {
		return err
	}
	routes, err := route.List(p.s, Protocol)
	if err != nil {
		return err
	}
	b := route.NewBatch()
	for _, r := range routes {
		route.Delete(b, route.Route{Owner: Protocol, Table: r.Table, To: r.To})
	}
	for _, v := range devices {
		link.DeleteNamed(b, v.Name)
	}
	return p.s.Apply(b)
}
