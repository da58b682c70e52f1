package kubeproxy

import (
	"context"
	"errors"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
)

// Node is a network namespace with a kube-proxy at work in it, and the API server of its own that it listens to, on the
// namespace's loopback. The server is in this process: what it costs is in no Usage.
type Node struct {
	*Proxy
	API  *apiserver.Server
	stop func() error
}

// NewNode serves the objects, of which one must be the Node o.Node, and measures a cold sync. o.Server is set here.
func NewNode(ctx context.Context, o Options, objects ...source.Object) (n *Node, c Cold, err error) {
	n = &Node{API: apiserver.New(objects...)}
	n.API.Encode()
	if o.Server, n.stop, err = n.API.Start(o.Namespace, "127.0.0.1:0"); err != nil {
		return nil, c, err
	}
	if n.Proxy, c, err = ColdSync(ctx, o); err != nil {
		return nil, c, errors.Join(err, n.stop())
	}
	return n, c, nil
}

// Apply puts an object in, new or changed. The kube-proxy hears of it at once.
func (n *Node) Apply(o source.Object) error {
	n.API.Apply(source.Change{Key: source.KeyOf(o), Object: o})
	return nil
}

// Close stops the kube-proxy, then the server. The rules stay, as with Stop.
func (n *Node) Close() error { return errors.Join(n.Stop(), n.stop()) }
