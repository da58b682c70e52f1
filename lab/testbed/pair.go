package testbed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/kuberouter"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// The addresses are the same in every pair.
var (
	NodeAddr = netip.MustParseAddr("172.18.0.2") // as generate's Node says
	farAddr  = netip.MustParseAddr("172.18.0.1")
	podAddr  = netip.MustParseAddr("10.128.0.254") // of the range that generate's Node has for pods
	gateway  = netip.MustParseAddr("169.254.1.1")  // the node, as its pods know it
)

// The server's port and the number of its addresses.
const (
	ServerPort = 8080 // as generate's endpoints have it
	Servers    = 2 * Endpoints
)

// ServerAddr returns the i-th address of the server: the first are the endpoints of the Services that are connected to,
// the others replace them in changes.
func ServerAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 64, 0, byte(1 + i)}) }

// Pair is two network namespaces joined by a veth: a node, where the client and perhaps an agent run, and a far end
// with the server.
type Pair struct {
	Arm        string
	Params     result.Params // of its blocks
	Services   int           // 0: none, and no agent of theirs
	Near       *netns.Namespace
	Far        *netns.Namespace
	pod        *netns.Namespace // nil: none
	servers    []server
	exact      bool // servers are inline
	inline     []*load.Inline
	Agent      *Process           // nil: none, or none yet
	peer       *Pair              // the far end as a node with an agent; nil: none
	client     *netns.Namespace   // the client's pod; nil: the client is a process of the far end
	KubeProxy  *kubeproxy.Node    // nil: none
	KubeRouter *kuberouter.Router // nil: none
	cgroup     string             // folder of the one that holds the node's processes; "": they need none of their own
	Words      *load.Words        // that the server understands; nil: load's own
}

// server answers in a far end.
type server interface {
	load.Worker
	Close() error
}

// settings of both namespaces: no packet but ours, and ports enough that none comes again while conntrack knows it.
var settings = []sysctl.Setting{
	{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/default/rp_filter", Value: "0"},
	{Name: "-net/ipv6/conf/all/disable_ipv6", Value: "1"},
	{Name: "-net/ipv6/conf/default/disable_ipv6", Value: "1"},
	{Name: "-net/ipv6/conf/lo/disable_ipv6", Value: "0"}, // IPVS's local route wants it
	{Name: "net/ipv4/ip_local_port_range", Value: "1024 65535"},
	{Name: "net/core/somaxconn", Value: "65535"},
}

// withIPv6 undoes settings that turn IPv6 off.
var withIPv6 = []sysctl.Setting{{Name: "-net/ipv6/conf/all/disable_ipv6", Value: "0"},
	{Name: "-net/ipv6/conf/default/disable_ipv6", Value: "0"}}

// NewPair makes the namespaces NAME-node and NAME-far.
func NewPair(ctx context.Context, name string) (p *Pair, err error) {
	p = &Pair{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.Near, err = NewNamespace(name + nodeSuffix); err != nil {
		return p, err
	}
	if p.Far, err = NewNamespace(name + farSuffix); err != nil {
		return p, err
	}
	return p, p.join(ctx)
}

// Hooks reports whether a mode attaches to a cgroup: then the node's processes need one of their own. Other modes
// mostly do without, since entering one takes tens of milliseconds.
func Hooks(mode string) bool { return mode == "ebpf" }

// Group returns the node's processes a cgroup of their own, if this machine has any. Without one, a mode that hooks
// into one hooks into all of the machine's.
func (p *Pair) Group() {
	if p.cgroup == "" {
		p.cgroup, _ = cgroup.New(p.Near.Name)
	}
}

// Cgroup returns the folder of the cgroup that holds the node's processes, "" where they have none of their own.
func (p *Pair) Cgroup() string { return p.cgroup }

// Enter runs f on the calling thread as one of the node's processes.
func (p *Pair) Enter(f func() error) error { return p.enterIn(p.Near, f) }

// EnterPod runs f on the calling thread as one of the pod's processes.
func (p *Pair) EnterPod(f func() error) error { return p.enterIn(p.pod, f) }

// EnterClient runs f on the calling thread as a process of the client's pod, or else of the far end.
func (p *Pair) EnterClient(f func() error) error {
	node, ns := p, p.Far
	if p.peer != nil {
		node = p.peer
	}
	if p.client != nil {
		ns = p.client
	}
	return node.enterIn(ns, f)
}

func (p *Pair) enterIn(ns *netns.Namespace, f func() error) error {
	return ns.Do(func() error {
		if p.cgroup == "" {
			return f()
		}
		return cgroup.Do(p.cgroup, f)
	})
}

// Workers returns those whose processor time belongs to a load between the two ends.
func (p *Pair) Workers() (w load.Workers) {
	for _, s := range p.servers {
		w.Servers = append(w.Servers, s)
	}
	for _, a := range p.agents() {
		w.Agents = append(w.Agents, a)
	}
	if p.KubeProxy != nil {
		w.Agents = append(w.Agents, subject{p.KubeProxy})
	}
	if p.KubeRouter != nil {
		w.Agents = append(w.Agents, subject{p.KubeRouter})
	}
	return w
}

// agents returns the pair's agents.
func (p *Pair) agents() (l []*Process) {
	if p.Agent != nil {
		l = append(l, p.Agent)
	}
	if p.peer != nil {
		l = append(l, p.peer.agents()...)
	}
	return l
}

// subject is another's program as a worker: its processor time is counted.
type subject struct {
	program interface{ CPU() (time.Duration, error) }
}

// CPU is 0 where it can't be read.
func (w subject) CPU() time.Duration {
	d, _ := w.program.CPU()
	return d
}

// NewNamespace makes a namespace with our settings and its loopback up.
func NewNamespace(name string) (*netns.Namespace, error) {
	ns, err := netns.New(name)
	if err != nil {
		return nil, err
	}
	err = sysctl.Set(ns, settings...)
	if err == nil {
		err = DialLink(ns, func(c *link.Conn) error { return c.Up(1) }) // the loopback is always interface 1
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close(), netns.Delete(name))
	}
	return ns, nil
}

// DialLink calls f with a connection to rtnetlink of a namespace.
func DialLink(ns *netns.Namespace, f func(*link.Conn) error) error {
	c, err := link.Dial(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(c)
}

var nodeMAC, farMAC, gatewayMAC, clientMAC = [6]byte{2, 0xf1, 0, 0, 0, 2}, [6]byte{2, 0xf1, 0, 0, 0, 1},
	[6]byte{2, 0xf1, 0, 0, 0, 3}, [6]byte{2, 0xf1, 0, 0, 0, 4}

// join lays the veth. Every route leads over it via the other end, whose link-layer address is a permanent neighbour.
func (p *Pair) join(ctx context.Context) error {
	err := DialLink(p.Near, func(c *link.Conn) error {
		_, err := c.AddVeth(link.End{Name: "eth0", MAC: net.HardwareAddr(nodeMAC[:])},
			link.End{Name: "eth0", MAC: net.HardwareAddr(farMAC[:])}, p.Far)
		return err
	})
	if err != nil {
		return err
	}
	far := []netip.Addr{farAddr}
	for i := range Servers {
		far = append(far, ServerAddr(i))
	}
	return errors.Join(
		Plug(ctx, p.Far, far, NodeAddr, nodeMAC),
		Plug(ctx, p.Near, []netip.Addr{NodeAddr}, farAddr, farMAC))
}

// addPod makes a pod on the node: a namespace whose device leads to the node, which forwards.
func (p *Pair) addPod(ctx context.Context) error { return p.addPodBy(ctx, PathVeth) }

// Plug brings a namespace's eth0 up with addresses and a default route via the other end.
func Plug(ctx context.Context, ns *netns.Namespace, addrs []netip.Addr, via netip.Addr, mac [6]byte) error {
	return DialLink(ns, func(c *link.Conn) error {
		eth0, err := c.Index("eth0")
		if err != nil {
			return err
		}
		if err := c.Up(eth0); err != nil {
			return err
		}
		for _, a := range addrs {
			if err := c.AddAddress(eth0, netip.PrefixFrom(a, a.BitLen())); err != nil {
				return err
			}
		}
		return errors.Join(
			c.PutNeighbour(link.Neighbour{Dev: eth0, Addr: via, MAC: mac}),
			route.PutIn(ns, route.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: via, Dev: eth0, Source: addrs[0]}),
			c.Await(ctx, eth0, addrs...))
	})
}

// Everywhere is all addresses of the far namespace, at the endpoints' port.
var Everywhere = netip.AddrPortFrom(netip.IPv4Unspecified(), ServerPort)

// Serve starts a server at a place in the far namespace.
func (p *Pair) Serve(thread load.Thread, at netip.AddrPort, sizes load.Sizes, id byte) error {
	return p.ServeAs(load.ServerConfig{Thread: thread, Sizes: sizes, ID: id, Listen: []netip.AddrPort{at}})
}

// ServeAs starts a server.
func (p *Pair) ServeAs(c load.ServerConfig) error {
	if p.exact {
		s, err := load.ServeInline(c)
		if err == nil {
			p.inline, p.servers = append(p.inline, s), append(p.servers, s)
		}
		return err
	}
	s, err := load.Serve(c)
	if err == nil {
		p.servers = append(p.servers, s)
	}
	return err
}

// Tracked returns how many connections conntrack knows of in the node's namespace.
func (p *Pair) Tracked() (n int, err error) {
	err = p.Near.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if errors.Is(err, fs.ErrNotExist) {
			return nil // this kernel tracks nothing yet
		}
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("count tracked connections in %s: %w", p.Near.Name, err)
	}
	return n, nil
}

// Close ends the server and removes the namespaces.
func (p *Pair) Close() error {
	var errs []error
	for _, s := range p.servers {
		errs = append(errs, s.Close())
	}
	far := p.Far
	if p.peer != nil {
		errs, far = append(errs, p.peer.Close()), nil
	}
	if p.Agent != nil { // what it pinned outlives the namespace
		errs = append(errs, p.Enter(func() error { return mode.Clean(context.Background()) }))
	}
	for end := time.Now().Add(time.Second); p.cgroup != "" && time.Now().Before(end); {
		errs = append(errs, cgroup.Delete(p.cgroup))
		if _, err := os.Stat(p.cgroup); err != nil {
			break
		}
		time.Sleep(time.Millisecond) // threads that have ended leave it a moment later
	}
	for _, ns := range []*netns.Namespace{p.Near, far, p.pod, p.client} {
		if ns != nil {
			errs = append(errs, ns.Close(), netns.Delete(ns.Name))
		}
	}
	return errors.Join(errs...)
}

// Own assigns all addresses of a prefix to the node.
func (p *Pair) Own(prefix netip.Prefix) error {
	const loopback = 1 // always interface 1
	return route.PutIn(p.Near, route.Route{Owner: unix.RTPROT_STATIC, Table: unix.RT_TABLE_LOCAL, Type: route.Local,
		To: prefix, Dev: loopback})
}
