// Package network is the pod network of a node, as a subsystem of its agent: what it comes to, its data planes, the
// server of the CNI plugin, and the files of others that it follows.
package network

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

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// Options is how a node connects its pods.
type Options struct {
	Resolve resolve.Config
	Socket  string // path, for the CNI plugin
	Records string // folder of address records, in memory
	Chained bool   // another plugin connects pods; the agent has what else they need put into the kernel
	Boot    string // names this boot of the node
	// calls notify with the node's devices, and whether its kernel has no IPv6 for pods', and again whenever they have
	// changed, until ctx ends; nil: Chained
	Follow func(ctx context.Context, notify func([]resolve.Device, bool)) error
	// is called once pods can be attached, and every filePeriod from then on
	OnReady func() error
	// with ranges that see pods' own addresses, in ip-masq-agent's format; "": none
	MasqueradeFile string
	// path, of what was changed so that devices accept router advertisements; "": they don't
	AdvertisementsFile string
}

// filePeriod is how often files that others write, or remove, are looked at.
const filePeriod = time.Second

// Network is the pod network of a node in one network namespace. It implements subsystem.Subsystem.
type Network struct {
	Options
	log      *slog.Logger
	planes   []mode.NetworkPlane
	server   *attach.Server
	listener *net.UnixListener
	accept   *node.Advertisements // nil: none are accepted
	loops

	mu       sync.Mutex // guards what follows
	resolver *resolve.Resolver
	decides  bool     // the source has been read
	begun    bool     // the planes have the first parts
	devices  []string // the node's devices; nil: not known yet, nothing follows from objects
	files
	problems
}

var _ subsystem.Subsystem = (*Network)(nil)

// loops are those of the planes and of the server.
type loops struct {
	ctx   context.Context
	stop  context.CancelFunc
	ended sync.WaitGroup
}

// files is what is known of the files that others write.
type files struct {
	masquerade  resolve.Masquerade // as last read
	established bool               // OnReady has been called
	failed      string             // why it failed last
	failure     []source.Problem   // of that
}

// problems are those of objects, and of pods that the node's ranges don't hold.
type problems struct {
	resolved, all []source.Problem
	outOfRange    string // of those pods, "": there are none
	ignored       string // why router advertisements are, "": they aren't
	unmade        string // files.failed, as in all
}

// line is the planes as one.
type line []mode.NetworkPlane

// Change implements attach.Line.
func (l line) Change(put, del []model.NetworkPart) {
	for _, p := range l {
		p.Change(put, del)
	}
}

// Sync implements attach.Line.
func (l line) Sync(ctx context.Context) (err error) {
	for _, p := range l {
		err = errors.Join(err, p.Sync(ctx))
	}
	return err
}

// SyncOwner implements attach.Line.
func (l line) SyncOwner(ctx context.Context, o model.Owner) (err error) {
	for _, p := range l {
		err = errors.Join(err, p.SyncOwner(ctx, o))
	}
	return err
}

// Open opens the pod network of the calling thread's network namespace. notReady returns why pods can't be attached
// yet, "" if they can, and whether pods that run may be cut off. atDevices is mode.Mode.MasqueradesAtDevices.
func Open(o Options, atDevices bool, notReady func() (why string, limited bool), pods attach.Pods,
	log *slog.Logger) (n *Network, err error) {
	pool, err := ipam.Open(o.Records, o.Boot)
	if err != nil {
		return nil, err
	}
	config := o.Resolve
	config.SCTPUnmasqueraded = atDevices
	n = &Network{Options: o, log: log, resolver: resolve.New(config), files: files{masquerade: o.Resolve.Masquerade}}
	n.readMasquerade()
	if !o.Chained {
		if n.planes, err = mode.OpenNetwork(log, atDevices); err != nil {
			return nil, err
		}
	}
	n.server, err = attach.New(attach.Options{Pool: pool, Line: line(n.planes),
		Ready:   func() error { return attach.NotReady(notReady()) },
		Differs: mode.PodDiffers, Pods: pods, Chained: o.Chained, Log: log,
		Cut: func(of func(netip.Addr) bool) error { return mode.CutFlows(n.planes, of) }})
	if err == nil && o.AdvertisementsFile != "" {
		n.accept, err = node.OpenAdvertisements(o.AdvertisementsFile)
	}
	if err == nil {
		n.listener, err = cni.Listen(o.Socket)
	}
	if err != nil {
		return nil, errors.Join(err, n.closeHandles())
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	for _, p := range n.planes {
		n.ended.Go(func() { p.Run(n.ctx) })
	}
	if o.Chained {
		n.server.Begin(nil, nil)
	}
	return n, nil
}

// Start implements subsystem.Subsystem.
func (n *Network) Start(h subsystem.Host) {
	n.ended.Go(func() { n.until("CNI server", func() error { return n.server.Serve(n.ctx, n.listener) }) })
	n.ended.Go(func() { n.until("watch of pods' devices", func() error { return n.server.Follow(n.ctx) }) })
	if n.Follow != nil {
		h.Go("devices", func(ctx context.Context) error {
			return n.Follow(ctx, func(l []resolve.Device, noIPv6 bool) {
				n.SetDevices(l, noIPv6)
				h.LogProblems()
			})
		})
	}
	h.Go("network files", func(ctx context.Context) error { return n.followFiles(ctx, h) })
}

// until runs f and logs its error, but for the end of the loops.
func (n *Network) until(what string, f func() error) {
	if err := f(); err != nil && n.ctx.Err() == nil {
		n.log.Error(what+" ended; restart the agent", "error", err)
	}
}

func (n *Network) closeHandles() (err error) {
	if n.listener != nil {
		n.listener.Close() // the server has, if it was started
	}
	if n.server != nil {
		err = n.server.Close()
	}
	if n.accept != nil {
		err = errors.Join(err, n.accept.Close())
	}
	for _, p := range n.planes {
		err = errors.Join(err, p.Close())
	}
	return err
}

// Close ends the loops and the server and leaves the kernel as it is: pods stay connected.
func (n *Network) Close() error {
	n.stop()
	n.ended.Wait()
	return n.closeHandles()
}

// SetDevices sets the node's devices, and whether its kernel has no IPv6 for pods'.
func (n *Network) SetDevices(l []resolve.Device, noIPv6 bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.resolver.SetDevices(l)
	n.resolver.SetNoIPv6(noIPv6)
	n.devices = make([]string, 0, len(l))
	for _, d := range l {
		n.devices = append(n.devices, d.Name)
	}
	if n.decides {
		n.decide()
	}
}

// Attached returns what is attached, the newest last.
func (n *Network) Attached() []*model.Attachment { return n.server.Attached() }

// acceptAdvertisements has the node's devices accept router advertisements if it forwards IPv6, or is going to.
func (n *Network) acceptAdvertisements() (why string) {
	now, isIPv6 := n.resolver.Network().Network, func(r netip.Prefix) bool { return r.Addr().Is6() }
	if n.accept == nil || now == nil || !slices.ContainsFunc(now.Ranges, isIPv6) {
		return ""
	}
	if err := n.accept.Accept(n.devices); err != nil {
		return err.Error()
	}
	return ""
}

// Decide implements subsystem.Subsystem. No other subsystem hears of what it decides: the planes do at once.
func (n *Network) Decide(u subsystem.Update, d *model.Delta) (known bool) {
	if n.Chained || u.Names != nil {
		return true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.resolver.Observe(u.Changes)
	if d != nil {
		n.decides = true
		n.decide()
	}
	return true
}

// Change implements subsystem.Subsystem.
func (n *Network) Change(subsystem.Update, model.Delta) {}

// decide passes to the planes what follows from changes of objects. n.mu is held.
func (n *Network) decide() {
	if n.devices == nil { // without an uplink, what an agent before this one has written would go for a moment
		return
	}
	c := n.resolver.Apply(nil)
	ignored := n.acceptAdvertisements()
	n.server.SetSources(n.resolver.Sources())
	if !n.begun {
		n.begun = true
		n.server.Begin(c.Put, c.Del)
	} else if !c.Empty() {
		line(n.planes).Change(c.Put, c.Del)
	}
	n.server.SetNetwork(n.resolver.Network().Network)
	n.updateProblems(ignored)
}

// Problems implements subsystem.Subsystem.
func (n *Network) Problems() subsystem.Problems {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.Chained {
		return subsystem.Problems{Node: n.failure}
	}
	return subsystem.Problems{Node: n.all} // with the failure
}

// mostOutOfRange is how many pods a problem names.
const mostOutOfRange = 10

// updateProblems joins what is wrong with objects, the pods that have addresses outside the node's podCIDRs, as when
// these were changed, and why router advertisements are ignored. Where nothing changed, Problems returns the same
// slice.
func (n *Network) updateProblems(ignored string) {
	outOfRange := n.findOutOfRange()
	now := n.resolver.Problems()
	same := len(now) == len(n.resolved) && (len(now) == 0 || &now[0] == &n.resolved[0])
	if same && outOfRange == n.outOfRange && ignored == n.ignored && n.failed == n.unmade {
		return
	}
	n.resolved, n.outOfRange, n.ignored, n.unmade = now, outOfRange, ignored, n.failed
	n.all = slices.Concat(now, n.failure)
	own := source.Key{Kind: source.Node, Name: n.Resolve.Node}
	if outOfRange != "" {
		n.all = append(n.all, source.Problem{Object: own, Field: "spec.podCIDRs", Reason: "PodsOutsidePodCIDRs",
			Message: outOfRange})
	}
	if ignored != "" {
		n.all = append(n.all, source.Problem{Object: own, Reason: "RouterAdvertisements", Message: ignored})
	}
}

// findOutOfRange returns a text about the pods with addresses outside the node's ranges, "" without any.
func (n *Network) findOutOfRange() string {
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
	if more := len(pods) - mostOutOfRange; more > 0 {
		pods = append(pods[:mostOutOfRange], fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("no longer hold the addresses of %s, which other nodes can't reach; delete these pods, so that "+
		"others take their place", strings.Join(pods, ", "))
}

// Readiness implements subsystem.Subsystem.
func (n *Network) Readiness() subsystem.Readiness {
	r := subsystem.Readiness{Serving: true, Limited: true}
	for _, p := range n.planes {
		if serving, why := p.Serving(); !serving {
			r.Serving = false
			if why != "" {
				r.Why = "pods are not connected: " + why
			}
			break
		}
	}
	return r
}

// SyncOwner implements subsystem.Subsystem: the server waits for attachments.
func (n *Network) SyncOwner(context.Context, model.Owner) error { return nil }

// FirstSync implements subsystem.Subsystem. It makes known that pods can be attached.
func (n *Network) FirstSync(ctx context.Context) error {
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
	err := n.OnReady()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.established = true
	return err
}

// setFailed records why OnReady failed, nil: it didn't. n.mu is held.
func (n *Network) setFailed(err error) {
	failed := ""
	if err != nil {
		failed = err.Error()
	}
	if failed == n.failed {
		return
	}
	n.failed, n.failure = failed, nil
	if err != nil {
		n.log.Error("the CNI network configuration isn't as it should be, retrying", "error", err)
		n.failure = []source.Problem{{Object: source.Key{Kind: source.Node, Name: n.Resolve.Node},
			Reason: "CNIConfiguration", Message: failed}}
	}
	if !n.Chained {
		n.updateProblems(n.ignored)
	}
}

// readMasquerade reads the file with ranges that see pods' own addresses. One that can't be read changes nothing.
func (n *Network) readMasquerade() {
	if n.MasqueradeFile == "" {
		return
	}
	b, err := os.ReadFile(n.MasqueradeFile)
	var m resolve.Masquerade
	if err == nil {
		m, err = resolve.ParseMasquerade(b)
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
func (n *Network) followFiles(ctx context.Context, h subsystem.Host) error {
	tick := time.NewTicker(filePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			n.checkFiles()
			h.LogProblems()
		}
	}
}

func (n *Network) checkFiles() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.readMasquerade()
	if n.decides {
		n.decide()
	}
	if n.established {
		n.setFailed(n.OnReady())
	}
}

// Loops implements subsystem.Subsystem.
func (n *Network) Loops() map[string]subsystem.Loop {
	m := map[string]subsystem.Loop{}
	for _, p := range n.planes {
		m[p.Name] = subsystem.Loop{Status: p.Status(), Without: "connects no pod"}
	}
	return m
}

// Status implements subsystem.Subsystem: the status page has no section of the pod network.
func (n *Network) Status(*subsystem.State) {}

// Decided implements subsystem.Subsystem.
func (n *Network) Decided(d *inspect.Decided) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d.Network = n.resolver.Network()
	d.Network.Routes, d.NetworkProblems = slices.Clone(d.Network.Routes), slices.Clone(n.all)
}

// Metrics implements subsystem.Subsystem.
func (n *Network) Metrics() []prometheus.Collector { return []prometheus.Collector{collector{n}} }

var droppedDesc = prometheus.NewDesc("fairlead_network_dropped_packets_total",
	"Packets that source validation of the pod network dropped: forged_source of a pod; inside_source, of pods or of "+
		"what is behind the overlay, by another device; tunnel_source of what an overlay packet carried; tunnel_peer of "+
		"overlay packets of no node, or to another address; pod_overlay of a pod to another node's end of the overlay "+
		"(network.mode Own).", []string{"reason"}, nil)

// collector makes metrics of what source validation dropped.
type collector struct{ *Network }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- droppedDesc }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	dropped, err := mode.NetworkDropped(c.planes)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(droppedDesc, err)
		return
	}
	for reason, n := range dropped {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(n), reason)
	}
}
