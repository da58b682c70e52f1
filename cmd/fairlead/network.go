package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// podNetwork sets how a configuration has the node connect its pods, or how policies know the devices of those that
// others connect, and returns what to close in the end.
func podNetwork(c *config.Config, services resolve.Config, o *agent.Options) (io.Closer, error) {
	if c.Attaches() {
		n, folder, err := attachOptions(c, services)
		if err != nil {
			return nil, err
		}
		o.Network = n
		if c.Network() {
			return ownNetwork(n, folder)
		}
		n.Chained = true
		n.OnReady = func() error { return attach.WriteChained(folder, n.Socket, n.Records) }
	}
	if o.Policies == nil {
		return io.NopCloser(nil), nil
	}
	if o.Policies.AnySource = !c.ChecksSources(); o.Policies.AnySource {
		return io.NopCloser(nil), nil
	}
	hosts, err := route.OpenHosts() // Fairlead's own network guards its pods' devices
	if err == nil {
		o.Policies.Devices = podDevices{hosts}
	}
	return hosts, err
}

// podDevices are the devices by which this node's routes reach pods.
type podDevices struct{ *route.Hosts }

// Follow implements agent.Devices.
func (d podDevices) Follow(ctx context.Context, notify func([]policy.Device)) error {
	return d.Hosts.Follow(ctx, func(l []route.Device) { notify(policyDevices(l)) })
}

// policyDevices returns devices as the resolver of policies takes them.
func policyDevices(l []route.Device) []policy.Device {
	out := make([]policy.Device, len(l))
	for i, d := range l {
		out[i] = policy.Device(d)
	}
	return out
}

// attachOptions returns what a configuration says of pods that the container runtime has the agent attach, and the
// runtime's folder of network configurations.
func attachOptions(c *config.Config, services resolve.Config) (n *agent.NetworkOptions, folder string, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, "", fmt.Errorf("read which boot of this node it is: %w", err)
	}
	folder = c.Own.Network.CNIFolder
	if s, err := os.Stat(folder); err != nil || !s.IsDir() {
		return nil, "", fmt.Errorf("network.cniFolder %s is no folder: name that of the container runtime, or make it",
			folder)
	}
	run := c.Own.Network.RunFolder
	return &agent.NetworkOptions{Resolve: c.ResolveNetwork(services), Socket: filepath.Join(run, "cni.sock"),
		Records: filepath.Join(run, "attachments"), MasqueradeFile: c.MasqueradeFile(),
		AdvertisementsFile: advertisementsFile(c), Boot: strings.TrimSpace(string(boot))}, folder, nil
}

// advertisementsFile returns the path of what was changed so that devices accept router advertisements.
func advertisementsFile(c *config.Config) string {
	return filepath.Join(c.Own.Network.RunFolder, node.AdvertisementsFile)
}

// acceptAdvertisements has the devices that there are accept router advertisements if the agent is to connect pods, for
// one in a container that can't set that.
func acceptAdvertisements(ctx context.Context, c *config.Config) error {
	if !c.Network() {
		return nil
	}
	devices, _, err := devicesHere(ctx)
	if err != nil {
		return err
	}
	a, err := node.OpenAdvertisements(advertisementsFile(c))
	if err != nil {
		return err
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return errors.Join(a.Accept(names), a.Close())
}

// ownNetwork has the agent connect pods itself, and returns what to close in the end.
func ownNetwork(n *agent.NetworkOptions, folder string) (io.Closer, error) {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return nil, err
	}
	n.Follow = func(ctx context.Context, notify func([]network.Device, bool)) error {
		return followDevices(ctx, interfaces, notify)
	}
	n.OnReady = func() error { return attach.WriteConfig(folder, n.Socket, n.Records) }
	return interfaces, nil
}

// followDevices calls notify with the node's devices, and whether its kernel has no IPv6 for more, and again whenever
// they have changed, until ctx ends.
func followDevices(ctx context.Context, interfaces *link.Interfaces, notify func([]network.Device, bool)) error {
	return interfaces.Follow(ctx, func(l []link.Interface) {
		devices := make([]network.Device, 0, len(l))
		for _, i := range l {
			devices = append(devices, network.Device{Name: i.Name, MTU: i.MTU, Prefixes: i.Prefixes})
		}
		notify(devices, interfaces.NoIPv6())
	})
}
