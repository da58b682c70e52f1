package migrate

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/kernel/ipset"
	"fairlead.dev/fairlead/kernel/ipvs"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
)

// removeIPVS removes what mode ipvs has beside its chains: services, but for those at addresses to keep, the interface
// that holds their addresses, and its sets.
func removeIPVS(exclude []netip.Prefix) error {
	dev, err := net.InterfaceByName(dummy)
	if err != nil {
		return nil // none was here
	}
	here, err := netns.Current()
	if err != nil {
		return err
	}
	defer here.Close()
	links, err := link.Dial(here)
	if err != nil {
		return err
	}
	defer links.Close()
	return errors.Join(removeVirtuals(exclude), links.Delete(dev.Index), ipset.Destroy("KUBE-"))
}

func removeVirtuals(exclude []netip.Prefix) error {
	c, err := ipvs.Open()
	if err != nil {
		return nil // this kernel has no IPVS
	}
	defer c.Close()
	list, err := c.Virtuals()
	if err != nil {
		return err
	}
	var b ipvs.Batch
	for _, v := range list {
		if !slices.ContainsFunc(exclude, func(p netip.Prefix) bool { return p.Contains(v.At.Addr()) }) {
			b.DelVirtual(v)
		}
	}
	if b.Empty() {
		return nil
	}
	return c.Run(&b)
}
