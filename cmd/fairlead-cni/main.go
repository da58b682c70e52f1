// Command fairlead-cni is the CNI plugin, which the container runtime starts for each pod: it passes calls on to the
// agent of its node.
package main

import (
	"os"

	"fairlead.dev/fairlead/cni"
)

func main() {
	p := cni.Plugin{Environment: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout}
	os.Exit(p.Run())
}
