package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent/mode"
	podnetwork "fairlead.dev/fairlead/agent/network"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// startNetwork runs the pod network of the calling thread's network namespace, as an agent of a node does, beside a
// mode. What pods send to the one outside keeps its source: cases name the one that it sees. Pods of a node may have an
// MTU of their own.
func startNetwork(m mode.Mode,
	mtu map[string]int) func(context.Context, string, string, []source.Object) (conformance.NodeNetwork, error) {
	return func(ctx context.Context, node, folder string, objects []source.Object) (conformance.NodeNetwork, error) {
		socket, records := filepath.Join(folder, "cni.sock"), filepath.Join(folder, "records")
		n, err := openNetwork(NetworkOptions{Socket: socket, Records: records, Boot: "x",
			Resolve: network.Config{Node: node, MTU: mtu[node], Masquerade: onlyToNodes(objects)},
			OnReady: func() error { return attach.WriteConfig(folder, socket, records) }}, m.MasqueradesAtDevices(),
			slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		if err := n.learn(ctx, objects); err != nil {
			return nil, errors.Join(err, n.Close())
		}
		return n, nil
	}
}

// runningNetwork is a node's pod network without an agent.
type runningNetwork struct{ *podnetwork.Network }

// openNetwork opens the pod network of the calling thread's network namespace and serves the CNI plugin.
func openNetwork(o NetworkOptions, atDevices bool, log *slog.Logger) (*runningNetwork, error) {
	n, err := podnetwork.Open(o, atDevices, func() (string, bool) { return "", false }, nil, log)
	if err != nil {
		return nil, err
	}
	n.Start(noAgent{})
	return &runningNetwork{n}, nil
}

// noAgent is the host of a subsystem without an agent.
type noAgent struct{}

func (noAgent) Go(string, func(context.Context) error) {}
func (noAgent) Apply(subsystem.Update)                 {}
func (noAgent) LogProblems()                           {}
func (noAgent) Report()                                {}

// Decided implements conformance.NodeNetwork.
func (n *runningNetwork) Decided() *model.PodNetwork {
	var d inspect.Decided
	n.Network.Decided(&d)
	return d.Network
}

// onlyToNodes has all destinations but Nodes' InternalIPs see pods' own addresses.
func onlyToNodes(objects []source.Object) (m network.Masquerade) {
	var nodes []netip.Addr
	for _, o := range objects {
		node, is := o.(*corev1.Node)
		if !is {
			continue
		}
		for _, a := range node.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				nodes = append(nodes, netip.MustParseAddr(a.Address))
			}
		}
	}
	return network.Masquerade{Except: slices.Concat(without(netip.MustParsePrefix("0.0.0.0/0"), nodes),
		without(netip.MustParsePrefix("::/0"), nodes))}
}

// without returns the prefixes of all addresses of p but some.
func without(p netip.Prefix, some []netip.Addr) []netip.Prefix {
	switch {
	case !slices.ContainsFunc(some, p.Contains):
		return []netip.Prefix{p}
	case p.IsSingleIP():
		return nil
	}
	upper := p.Addr().AsSlice()
	upper[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	a, _ := netip.AddrFromSlice(upper)
	return append(without(netip.PrefixFrom(p.Addr(), p.Bits()+1), some), without(netip.PrefixFrom(a, p.Bits()+1), some)...)
}

// learn has n learn of the node's devices and of objects, and returns once pods can be attached.
func (n *runningNetwork) learn(ctx context.Context, objects []source.Object) error {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return err
	}
	defer interfaces.Close()
	once, stop := context.WithCancel(ctx)
	defer stop()
	err = followInterfaces(once, interfaces, func(devices []network.Device, noIPv6 bool) {
		n.SetDevices(devices, noIPv6)
		stop()
	})
	if err != nil {
		return err
	}
	n.decide(objects...)
	return n.FirstSync(ctx)
}

// decide has n decide again, with objects that have changed.
func (n *runningNetwork) decide(objects ...source.Object) {
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	n.Decide(subsystem.Update{Changes: changes}, &model.Delta{})
}

// networkParts is how many parts the cases of Services and policies are divided into where -matrix is not set: each
// mode has another one.
const networkParts = 10

// TestNetworkConformance judges each mode, beside an engine, over the product's own network: pods are attached by the
// CNI plugin, called as a container runtime does. Without the flag matrix the modes share half of the cases.
func TestNetworkConformance(t *testing.T) {
	for i, name := range onHost {
		m, err := mode.Of(name)
		if err != nil {
			t.Fatal(err)
		}
		m = m.With(mode.Options{Policies: true, PodNetwork: true})
		s := implementation(m)
		s.Network = &conformance.PodNetwork{Name: "own", Start: startNetwork(m, nil)}
		s.UnpolicedServices = unpoliced[name]
		part, parts, beside := i, networkParts, engines[i%len(engines):][:1]
		if *matrix {
			part, parts, beside = 0, 1, engines
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Run("services", func(t *testing.T) { conformance.RunPart(t, s, part, parts) })
			for _, e := range beside {
				s.Engine = e
				t.Run(e.Name, func(t *testing.T) {
					conformance.RunPart(t, s, part, parts)
					uneven := s // what b's pods are sent may be too long for them
					uneven.Network = &conformance.PodNetwork{Name: "own", Start: startNetwork(m, map[string]int{"b": 1400})}
					conformance.RunNetwork(t, uneven)
				})
			}
		})
	}
}
