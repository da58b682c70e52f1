// Command fairlead-cni is the CNI plugin, which the container runtime starts for each pod: it passes calls on to the
// agent of its node. By the name loopback it brings up pods' loopback devices. "fairlead-cni install FOLDER" copies it
// into the runtime's folder of plugins, under both names.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"fairlead.dev/fairlead/cni"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "install" {
		if err := cni.Install(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "fairlead-cni:", err)
			os.Exit(1)
		}
		return
	}
	p := cni.Plugin{Environment: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout,
		Loopback: filepath.Base(os.Args[0]) == cni.LoopbackName}
	os.Exit(p.Run())
}
