package route

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.NetworkPart, Key, Value],
// dataplane.Watcher and dataplane.Cleaner.
type Plane struct {
	ns       *netns.Namespace
	s        *netlink.Socket
	settings [len(settings)]*sysctl.File
	relevant atomic.Pointer[devices] // to Watch
}

var (
	_ dataplane.Plane[model.NetworkPart, Key, Value] = (*Plane)(nil)
	_ dataplane.Watcher                              = (*Plane)(nil)
	_ dataplane.Cleaner                              = (*Plane)(nil)
)

// devices are the interface indexes of devices in use, by name.
type devices map[string]int

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
	p.relevant.Store(&devices{})
	for i, name := range settings {
		p.settings[i] = sysctl.OpenOptional(name)
	}
	return p, nil
}

// Close closes the plane's handles. The kernel keeps what was written.
func (p *Plane) Close() error {
	err := errors.Join(p.s.Close(), p.ns.Close())
	for _, f := range p.settings {
		err = errors.Join(err, f.Close())
	}
	return err
}

// Read implements dataplane.Plane.
func (p *Plane) Read(context.Context) (l []Fact, err error) {
	names, err := link.Names(p.s)
	if err != nil {
		return nil, err
	}
	tunnel, err := p.readVXLAN(names)
	if err != nil {
		return nil, err
	}
	ipip, err := p.readIPIP(names)
	if err != nil {
		return nil, err
	}
	child, err := p.readChild(names)
	if err != nil {
		return nil, err
	}
	rules, err := p.readRules()
	if err != nil {
		return nil, err
	}
	routes, err := route.List(p.s, Protocol)
	seen := make(map[Key]bool, len(routes))
	for _, r := range routes {
		f := readRoute(r, names)
		if !seen[f.Key] { // of several metrics the first counts for the kernel too
			l = append(l, f)
		}
		seen[f.Key] = true
	}
	l = slices.Concat(l, p.readSettings(routes), tunnel, ipip, child, rules)
	p.observe(l, names)
	return slices.Concat(l, p.readForwarding(l), p.readReversePath(l)), err
}

// readReversePath reads whether the uplink's reverse path filter looks routes up with packets' marks, where there are
// rules.
func (p *Plane) readReversePath(facts []Fact) (l []Fact) {
	var uplink string
	rules := false
	for _, f := range facts {
		switch f.Key.Kind {
		case KindDevice:
			uplink = cmp.Or(uplink, f.Value.Device)
		case KindRule:
			rules = rules || f.Key.To.Addr().Is4()
		}
	}
	if marks, err := link.MarksReversePath(p.s, uplink); rules && uplink != "" && err == nil && marks {
		l = append(l, Fact{Key: Key{Kind: KindReversePath}, Value: Value{Device: uplink}})
	}
	return l
}

// readForwarding reads which of the devices by which facts have packets come from other nodes forward them.
func (p *Plane) readForwarding(facts []Fact) (l []Fact) {
	var uplink string
	add := func(device string) {
		if v, err := sysctl.Get(p.ns, network.Forwarding(device)); err == nil && v != "0" {
			l = append(l, forwarding(device))
		}
	}
	for _, f := range facts {
		switch {
		case f.Key.Kind == KindDevice && f.Key.Name != nameOf(model.ChildDevice):
			if add(f.Key.Name.String()); f.Value.Via.Is4() {
				uplink = cmp.Or(uplink, f.Value.Device)
			}
		case f.Key.Kind == KindRoute && f.Key.To.Addr().Is4() && nameOf(f.Value.Device) == 0:
			uplink = cmp.Or(uplink, f.Value.Device)
		}
	}
	if uplink != "" {
		add(uplink)
	}
	return l
}

// readSettings reads the settings of the families that have routes. Those of others are not this plane's, even if they
// have the value that it would write.
func (p *Plane) readSettings(routes []route.Route) (l []Fact) {
	for i, f := range p.settings {
		ours := func(r route.Route) bool { return family(r.To.Addr()) == i }
		if !slices.ContainsFunc(routes, ours) {
			continue
		}
		text, err := f.Get()
		if n, failed := strconv.ParseUint(text, 10, 32); err == nil && failed == nil && n > 0 {
			l = append(l, Fact{Key: Key{Kind: KindSetting, Name: nameOf(settings[i])}, Value: Value{Number: uint32(n)}})
		}
	}
	return l
}

func readRoute(r route.Route, names map[int]string) Fact {
	f := Fact{Key: Key{Kind: KindRoute, To: r.To}, Value: Value{Unreachable: r.Type == route.Unreachable}}
	if !f.Value.Unreachable {
		f.Value.Device, f.Value.Via, f.Value.Source = names[r.Dev], r.Via, r.Source
		f.Value.Altered = !r.IsMain()
	}
	if r.Table == podTable {
		f.Key.Kind, f.Value.Altered = KindPodRoute, r.Type != route.Unicast
	}
	return f
}

// readIPIP reads the device of IPIP and its addresses.
func (p *Plane) readIPIP(names map[int]string) (l []Fact, err error) {
	v, index, err := link.FindIPIP(p.s, IPIPDevice)
	if err != nil || index == 0 {
		return nil, err
	}
	l = []Fact{{Key: Key{Kind: KindDevice, Name: nameOf(IPIPDevice)}, Value: Value{Device: names[v.Uplink], Via: v.Local,
		MTU: uint16(v.MTU), Altered: !v.Up}}}
	return p.addresses(l, IPIPDevice, index)
}

// readChild reads the node's own child of the uplink and its addresses.
func (p *Plane) readChild(names map[int]string) (l []Fact, err error) {
	v, index, err := link.FindIPVLAN(p.s, model.ChildDevice)
	if err != nil || index == 0 {
		return nil, err
	}
	l = []Fact{{Key: Key{Kind: KindDevice, Name: nameOf(model.ChildDevice)}, Value: Value{Device: names[v.Parent],
		Number: uint32(v.Mode), MTU: uint16(v.MTU), Altered: !v.Up}}}
	return p.addresses(l, model.ChildDevice, index)
}

// addresses appends the addresses of a device.
func (p *Plane) addresses(l []Fact, name string, index int) ([]Fact, error) {
	addresses, err := link.AddressesOf(p.s, index)
	for _, a := range addresses {
		l = append(l, Fact{Key: Key{Kind: KindAddress, Name: nameOf(name), To: a.Prefix}})
	}
	return l, err
}

// readVXLAN reads the device of VXLAN and what stands on it.
func (p *Plane) readVXLAN(names map[int]string) (l []Fact, err error) {
	v, index, err := link.FindVXLAN(p.s, Device)
	if err != nil || index == 0 {
		return nil, err
	}
	l = append(l, Fact{Key: Key{Kind: KindDevice, Name: nameOf(Device)}, Value: Value{Device: names[v.Uplink],
		Via: v.Local, MAC: v.MAC,
		Number: v.VNI, Port: v.Port, MTU: uint16(v.MTU), Altered: v.Learns || !v.Up}})
	if l, err = p.addresses(l, Device, index); err != nil {
		return nil, err
	}
	neighbours, err := link.Neighbours(p.s, index)
	if err != nil {
		return nil, err
	}
	for _, n := range neighbours {
		l = append(l, Fact{Key: Key{Kind: KindNeighbour, To: host(n.Addr)}, Value: Value{MAC: n.MAC}})
	}
	if v.VNI == 0 {
		return l, nil // another kind of device, which has no such entries
	}
	forwards, err := link.Forwards(p.s, index)
	seen := map[[6]byte]bool{}
	for _, n := range forwards {
		f := Fact{Key: Key{Kind: KindForward, MAC: n.MAC}, Value: Value{Via: n.Addr, Altered: seen[n.MAC]}}
		if seen[n.MAC] { // several destinations: another program's doing
			l = slices.DeleteFunc(l, func(o Fact) bool { return o.Key == f.Key })
		}
		seen[n.MAC] = true
		l = append(l, f)
	}
	return l, err
}

// observe records which devices matter to Watch, those of routes and uplinks among facts with those before.
func (p *Plane) observe(facts []Fact, names map[int]string) {
	now := devices{}
	for _, name := range ownedDevices {
		now[name] = 0
	}
	for name := range *p.relevant.Load() {
		now[name] = 0
	}
	for _, f := range facts {
		if f.Value.Device != "" {
			now[f.Value.Device] = 0
		}
	}
	for index, name := range names {
		if _, used := now[name]; used {
			now[name] = index
		}
	}
	p.relevant.Store(&now)
}

// Write implements dataplane.Plane.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	old := make(map[Key]Value, len(del))
	for _, f := range del {
		old[f.Key] = f.Value
	}
	order := func(a, b Fact) int { return cmp.Compare(a.Key.Rank(), b.Key.Rank()) }
	put, del = slices.Clone(put), slices.Clone(del)
	slices.SortStableFunc(put, order)
	w := writer{Plane: p, facts: put, old: old, put: map[Key]bool{}}
	for len(put) > 0 {
		n := 1
		for n < len(put) && put[n].Key.Rank() == put[0].Key.Rank() {
			n++
		}
		if err := w.rank(put[:n]); err != nil {
			return err
		}
		put = put[n:]
	}
	slices.SortStableFunc(del, func(a, b Fact) int { return order(b, a) })
	for _, f := range del {
		if !w.put[f.Key] {
			w.remove(f)
		}
	}
	return w.Run(p.s)
}

// writer is one Write.
type writer struct {
	*Plane
	network.Batch[Key]
	facts []Fact // to put
	old   map[Key]Value
	put   map[Key]bool
	names map[string]int // interface indexes; nil: to be read

	replaced string // the device that was, so that what is held is not known; "": none
}

// rank writes facts of one rank.
func (w *writer) rank(facts []Fact) error {
	if facts[0].Key.Kind != KindSetting && w.names == nil {
		if err := w.find(); err != nil {
			return err
		}
	}
	for _, f := range facts {
		w.put[f.Key] = true
		if err := w.make(f); err != nil {
			w.Refuse(f.Key, err)
		}
	}
	if facts[0].Key.Kind == KindDevice {
		w.names = nil
	}
	if err := w.Run(w.s); err != nil || w.replaced == "" {
		return withRemedy(err)
	}
	return fmt.Errorf("device %s was replaced, since what differs of it can't be changed; what stands on it is "+
		"written again", w.replaced)
}

// remedies are what to do where the kernel lacks a kind of device, by the device.
var remedies = map[string]string{
	IPIPDevice:        "IPIP: load its module ipip, or set network.encapsulation to VXLAN on all nodes",
	model.ChildDevice: "ipvlan: load its module ipvlan, or set network.device to veth",
}

// withRemedy returns err, where the kernel lacks a kind of device with what to do about it.
func withRemedy(err error) error {
	if refused, ok := errors.AsType[*dataplane.Refused[Key]](err); ok {
		for name, remedy := range remedies {
			k := Key{Kind: KindDevice, Name: nameOf(name)}
			if why := refused.Facts[k]; errors.Is(why, unix.EOPNOTSUPP) {
				refused.Facts[k] = fmt.Errorf("%w: this kernel has no %s", why, remedy)
			}
		}
	}
	return err
}

// find reads the interface indexes.
func (w *writer) find() error {
	names, err := link.Names(w.s)
	if err != nil {
		return err
	}
	w.observe(w.facts, names)
	w.names = make(map[string]int, len(names))
	for index, name := range names {
		w.names[name] = index
	}
	return nil
}

// device returns the interface index of a device.
func (w *writer) device(name string) (int, error) {
	if index := w.names[name]; index != 0 {
		return index, nil
	}
	return 0, fmt.Errorf("this node has no device %s", name)
}

// make adds the requests that make a fact true.
func (w *writer) make(f Fact) error {
	switch f.Key.Kind {
	case KindSetting:
		i := slices.Index(settings[:], f.Key.Name.String())
		return w.settings[i].Set(strconv.FormatUint(uint64(f.Value.Number), 10))
	case KindRule:
		return w.makeRule(f.Key)
	}
	dev, err := w.device(needs(f))
	if err != nil {
		return err
	}
	if f.Key.Kind == KindForwarding {
		return sysctl.Set(w.ns, sysctl.Setting{Name: network.Forwarding(f.Value.Device), Value: "1"})
	}
	w.Add(f.Key, func(b *netlink.Batch) { w.request(b, f, dev) })
	return nil
}

// needs returns the name of the device without which a fact can't be made true.
func needs(f Fact) string {
	switch f.Key.Kind {
	case KindNeighbour, KindForward:
		return Device
	case KindAddress:
		return f.Key.Name.String()
	}
	if f.Value.Unreachable {
		return "lo"
	}
	return f.Value.Device
}

// request adds the requests that make a fact true, which needs the device of an interface index.
func (w *writer) request(b *netlink.Batch, f Fact, dev int) {
	v := f.Value
	switch f.Key.Kind {
	case KindDevice:
		switch f.Key.Name.String() {
		case IPIPDevice:
			w.makeIPIP(b, v, dev)
		case model.ChildDevice:
			w.makeChild(b, v, dev)
		default:
			w.makeVXLAN(b, v, dev)
		}
	case KindAddress:
		link.PutAddresses(b, link.Address{Dev: dev, Prefix: f.Key.To})
	case KindNeighbour:
		link.PutNeighbours(b, link.Neighbour{Dev: dev, Addr: f.Key.To.Addr(), MAC: v.MAC})
	case KindForward:
		if old, held := w.old[f.Key]; held && old.Altered {
			link.DeleteForwards(b, link.Neighbour{Dev: dev, MAC: f.Key.MAC})
		}
		link.PutForwards(b, link.Neighbour{Dev: dev, Addr: v.Via, MAC: f.Key.MAC})
	case KindRoute, KindPodRoute:
		route.Put(b, routeOf(f, dev))
	case KindReversePath:
		link.MarkReversePath(b, v.Device)
	}
}

func routeOf(f Fact, dev int) route.Route {
	r := route.Route{Owner: Protocol, To: f.Key.To, Table: tableOf(f.Key.Kind)}
	if f.Value.Unreachable {
		r.Type = route.Unreachable
		return r
	}
	r.Via, r.Dev, r.Source, r.Interior = f.Value.Via, dev, f.Value.Source, true
	return r
}

// makeIPIP adds the requests that make the device of IPIP. One that has another uplink or source is replaced.
func (w *writer) makeIPIP(b *netlink.Batch, v Value, uplink int) {
	old, held := w.old[Key{Kind: KindDevice, Name: nameOf(IPIPDevice)}]
	now := link.IPIP{Local: v.Via, Uplink: uplink, MTU: int(v.MTU)}
	same := held && old.Device == v.Device && old.Via == v.Via
	if held && !same {
		link.DeleteNamed(b, IPIPDevice)
		w.replaced = IPIPDevice
	}
	if !same {
		link.AddIPIP(b, IPIPDevice, now)
	}
	link.ChangeIPIP(b, IPIPDevice, now)
}

// makeChild adds the requests that make the node's own child of the uplink. One of another uplink is replaced.
func (w *writer) makeChild(b *netlink.Batch, v Value, uplink int) {
	old, held := w.old[Key{Kind: KindDevice, Name: nameOf(model.ChildDevice)}]
	now := link.IPVLAN{Parent: uplink, Mode: uint16(v.Number), MTU: int(v.MTU)}
	same := held && old.Device == v.Device
	if held && !same {
		link.DeleteNamed(b, model.ChildDevice)
		w.replaced = model.ChildDevice
	}
	if !same {
		link.AddIPVLAN(b, model.ChildDevice, now, link.Here)
	}
	link.ChangeIPVLAN(b, model.ChildDevice, now)
}

// makeVXLAN adds the requests that make the device of VXLAN. One that has another VNI, port or family is replaced.
func (w *writer) makeVXLAN(b *netlink.Batch, v Value, uplink int) {
	old, held := w.old[Key{Kind: KindDevice, Name: nameOf(Device)}]
	now := link.VXLAN{VNI: v.Number, Port: v.Port, Local: v.Via, Uplink: uplink, MAC: v.MAC, MTU: int(v.MTU)}
	switch {
	case !held:
		link.AddVXLAN(b, Device, now)
	case old.Number != v.Number || old.Port != v.Port || old.Via.Is4() != v.Via.Is4():
		link.DeleteNamed(b, Device)
		link.AddVXLAN(b, Device, now)
		w.replaced = Device
	default:
		link.ChangeVXLAN(b, Device, now)
	}
}

// remove adds the requests that make a fact untrue. A setting stays: others need it too.
func (w *writer) remove(f Fact) {
	if f.Key.Kind == KindSetting || f.Key.Kind == KindForwarding || f.Key.Kind == KindReversePath {
		return
	}
	if w.names == nil {
		if err := w.find(); err != nil {
			w.Refuse(f.Key, err)
			return
		}
	}
	if f.Key.Kind == KindRule {
		w.removeRule(f.Key)
		return
	}
	dev := w.names[cmp.Or(f.Key.Name.String(), Device)]
	if dev == 0 && f.Key.Kind != KindRoute && f.Key.Kind != KindPodRoute {
		return // gone, with all that stood on it
	}
	w.Add(f.Key, func(b *netlink.Batch) {
		switch f.Key.Kind {
		case KindDevice:
			link.DeleteNamed(b, f.Key.Name.String())
		case KindAddress:
			link.DeleteAddresses(b, link.Address{Dev: dev, Prefix: f.Key.To})
		case KindNeighbour:
			link.DeleteNeighbours(b, link.Neighbour{Dev: dev, Addr: f.Key.To.Addr(), MAC: f.Value.MAC})
		case KindForward:
			link.DeleteForwards(b, link.Neighbour{Dev: dev, MAC: f.Key.MAC})
		case KindRoute, KindPodRoute:
			route.Delete(b, route.Route{Owner: Protocol, To: f.Key.To, Table: tableOf(f.Key.Kind)})
		}
	})
}

// groups are the notifications of what this plane writes, and of what goes with a device.
var groups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF}

// Watch implements dataplane.Watcher.
func (p *Plane) Watch(ctx context.Context) (<-chan struct{}, error) {
	return network.Watch(ctx, p.ns, p.s, groups, p.concerns)
}

// concerns reports whether a notification may be about a fact.
func (p *Plane) concerns(m netlink.Message) bool {
	relevant := *p.relevant.Load()
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		_, used := relevant[link.NameIn(m)]
		return used
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		return link.NeighbourDevice(m) == relevant[Device]
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return network.ConcernsRoutes(m, Protocol)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		r, ok := rule.Of(m)
		return ok && r.Owner == Protocol
	case unix.RTM_NEWNETCONF:
		index, off := link.ForwardingOff(m)
		return off && (index == link.AllDevices || slices.Contains(slices.Collect(maps.Values(relevant)), index))
	}
	return link.IsAddress(m)
}

// Clean implements dataplane.Cleaner. Forwarding stays as it is.
func (p *Plane) Clean(context.Context) error {
	routes, err := route.List(p.s, Protocol)
	if err != nil {
		return err
	}
	rules, err := rule.List(p.s, Protocol)
	if err != nil {
		return err
	}
	b := route.NewBatch()
	rule.Delete(b, rules...)
	for _, r := range routes {
		route.Delete(b, route.Route{Owner: Protocol, Table: r.Table, To: r.To})
	}
	for _, name := range ownedDevices {
		link.DeleteNamed(b, name)
	}
	return p.s.Apply(b)
}
