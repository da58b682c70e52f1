package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/kernel/netns"
)

// AddMACVLAN makes a device with a link-layer address of its own on a parent here, in another namespace and down. Those
// of one parent reach each other (mode bridge).
func (c *Conn) AddMACVLAN(parent int, far End, in *netns.Namespace) error {
	return c.addChild(&netlink.Macvlan{LinkAttrs: childOf(parent, far, in), Mode: netlink.MACVLAN_MODE_BRIDGE}, far, in)
}

// AddIPVLAN makes a device that shares its parent's link-layer address, in another namespace and down. With routes, the
// parent's namespace routes for it (mode l3); else it is on the parent's link (mode l2).
func (c *Conn) AddIPVLAN(parent int, routes bool, far End, in *netns.Namespace) error {
	mode := netlink.IPVLAN_MODE_L2
	if routes {
		mode = netlink.IPVLAN_MODE_L3
	}
	return c.addChild(&netlink.IPVlan{LinkAttrs: childOf(parent, far, in), Mode: mode}, far, in)
}

// childName is what a device is called until it is where it is to be: for Linux 6.12, its name must be free in its
// parent's namespace too.
const childName = "fl-child"

// childOf returns the attributes of a device of a parent.
func childOf(parent int, far End, in *netns.Namespace) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name, a.HardwareAddr, a.ParentIndex, a.Namespace = childName, far.MAC, parent, netlink.NsFd(in.FD())
	return a
}

// addChild makes a device and names it.
func (c *Conn) addChild(l netlink.Link, far End, in *netns.Namespace) error {
	if err := c.h.LinkAdd(l); err != nil {
		return fmt.Errorf("add %s %s in %s: %w", l.Type(), far.Name, in.Name, err)
	}
	there, err := Dial(in)
	if err != nil {
		return err
	}
	defer there.Close()
	made, err := there.h.LinkByName(childName)
	if err == nil {
		if err = there.h.LinkSetName(made, far.Name); err != nil {
			err = errors.Join(err, there.h.LinkDel(made))
		}
	}
	if err != nil {
		return fmt.Errorf("name %s %s in %s: %w", l.Type(), far.Name, in.Name, err)
	}
	return nil
}

// AddNetkit makes a pair of netkit devices, which carry frames as a veth does (mode l2): near here and up, far in
// another namespace and down. It returns near's index.
func (c *Conn) AddNetkit(near, far End, in *netns.Namespace) (int, error) {
	a, peer := netlink.NewLinkAttrs(), netlink.NewLinkAttrs()
	a.Name, a.HardwareAddr, a.Flags = near.Name, near.MAC, net.FlagUp
	peer.Name, peer.HardwareAddr, peer.Namespace = far.Name, far.MAC, netlink.NsFd(in.FD())
	n := &netlink.Netkit{LinkAttrs: a, Mode: netlink.NETKIT_MODE_L2, Policy: netlink.NETKIT_POLICY_FORWARD,
		PeerPolicy: netlink.NETKIT_POLICY_FORWARD}
	n.SetPeerAttrs(&peer)
	if err := c.h.LinkAdd(n); err != nil {
		return 0, fmt.Errorf("add netkit %s with peer %s in %s: %w", near.Name, far.Name, in.Name, err)
	}
	return n.Index, nil
}

// AddIPIP makes a tunnel of IPv4 in IPv4 (RFC 2003) between two addresses, which is up, and returns its index.
func (c *Conn) AddIPIP(name string, local, remote netip.Addr) (int, error) {
	a := netlink.NewLinkAttrs()
	a.Name, a.Flags = name, net.FlagUp
	t := &netlink.Iptun{LinkAttrs: a, Local: local.AsSlice(), Remote: remote.AsSlice(), PMtuDisc: 1}
	if err := c.h.LinkAdd(t); err != nil {
		return 0, fmt.Errorf("add ipip %s from %s to %s: %w", name, local, remote, err)
	}
	return t.Index, nil
}
