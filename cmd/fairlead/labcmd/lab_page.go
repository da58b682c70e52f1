package labcmd

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/lab/report"
)

// labPage writes a page on exact runs.
func labPage() *cobra.Command {
	out := ""
	c := &cobra.Command{
		Use:   "page RUN...",
		Short: "Write a page, in Markdown, on exact runs of several kernels beside runs by time",
		Long: `Write a page, in Markdown, on exact runs of one or several kernels, a folder each, and on runs of the same experiments
by time: instructions of each arm, where they go, and each ratio beside the one of times, with the distance between both. Of
what several runs in one kernel have, the one that is named first counts.`,
		Example: "  fairlead lab page lab-results/connect-20261129-101500 --out exact.md",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("lab page: no folder is named: name those of runs, one of them exact")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			page, err := report.ExactPage(args)
			if err != nil {
				return err
			}
			if out == "" {
				_, err = fmt.Fprint(cli.Out(c), page)
				return err
			}
			return os.WriteFile(out, []byte(page), 0o644)
		},
	}
	c.Flags().StringVar(&out, "out", "", "`file` that is written (default: standard output)")
	c.MarkFlagFilename("out", "md")
	return c
}
