// Command control-plane is etcd, kube-apiserver and the EndpointSlice controller, built from their published modules
// without a change, in one program, since they are mostly the same packages. The first argument says which it is. This
// module exists to pin them: nothing of Fairlead imports it, and it imports nothing of Fairlead.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	name := ""
	if len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "endpointslice-controller":
		os.Exit(cli.Run(newControllerCommand()))
	default:
		fmt.Fprintln(os.Stderr, "control-plane: the first argument is etcd, kube-apiserver or endpointslice-controller")
		os.Exit(2)
	}
}
