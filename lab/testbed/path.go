package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/load"
)

// Path is what connects the server of a pair with the node's device.
type Path string

// The paths that the testbed makes itself.
const (
	PathHost     Path = "host"      // nothing: the server is a process of the node
	PathVeth     Path = "veth"      // a veth to a pod, for which the node routes
	PathBridge   Path = "bridge"    // a veth to a pod on a bridge, for which the node routes
	PathNetkit   Path = "netkit"    // a netkit pair to a pod, for which the node routes
	PathIPIP     Path = "ipip"      // a veth to a pod, and the kernel's IPIP tunnel between the nodes
	PathMACVLAN  Path = "macvlan"   // the pod has a macvlan of the node's device
	PathIPVLANL2 Path = "ipvlan-l2" // the pod has an ipvlan of the node's device, on its link
	PathIPVLANL3 Path = "ipvlan-l3" // the same, for which the node routes
)

// tunnelAddr is what the far end is called inside of a tunnel, as another node is.
var tunnelAddr = netip.MustParseAddr("10.129.0.1")

// AddPathPair makes the namespaces of an arm with its server behind a path, and adds them to the testbed.
func (b *Testbed) AddPathPair(ctx context.Context, arm string, path Path) (*Pair, error) {
	p, err := b.addPair(ctx, arm, nil, false)
	if err != nil || path == PathHost {
		return p, err
	}
	return p, p.addPodBy(ctx, path)
}

// ServerAddr returns the address of the pair's server: its pod's, or its node's.
func (p *Pair) ServerAddr() netip.Addr {
	if p.pod != nil {
		return podAddr
	}
	return NodeAddr
}

// Home returns the network namespace of the pair's server.
func (p *Pair) Home() *netns.Namespace {
	if p.pod != nil {
		return p.pod
	}
	return p.Near
}

// addPodBy makes a pod on the node, behind a path.
func (p *Pair) addPodBy(ctx context.Context, path Path) (err error) {
	if p.pod, err = NewNamespace(strings.TrimSuffix(p.Near.Name, nodeSuffix) + "-pod"); err != nil {
		return err
	}
	near, far := link.End{Name: PodDevice, MAC: gatewayMAC[:]}, link.End{Name: "eth0", MAC: clientMAC[:]}
	switch path {
	case PathMACVLAN:
		return p.shareDevice(ctx, clientMAC, func(c *link.Conn, eth0 int) error { return c.AddMACVLAN(eth0, far, p.pod) })
	case PathIPVLANL2, PathIPVLANL3:
		far.MAC = nil
		return p.shareDevice(ctx, nodeMAC, func(c *link.Conn, eth0 int) error {
			return c.AddIPVLAN(eth0, path == PathIPVLANL3, far, p.pod)
		})
	case PathNetkit:
		return routePod(ctx, p.Near, p.pod, podAddr,
			func(c *link.Conn) (int, error) { return c.AddNetkit(near, far, p.pod) })
	}
	err = routeBy(ctx, path, p.Near, p.pod, podAddr, PodDevice)
	if path == PathIPIP {
		err = errors.Join(err, p.tunnel(p.Near, NodeAddr, farAddr, netip.Addr{}, tunnelAddr),
			p.tunnel(p.Far, farAddr, NodeAddr, tunnelAddr, podAddr))
	}
	return err
}

// routeBy connects a pod with a node by a veth, whose end on the node is a port of a bridge where the path has one: the
// node routes to it.
func routeBy(ctx context.Context, path Path, node, pod *netns.Namespace, addr netip.Addr, device string) error {
	port := 0
	err := routePod(ctx, node, pod, addr, func(c *link.Conn) (_ int, err error) {
		port, err = c.AddVeth(link.End{Name: device, MAC: gatewayMAC[:]}, link.End{Name: "eth0", MAC: clientMAC[:]}, pod)
		if err != nil || path != PathBridge {
			return port, err
		}
		bridge, err := c.AddBridge("bridge") // with the link-layer address of its first port
		return bridge, errors.Join(err, c.Attach(port, bridge))
	})
	if err != nil || path != PathBridge {
		return err
	}
	return DialLink(node, func(c *link.Conn) error { return c.Await(ctx, port) })
}

// routePod connects a pod with a node by a device that connect makes: the node routes to it.
func routePod(ctx context.Context, node, pod *netns.Namespace, addr netip.Addr,
	connect func(*link.Conn) (int, error)) error {
	err := DialLink(node, func(c *link.Conn) error {
		dev, err := connect(c)
		if err != nil {
			return err
		}
		return errors.Join(
			c.PutNeighbour(link.Neighbour{Dev: dev, Addr: addr, MAC: clientMAC}),
			route.PutIn(node, route.Route{To: netip.PrefixFrom(addr, addr.BitLen()), Dev: dev}))
	})
	if err != nil {
		return err
	}
	return errors.Join(
		sysctl.Set(node, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"}),
		Plug(ctx, pod, []netip.Addr{addr}, gateway, gatewayMAC))
}

// shareDevice has the pod share the node's device, by one that share makes: the far end sends to it on the link.
func (p *Pair) shareDevice(ctx context.Context, mac [6]byte, share func(c *link.Conn, eth0 int) error) error {
	err := DialLink(p.Near, func(c *link.Conn) error {
		eth0, err := c.Index("eth0")
		if err != nil {
			return err
		}
		return share(c, eth0)
	})
	if err != nil {
		return err
	}
	return errors.Join(
		DialLink(p.Far, func(c *link.Conn) error {
			eth0, err := c.Index("eth0")
			if err != nil {
				return err
			}
			return errors.Join(
				c.PutNeighbour(link.Neighbour{Dev: eth0, Addr: podAddr, MAC: mac}),
				route.PutIn(p.Far, route.Route{To: netip.PrefixFrom(podAddr, podAddr.BitLen()), Dev: eth0}))
		}),
		Plug(ctx, p.pod, []netip.Addr{podAddr}, farAddr, farMAC))
}

// tunnel makes one end of an IPIP tunnel with an address of its own, which may be none, and a route through it.
func (p *Pair) tunnel(ns *netns.Namespace, local, remote, own, to netip.Addr) error {
	return DialLink(ns, func(c *link.Conn) error {
		dev, err := c.AddIPIP("tunnel", local, remote)
		if err != nil {
			return err
		}
		if own.IsValid() {
			err = c.AddAddress(dev, netip.PrefixFrom(own, own.BitLen()))
		}
		return errors.Join(err,
			route.PutIn(ns, route.Route{To: netip.PrefixFrom(to, to.BitLen()), Dev: dev, Source: own}))
	})
}

// Try makes a pair on a testbed of its own and connects to its server. It returns why that fails, "" if it does not,
// and remembers it under the name.
func (b *Testbed) Try(ctx context.Context, name string,
	add func(context.Context, *Testbed) (*Pair, error)) (why string, err error) {
	if why, tried := b.tried[name]; tried {
		return why, nil
	}
	t := &Testbed{Config: b.Config, Name: b.Name + "-try", Rand: b.Rand, CPUs: b.CPUs, Machine: b.Machine,
		tried: map[string]string{}}
	if err := t.makeDir(); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	p, err := add(ctx, t)
	if err == nil {
		err = p.Serve(load.Thread{Enter: p.Home().Do}, Everywhere, Sizes, 1)
	}
	if err == nil {
		err = t.connects(ctx, p)
	}
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if err != nil {
		b.tried[name] = Brief(err.Error())
	} else {
		b.tried[name] = ""
	}
	return b.tried[name], nil
}

// connects returns an error where no connection from a pair's far end reaches its server.
func (b *Testbed) connects(ctx context.Context, p *Pair) error {
	c := b.Client(p, []netip.AddrPort{netip.AddrPortFrom(p.ServerAddr(), ServerPort)}, 0)
	c.Thread, c.Most = load.Thread{Enter: p.Far.Do}, 3 // on any processor: it is no measurement
	s, err := c.Run(ctx, load.CRR, b.Within(10*time.Second))
	if err == nil && s.Ops == 0 {
		err = fmt.Errorf("no connection comes through (%v)", s.Errors)
	}
	return err
}
