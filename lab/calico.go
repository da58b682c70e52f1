package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/rules"
	"fairlead.dev/fairlead/model"
)

// Calico's pods on a node and policies of each, as the article has them.
const (
	armCalico      = "calico"
	calicoPods     = 30
	calicoPolicies = 3
	fewServices    = 20 // of kube-proxy, which the article compares that with
)

// calico is a node with Calico's rules of policies. Two of its pods are there, the others' devices have names alone; the far end stands
// for pods of other nodes.
type calico struct {
	*pair
	classic.Calico
	pods []*netns.Namespace // of the first two
}

// calicoMAC is that of the node's end of every pod's veth, as in Calico.
var calicoMAC = [6]byte{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}

// podMAC is that of a pod's end.
func podMAC(i int) [6]byte { return [6]byte{2, 0xf1, 0, 0, 1, byte(i)} }

// newCalico makes the pods. Each lets clients in by each of its policies alike: a pod of another node by each, and a share of its neighbours.
func newCalico() (c classic.Calico) {
	c.Pool = netip.MustParsePrefix("10.64.0.0/10")
	for i := range calicoPods {
		c.Pods = append(c.Pods, classic.Pod{Name: fmt.Sprintf("default/pod-%d", i), Addr: netip.AddrFrom4([4]byte{10, 65, 0, byte(1 + i)}), Port: serverPort, Policies: make([][]netip.Addr, calicoPolicies)})
	}
	for i := range c.Pods {
		l := c.Pods[i].Policies
		for j := range l {
			l[j] = append(l[j], elsewhere(j))
		}
		for j := range c.Pods {
			if at := (i + j) % calicoPolicies; i != j {
				l[at] = append(l[at], c.Pods[j].Addr)
			}
		}
	}
	return c
}

// elsewhere is a pod of another node that the i-th policy of each pod lets in.
func elsewhere(i int) netip.Addr { return serverAddr(i) }

// tryCalico says why Calico's rules can't be written here, if so.
func (r *run) tryCalico(ctx context.Context) (err error) {
	ns, err := newSpace(r.id + "-try")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.drop(ns)) }()
	c := newCalico()
	return ns.Do(func() error { return c.Install(ctx, classic.Legacy) })
}

// raiseCalico makes the node, and a server at each end of every way through it.
func (r *run) raiseCalico(ctx context.Context) (c *calico, err error) {
	name := r.id + "-" + armCalico
	p, err := newPair(ctx, name)
	if err != nil {
		return nil, err
	}
	c = &calico{pair: p, Calico: newCalico()}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for i := range 2 {
		if err := c.plug(ctx, name, i); err != nil {
			return nil, fmt.Errorf("pod %d of %s: %w", i, p.node.Name, err)
		}
	}
	if err := link.Set(p.node, link.Setting{Name: "ipv4/ip_forward", Value: "1"}); err != nil {
		return nil, err
	}
	if err := c.serve(load.Place{Enter: c.far.Do}, everywhere, single, 1); err != nil {
		return nil, err
	}
	return c, p.node.Do(func() error { return c.Install(ctx, classic.Legacy) })
}

// plug makes a pod, with a server.
func (c *calico) plug(ctx context.Context, name string, i int) error {
	pod := &c.Pods[i]
	ns, err := newSpace(fmt.Sprintf("%s-pod%d", name, i))
	if err != nil {
		return err
	}
	c.pods = append(c.pods, ns)
	mac := podMAC(i)
	err = dial(c.node, func(l *link.Conn) error {
		dev, err := l.AddVeth(link.End{Name: pod.Device(), MAC: net.HardwareAddr(calicoMAC[:])}, link.End{Name: "eth0", MAC: net.HardwareAddr(mac[:])}, ns)
		if err != nil {
			return err
		}
		return errors.Join(l.Up(dev),
			l.PutNeighbour(link.Neighbour{Dev: dev, Addr: pod.Addr, MAC: mac}),
			l.PutRoute(link.Route{To: netip.PrefixFrom(pod.Addr, 32), Dev: dev}))
	})
	if err == nil {
		err = plug(ctx, ns, []netip.Addr{pod.Addr}, nodeAddr, calicoMAC)
	}
	if err != nil {
		return err
	}
	return c.serve(load.Place{Enter: ns.Do}, everywhere, single, 1)
}

func (c *calico) close() error {
	err := c.pair.close()
	for _, ns := range c.pods {
		err = errors.Join(err, ns.Close(), netns.Delete(ns.Name))
	}
	return err
}

// Ways of a connection through the node, as measures have them.
const (
	comes  = ""        // to a pod, from another node
	leaves = "-leaves" // from a pod, to another node
	stays  = "-stays"  // between two of its pods
)

// packet opens a connection of a way: to or from a pod, with a client or server elsewhere or in another pod.
func (c *calico) packet(way string, pod, other int) rules.Packet {
	p := rules.Packet{Protocol: model.TCP, Path: rules.Forwarded, In: "eth0", Out: "eth0", Node: []netip.Addr{nodeAddr}}
	at := func(a netip.Addr, client bool) netip.AddrPort {
		if client {
			return netip.AddrPortFrom(a, 40000)
		}
		return netip.AddrPortFrom(a, serverPort)
	}
	own := c.Pods[pod]
	switch way {
	case comes:
		p.Src, p.Dst, p.Out = at(elsewhere(other), true), at(own.Addr, false), own.Device()
	case leaves:
		p.Src, p.Dst, p.In = at(own.Addr, true), at(elsewhere(other), false), own.Device()
	default:
		p.Src, p.Dst, p.In, p.Out = at(own.Addr, true), at(c.Pods[other].Addr, false), own.Device(), c.Pods[other].Device()
	}
	return p
}

// each calls f for every connection of a way: every pod, with whom it talks to.
func (c *calico) each(way string, f func(pod, other int) error) error {
	others := calicoPolicies
	if way == stays {
		others = len(c.Pods)
	}
	for pod := range c.Pods {
		for other := range others {
			if way == stays && pod == other {
				continue
			}
			if err := f(pod, other); err != nil {
				return err
			}
		}
	}
	return nil
}

// countCalico counts the rules that a connection meets, on average over all pods, and has the kernel count those of the pods that are there.
func (r *tigera) countCalico(ctx context.Context) (asked int, err error) {
	c, err := r.raiseCalico(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	set, err := readRules(ctx, c.node)
	if err != nil {
		return 0, err
	}
	for _, way := range []string{comes, leaves, stays} {
		sum, n := 0.0, 0
		err := c.each(way, func(pod, other int) error {
			packet := c.packet(way, pod, other)
			counted, err := set.count(packet)
			if err != nil {
				return err
			}
			sum, n = sum+counted.Mean, n+1
			if pod != 0 || way == stays && other != 1 { // the others' ends are not there
				return nil
			}
			asked++
			return set.agree(ctx, c.node, packet, counted, c.client(packet))
		})
		if err != nil {
			return asked, err
		}
		for _, services := range r.counts { // whatever their number
			if err := r.add(result.Block{Arm: armCalico, Params: params(services)}, "rules"+way, sum/float64(n)); err != nil {
				return asked, err
			}
		}
	}
	return asked, nil
}

// client is one of a packet's sender.
func (c *calico) client(p rules.Packet) load.Client {
	from := c.far
	if p.In != "eth0" {
		from = c.pods[0]
	}
	return load.Client{Place: load.Place{Enter: from.Do}, Sources: []netip.Addr{p.Src.Addr()}, Sizes: single}
}

// countFew counts, on paper alone, the rules of kube-proxy's of 2019 to the last of the few Services that the article compares Calico with.
func (r *tigera) countFew() error {
	if slices.Contains(r.counts, fewServices) {
		return nil // that arm is there
	}
	w, err := newWorld(fewServices)
	if err != nil {
		return err
	}
	t, err := rules.ParseIPTables(classic.IPTables19.Save(classic.FromParts(w.parts)), "")
	if err != nil {
		return err
	}
	n, err := rules.Static(t, sent(entry(service(last, fewServices))))
	if err != nil {
		return err
	}
	return r.add(result.Block{Arm: old, Params: params(fewServices)}, "rules-last", n.Rules.Mean)
}
