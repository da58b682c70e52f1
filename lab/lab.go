// Package lab lists the experiments and runs them. Each builds the network that it needs, loads it, writes what it
// measured into a run's directory, and is reported on.
//
//	services     what a Service costs a connection, and what it costs to keep the kernel as a cluster of many says
//	tigera       round trips, processor time and rules per connection in every mode and with kube-proxy's rules, by
//	             number of Services; the claims of "Comparing kube-proxy modes: iptables or IPVS?"
//	connect      connect() and connections in so many blocks that 1 % shows, hot and cold; run times of eBPF programs
//	centurylink  round trips of userspace against iptables and all others, as histograms; a stream's throughput
//	romana       what network policies delay a request by, by their number and the size of the answer; the claims of
//	             "High performance network policies in Kubernetes clusters"
//	policies     what network policies cost a connection, a round trip, and the upkeep of a node in a large cluster
//	containers   what a pod's network costs a server against a process of the node: by path, tunnel, conntrack, policies
//	             and limits of processor time; the claims of "Why containers slow applications down"
//	paths        what each path between two pods costs: on one node, across nodes by routes and tunnels, with and without
//	             the fast path
//	balance      how evenly each scheduler spreads connections, and which clients a hash moves when a backend goes
//	control      what it takes to keep a node as an API server says, beside a real kube-proxy
//	attach       what a CNI plugin takes to connect a pod, beside bridge and ptp with host-local
//	fleet        what all agents of a cluster cost its API server: bytes while it changes, a start of all at once
//
// The line is: an experiment (lab/experiment/NAME) measures on a testbed (lab/testbed) and writes a result
// (lab/result), of which lab/analysis computes what follows, and lab/report makes what people read. Below these stand
// stats (arithmetic), load (packets), classic (kube-proxy's rules), rules (counting them), kubeproxy (the real one),
// chart and progress.
package lab

import (
	"context"
	"errors"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/experiment/attach"
	"fairlead.dev/fairlead/lab/experiment/balance"
	"fairlead.dev/fairlead/lab/experiment/centurylink"
	"fairlead.dev/fairlead/lab/experiment/connect"
	"fairlead.dev/fairlead/lab/experiment/containers"
	"fairlead.dev/fairlead/lab/experiment/control"
	"fairlead.dev/fairlead/lab/experiment/fleet"
	"fairlead.dev/fairlead/lab/experiment/paths"
	"fairlead.dev/fairlead/lab/experiment/policies"
	"fairlead.dev/fairlead/lab/experiment/romana"
	"fairlead.dev/fairlead/lab/experiment/services"
	"fairlead.dev/fairlead/lab/experiment/tigera"
	"fairlead.dev/fairlead/lab/report"
)

// Experiments returns all there are, in the order of the help.
func Experiments() []experiment.Experiment {
	return []experiment.Experiment{services.Experiment, tigera.Experiment, connect.Experiment, centurylink.Experiment,
		romana.Experiment, policies.Experiment, containers.Experiment, paths.Experiment, balance.Experiment,
		control.Experiment, attach.Experiment, fleet.Experiment}
}

// Run runs an experiment and returns the folder with its results and reports. Where ctx ends before the run does, all
// that the run made is removed, the report is of what was measured so far, and the error is ctx's.
func Run(ctx context.Context, e experiment.Experiment, o experiment.Options) (dir string, err error) {
	if dir, err = e.Perform(ctx, o); dir == "" {
		return "", err
	}
	return dir, errors.Join(err, report.Build(dir))
}
