package main

import (
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
)

// newControllerCommand makes the command that runs kube-controller-manager's EndpointSlice controller alone, as the
// manager does. The manager itself links 400 packages more, among them a kubelet's, for controllers that no test needs.
func newControllerCommand() *cobra.Command {
	c := &cobra.Command{Use: "endpointslice-controller", Args: cobra.NoArgs}
	kubeconfig := c.Flags().String("kubeconfig", "", "how the API server is reached")
	c.RunE = func(c *cobra.Command, _ []string) error {
		config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
		if err != nil {
			return err
		}
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}
		ctx := c.Context()
		f := informers.NewSharedInformerFactory(client, 0)
		const most, workers = 100, 5 // endpoints of a slice; both are the manager's defaults
		controller := endpointslice.NewController(ctx, f.Core().V1().Pods(), f.Core().V1().Services(), f.Core().V1().Nodes(),
			f.Discovery().V1().EndpointSlices(), most, client, time.Duration(0))
		f.Start(ctx.Done())
		controller.Run(ctx, workers)
		return nil
	}
	return c
}
