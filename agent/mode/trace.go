package mode

import (
	"context"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
)

// What Trace reports, and which of it.
type (
	TraceEvent  = ebpf.Event
	TraceFilter = ebpf.Filter
)

// TraceHosts returns the network namespaces of this machine, whose cookies events bear.
var TraceHosts = ebpf.Hosts

// Trace calls report with what each connect() and first datagram of a client on this node to a Service comes to, until
// ctx ends, and returns how many of these were lost because report was too slow. It needs an agent in a mode with the
// plane ebpf, in the calling thread's network namespace, with those options.
func Trace(ctx context.Context, o Options, f TraceFilter, report func(TraceEvent)) (lost uint64, err error) {
	p, err := ebpf.Open(o.ebpf())
	if err != nil {
		return 0, err
	}
	defer p.Close()
	return p.Trace(ctx, f, report)
}
