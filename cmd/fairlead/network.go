package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/attach"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/resolve/network"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// podNetwork sets how a configuration has the node connect its pods, or how policies know the devices of those that
// others connect, and returns what to close in the end.
func podNetwork(c *config.Config, services resolve.Config, o *agent.Options) (io.Closer, error) {
	switch {
	case !c.Network() && o.Policies != nil: // Fairlead's own network guards its pods' devices
		hosts, err := route.OpenHosts()
		if err == nil {
			o.Policies.Devices = hosts
		}
		return hosts, err
	case !c.Network():
		return io.NopCloser(nil), nil
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read which boot of this node it is: %w", err)
	}
	folder := c.Own.Network.CNIFolder
	if s, err := os.Stat(folder); err != nil || !s.IsDir() {
		return nil, fmt.Errorf("network.cniFolder %s is no folder: name that of the container runtime, or make it",
			folder)
	}
	run := c.Own.Network.RunFolder
	socket, records := filepath.Join(run, "cni.sock"), filepath.Join(run, "attachments")
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return nil, err
	}
	o.Network = &agent.NetworkOptions{Resolve: c.ResolveNetwork(services), Socket: socket,
		Records: records, MasqueradeFile: c.MasqueradeFile(), Boot: strings.TrimSpace(string(boot)),
		Follow: func(ctx context.Context, notify func([]network.Device)) error {
			return followDevices(ctx, interfaces, notify)
		},
		OnReady: func() error { return attach.WriteConfig(folder, socket, records) }}
	return interfaces, nil
}

// followDevices calls notify with the node's devices, and again whenever they have changed, until ctx ends.
func followDevices(ctx context.Context, interfaces *link.Interfaces, notify func([]network.Device)) error {
	return interfaces.Follow(ctx, func(l []link.Interface) {
		devices := make([]network.Device, 0, len(l))
		for _, i := range l {
			devices = append(devices, network.Device{Name: i.Name, MTU: i.MTU, Prefixes: i.Prefixes})
		}
		notify(devices)
	})
}
