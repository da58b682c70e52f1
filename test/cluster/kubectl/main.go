// Command kubectl is the real one, built from its published module without a change. This module exists to pin it:
// nothing of Fairlead imports it, and it imports nothing of Fairlead.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
)

func main() { os.Exit(cli.Run(cmd.NewDefaultKubectlCommand())) }
