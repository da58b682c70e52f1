package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/client-go/rest"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/event"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/source/manifest"
)

// access returns the way to the API server. A folder wins over it.
func access(c *config.Config) (kube.Access, error) {
	a := kube.Access{Kubeconfig: c.Proxy.ClientConnection.Kubeconfig, Master: c.Server}
	if a == (kube.Access{}) && os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
		return a, errors.New("--source is missing: name a folder of Kubernetes YAML, such as examples/shop, or read the " +
			"Kubernetes API with --kubeconfig")
	}
	return a, nil
}

// api is the Kubernetes API as a source for a node, which logs to log, or nowhere where that is nil. Where connections
// end at the agent, an endpoint at another node's node port could lead to this one again without end: its address must
// be known.
func api(c *config.Config, set *resolve.Config, log *slog.Logger) (*kube.Source, kube.Access, error) {
	a, err := access(c)
	o := kube.Options{
		Access: a, Node: set.Node, ProxyName: c.Own.ServiceProxyName,
		Nodes:          set.Capabilities.Ends || c.Network() || c.Own.DirectServerReturn,
		NeedsNodes:     needsNodes(c, set),
		Pods:           c.Attaches(), // for their host ports
		NamespaceBytes: c.Own.Limits.NamespaceBytes, Bytes: c.Own.Limits.Bytes, Log: log,
	}
	if c.Policies() {
		o.Kinds = []source.Kind{source.Namespace, source.Pod, source.NetworkPolicy, source.ClusterNetworkPolicy}
	}
	return kube.New(o), a, err
}

// needsNodes returns which objects need the Nodes' pod ranges or addresses: Services with external IPs, which must not
// be a pod's, or with node ports, which this node serves at the others' addresses, too; ServiceCIDRs that were added to
// the cluster's first, which must hold no pod; and ClusterNetworkPolicies.
func needsNodes(c *config.Config, set *resolve.Config) func(source.Object) bool {
	safe := c.Own.ExternalIPs == resolve.SafeExternalIPs
	some := c.Policies() || safe && c.Proxy.ClusterCIDR == ""
	remote := set.Capabilities.NoRemote == "" && !set.MasqueradeAll
	return func(o source.Object) bool {
		switch o := o.(type) {
		case *corev1.Service:
			return some && (safe && len(o.Spec.ExternalIPs) > 0 || remote && hasNodePorts(o))
		case *networkingv1.ServiceCIDR:
			return some && o.Name != "kubernetes"
		case *cnpv1.ClusterNetworkPolicy:
			return true
		}
		return false
	}
}

// hasNodePorts reports whether any node serves the node ports of a Service as well as another.
func hasNodePorts(o *corev1.Service) bool {
	return o.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal &&
		slices.ContainsFunc(o.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort != 0 })
}

// podSource returns a source of the Nodes and Pods of a cluster, among other objects.
func podSource(c *config.Config, node string) (source.Source, error) {
	if c.Own.Source != "" {
		return manifest.New(c.Own.Source), manifest.Check(c.Own.Source)
	}
	a, err := access(c)
	return kube.New(kube.Options{Access: a, Node: node, ProxyName: c.Own.ServiceProxyName, Nodes: true,
		Kinds: []source.Kind{source.Pod}}), err
}

// apiServers returns the addresses and ports of the API server that a reads from, none where they can't be found out
// now.
func apiServers(ctx context.Context, a kube.Access) (servers []netip.AddrPort) {
	c, err := a.Config()
	if err != nil {
		return nil // opening the source says so
	}
	u, _, err := rest.DefaultServerUrlFor(c)
	if err != nil {
		return nil
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", cmp.Or(u.Port(), u.Scheme))
	if err != nil {
		return nil
	}
	ctx, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		return nil
	}
	for _, addr := range addresses {
		servers = append(servers, netip.AddrPortFrom(addr.Unmap(), uint16(port)))
	}
	return servers
}

// openSource opens where a node's objects come from, and where Events about them go, nil where they go nowhere. What
// can't be read now is an error; an API server that doesn't answer is none.
func openSource(c *config.Config, set *resolve.Config, log *slog.Logger) (source.Source, event.Recorder, error) {
	if c.Own.Source != "" {
		return manifest.New(c.Own.Source), nil, manifest.Check(c.Own.Source)
	}
	s, a, err := api(c, set, log)
	if err == nil {
		_, err = a.Config()
	}
	return s, event.NewAPI(a.Config, set.Node, log), err
}

// load reads a source once, of the Kubernetes API's Pods only if asked to.
func load(ctx context.Context, c *config.Config, node string,
	withPods bool) ([]source.Object, []source.Problem, error) {
	if c.Own.Source != "" {
		return manifest.Load(c.Own.Source)
	}
	s, _, err := api(c, &resolve.Config{Node: node}, nil)
	if err != nil {
		return nil, nil, err
	}
	ctx, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	return s.Load(ctx, withPods)
}
