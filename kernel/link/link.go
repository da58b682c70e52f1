// Package link makes and lists network devices, their addresses and neighbours.
//
// It is a thin typed layer: one call is one kernel request (two where an index must be read back). It keeps nothing and
// decides nothing.
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// MaxName is how many characters an interface name may have.
const MaxName = unix.IFNAMSIZ - 1

// Conn is a netlink connection to one network namespace. It may not be used by two goroutines at once.
type Conn struct{ h *netlink.Handle }

// Dial connects to ns. The connection works from any thread and outlives ns's handle.
func Dial(ns *netns.Namespace) (*Conn, error) {
	c := &Conn{}
	err := ns.Do(func() (err error) {
		c.h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", ns.Name, err)
	}
	return c, nil
}

// Close ends the connection.
func (c *Conn) Close() { c.h.Close() }

// Index returns the index of the interface of that name.
func (c *Conn) Index(name string) (int, error) {
	l, err := c.h.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("look up interface %s: %w", name, err)
	}
	return l.Attrs().Index, nil
}

// End is one end of a veth pair.
type End struct {
	Name string           // at most MaxName characters
	MAC  net.HardwareAddr // nil: the kernel's choice
}

// AddVeth makes a pair of interfaces: near here and up, far in another namespace and down. It returns near's index.
func (c *Conn) AddVeth(near, far End, in *netns.Namespace) (int, error) {
	a := netlink.NewLinkAttrs()
	a.Name, a.HardwareAddr, a.Flags = near.Name, near.MAC, net.FlagUp
	v := &netlink.Veth{
		LinkAttrs: a, PeerName: far.Name, PeerHardwareAddr: far.MAC, PeerNamespace: netlink.NsFd(in.FD()), PeerTxQLen: -1,
	}
	if err := c.h.LinkAdd(v); err != nil {
		return 0, fmt.Errorf("add veth %s with peer %s in %s: %w", near.Name, far.Name, in.Name, err)
	}
	return v.Index, nil
}

// AddBridge makes a bridge that is up, forwards from the first moment and doesn't snoop multicast. It returns its
// index.
func (c *Conn) AddBridge(name string) (int, error) {
	a := netlink.NewLinkAttrs()
	a.Name, a.Flags = name, net.FlagUp
	snoop := false
	b := &netlink.Bridge{LinkAttrs: a, MulticastSnooping: &snoop}
	if err := c.h.LinkAdd(b); err != nil {
		return 0, fmt.Errorf("add bridge %s: %w", name, err)
	}
	return b.Index, nil
}

// dev names an interface for requests that need no more than its index.
func dev(index int) netlink.Link { return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}} }

// Attach makes the interface a port of the bridge.
func (c *Conn) Attach(port, bridge int) error {
	if err := c.h.LinkSetMasterByIndex(dev(port), bridge); err != nil {
		return fmt.Errorf("attach interface %d to bridge %d: %w", port, bridge, err)
	}
	return nil
}

// Up brings the interface up.
func (c *Conn) Up(index int) error {
	if err := c.h.LinkSetUp(dev(index)); err != nil {
		return fmt.Errorf("bring interface %d up: %w", index, err)
	}
	return nil
}

// SetGSO has TCP send IPv4 segments of up to so many bytes to the interface, for it or whoever is behind to cut: more
// than 65,536 is what the kernel calls BIG TCP (Linux 6.3; older ones take no notice, without an error). Where the
// interface takes no more than 65,536, the error is unix.EINVAL.
func (c *Conn) SetGSO(index, bytes int) error {
	if err := c.h.LinkSetGSOIPv4MaxSize(dev(index), bytes); err != nil {
		return fmt.Errorf("have interface %d take pieces of %d bytes: %w", index, bytes, err)
	}
	return nil
}

// GSO reads what SetGSO sets: 0 where the kernel knows of no such number.
func (c *Conn) GSO(index int) (bytes int, err error) {
	l, err := c.h.LinkByIndex(index)
	if err != nil {
		return 0, fmt.Errorf("read interface %d: %w", index, err)
	}
	return int(l.Attrs().GSOIPv4MaxSize), nil
}

// Await waits until the kernel has done in the background what follows from earlier requests: the interface passes
// packets (link watch knows of its carrier, a bridge that it is a port of forwards), and the namespace takes packets to
// its IPv6 addresses. Before, packets are lost or go astray. It gives up with ctx, and after ten seconds.
func (c *Conn) Await(ctx context.Context, index int, addrs ...netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		ready, err := c.ready(index, addrs)
		if ready || err != nil {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return fmt.Errorf("wait until interface %d is ready with %v: %w", index, addrs, ctx.Err())
		}
	}
}

// stateless are kinds of devices that are made with their carrier on: no event ever sets their state (RFC 2863).
var stateless = []string{"ipvlan", "vxlan"}

func (c *Conn) ready(index int, addrs []netip.Addr) (bool, error) {
	l, err := c.h.LinkByIndex(index) // which has the kernel see to its carrier at once, since Linux 6.8
	if err != nil {
		return false, fmt.Errorf("look up interface %d: %w", index, err)
	}
	switch a := l.Attrs(); {
	case a.OperState == netlink.OperUp, a.Flags&net.FlagLoopback != 0: // a loopback has no such state
	case a.OperState == netlink.OperUnknown && a.Flags&net.FlagUp != 0 && slices.Contains(stateless, l.Type()):
	default:
		return false, nil
	}
	for _, a := range addrs {
		if a.Is4() {
			continue // ready once it is there
		}
		routes, err := c.h.RouteGet(a.AsSlice())
		if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("look up route to %s: %w", a, err)
		}
		if len(routes) == 0 || routes[0].Type != unix.RTN_LOCAL {
			return false, nil
		}
	}
	return true, nil
}

// Delete removes the interface, and with it the other end of a veth pair. One that isn't there is no error.
func (c *Conn) Delete(index int) error {
	if err := c.h.LinkDel(dev(index)); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete interface %d: %w", index, err)
	}
	return nil
}

// AddAddress adds an address to the interface, without duplicate address detection, and with a route only where the
// prefix is wider than the address. One that it has is no error. See Await for when it is in use.
func (c *Conn) AddAddress(index int, p netip.Prefix) error { return c.addAddress(index, p, 0) }

// AddAddressAlone is AddAddress without a route to the prefix.
func (c *Conn) AddAddressAlone(index int, p netip.Prefix) error {
	return c.addAddress(index, p, unix.IFA_F_NOPREFIXROUTE)
}

func (c *Conn) addAddress(index int, p netip.Prefix, flags int) error {
	a := &netlink.Addr{IPNet: ipNet(p), Flags: flags}
	if p.Addr().Is6() {
		a.Flags |= unix.IFA_F_NODAD
	}
	if err := c.h.AddrAdd(dev(index), a); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add address %s to interface %d: %w", p, index, err)
	}
	return nil
}

// Neighbour is a link-layer address that needs no asking.
type Neighbour struct {
	Dev  int // interface index
	Addr netip.Addr
	MAC  [6]byte
}

// PutNeighbour makes the neighbour permanent, in place of what is known of its address.
func (c *Conn) PutNeighbour(n Neighbour) error {
	if err := c.h.NeighSet(n.netlink()); err != nil {
		return fmt.Errorf("set neighbour %s on interface %d: %w", n.Addr, n.Dev, err)
	}
	return nil
}

// DeleteNeighbour forgets the neighbour. One that isn't there is no error.
func (c *Conn) DeleteNeighbour(n Neighbour) error {
	if err := c.h.NeighDel(n.netlink()); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete neighbour %s on interface %d: %w", n.Addr, n.Dev, err)
	}
	return nil
}

func (n Neighbour) netlink() *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: n.Dev, State: netlink.NUD_PERMANENT, IP: n.Addr.AsSlice(), HardwareAddr: n.MAC[:]}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
