package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/attach"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// NetworkOptions is how a node connects its pods.
type NetworkOptions struct {
	Resolve network.Config
	Socket  string // path, for the CNI plugin
	Records string // folder of address records, in memory
	Chained bool   // another plugin connects pods; the agent has what else they need put into the kernel
	Boot    string // names this boot of the node
	// calls notify with the node's devices, and whether its kernel has no IPv6 for pods', and again whenever they have
	// changed, until ctx ends; nil: Chained
	Follow func(ctx context.Context, notify func([]network.Device, bool)) error
	// is called once pods can be attached, and every filePeriod from then on
	OnReady func() error
	// with ranges that see pods' own addresses, in ip-masq-agent's format; "": none
	MasqueradeFile string
}

// filePeriod is how often files that others write, or remove, are looked at.
const filePeriod = 2 * time.Second

// Network is the pod network of a node in one network namespace: what it comes to, its planes, and the server of the
// CNI plugin. A nil one stands for a node whose pods others connect: its methods do nothing.
type Network struct {
	NetworkOptions
	log      *slog.Logger
	planes   []mode.NetworkPlane
	server   *attach.Server
	listener *net.UnixListener
	stop     context.CancelFunc
	ended    sync.WaitGroup

	// under the mutex of who holds it:
	resolver *network.Resolver
	begun    bool
	devices  bool            // the node's devices are known: before, nothing follows from objects
	early    []source.Change // that came before
	files
	problems
}

// files is what is known of the files that others write.
type files struct {
	masquerade network.Masquerade // as last read
	failed     string             // why OnReady failed last
	failure    []source.Problem   // of that
}

// problems are those of objects, and of pods that the node's ranges don't hold.
type problems struct {
	resolved, all []source.Problem
	stranded      string // of those pods, "": there are none
}

// networkLine is the planes as one.
type networkLine []mode.NetworkPlane

// Change implements attach.Line.
func (l networkLine) Change(put, del []model.NetworkPart) {
	for _, p := range l {
		p.Change(put, del)
	}
}

// Sync implements attach.Line.
func (l networkLine) Sync(ctx context.Context) (err error) {
	for _, p := range l {
		err = errors.Join(err, p.Sync(ctx))
	}
	return err
}

// SyncOwner implements attach.Line.
func (l networkLine) SyncOwner(ctx context.Context, o model.Owner) (err error) {
	for _, p := range l {
		err = errors.Join(err, p.SyncOwner(ctx, o))
	}
	return err
}

// OpenNetwork opens the pod network of the calling thread's network namespace. Without options there is none. ready
// returns why pods can't be attached yet. atDevices is mode.Mode.MasqueradesAtDevices.
func OpenNetwork(o *NetworkOptions, atDevices bool, ready func() error, pods attach.Pods,
	log *slog.Logger) (n *Network, err error) {
	if o == nil {
		return nil, nil
	}
	pool, err := ipam.Open(o.Records, o.Boot)
	if err != nil {
		return nil, err
	}
	resolve := o.Resolve
	resolve.SCTPUnmasqueraded = atDevices
	n = &Network{NetworkOptions: *o, log: log, resolver: network.New(resolve),
		files: files{masquerade: o.Resolve.Masquerade}}
	n.readMasquerade()
	if !o.Chained {
		if n.planes, err = mode.OpenNetwork(log, atDevices); err != nil {
			return nil, err
		}
	}
	n.server, err = attach.New(attach.Options{Pool: pool, Line: networkLine(n.planes), Ready: ready,
		Differs: mode.PodDiffers, Pods: pods, Chained: o.Chained, Log: log,
		Cut: func(of func(netip.Addr) bool) error { return mode.CutFlows(n.planes, of) }})
	if err == nil {
		n.listener, err = attach.Listen(o.Socket)
	}
	if err != nil {
		return nil, errors.Join(err, n.closeHandles())
	}
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	for _, p := range n.planes {
		n.ended.Go(func() { p.Run(ctx) })
	}
	if o.Chained {
		n.server.Begin(nil, nil)
	}
	n.ended.Go(func() { n.until(ctx, "CNI server", func() error { return n.server.Serve(ctx, n.listener) }) })
	n.ended.Go(func() { n.until(ctx, "watch of pods' devices", func() error { return n.server.Follow(ctx) }) })
	return n, nil
}

// until runs f and logs its error, but for the end of ctx.
func (n *Network) until(ctx context.Context, what string, f func() error) {
	if err := f(); err != nil && ctx.Err() == nil {
		n.log.Error(what+" ended; restart the agent", "error", err)
	}
}

func (n *Network) closeHandles() (err error) {
	if n.server != nil {
		err = n.server.Close()
	}
	for _, p := range n.planes {
		err = errors.Join(err, p.Close())
	}
	return err
}

// Close ends the loops and the server and leaves the kernel as it is: pods stay connected.
func (n *Network) Close() error {
	if n == nil {
		return nil
	}
	n.stop()
	n.ended.Wait()
	return n.closeHandles()
}

// follow passes the node's devices, and whether there is no IPv6, to set until ctx ends.
func (n *Network) follow(ctx context.Context, set func([]network.Device, bool)) error {
	if n == nil || n.Follow == nil {
		return nil
	}
	return n.Follow(ctx, set)
}

// setDevices sets the node's devices, and whether its kernel has no IPv6 for pods'. What follows comes with Apply.
func (n *Network) setDevices(l []network.Device, noIPv6 bool) {
	n.resolver.SetDevices(l)
	n.resolver.SetNoIPv6(noIPv6)
	n.devices = true
}

// Apply takes changes of objects and hands on what follows from them.
func (n *Network) Apply(changes []source.Change) {
	if n == nil || n.Chained {
		return
	}
	if !n.devices { // without an uplink, what an agent before this one has written would go for a moment
		n.early = append(n.early, changes...)
		return
	}
	changes, n.early = append(n.early, changes...), nil
	c := n.resolver.Apply(changes)
	n.server.SetSources(n.resolver.Sources())
	if !n.begun {
		n.begun = true
		n.server.Begin(c.Put, c.Del)
	} else if !c.Empty() {
		networkLine(n.planes).Change(c.Put, c.Del)
	}
	n.server.SetNetwork(n.resolver.Network().Network)
	n.updateProblems()
}

// Problems returns what is wrong with the pod network.
func (n *Network) Problems() []source.Problem {
	if n == nil {
		return nil
	}
	if n.Chained {
		return n.failure
	}
	return n.all
}

// mostStranded is how many pods a problem names.
const mostStranded = 10

// updateProblems joins what is wrong with objects and the pods that have addresses outside the node's podCIDRs, as when
// these were changed. Where nothing changed, Problems returns the same slice.
func (n *Network) updateProblems() {
	stranded := n.findStranded()
	now := n.resolver.Problems()
	same := len(now) == len(n.resolved) && (len(now) == 0 || &now[0] == &n.resolved[0])
	if same && stranded == n.stranded {
		return
	}
	n.resolved, n.stranded, n.all = now, stranded, now
	if stranded != "" {
		n.all = append(slices.Clone(now), source.Problem{Object: source.Key{Kind: source.Node, Name: n.Resolve.Node},
			Field: "spec.podCIDRs", Reason: "PodsOutsidePodCIDRs", Message: stranded})
	}
}

// findStranded returns a text about the pods with addresses outside the node's ranges, "" without any.
func (n *Network) findStranded() string {
	now := n.resolver.Network().Network
	if now == nil {
		return ""
	}
	var pods []string
	for _, a := range n.server.Attached() {
		for _, address := range a.Addresses {
			if !slices.ContainsFunc(now.Ranges, func(r netip.Prefix) bool { return r.Contains(address) }) {
				pods = append(pods, fmt.Sprintf("%s (%s)", a.Pod, address))
			}
		}
	}
	if len(pods) == 0 {
		return ""
	}
	slices.Sort(pods)
	if more := len(pods) - mostStranded; more > 0 {
		pods = append(pods[:mostStranded], fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("no longer hold the addresses of %s, which other nodes can't reach; delete these pods, so that "+
		"others take their place", strings.Join(pods, ", "))
}

// Serving reports whether what all pods need is in the kernel. If not, why is the reason, "" while nothing has been
// tried yet.
func (n *Network) Serving() (serving bool, why string) {
	if n == nil {
		return true, ""
	}
	for _, p := range n.planes {
		if ok, why := p.Serving(); !ok {
			return false, why
		}
	}
	return true, ""
}

// arrive waits until the pod network is in the kernel for the first time, and says that pods can come.
func (n *Network) arrive(ctx context.Context) error {
	if n == nil {
		return nil
	}
	for _, p := range n.planes {
		select {
		case <-p.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if n.OnReady == nil {
		return nil
	}
	return n.OnReady()
}

// setFailed takes in why OnReady failed, nil: it didn't.
func (n *Network) setFailed(err error) {
	failed := ""
	if err != nil {
		failed = err.Error()
	}
	if failed == n.failed {
		return
	}
	n.failed, n.failure = failed, nil
	if err == nil {
		return
	}
	n.log.Error("putting the CNI network configuration back failed, retrying", "error", err)
	n.failure = []source.Problem{{Object: source.Key{Kind: source.Node, Name: n.Resolve.Node}, Reason: "CNIConfiguration",
		Message: failed}}
}

// readMasquerade reads the file with ranges that see pods' own addresses. One that can't be read changes nothing.
func (n *Network) readMasquerade() {
	if n.MasqueradeFile == "" {
		return
	}
	b, err := os.ReadFile(n.MasqueradeFile)
	var m network.Masquerade
	if err == nil {
		m, err = network.ParseMasquerade(b)
	}
	if err != nil {
		m = n.masquerade
		m.Fault = err.Error()
	}
	n.masquerade = m
	n.resolver.SetMasquerade(m)
}

// followFiles follows the masquerade file, and puts the CNI configuration back where it was removed or changed, until
// ctx ends.
func (a *Agent) followFiles(ctx context.Context) error {
	if a.network == nil {
		return nil
	}
	tick := time.NewTicker(filePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			a.checkFiles()
		}
	}
}

func (a *Agent) checkFiles() {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.network
	n.readMasquerade()
	if a.batches.count > 0 {
		n.Apply(nil)
		a.notifyAll()
	}
	if !a.batches.synced || n.OnReady == nil {
		return
	}
	n.setFailed(n.OnReady())
	a.notifyAll()
}

// status adds the loops' states to those of other planes.
func (n *Network) status(m map[string]reconcile.Status) {
	if n == nil {
		return
	}
	for _, p := range n.planes {
		m[p.Name] = p.Status()
	}
}

// dropped returns how many packets were dropped, by reason.
func (n *Network) dropped() (map[string]uint64, error) {
	if n == nil {
		return nil, nil
	}
	return mode.NetworkDropped(n.planes)
}

var networkDroppedDesc = prometheus.NewDesc("fairlead_network_dropped_packets_total",
	"Packets that source validation of the pod network dropped: forged_source of pods, tunnel_source of what came out "+
		"of the overlay, tunnel_peer of overlay packets of no node (network.mode Own).", []string{"reason"}, nil)

// collectNetwork makes metrics of what source validation dropped.
func (c collector) collectNetwork(ch chan<- prometheus.Metric) {
	dropped, err := c.network.dropped()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(networkDroppedDesc, err)
		return
	}
	for reason, n := range dropped {
		ch <- prometheus.MustNewConstMetric(networkDroppedDesc, prometheus.CounterValue, float64(n), reason)
	}
}

// has reports whether a plane is one of the pod network.
func (n *Network) has(plane string) bool {
	if n == nil {
		return false
	}
	for _, p := range n.planes {
		if p.Name == plane {
			return true
		}
	}
	return false
}

// errNotReady returns the error that pods can't be attached for a reason, nil without one.
func errNotReady(why string) error {
	if why == "" {
		return nil
	}
	return fmt.Errorf("this node is not ready: %s", why)
}
