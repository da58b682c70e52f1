package sandbox

import (
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// box is a network namespace with one interface eth0, and what was put into it.
type box struct {
	ns         *netns.Namespace
	eth0       int // interface index
	mac        [6]byte
	routes     map[netip.Prefix]route.Route
	neighbours map[netip.Addr]link.Neighbour
	requested  map[netip.Prefix]netip.Addr // routes by Host.Route: next hop by prefix
}

// quiet are settings of every namespace. Written out, since a new namespace inherits some from its maker's.
var quiet = []sysctl.Setting{
	{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/default/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/all/accept_redirects", Value: "0"},
	{Name: "net/ipv4/conf/default/accept_redirects", Value: "0"},
	{Name: "net/ipv4/conf/all/route_localnet", Value: "0"},
	{Name: "net/ipv4/conf/default/route_localnet", Value: "0"},
	{Name: "net/ipv4/icmp_ratelimit", Value: "0"}, // a host that refuses says so every time
	{Name: "net/ipv6/icmp/ratelimit", Value: "0"},
	{Name: "net/ipv6/conf/all/accept_dad", Value: "0"},
	{Name: "net/ipv6/conf/default/accept_dad", Value: "0"},
	{Name: "net/ipv6/conf/default/accept_ra", Value: "0"},
	{Name: "net/ipv6/conf/default/accept_redirects", Value: "0"},
	{Name: "net/ipv6/conf/default/addr_gen_mode", Value: "1"}, // no link-local addresses, so no chatter about them
}

// Settings by what a namespace is for. ip_forward comes first: writing it resets others.
var (
	hostSettings = append([]sysctl.Setting{{Name: "net/ipv4/ip_forward", Value: "0"}}, quiet...)
	nodeSettings = append([]sysctl.Setting{
		{Name: "net/ipv4/ip_forward", Value: "1"},
		{Name: "net/ipv6/conf/all/forwarding", Value: "1"},
		{Name: "net/ipv4/conf/all/send_redirects", Value: "0"},
		{Name: "net/ipv4/conf/default/send_redirects", Value: "0"},
	}, quiet...)
	wireSettings = append([]sysctl.Setting{
		{Name: "net/ipv4/ip_forward", Value: "0"},
		{Name: "-bridge/bridge-nf-call-iptables", Value: "0"},
		{Name: "-bridge/bridge-nf-call-ip6tables", Value: "0"},
		{Name: "-bridge/bridge-nf-call-arptables", Value: "0"},
	}, quiet...)
)

// newBox makes a namespace with these settings and its loopback up.
func newBox(name string, mac [6]byte, settings []sysctl.Setting) (*box, error) {
	ns, err := netns.New(name)
	if err != nil {
		return nil, err
	}
	b := &box{
		ns: ns, mac: mac, requested: map[netip.Prefix]netip.Addr{},
		routes: map[netip.Prefix]route.Route{}, neighbours: map[netip.Addr]link.Neighbour{},
	}
	err = sysctl.Set(ns, settings...)
	if err == nil {
		err = b.dial(func(c *link.Conn) error { return c.Up(1) }) // the loopback is always interface 1
	}
	if err != nil {
		return nil, errors.Join(err, b.delete())
	}
	return b, nil
}

// delete removes the namespace.
func (b *box) delete() error { return errors.Join(b.ns.Close(), netns.Delete(b.ns.Name)) }

// dial runs f with a netlink connection to the namespace.
func (b *box) dial(f func(*link.Conn) error) error {
	c, err := link.Dial(b.ns)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(c)
}

// plug finds eth0, brings it up and adds the addresses, each with the length of its link's prefix. Routes into that
// are made by set.
func (b *box) plug(addrs []netip.Prefix) error {
	return b.dial(func(c *link.Conn) (err error) {
		if b.eth0, err = c.Index("eth0"); err != nil {
			return err
		}
		if err := c.Up(b.eth0); err != nil {
			return err
		}
		for _, a := range addrs {
			add := c.AddAddress
			if !a.IsSingleIP() {
				add = c.AddAddressAlone
			}
			if err := add(b.eth0, a); err != nil {
				return err
			}
		}
		return nil
	})
}

// set makes these the routes and neighbours of the namespace, besides those of the kernel's own making.
func (b *box) set(routes map[netip.Prefix]route.Route, neighbours map[netip.Addr]link.Neighbour) error {
	err := b.dial(func(c *link.Conn) error {
		return errors.Join(
			converge(b.neighbours, neighbours, c.PutNeighbour, c.DeleteNeighbour),
			converge(b.routes, routes,
				func(r route.Route) error { return route.PutIn(b.ns, r) },
				func(r route.Route) error { return route.DeleteIn(b.ns, r) }))
	})
	if err != nil {
		return fmt.Errorf("in network namespace %s: %w", b.ns.Name, err)
	}
	return nil
}

// forget drops what hung on an interface that is gone.
func (b *box) forget(index int) {
	for p, r := range b.routes {
		if r.Dev == index {
			delete(b.routes, p)
		}
	}
	for a, n := range b.neighbours {
		if n.Dev == index {
			delete(b.neighbours, a)
		}
	}
}

// converge puts what is wanted and not held, deletes what is held and not wanted, and keeps held up to date.
func converge[K, V comparable](held, wanted map[K]V, put, del func(V) error) error {
	var errs []error
	for k, v := range wanted {
		if old, ok := held[k]; ok && old == v {
			continue
		}
		if err := put(v); err != nil {
			errs = append(errs, err)
			continue
		}
		held[k] = v
	}
	for k, v := range held {
		if _, ok := wanted[k]; ok {
			continue
		}
		if err := del(v); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(held, k)
	}
	return errors.Join(errs...)
}
