package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/rule"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// Veth is the name of the node's end of the way into the netns.
const Veth = model.ProxyDevice

// netnsDevice is the name of the netns's end.
const netnsDevice = "eth0"

// What marks routes and rules as ours. Rules for connections that outlive their frontend are no part's facts.
const (
	Owner         = 0xf1
	ownerDetained = 0xf2
)

// The tables: for fragments of datagrams, of connections that outlive their frontend, of the node's addresses that take
// node ports, of addresses whatever the port, and one for each protocol and port.
const (
	tables         = uint32(0xfa) << 24
	tableDetained  = tables + 1
	tableNode      = tables + 2
	tableUDP6      = tables + 3 // in the netns
	tableUnmatched = tables + 4
)

func tableOf(protocol uint8, port uint16) uint32 { return tables | uint32(protocol)<<16 | uint32(port) }

// Priorities of our rules. Those that name a port come before the kernel's own for local addresses, whose priority is
// 0, too: see localLast.
const (
	priorityPort      = 0
	priorityBack      = 70 // of what comes from the netns: past the next ones
	priorityWhole     = 71 // of datagrams that are whole: past the next
	priorityFragments = 72
	priorityForeign   = 73 // where they go on
	priorityUnmatched = 74 // what no frontend and no address of the node's own matches
)

// The next hops between node and netns, on links of theirs alone, and an address for what the netns itself has to say.
var (
	gateway4, gateway6 = netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")
	speaker6           = netip.MustParsePrefix("fd66:6169:726c:6561::1/128")
	macNode, macNetns  = [6]byte{2, 'f', 'l', 0, 0, 1}, [6]byte{2, 'f', 'l', 0, 0, 2}
)

func gateway(six bool) netip.Addr {
	if six {
		return gateway6
	}
	return gateway4
}

// privateNetns is a network namespace without a name in which every address is local. It lives as long as the process.
type privateNetns struct {
	ns  *netns.Namespace
	dev int // index of the node's end of the way in; 0: there is none
}

// newPrivateNetns makes a netns without a way in.
func newPrivateNetns() (*privateNetns, error) {
	r := &privateNetns{}
	err := aside(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		r.ns, err = netns.Current()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	return r, nil
}

// aside runs f on a thread of its own, which ends with it.
func aside(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- f()
	}()
	return <-done
}

// open makes the way between the node and the netns anew, whole or not at all.
func (r *privateNetns) open(node *netns.Namespace) error {
	here, err := link.Dial(node)
	if err != nil {
		return err
	}
	defer here.Close()
	there, err := link.Dial(r.ns)
	if err != nil {
		return err
	}
	defer there.Close()
	r.dev = 0
	if err := shut(here); err != nil {
		return err
	}
	near := link.End{Name: Veth, MAC: net.HardwareAddr(macNode[:])}
	dev, err := here.AddVeth(near, link.End{Name: netnsDevice, MAC: net.HardwareAddr(macNetns[:])}, r.ns)
	if err != nil {
		return err
	}
	// a kernel that knows no longer ones goes on with its own
	if err := here.SetGSO(dev, maxGSOSize); err != nil && !errors.Is(err, unix.EINVAL) {
		return errors.Join(err, here.Delete(dev))
	}
	if err := r.furnish(there); err != nil {
		return errors.Join(err, here.Delete(dev))
	}
	if err := errors.Join(sysctl.Set(node, vethSettings...), neighbours(here, dev, macNetns)); err != nil {
		return errors.Join(err, here.Delete(dev))
	}
	r.dev = dev
	return nil
}

// maxGSOSize is how many bytes TCP of the node itself puts into one piece on its way into the netns (BIG TCP), where 64
// KiB are usual: what a piece costs beyond its bytes is the client's processor time. Out of the netns it stays as is:
// most of what leaves goes on to a device that takes no more, and would be cut small for it. So do pieces of IPv6,
// which would have an option header (RFC 2675) that a node's firewall may not look behind.
const maxGSOSize = 192 << 10

// vethSettings are of the way into the netns: packets from there may come from addresses of the node itself, loopback
// ones among them. It speaks IPv6 also where that is switched off for all interfaces: the kernel refuses next hops on
// it else.
var vethSettings = []sysctl.Setting{
	{Name: "-net/ipv6/conf/" + Veth + "/disable_ipv6", Value: "0"},
	{Name: "net/ipv4/conf/" + Veth + "/accept_local", Value: "1"},
	{Name: "net/ipv4/conf/" + Veth + "/route_localnet", Value: "1"},
	{Name: "net/ipv4/conf/" + Veth + "/rp_filter", Value: "0"},
}

// neighbours has next hops be at the other end of the way into the netns.
func neighbours(c *link.Conn, dev int, mac [6]byte) (err error) {
	for _, every := range everywhere() {
		err = errors.Join(err, c.PutNeighbour(link.Neighbour{Dev: dev, Addr: gateway(every.Addr().Is6()), MAC: mac}))
	}
	return err
}

// haveIPv6 reports whether the kernel speaks it.
var haveIPv6 = sync.OnceValue(func() bool {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
})

// everywhere returns the prefix of all addresses, for each family that the kernel speaks.
func everywhere() []netip.Prefix {
	l := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0)}
	if haveIPv6() {
		l = append(l, netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	}
	return l
}

// shut removes the way into a netns, whoever's it is.
func shut(node *link.Conn) error {
	dev, err := node.Index(Veth)
	if err != nil {
		return nil // there is none
	}
	return node.Delete(dev)
}

// settings of the netns. Refusals are answered every time, as a node's own are.
var netnsSettings = []sysctl.Setting{
	{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/" + netnsDevice + "/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/" + netnsDevice + "/route_localnet", Value: "1"},
	{Name: "net/ipv4/tcp_mtu_probing", Value: "1"},      // it hears of no ICMP errors
	{Name: "net/ipv4/icmp_echo_ignore_all", Value: "1"}, // nothing is there
	{Name: "-net/ipv6/icmp/echo_ignore_all", Value: "1"},
	{Name: "net/ipv4/icmp_ratelimit", Value: "0"},
	{Name: "-net/ipv6/icmp/ratelimit", Value: "0"},
	{Name: "-net/ipv6/conf/lo/disable_ipv6", Value: "0"}, // which the namespace may have got from the host
	{Name: "-net/ipv6/conf/" + netnsDevice + "/disable_ipv6", Value: "0"},
	{Name: "-net/ipv6/conf/" + netnsDevice + "/accept_ra", Value: "0"},
}

// everyPath is a packet's size that every path of IPv6 takes (RFC 8200, section 5). UDP leaves the netns in such,
// since no ICMP error gets there: longer answers go in fragments, as those of IPv4 do, which routers may fragment.
const everyPath = 1280

// furnish has every packet that comes in be for the netns itself, and everything that it sends go to the node.
func (r *privateNetns) furnish(c *link.Conn) error {
	dev, err := c.Index(netnsDevice)
	if err != nil {
		return err
	}
	const lo = 1
	err = errors.Join(sysctl.Set(r.ns, netnsSettings...), c.Up(lo), c.Up(dev), neighbours(c, dev, macNode))
	if haveIPv6() && err == nil {
		err = c.AddAddress(lo, speaker6)
	}
	if err != nil {
		return err
	}
	const kernels, local, main = unix.RTPROT_KERNEL, unix.RT_TABLE_LOCAL, unix.RT_TABLE_MAIN
	b := route.NewBatch()
	for _, every := range everywhere() {
		six := every.Addr().Is6()
		toItself := route.Route{Owner: Owner, Table: local, Type: route.Local, To: every, Dev: lo}
		route.Delete(b, toItself) // no gateway may be local
		rule.Put(b,
			rule.Rule{Owner: Owner, Priority: 10, Six: six, Input: netnsDevice, Table: local},
			rule.Rule{Owner: Owner, Priority: 20, Six: six, Input: "lo", Table: main})
		route.Put(b, route.Route{Owner: Owner, Table: main, To: every, Via: gateway(six), Dev: dev}, toItself)
		rule.Delete(b, rule.Rule{Owner: kernels, Priority: 0, Six: six, Table: local})
	}
	if haveIPv6() {
		route.Put(b, route.Route{Owner: Owner, Table: tableUDP6, To: netip.PrefixFrom(netip.IPv6Unspecified(), 0),
			Via: gateway6, Dev: dev, MTU: everyPath})
		rule.Put(b, rule.Rule{Owner: Owner, Priority: 15, Six: true, Protocol: uint8(model.UDP), Input: "lo",
			Table: tableUDP6})
	}
	s, err := netlink.OpenIn(r.ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Apply(b)
}
