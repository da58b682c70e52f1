package main

import (
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
)

// showCommand reports what is wanted, what the kernel holds, and where they differ.
func showCommand() *cobra.Command {
	var n nodeFlags
	var o cli.Output
	c := &cobra.Command{
		Use:   "show [SERVICE...] [--source DIR --node NAME]",
		Short: "Show each Service's addresses and endpoints, and whether the kernel holds them",
		Long: `Show each Service's addresses and endpoints, and whether the kernel holds them; where network policies are on,
and no Service is named, also which policies decide about the node's pods.

Exit status: 0 if everything was read, whatever the kernel holds; 1 on an error, and where an object could not be read.` + asTheAgent,
		Example: `  fairlead show
  fairlead show --source examples/shop --node a
  fairlead show --source examples/shop --node a shop/web cart
  fairlead show --source examples/shop --node a -o json | jq '.frontends[].entry'`,
		RunE: func(c *cobra.Command, names []string) error {
			w, err := n.read(c.Context(), false)
			if err != nil {
				return err
			}
			a, err := w.Audit(c.Context())
			if err != nil {
				return err
			}
			s, err := w.Overview(a, names)
			if err != nil {
				return err
			}
			return errors.Join(o.Print(cli.Out(c), s, text.Overview{Overview: s}.Table), w.Unread())
		},
	}
	n.add(c)
	o.Add(c)
	c.AddCommand(showNetwork())
	return c
}
