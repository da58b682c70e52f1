// Package sandbox is a cluster in a box: nodes, pods and a client outside as network namespaces of one machine, made
// from Kubernetes objects.
//
//	             wire (a bridge in a namespace of its own)
//	   ┌──────────────┬──────────────┐
//	outside         node a         node b
//	              ┌───┴───┐          │
//	           pod x    pod y      pod z
//
// A Node is a namespace on the wire with its InternalIPs and ExternalIPs; whatever these are, the hosts on the wire
// have a route to each. A Pod with a node is a namespace behind it, with one default route; a Pod on the host network
// is its node. Every node, and the outside client, knows the way to every pod. What nothing knows the way to, such as
// the address of a Service that no data plane serves, goes from pods to their node, from nodes to the outside client,
// and ends there unanswered; from the outside client it goes to the first node by name. Link-layer addresses are all
// known beforehand: no packet waits for one.
//
// With Options.CNI, agents connect the pods instead, called by the CNI plugin; nodes have no other routes to pods.
//
// There is no data plane here, no policy and no host port: those are what a sandbox is for. Nothing is put into the
// namespace that the caller runs in.
package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"sync"

	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// Options say what cluster to make.
type Options struct {
	// starts the names of all namespaces; lower-case letters and digits; default "fl" and 8 hex digits
	Name     string
	Objects  []source.Object // Nodes and Pods are built, the addresses of others are kept free
	Serve    bool            // answer on every container port, see package echo
	Progress func(done, total int)
	// CNI returns the folder of CNI network configurations of a node; then pods have no network until Attach connects
	// them, and nodes know of no way to pods. Nil: pods are connected by the sandbox itself.
	CNI func(node string) string
	// Apart has each node on a link of its own, as far as it can tell, instead of one link for all. Only with CNI.
	Apart bool
}

// Cluster is a cluster that is up.
type Cluster struct {
	Name     string
	serve    bool
	progress func(done, total int)
	cni      func(node string) string
	apart    bool

	mu     sync.Mutex
	wire   *box
	bridge int // interface index of the bridge in wire
	hosts  map[string]*Host
	made   uint32 // counts interfaces, for names and link-layer addresses
	gone   bool   // Down is done

	cgroups []string // all that were made: one stays while a process is in there
}

var goodName = regexp.MustCompile(`^[a-z][a-z0-9]{0,31}$`)

// Up makes a cluster. On an error nothing is left behind; errors in the objects come before anything is made. A name is
// taken while its cluster is up, and also where a process was killed and left one: see Leftovers.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a sandbox is made of network namespaces, which takes root: run this with sudo")
	}
	if o.Name == "" {
		o.Name = randomName()
	}
	if !goodName.MatchString(o.Name) {
		return nil, fmt.Errorf("sandbox name %q: must be a lower-case letter, then up to 31 of a-z and 0-9", o.Name)
	}
	c := &Cluster{Name: o.Name, serve: o.Serve, progress: o.Progress, cni: o.CNI, apart: o.Apart,
		hosts: map[string]*Host{}}
	want, err := c.layout(o.Objects, nil)
	if err != nil {
		return nil, err
	}
	if err := claim(o.Name); err != nil {
		return nil, err
	}
	if err := c.build(ctx, want); err != nil {
		return nil, errors.Join(fmt.Errorf("build sandbox %s: %w", o.Name, err), c.Down())
	}
	return c, nil
}

// layout decides what hosts there are to be.
func (c *Cluster) layout(objects []source.Object, external []netip.Addr) (layout, error) {
	want, err := newLayout(objects, external)
	if err != nil {
		return want, fmt.Errorf("lay out sandbox %s: %w", c.Name, err)
	}
	if c.cni != nil && !c.apart {
		want.links()
	}
	return want, nil
}

func randomName() string {
	b := make([]byte, 4)
	rand.Read(b)
	return "fl" + hex.EncodeToString(b)
}

// Update makes the cluster follow the objects, which are all there are now: pods and nodes come and go, and one that
// has changed goes and comes. Errors in the objects leave the cluster as it is; after another error the next Update
// mends it.
func (c *Cluster) Update(ctx context.Context, objects []source.Object) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	external := c.hosts["outside"]
	if external == nil {
		return fmt.Errorf("update sandbox %s: it is down", c.Name)
	}
	want, err := c.layout(objects, external.Addresses)
	if err != nil {
		return err
	}
	if err := c.follow(ctx, want); err != nil {
		return fmt.Errorf("update sandbox %s: %w", c.Name, err)
	}
	return nil
}

// Down removes the cluster. The kernel takes the namespaces apart in the background. Down again is no error.
func (c *Cluster) Down() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil // the name may be another's by now
	}
	var errs []error
	for _, h := range c.hosts {
		if h.server != nil {
			errs = append(errs, h.server.Close())
		}
	}
	for _, h := range c.hosts {
		if !h.spec.shared {
			errs = append(errs, h.unload(), h.box.delete())
		}
	}
	if c.wire != nil {
		errs = append(errs, c.wire.delete())
	}
	for _, path := range c.cgroups {
		errs = append(errs, cgroup.Delete(path))
	}
	clear(c.hosts)
	c.wire = nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take sandbox %s down: %w", c.Name, err)
	}
	c.gone = true
	return unclaim(c.Name)
}

// Node returns the host of the Node of that name.
func (c *Cluster) Node(name string) (*Host, error) { return c.host("node " + name) }

// Pod returns the host of a Pod.
func (c *Cluster) Pod(namespace, name string) (*Host, error) {
	return c.host("pod " + namespace + "/" + name)
}

// External returns the client outside the cluster, nil once the cluster is down.
func (c *Cluster) External() *Host {
	h, _ := c.host("outside")
	return h
}

func (c *Cluster) host(name string) (*Host, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h, ok := c.hosts[name]
	if !ok {
		return nil, fmt.Errorf("sandbox %s has no %s", c.Name, name)
	}
	return h, nil
}

// Hosts returns all hosts: outside, nodes, pods, each by name.
func (c *Cluster) Hosts() []*Host {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sorted()
}

func (c *Cluster) sorted() []*Host { return slices.SortedFunc(maps.Values(c.hosts), compareHosts) }

// build makes the wire, then everything else.
func (c *Cluster) build(ctx context.Context, want layout) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wire, err = newBox(c.Name+"-wire", [6]byte{}, wireSettings); err != nil {
		return err
	}
	err = c.wire.dial(func(w *link.Conn) (err error) {
		c.bridge, err = w.AddBridge("wire")
		return err
	})
	if err != nil {
		return err
	}
	return c.follow(ctx, want)
}

// follow removes hosts that are not wanted as they are, adds those that are missing, and connects all.
func (c *Cluster) follow(ctx context.Context, want layout) error {
	for _, h := range slices.Backward(c.sorted()) {
		if !c.stays(h, want) {
			if err := c.remove(h); err != nil {
				return fmt.Errorf("remove %s: %w", h.Name, err)
			}
		}
	}
	specs := want.sorted()
	var added []*Host
	for i, s := range specs {
		if c.hosts[s.host.Name] == nil {
			if err := errors.Join(ctx.Err(), c.add(s)); err != nil {
				return fmt.Errorf("add %s: %w", s.host.Name, err)
			}
			added = append(added, c.hosts[s.host.Name])
		}
		if c.progress != nil {
			c.progress(i+1, len(specs))
		}
	}
	for _, h := range c.hosts {
		if h.Role == Pod {
			continue // its one route never changes
		}
		if err := errors.Join(ctx.Err(), c.connect(h)); err != nil {
			return fmt.Errorf("connect %s: %w", h.Name, err)
		}
	}
	for _, h := range added {
		if c.waits(h) {
			continue
		}
		if err := c.await(ctx, h); err != nil {
			return fmt.Errorf("wait for %s: %w", h.Name, err)
		}
	}
	return c.record()
}

// await waits until a host is ready for packets.
func (c *Cluster) await(ctx context.Context, h *Host) error {
	if h.spec.shared {
		return nil
	}
	return errors.Join(
		c.above(h).dial(func(l *link.Conn) error { return l.Await(ctx, h.port) }),
		h.box.dial(func(l *link.Conn) error { return l.Await(ctx, h.box.eth0, h.Addresses...) }))
}

// above is where the other end of a host's eth0 is: the wire's namespace, or its node's.
func (c *Cluster) above(h *Host) *box {
	if h.Role == Pod {
		return c.hosts["node "+h.Node].box
	}
	return c.wire
}

// stays reports whether a host is wanted just as it is. A pod goes when its node does.
func (c *Cluster) stays(h *Host, want layout) bool {
	s, ok := want.specs[h.Name]
	if !ok || !s.equal(*h.spec) {
		return false
	}
	return h.Role != Pod || c.stays(c.hosts["node "+h.Node], want)
}

// remove takes a host away, and its interface at once: another may want its addresses.
func (c *Cluster) remove(h *Host) error {
	if h.server != nil {
		h.server.Close()
		h.server = nil
	}
	if h.spec.shared {
		delete(c.hosts, h.Name)
		return nil
	}
	at := c.above(h)
	if h.Role == Pod && c.cni != nil {
		if err := c.detach(h); err != nil {
			return err
		}
		h.port = 0
	}
	if h.port != 0 {
		if err := at.dial(func(l *link.Conn) error { return l.Delete(h.port) }); err != nil {
			return err
		}
		at.forget(h.port)
	}
	delete(c.hosts, h.Name)
	return errors.Join(h.unload(), h.box.delete())
}

// add makes a host. What it got half made is removed.
func (c *Cluster) add(s spec) (err error) {
	h := s.host
	h.cluster, h.spec = c, &s
	switch {
	case s.shared:
		h.box = c.hosts["node "+h.Node].box
		h.Namespace = h.box.ns.Name
	case h.Role == Pod:
		h.Namespace = c.namespace(h.Namespace)
		err = c.addPod(&h)
	default:
		h.Namespace = c.namespace(h.Namespace)
		err = c.addToWire(&h)
	}
	c.join(&h)
	if err == nil && c.serve && len(s.ports) > 0 {
		err = h.Do(func() error {
			h.server, err = echo.Serve(h.Name[len("pod "):], s.ports)
			return err
		})
	}
	if err == nil {
		c.hosts[h.Name] = &h
		return nil
	}
	if h.box != nil && !s.shared {
		err = errors.Join(err, c.remove(&h))
	}
	return err
}

// namespace returns the full name of a namespace. One too long for a file name ends in a digest of itself.
func (c *Cluster) namespace(name string) string {
	full := c.Name + "-" + name
	if len(full) <= 200 {
		return full
	}
	digest := fnv.New64a()
	digest.Write([]byte(full))
	return fmt.Sprintf("%s.%016x", full[:183], digest.Sum64())
}

// next counts one interface and returns its number and link-layer address.
func (c *Cluster) next() (uint32, [6]byte) {
	c.made++
	mac := [6]byte{0x02, 0xf1}
	binary.BigEndian.PutUint32(mac[2:], c.made)
	return c.made, mac
}

// addToWire makes a node or the outside client.
func (c *Cluster) addToWire(h *Host) (err error) {
	settings := hostSettings
	if h.Role == Node {
		settings = nodeSettings
	}
	n, mac := c.next()
	if h.box, err = newBox(h.Namespace, mac, settings); err != nil {
		return err
	}
	err = c.wire.dial(func(w *link.Conn) error {
		near := link.End{Name: fmt.Sprintf("host%d", n)}
		h.port, err = w.AddVeth(near, link.End{Name: "eth0", MAC: mac[:]}, h.box.ns)
		if err != nil {
			return err
		}
		return w.Attach(h.port, c.bridge)
	})
	if err != nil {
		return err
	}
	return h.box.plug(h.spec.prefixes())
}

// A pod's gateways are link-local addresses that nothing has: a permanent neighbour entry says that they are the node.
var (
	gateways   = []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}
	gatewayMAC = [6]byte{0x02, 0xf1, 0xff, 0xff, 0xff, 0xff}
)

// addPod makes a pod behind its node.
func (c *Cluster) addPod(h *Host) (err error) {
	n, mac := c.next()
	if h.box, err = newBox(h.Namespace, mac, hostSettings); err != nil || c.cni != nil {
		return err
	}
	err = c.above(h).dial(func(l *link.Conn) error {
		near := link.End{Name: fmt.Sprintf("veth%d", n), MAC: gatewayMAC[:]}
		h.port, err = l.AddVeth(near, link.End{Name: "eth0", MAC: mac[:]}, h.box.ns)
		return err
	})
	if err != nil {
		return err
	}
	if err := h.box.plug(h.spec.prefixes()); err != nil {
		return err
	}
	return c.connect(h)
}

// record writes the hosts down for other processes to see.
func (c *Cluster) record() error {
	s := self(c.Name)
	for _, h := range c.sorted() {
		s.Hosts = append(s.Hosts, *h)
	}
	return s.write()
}
