// Command kube-proxy is Kubernetes' own, built from its published modules without a change: the lab's subject to
// measure Fairlead against. This module exists to pin it: nothing of Fairlead imports it, and it imports nothing of
// Fairlead.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() { os.Exit(cli.Run(app.NewProxyCommand())) }
