package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/agent/attach"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// startNetwork runs the pod network of the calling thread's network namespace, as an agent of a node does, beside a
// mode. What pods send keeps its source: cases name the one that the client outside sees. Pods of a node may have
// an MTU of their own.
func startNetwork(m mode.Mode,
	mtu map[string]int) func(context.Context, string, string, []source.Object) (io.Closer, error) {
	return func(ctx context.Context, node, folder string, objects []source.Object) (io.Closer, error) {
		socket, records := filepath.Join(folder, "cni.sock"), filepath.Join(folder, "records")
		n, err := OpenNetwork(&NetworkOptions{Socket: socket, Records: records, Boot: "x",
			Resolve: network.Config{Node: node, MTU: mtu[node], Masquerade: network.Masquerade{Off: true}},
			OnReady: func() error { return attach.WriteConfig(folder, socket, records) }}, m.MasqueradesAtDevices(), nil,
			nil, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		if err := n.learn(ctx, objects); err != nil {
			return nil, errors.Join(err, n.Close())
		}
		return n, nil
	}
}

// learn has n learn of the node's devices and of objects, and returns once pods can be attached.
func (n *Network) learn(ctx context.Context, objects []source.Object) error {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return err
	}
	defer interfaces.Close()
	once, stop := context.WithCancel(ctx)
	defer stop()
	err = followInterfaces(once, interfaces, func(devices []network.Device, noIPv6 bool) {
		n.setDevices(devices, noIPv6)
		stop()
	})
	if err != nil {
		return err
	}
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	n.Apply(changes)
	return n.arrive(ctx)
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
