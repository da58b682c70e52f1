// Command image makes the container image, without a daemon: an OCI layout in a tar file of the binaries it is given,
// one for each architecture, each on an empty base or on one's own.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/spf13/cobra"
)

// usual is the chart's image, by its whole name: a container runtime finds no other under the short one.
const usual = "docker.io/library/fairlead:0.1.0"

// packageCache returns where packages are kept: below the user's own cache, which no other user can write to.
func packageCache() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "fairlead-packages"
	}
	return filepath.Join(dir, "fairlead", "packages")
}

// outputs is where an image goes.
type outputs struct{ out, push, bill, created string }

// produce makes the image, writes it to each of its outputs and returns its digest.
func produce(ctx context.Context, o Options, to outputs) (v1.Hash, error) {
	index, err := Build(ctx, o)
	if err != nil {
		return v1.Hash{}, err
	}
	digest, err := index.Digest()
	if err != nil {
		return digest, err
	}
	if to.out != "" {
		if err := Write(index, o.Name, to.out); err != nil {
			return digest, err
		}
	}
	if to.push != "" {
		if err := Push(ctx, index, to.push); err != nil {
			return digest, err
		}
	}
	if to.bill != "" {
		text, err := o.Bill(digest.String(), to.created)
		if err == nil {
			err = os.WriteFile(to.bill, text, 0o644)
		}
		if err != nil {
			return digest, fmt.Errorf("bill of materials: %w", err)
		}
	}
	return digest, nil
}

func main() {
	var o Options
	var to outputs
	c := &cobra.Command{
		Use:   "image --binary ARCH=FILE … [--out FILE] [--push REFERENCE]",
		Short: "Make the container image of static binaries",
		Example: `  image --binary amd64=bin/fairlead-amd64 --binary arm64=bin/fairlead-arm64 --out bin/fairlead-image.tar
  image --binary amd64=bin/fairlead-amd64 --base registry.example.com/iptables:1 --push registry.example.com/fairlead:1`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(c *cobra.Command, _ []string) error {
			digest, err := produce(c.Context(), o, to)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.OutOrStdout(), digest)
			return nil
		},
	}
	c.Flags().StringToStringVar(&o.Binaries, "binary", nil, "static binaries by architecture")
	c.Flags().StringToStringVar(&o.Plugins, "plugin", nil, "static CNI plugins by architecture, which the chart installs")
	c.Flags().StringVar(&o.Base, "base", "",
		"an image to put them on, a reference or an OCI layout's folder; empty: nothing")
	c.Flags().StringVar(&o.Name, "name", usual,
		"the image's whole name in the file; as it is, the one that the chart asks for")
	c.Flags().StringVar(&o.Revision, "revision", "", "the commit that the binaries were built from")
	c.Flags().BoolVar(&o.Tools, "tools", true,
		"put iptables of both variants into it, from Debian's packages that are pinned in packages.lock")
	c.Flags().StringVar(&o.Mirror, "mirror", Debian, "where these come from")
	c.Flags().StringVar(&o.Cache, "cache", packageCache(), "a folder that keeps them")
	c.Flags().StringVar(&to.bill, "sbom", "", "a file for the software bill of materials, as SPDX 2.3 JSON")
	c.Flags().StringVar(&to.created, "created", "1970-01-01T00:00:00Z", "the time that the bill of materials names")
	c.Flags().StringVar(&to.out, "out", "", "a tar file to write")
	c.Flags().StringVar(&to.push, "push", "", "a reference to push to, with the credentials of Docker's configuration")
	c.MarkFlagRequired("binary")
	if err := c.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}
