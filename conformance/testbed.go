package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// syncTime is how long a data plane may take until the kernel is as told.
const syncTime = 90 * time.Second

// nodes are the nodes of the cast.
var nodes = []string{"a", "b"}

// testbed is the cast in a sandbox, with the subject at work on each node.
type testbed struct {
	implementation Implementation
	cluster        *sandbox.Cluster
	network        *podNetwork // nil: the cluster's own wires
	config         Config
	objects        map[source.Key]source.Object
	agents         map[string]*agent          // by node
	devices        map[string][]policy.Device // by node: by which it reaches its pods
	addresses      map[string][]netip.Addr    // by node: its own, those that its pod network added among them
	made           map[string][]source.Key    // by the name in a slices section: the objects that it made
	known          map[string]netip.AddrPort
	flows          map[string]*flow
	lost           map[string]bool // flows that ended with a subject whose connections do
	ports          atomic.Uint32   // client ports chosen so far
	patience       time.Duration
	refused        []string // what the subject was not asked for, as it says that it can't
	ended          bool     // the rest hangs on that

	mu      sync.Mutex         // for refused, ended and servers, where lines are checked side by side
	servers map[string]*server // by host and port
}

// agent is what runs on a node: a resolver and the subject, and what they have come to.
type agent struct {
	implementation Implementation
	host           *sandbox.Host
	resolver       *resolve.Resolver
	runner         Runner[model.ServicePart]
	services       *model.Snapshot // as of the last sync
	policies       *policyAgent    // nil without a policy engine
}

// newTestbed brings the cast up, and the subject on each node with nothing but the nodes and pods to know of.
func newTestbed(ctx context.Context, s Implementation, c Config) (*testbed, error) {
	w := &testbed{patience: s.within(patience), implementation: s, config: c, objects: map[source.Key]source.Object{},
		agents: map[string]*agent{}, devices: map[string][]policy.Device{}, addresses: map[string][]netip.Addr{},
		made: map[string][]source.Key{}, known: map[string]netip.AddrPort{}, flows: map[string]*flow{},
		lost: map[string]bool{}, servers: map[string]*server{}}
	o := sandbox.Options{Objects: topologyObjects(), Serve: true}
	var err error
	if w.network, err = openNetwork(s.Network, &o); err != nil {
		return nil, err
	}
	for _, x := range o.Objects {
		w.objects[source.KeyOf(x)] = x
	}
	if w.cluster, err = sandbox.Up(ctx, o); err != nil {
		return nil, errors.Join(err, w.network.close())
	}
	if err := w.network.connect(ctx, w.cluster, o.Objects); err != nil {
		return nil, errors.Join(err, w.close())
	}
	for _, n := range nodes {
		if err := errors.Join(w.beLiberal(n), w.readDevices(n), w.start(n)); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	return w, nil
}

// beLiberal has a node's connection tracking call no segment invalid: here the two directions of a connection may pass
// different nodes, and mode iptables drops what is invalid unless it is told so. A kernel without it, yet, has no
// setting.
func (w *testbed) beLiberal(node string) error {
	host, err := w.cluster.Node(node)
	if err != nil {
		return err
	}
	err = host.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", []byte("1"), 0o644)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readDevices finds a node's addresses and the devices by which it reaches its pods, as an agent does.
func (w *testbed) readDevices(node string) error {
	host, err := w.cluster.Node(node)
	if err != nil {
		return err
	}
	return host.Do(func() error {
		hosts, err := route.OpenHosts()
		if err != nil {
			return err
		}
		devices, err := hosts.Devices()
		for _, d := range devices {
			w.devices[node] = append(w.devices[node], policy.Device(d))
		}
		w.addresses[node] = host.Addresses
		if w.network != nil {
			w.addresses[node] = append(slices.Clone(host.Addresses), ownAddresses(node)...)
		}
		return errors.Join(err, hosts.Close())
	})
}

// close ends everything.
func (w *testbed) close() error {
	var errs []error
	for _, f := range w.flows {
		if f.held != nil {
			errs = append(errs, f.held.Close())
		}
	}
	for _, a := range w.agents {
		errs = append(errs, a.close())
	}
	return errors.Join(append(errs, w.network.close(), w.cluster.Down())...)
}

// start starts a node's agent, which then learns of everything there is.
func (w *testbed) start(node string) error {
	host, err := w.cluster.Node(node)
	if err != nil {
		return err
	}
	a := &agent{implementation: w.implementation, host: host, resolver: resolve.New(w.resolveConfig(node))}
	err = host.Do(func() (err error) {
		a.runner, err = w.implementation.Start()
		return err
	})
	if err != nil {
		return fmt.Errorf("start %s on node %s: %w", w.implementation.Name, node, err)
	}
	if e := w.implementation.Engine; e != nil {
		if a.policies, err = w.startPolicies(node, host); err != nil {
			return errors.Join(fmt.Errorf("start policy engine %s on node %s: %w", e.Name, node, err), a.runner.Close())
		}
	}
	w.agents[node] = a
	a.change(w.everything())
	return nil
}

// everything returns all objects, as changes.
func (w *testbed) everything() (l []source.Change) {
	for _, k := range sortedKeys(w.objects) {
		l = append(l, source.Change{Key: k, Object: w.objects[k]})
	}
	return l
}

func sortedKeys(m map[source.Key]source.Object) []source.Key {
	return slices.SortedFunc(maps.Keys(m), func(a, b source.Key) int { return strings.Compare(a.String(), b.String()) })
}

// resolveConfig returns what a node's resolver is told.
func (w *testbed) resolveConfig(node string) resolve.Config {
	c := resolve.Config{
		Node: node, Addresses: w.addresses[node], MasqueradeAll: w.config.MasqueradeAll,
		NodePortAddresses: w.config.NodePortAddresses, ProxyName: w.config.ProxyName,
		DirectServerReturn: w.config.DirectServerReturn,
		Guard:              resolve.Guard{ExternalIPs: w.config.ExternalIPs, APIServers: []netip.AddrPort{apiServer}},
		Objects:            resolve.Objects{HostPorts: w.config.HostPorts}, Limits: w.config.Limits,
		Capabilities: model.Capabilities{Name: w.implementation.Name, Schedulers: w.implementation.Schedulers,
			Fallback: w.implementation.Fallback, Unsupported: model.Unsupported{
				NoRemote: w.implementation.NoRemote, NoLocal: w.implementation.NoLocal}},
	}
	c.PodInterfaces.Name, c.PodInterfaces.Prefix = strings.CutSuffix(w.config.PodInterfaces, "*")
	for _, t := range w.config.ClusterCIDRs {
		p, _ := netip.ParsePrefix(t) // what is no range is the resolver's to complain of
		c.ClusterCIDRs = append(c.ClusterCIDRs, p)
	}
	return c
}

// change passes changes to the subject by way of the resolver.
func (a *agent) change(l []source.Change) {
	d := a.resolver.Apply(l)
	a.runner.Change(a.served(d.Services.Put), a.served(d.Services.Del))
	if a.policies != nil {
		if a.implementation.PreDNAT {
			a.policies.resolver.ApplyServices(d.Services)
		}
		a.policies.change(l)
	}
}

// close stops the agent and leaves the kernel as it is.
func (a *agent) close() error {
	if a.policies == nil {
		return a.runner.Close()
	}
	return errors.Join(a.policies.runner.Close(), a.runner.Close())
}

// served leaves out the frontends that the subject refuses.
func (a *agent) served(parts []model.ServicePart) (l []model.ServicePart) {
	for _, p := range parts {
		if f, ok := p.(*model.Frontend); !ok || a.implementation.WhyNot(f) == "" {
			l = append(l, p)
		}
	}
	return l
}

// restart stops a node's agent and starts another in its place.
func (w *testbed) restart(node string) error {
	if err := w.agents[node].close(); err != nil {
		return fmt.Errorf("stop %s on node %s: %w", w.implementation.Name, node, err)
	}
	if w.implementation.Ends {
		w.forget(node)
	}
	return w.start(node)
}

// forget drops what ends with the agent of a node: connections through it, and which endpoint was whose.
func (w *testbed) forget(node string) {
	for name, f := range w.flows {
		if f.j.node == node && f.held != nil {
			f.held.Close()
			delete(w.flows, name)
			w.lost[name] = true
		}
	}
	clear(w.known)
}

// change makes changes known on every node, at once. To agents that are to restart, they come while these are away.
func (w *testbed) change(l []source.Change, restarts ...string) error {
	for _, c := range l {
		if delete(w.objects, c.Key); c.Object != nil {
			w.objects[c.Key] = c.Object
		}
	}
	for _, n := range nodes {
		if !slices.Contains(restarts, n) {
			w.agents[n].change(l)
		} else if err := w.restart(n); err != nil {
			return err
		}
	}
	return nil
}

// sync waits until every node's kernel is as told.
func (w *testbed) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.implementation.within(syncTime))
	defer cancel()
	for _, n := range nodes {
		a := w.agents[n]
		if err := a.runner.Sync(ctx); err != nil {
			return fmt.Errorf("sync %s on node %s: %w", w.implementation.Name, n, err)
		}
		if a.policies != nil {
			if err := a.policies.runner.Sync(ctx); err != nil {
				return fmt.Errorf("sync policy engine %s on node %s: %w", w.implementation.Engine.Name, n, err)
			}
		}
		a.services = a.resolver.Services()
		if a.policies != nil {
			both := *a.services
			both.Policies = a.policies.decided
			a.services = &both
		}
	}
	return nil
}

// applyStep applies a step's changes and waits until they are in force.
func (w *testbed) applyStep(ctx context.Context, s *Step) error {
	changes, err := w.changes(s)
	if err != nil {
		return err
	}
	restarts := s.Restart
	if s.Config != nil && !equalConfig(*s.Config, w.config) {
		w.config, restarts = *s.Config, nodes
	}
	if err := w.change(changes, restarts...); err != nil {
		return err
	}
	for _, l := range s.MTU {
		host, err := w.host(l.Host)
		if err == nil {
			err = host.Narrow(l.Bytes)
		}
		if err != nil {
			return err
		}
	}
	for _, n := range s.InjectFault {
		if err := w.agents[n].injectFault(ctx); err != nil {
			return fmt.Errorf("disturb %s on node %s: %w", w.implementation.Name, n, err)
		}
	}
	return w.sync(ctx)
}

func equalConfig(a, b Config) bool {
	return a.Policies == b.Policies && a.ExternalIPs == b.ExternalIPs && a.Limits == b.Limits &&
		a.MasqueradeAll == b.MasqueradeAll && a.ProxyName == b.ProxyName && a.PodInterfaces == b.PodInterfaces &&
		a.DirectServerReturn == b.DirectServerReturn && a.HostPorts == b.HostPorts &&
		slices.Equal(a.ClusterCIDRs, b.ClusterCIDRs) &&
		slices.Equal(a.NodePortAddresses, b.NodePortAddresses)
}

func (a *agent) injectFault(ctx context.Context) error {
	var target any = a.runner
	if a.policies != nil {
		target = a.policies.runner
	}
	d, ok := target.(FaultInjector)
	if !ok {
		return errors.New("its Runner is no FaultInjector, so what it does after damage can't be tried")
	}
	return a.host.Do(func() error { return d.InjectFault(ctx) })
}

// changes returns what a step changes, object by object.
func (w *testbed) changes(s *Step) (l []source.Change, err error) {
	for _, text := range s.Remove {
		k, err := parseKey(text)
		if err != nil {
			return nil, err
		}
		keys := []source.Key{k}
		if name, ok := strings.CutPrefix(text, "slice "); ok {
			keys = w.made[name]
			delete(w.made, name)
		}
		for _, k := range keys {
			l = append(l, source.Change{Key: k})
		}
	}
	for _, n := range s.Names {
		l = append(l, source.Resolved(n.Name, n.Addresses))
	}
	for _, m := range s.YAML {
		objects, err := m.decode()
		if err != nil {
			return nil, err
		}
		l = append(l, source.Put(objects...)...)
	}
	for _, line := range s.Slices {
		l = append(l, w.slices(line.settle(w.known))...)
	}
	return l, nil
}

// slices returns what a line of a slices section changes: what it makes, and what an earlier one of its name and family
// made that it doesn't.
func (w *testbed) slices(line sliceLine) (l []source.Change) {
	var keys []source.Key
	for _, s := range line.slices() {
		k := source.KeyOf(s)
		keys = append(keys, k)
		l = append(l, source.Change{Key: k, Object: s})
	}
	for _, k := range w.made[line.Name] {
		switch {
		case slices.Contains(keys, k):
		case line.makes(k):
			l = append(l, source.Change{Key: k})
		default:
			keys = append(keys, k)
		}
	}
	w.made[line.Name] = keys
	return l
}

// host returns the sandbox's host of a member of the cast.
func (w *testbed) host(m *member) (*sandbox.Host, error) {
	switch {
	case m.Node == "":
		return w.cluster.External(), nil
	case m.isNode():
		return w.cluster.Node(m.Node)
	}
	return w.cluster.Pod(m.namespaceOf(), m.Name)
}

// dump shows what the kernel of a node holds of the subject, as far as it can say.
func (w *testbed) dump(node string) string {
	a := w.agents[node]
	d, ok := a.runner.(Dumper)
	if !ok {
		return w.implementation.Name + " has no Dump"
	}
	var text string
	if err := a.host.Do(func() error { text = d.Dump(); return nil }); err != nil {
		return err.Error()
	}
	return text
}
