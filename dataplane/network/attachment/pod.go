package attachment

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/network"
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
	return inside(a, func(pod *netlink.Socket, ns int) error {
		var leftover netlink.Batch
		link.DeleteNamed(&leftover, a.Interface)
		if err := pod.Apply(&leftover); err != nil {
			return err
		}
		far := link.Veth{Name: a.Interface, MAC: a.MACs.Pod, MTU: a.MTU}
		add := func() error {
			var pair netlink.Batch
			link.AddPair(&pair, near, far, ns)
			return node.Apply(&pair)
		}
		err := add()
		if errors.Is(err, unix.EEXIST) { // an attachment of the same name was released
			if err = link.DeleteReleased(node, func(v link.Veth) bool { return v.Name == near.Name }); err == nil {
				err = add()
			}
		}
		if err != nil {
			return withRemedy(err, near.Kind)
		}
		var up netlink.Batch
		link.ChangeVeth(&up, near)
		err = node.Apply(&up)
		if err == nil {
			err = furnish(pod, a)
		}
		if err != nil {
			var undo netlink.Batch
			link.DeleteNamed(&undo, near.Name)
			return errors.Join(err, node.Apply(&undo))
		}
		return nil
	})
}

// withRemedy returns err, where the kernel lacks a kind of device with what to do about it.
func withRemedy(err error, kind string) error {
	if kind == link.KindNetkit && errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: this kernel has no netkit with link-layer addresses (Linux 6.10): set network.device to "+
			"veth, and recreate the pod", err)
	}
	return err
}

// child makes the child of the uplink by which a pod is connected by ipvlan, and the pod's inside. What is already as
// it should be stays.
func (w *writer) child(a *model.Attachment, parent int) error {
	v := link.IPVLAN{Parent: parent, Mode: network.IPVLANMode(a.Kind), MTU: a.MTU}
	if _, err := os.Stat(a.NetNS); errors.Is(err, fs.ErrNotExist) {
		return nil // not to be seen from here: the interface was made at ADD
	}
	return inside(a, func(pod *netlink.Socket, ns int) error {
		if differs, err := differs(pod, a); err != nil || differs == "" {
			return err
		}
		clear := func() error {
			var b netlink.Batch
			link.DeleteNamed(&b, a.Interface)
			link.DeleteNamed(&b, a.Device)
			return pod.Apply(&b)
		}
		if err := clear(); err != nil {
			return err
		}
		var b netlink.Batch
		link.AddIPVLAN(&b, a.Device, v, ns)
		if err := w.s.Apply(&b); err != nil {
			return err
		}
		if err := furnish(pod, a); err != nil {
			return errors.Join(err, clear())
		}
		return nil
	})
}

// inside runs f in a pod's network namespace, with a socket there and the namespace's file descriptor.
func inside(a *model.Attachment, f func(pod *netlink.Socket, ns int) error) error {
	file, err := os.Open(a.NetNS)
	if err != nil {
		return fmt.Errorf("open the network namespace of %s: %w; is the pod still there?", podName(a), err)
	}
	defer file.Close()
	err = netns.In(file, func() error {
		pod, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer pod.Close()
		return f(pod, int(file.Fd()))
	})
	if err != nil {
		return fmt.Errorf("network namespace of %s: %w", podName(a), err)
	}
	return nil
}

func podName(a *model.Attachment) string {
	if a.Pod != "" {
		return "pod " + a.Pod
	}
	return "container " + a.ID
}

// furnish configures a pod's end, in the pod's namespace.
func furnish(s *netlink.Socket, a *model.Attachment) error {
	name, ipvlan := a.Interface, a.Kind.IPVLAN()
	if ipvlan {
		name = a.Device
	}
	if a.Addresses[len(a.Addresses)-1].Is6() {
		for _, device := range []string{name, "lo"} { // by the latter it reaches itself
			_, _, err := sysctl.Ensure("net/ipv6/conf/"+device+"/disable_ipv6", "0")
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	dev, err := indexOf(s, name)
	if err != nil {
		return err
	}
	b := route.NewBatch()
	link.Up(b, "lo")
	if ipvlan {
		link.Rename(b, dev, a.Interface)
		link.ChangeIPVLAN(b, a.Interface, link.IPVLAN{MTU: a.MTU, Mode: network.IPVLANMode(a.Kind)})
	} else {
		link.ChangeVeth(b, link.Veth{Name: a.Interface, MAC: a.MACs.Pod, MTU: a.MTU})
	}
	for _, x := range a.Addresses {
		gateway, all := model.Gateways[0], netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if x.Is6() {
			gateway, all = model.Gateways[1], netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		link.PutAddresses(b, link.Address{Dev: dev, Prefix: host(x)})
		if !ipvlan { // else all that it sends goes to its own link-layer address
			link.PutNeighbours(b, link.Neighbour{Dev: dev, Addr: gateway, MAC: a.MACs.Node})
		}
		route.Put(b, route.Route{To: host(gateway), Dev: dev}, route.Route{To: all, Via: gateway, Dev: dev})
	}
	if rate := a.Limits.Egress / 8; rate > 0 {
		link.PutBuckets(b, link.Bucket{Dev: dev, Rate: rate})
	}
	return s.Apply(b)
}

// indexOf returns the interface index of a device, 0 where there is none of that name.
func indexOf(s *netlink.Socket, name string) (int, error) {
	names, err := link.Names(s)
	for index, n := range names {
		if n == name {
			return index, err
		}
	}
	return 0, err
}

// Differs returns how a pod's inside isn't as this plane makes it, "" where it is. The calling thread is in the pod's
// namespace.
func Differs(a *model.Attachment) (string, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return "", err
	}
	defer s.Close()
	return differs(s, a)
}

func differs(s *netlink.Socket, a *model.Attachment) (string, error) {
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
		case a.Kind.IPVLAN() != (v.Kind == link.KindIPVLAN):
			return "interface " + a.Interface + " is of kind " + v.Kind, nil
		case !a.Kind.IPVLAN() && v.MAC != a.MACs.Pod:
			return "interface " + a.Interface + " has another link-layer address", nil
		}
		return missing(s, dev, a)
	}
	return "interface " + a.Interface + " is gone", nil
}

// missing returns which address, neighbour, route or limit of a pod's interface is gone.
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
		case !a.Kind.IPVLAN() && !gateways[gateway]:
			return fmt.Sprintf("interface %s has no neighbour %s", a.Interface, gateway), nil
		case !ok || r.Via != gateway || r.Dev != dev:
			return fmt.Sprintf("the default route is not by %s", gateway), nil
		}
	}
	return lacksLimit(s, dev, a)
}

// lacksLimit returns how a pod's interface may send more than it is to, "" where it may not.
func lacksLimit(s *netlink.Socket, dev int, a *model.Attachment) (string, error) {
	want := link.Bucket{Dev: dev, Rate: a.Limits.Egress / 8}
	if want.Rate == 0 {
		return "", nil
	}
	buckets, err := link.Buckets(s)
	if err != nil || slices.Contains(buckets, want) {
		return "", err
	}
	return fmt.Sprintf("interface %s has no limit of %d bits a second", a.Interface, a.Limits.Egress), nil
}
