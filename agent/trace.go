package agent

import (
	"context"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
)

// Trace calls take with what each connect() and first datagram of a client on this node to a Service comes to, until ctx ends, and
// gives how many of these were lost because take was too slow. It takes an agent in a mode with the plane ebpf, in the
// calling thread's network namespace, with those options.
func Trace(ctx context.Context, o ebpf.Options, f ebpf.Filter, take func(ebpf.Event)) (lost uint64, err error) {
	p, err := ebpf.Open(o)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	return p.Trace(ctx, f, take)
}
