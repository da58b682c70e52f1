package main

import (
	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
)

// explainCommand returns what becomes of a packet and why.
func explainCommand() *cobra.Command {
	var n nodeFlags
	var o cli.Output
	var each bool
	var in string
	c := &cobra.Command{
		Use:   "explain FROM TO:PORT[/PROTOCOL]",
		Short: "Explain where a packet goes and why, and check that against the kernel",
		Long: `Explain what a node does with the first packet of a connection, and why: the frontend it matches, its allowed
source ranges, the endpoints it may go to, the source address that they see, and with --policy-mode the network
policies of both ends and the rules that decide. The result is checked against what the kernel holds in this
network namespace.

FROM is an address, a pod (namespace/name), a node (node/NAME, or its name), or "outside".
TO is an address, a Service (web, shop/web, web.shop or web.shop.svc.cluster.local), a pod or a node, with
a port by number or name. PROTOCOL is tcp, udp or sctp; without it that of the Service's port, else tcp.` + asTheAgent,
		Example: `  fairlead explain shop/client shop/web:http
  fairlead explain --source examples/shop --node a shop/client shop/web:http
  fairlead explain --source examples/shop --node a outside a:30080
  fairlead explain --source examples/shop --node a 192.0.2.7 '[fd00:96::10]:53/udp'`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			w, err := n.read(c.Context(), true)
			if err != nil {
				return err
			}
			p, err := w.Packet(args[0], args[1])
			if err != nil {
				return err
			}
			if p.In = in; in == "" && w.Services.Node.PodInterfaces.Name != "" {
				if p.In, err = node.InterfaceTo(p.Src.Addr()); err != nil { // where its answers leave, it comes in
					return err
				}
			}
			e, err := w.Explain(c.Context(), p, each)
			if err != nil {
				return err
			}
			return o.Print(cli.Out(c), e, text.Explanation{Explanation: e}.Tree)
		},
	}
	n.add(c)
	o.Add(c)
	c.Flags().StringVar(&in, "in", "", "the device of this node that the packet comes in by: may that send from FROM?")
	c.Flags().BoolVar(&each, "all-backends", false,
		"show what policies decide for each endpoint, also where it is the same")
	return c
}
