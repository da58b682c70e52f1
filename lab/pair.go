package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/load"
)

// Addresses are the same in every pair.
var (
	nodeAddr = netip.MustParseAddr("172.18.0.2") // as generate's Node says
	farAddr  = netip.MustParseAddr("172.18.0.1")
	podAddr  = netip.MustParseAddr("10.128.0.254") // of the range that generate's Node gives to pods
	gateway  = netip.MustParseAddr("169.254.1.1")  // the node, as its pods know it
)

const (
	serverPort = 8080 // as generate's endpoints have it
	servers    = 2 * endpoints
)

// serverAddr is the i-th address that the server answers at: the first endpoints are those of the Services that are
// connected to, the others stand in for them when they are replaced.
func serverAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 64, 0, byte(1 + i)}) }

// pair is two network namespaces joined by a veth: a node, where the client and perhaps an agent run, and a far end
// with the server.
type pair struct {
	arm      string
	services int // 0: none, and no agent
	node     *netns.Namespace
	far      *netns.Namespace
	pod      *netns.Namespace // nil: none
	servers  []server
	agent    *process        // nil: none, or none yet
	proxy    *kubeproxy.Node // nil: none
	cgroup   string          // folder of the one that holds the node's processes; "": they need none of their own
	words    *load.Words     // that the server understands; nil: load's own
}

// server answers in a far end.
type server interface {
	load.Worker
	Close() error
}

// settings of both namespaces: no packet but ours, and ports enough that none comes again while conntrack knows it.
var settings = []link.Setting{
	{Name: "ipv4/conf/all/rp_filter", Value: "0"},
	{Name: "ipv4/conf/default/rp_filter", Value: "0"},
	{Name: "-ipv6/conf/all/disable_ipv6", Value: "1"},
	{Name: "-ipv6/conf/default/disable_ipv6", Value: "1"},
	{Name: "-ipv6/conf/lo/disable_ipv6", Value: "0"}, // IPVS's local route wants it
	{Name: "ipv4/ip_local_port_range", Value: "1024 65535"},
	{Name: "core/somaxconn", Value: "65535"},
}

// newPair makes the namespaces NAME-node and NAME-far.
func newPair(ctx context.Context, name string) (p *pair, err error) {
	p = &pair{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.node, err = newSpace(name + nodeSuffix); err != nil {
		return p, err
	}
	if p.far, err = newSpace(name + "-far"); err != nil {
		return p, err
	}
	return p, p.join(ctx)
}

// hooks says whether a mode hooks into a cgroup: then the node's processes want one of their own. Others are spared it mostly, since to
// enter takes tens of milliseconds.
func hooks(mode string) bool { return mode == armEBPF }

// group gives the node's processes a cgroup of their own, if this machine has any. Without one, a mode that hooks into one hooks into all of the
// machine's.
func (p *pair) group() {
	if p.cgroup == "" {
		p.cgroup, _ = cgroup.New(p.node.Name)
	}
}

// enter runs f on the calling thread as one of the node's processes.
func (p *pair) enter(f func() error) error { return p.enterIn(p.node, f) }

// enterPod runs f on the calling thread as one of the pod's processes.
func (p *pair) enterPod(f func() error) error { return p.enterIn(p.pod, f) }

func (p *pair) enterIn(ns *netns.Namespace, f func() error) error {
	return ns.Do(func() error {
		if p.cgroup == "" {
			return f()
		}
		return cgroup.Do(p.cgroup, f)
	})
}

// workers are those whose processor time belongs to a load between the two.
func (p *pair) workers() (w load.Workers) {
	for _, s := range p.servers {
		w.Servers = append(w.Servers, s)
	}
	if p.agent != nil {
		w.Agents = []load.Worker{p.agent}
	}
	if p.proxy != nil {
		w.Agents = []load.Worker{proxyWorker{p.proxy}}
	}
	return w
}

// proxyWorker is a kube-proxy as one whose processor time is counted.
type proxyWorker struct{ *kubeproxy.Node }

// CPU is 0 where it can't be read.
func (w proxyWorker) CPU() time.Duration {
	d, _ := w.Node.CPU()
	return d
}

// newSpace makes a namespace with our settings and its loopback up.
func newSpace(name string) (*netns.Namespace, error) {
	ns, err := netns.New(name)
	if err != nil {
		return nil, err
	}
	err = link.Set(ns, settings...)
	if err == nil {
		err = dial(ns, func(c *link.Conn) error { return c.Up(1) }) // the loopback is always interface 1
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close(), netns.Delete(name))
	}
	return ns, nil
}

func dial(ns *netns.Namespace, f func(*link.Conn) error) error {
	c, err := link.Dial(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(c)
}

var nodeMAC, farMAC, gatewayMAC, clientMAC = [6]byte{2, 0xf1, 0, 0, 0, 2}, [6]byte{2, 0xf1, 0, 0, 0, 1}, [6]byte{2, 0xf1, 0, 0, 0, 3}, [6]byte{2, 0xf1, 0, 0, 0, 4}

// join lays the veth. Every route leads over it by way of the other end, whose link-layer address needs no asking.
func (p *pair) join(ctx context.Context) error {
	err := dial(p.node, func(c *link.Conn) error {
		_, err := c.AddVeth(link.End{Name: "eth0", MAC: net.HardwareAddr(nodeMAC[:])}, link.End{Name: "eth0", MAC: net.HardwareAddr(farMAC[:])}, p.far)
		return err
	})
	if err != nil {
		return err
	}
	far := []netip.Addr{farAddr}
	for i := range servers {
		far = append(far, serverAddr(i))
	}
	return errors.Join(
		plug(ctx, p.far, far, nodeAddr, nodeMAC),
		plug(ctx, p.node, []netip.Addr{nodeAddr}, farAddr, farMAC))
}

// addPod makes a pod on the node: a namespace whose device leads to the node, which forwards.
func (p *pair) addPod(ctx context.Context) (err error) {
	if p.pod, err = newSpace(strings.TrimSuffix(p.node.Name, nodeSuffix) + "-pod"); err != nil {
		return err
	}
	err = dial(p.node, func(c *link.Conn) error {
		dev, err := c.AddVeth(link.End{Name: "pod", MAC: net.HardwareAddr(gatewayMAC[:])}, link.End{Name: "eth0", MAC: net.HardwareAddr(clientMAC[:])}, p.pod)
		if err != nil {
			return err
		}
		return errors.Join(
			c.PutNeighbour(link.Neighbour{Dev: dev, Addr: podAddr, MAC: clientMAC}),
			c.PutRoute(link.Route{To: netip.PrefixFrom(podAddr, podAddr.BitLen()), Dev: dev}))
	})
	return errors.Join(err,
		link.Set(p.node, link.Setting{Name: "ipv4/ip_forward", Value: "1"}),
		plug(ctx, p.pod, []netip.Addr{podAddr}, gateway, gatewayMAC))
}

// plug brings a namespace's eth0 up with addresses and a default route via the other end.
func plug(ctx context.Context, ns *netns.Namespace, addrs []netip.Addr, via netip.Addr, mac [6]byte) error {
	return dial(ns, func(c *link.Conn) error {
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
			c.PutRoute(link.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: via, Dev: eth0, Source: addrs[0]}),
			c.Await(ctx, eth0, addrs...))
	})
}

// translate writes one rule into the node's kernel: what it sends to one TCP port goes to another address.
func (p *pair) translate(from, to netip.AddrPort) error {
	addr, port := from.Addr().As4(), func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	is := func(load nft.Expr, v []byte) []nft.Expr { return []nft.Expr{load, nft.Cmp(nft.Eq, nft.R(0), v)} }
	var tx nft.Tx
	tx.AddTable("lab")
	tx.AddChain("lab", nft.Chain{Name: "output", Hook: &nft.Hook{Type: "nat", Number: unix.NF_INET_LOCAL_OUT, Priority: -100}})
	tx.AddRule("lab", "output", nft.Rule{Comment: "the only one", Exprs: slices.Concat(
		is(nft.Meta(nft.MetaNFProto, nft.R(0)), []byte{unix.NFPROTO_IPV4}),
		is(nft.Payload(nft.NetworkHeader, 16, 4, nft.R(0)), addr[:]),
		is(nft.Meta(nft.MetaL4Proto, nft.R(0)), []byte{unix.IPPROTO_TCP}),
		is(nft.Payload(nft.TransportHeader, 2, 2, nft.R(0)), port(from)),
		[]nft.Expr{nft.Load(nft.R(0), to.Addr().AsSlice()), nft.Load(nft.R(1), port(to)), nft.DNAT(unix.NFPROTO_IPV4, nft.R(0), nft.R(1))},
	)})
	err := p.node.Do(func() error {
		c, err := nft.Open()
		if err != nil {
			return err
		}
		return errors.Join(c.Commit(&tx), c.Close())
	})
	if err != nil {
		return fmt.Errorf("write the one rule of %s: %w", p.node.Name, err)
	}
	return nil
}

// everywhere is all addresses of the far namespace, at the endpoints' port.
var everywhere = netip.AddrPortFrom(netip.IPv4Unspecified(), serverPort)

// serve starts a server at a place in the far namespace.
func (p *pair) serve(place load.Place, at netip.AddrPort, sizes load.Sizes, id byte) error {
	s, err := load.Serve(load.ServerConfig{Place: place, Sizes: sizes, ID: id, Listen: []netip.AddrPort{at}})
	if err == nil {
		p.servers = append(p.servers, s)
	}
	return err
}

// tracked is how many connections conntrack knows of in the node's namespace.
func (p *pair) tracked() (n int, err error) {
	err = p.node.Do(func() error {
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
		return 0, fmt.Errorf("count tracked connections in %s: %w", p.node.Name, err)
	}
	return n, nil
}

// close ends the server and removes the namespaces.
func (p *pair) close() error {
	var errs []error
	for _, s := range p.servers {
		errs = append(errs, s.Close())
	}
	if p.agent != nil { // what it pinned outlives the namespace
		errs = append(errs, p.enter(func() error { return agent.Clean(context.Background()) }))
	}
	for end := time.Now().Add(time.Second); p.cgroup != "" && time.Now().Before(end); {
		errs = append(errs, cgroup.Delete(p.cgroup))
		if _, err := os.Stat(p.cgroup); err != nil {
			break
		}
		time.Sleep(time.Millisecond) // threads that have ended leave it a moment later
	}
	for _, ns := range []*netns.Namespace{p.node, p.far, p.pod} {
		if ns != nil {
			errs = append(errs, ns.Close(), netns.Delete(ns.Name))
		}
	}
	return errors.Join(errs...)
}
