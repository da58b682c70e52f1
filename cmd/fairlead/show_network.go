package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/ipam"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/source"
)

// showNetwork returns the command that compares the pod network with the kernel.
func showNetwork() *cobra.Command {
	var n nodeFlags
	var o cli.Output
	c := &cobra.Command{
		Use:   "network [--source DIR --node NAME]",
		Short: "Show a node's pod network: ranges, routes and attached pods",
		Long: `Show a node's pod network (network.mode Own): which ranges its pods have addresses of and how many are free, how
packets get to other nodes' pods, and those of pods to other nodes, which pods are attached, and whether the kernel
holds all that.` + asTheAgent,
		Example: "  fairlead show network --source examples/shop --node a\n  fairlead show network -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := readNetwork(c.Context(), &n)
			if err != nil {
				return err
			}
			return o.Print(cli.Out(c), s, text.Network{Network: s}.Tables)
		},
	}
	n.add(c)
	o.Add(c)
	return c
}

// decideNetwork returns the configuration and the pod network that is decided by it: by the agent, or by reading the
// source.
func decideNetwork(ctx context.Context, n *nodeFlags) (*config.Config, *inspect.Decided, error) {
	c, ofAgent, err := n.load()
	if err != nil {
		return nil, nil, err
	}
	if ofAgent {
		d, err := decidedByAgent(c)
		if err == nil {
			d.Problems = d.NetworkProblems
		}
		return c, d, err
	}
	services, err := c.Resolve()
	if err != nil {
		return nil, nil, err
	}
	objects, problems, err := load(ctx, c, services.Node, false)
	if err != nil {
		return nil, nil, err
	}
	set := c.ResolveNetwork(services)
	if set.Devices, set.NoIPv6, err = devicesHere(ctx); err != nil {
		return nil, nil, err
	}
	r := network.New(set)
	r.Apply(source.Put(objects...))
	return c, &inspect.Decided{Services: &model.Snapshot{Node: &model.Node{Name: services.Node}}, Network: r.Network(),
		Problems: append(problems, r.Problems()...)}, nil
}

// readNetwork gathers what "show network" prints.
func readNetwork(ctx context.Context, n *nodeFlags) (*inspect.Network, error) {
	c, decided, err := decideNetwork(ctx, n)
	if err != nil {
		return nil, err
	}
	records, err := recordsOf(c)
	if err != nil {
		return nil, err
	}
	s, err := inspect.NewNetwork(ctx, decided, records)
	if err != nil {
		return nil, err
	}
	if file, types, err := attach.First(c.Own.Network.CNIFolder); err == nil && c.Attaches() && file != "" {
		s.Runtime = fmt.Sprintf("%s calls %s", file, strings.Join(types, ", then "))
	}
	return s, nil
}

// devicesHere returns the network devices of the calling thread's network namespace, and whether its kernel has no IPv6
// for more.
func devicesHere(ctx context.Context) (devices []network.Device, noIPv6 bool, err error) {
	interfaces, err := link.OpenInterfaces()
	if err != nil {
		return nil, false, err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err = followDevices(ctx, interfaces, func(l []network.Device, none bool) {
		devices, noIPv6 = l, none
		stop()
	})
	return devices, noIPv6, errors.Join(err, interfaces.Close())
}

// recordsOf returns the records of the node's pods; none where no agent has made any.
func recordsOf(c *config.Config) ([]ipam.Record, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read which boot of this node it is: %w", err)
	}
	return ipam.Read(filepath.Join(c.Own.Network.RunFolder, "attachments"), strings.TrimSpace(string(boot)))
}
