package attachment

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// makePair makes both ends of an attachment's device, and the pod's inside. An interface of that name in the pod goes
// first: a leftover.
func makePair(node *netlink.Socket, near link.Veth, a *model.Attachment) error {
	file, err := os.Open(a.NetNS)
	if err != nil {
		return fmt.Errorf("open the network namespace of %s: %w; is the pod still there?", podName(a), err)
	}
	defer file.Close()
	return netns.In(file, func() error {
		pod, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer pod.Close()
		var leftover, pair netlink.Batch
		link.DeleteNamed(&leftover, a.Interface)
		if err := pod.Apply(&leftover); err != nil {
			return fmt.Errorf("network namespace of %s: %w", podName(a), err)
		}
		far := link.Veth{Name: a.Interface, MAC: a.MACs.Pod, MTU: a.MTU}
		link.AddPair(&pair, near, far, int(file.Fd()))
		if err := node.Apply(&pair); err != nil {
			return err
		}
		if err := furnish(pod, far, a); err != nil {
			var undo netlink.Batch
			link.DeleteNamed(&undo, near.Name)
			return errors.Join(fmt.Errorf("network namespace of %s: %w", podName(a), err), node.Apply(&undo))
		}
		return nil
	})
}

func podName(a *model.Attachment) string {
	if a.Pod != "" {
		return "pod " + a.Pod
	}
	return "container " + a.ID
}

// furnish configures a pod's end, in the pod's namespace.
func furnish(s *netlink.Socket, far link.Veth, a *model.Attachment) error {
	if a.Addresses[len(a.Addresses)-1].Is6() {
		_, _, err := sysctl.Ensure("net/ipv6/conf/"+far.Name+"/disable_ipv6", "0")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	names, err := link.Names(s)
	if err != nil {
		return err
	}
	dev := 0
	for index, name := range names {
		if name == far.Name {
			dev = index
		}
	}
	b := route.NewBatch()
	link.Up(b, "lo")
	link.ChangeVeth(b, far)
	for _, x := range a.Addresses {
		gateway, all := model.Gateways[0], netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if x.Is6() {
			gateway, all = model.Gateways[1], netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		link.PutAddresses(b, link.Address{Dev: dev, Prefix: host(x)})
		link.PutNeighbours(b, link.Neighbour{Dev: dev, Addr: gateway, MAC: a.MACs.Node})
		route.Put(b, route.Route{To: host(gateway), Dev: dev}, route.Route{To: all, Via: gateway, Dev: dev})
	}
	return s.Apply(b)
}

// Differs returns how a pod's inside isn't as this plane makes it, "" where it is. The calling thread is in the pod's
// namespace.
func Differs(a *model.Attachment) (string, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return "", err
	}
	defer s.Close()
	veths, err := link.Veths(s, a.Interface)
	if err != nil {
		return "", err
	}
	for dev, v := range veths {
		if v.Name != a.Interface {
			continue
		}
		switch {
		case !v.Up:
			return "interface " + a.Interface + " is down", nil
		case v.MAC != a.MACs.Pod:
			return "interface " + a.Interface + " has another link-layer address", nil
		}
		return missing(s, dev, a)
	}
	return "interface " + a.Interface + " is gone", nil
}

// missing returns which address, neighbour or route of a pod's interface is gone.
func missing(s *netlink.Socket, dev int, a *model.Attachment) (string, error) {
	addresses, err := link.AddressesOf(s, dev)
	if err != nil {
		return "", err
	}
	neighbours, err := link.Neighbours(s, dev)
	if err != nil {
		return "", err
	}
	held := map[netip.Addr]bool{}
	for _, x := range addresses {
		held[x.Prefix.Addr()] = true
	}
	gateways := map[netip.Addr]bool{}
	for _, n := range neighbours {
		gateways[n.Addr] = n.MAC == a.MACs.Node
	}
	for _, x := range a.Addresses {
		gateway, outside := model.Gateways[0], netip.MustParseAddr("203.0.113.1")
		if x.Is6() {
			gateway, outside = model.Gateways[1], netip.MustParseAddr("2001:db8::1")
		}
		r, ok, err := route.To(s, outside)
		switch {
		case err != nil:
			return "", err
		case !held[x]:
			return fmt.Sprintf("interface %s has no address %s", a.Interface, x), nil
		case !gateways[gateway]:
			return fmt.Sprintf("interface %s has no neighbour %s", a.Interface, gateway), nil
		case !ok || r.Via != gateway || r.Dev != dev:
			return fmt.Sprintf("the default route is not by %s", gateway), nil
		}
	}
	return "", nil
}
