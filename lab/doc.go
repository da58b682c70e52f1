// Package lab runs experiments: it builds the network that one needs, loads it, and writes what it saw into a run's
// directory, from which package report makes what people read.
//
// The experiment is services: what a Service costs a connection, and what it costs to keep the kernel as a cluster of
// many Services says. The product is used from outside alone, as its users have it: manifests go in, packets, netlink
// events, the status page and /proc come out.
//
// The parts stand by themselves: stats (arithmetic), load (packets), result (the directory), chart and report
// (drawing and words), progress. What is measured and how is here; no number is judged here.
package lab
