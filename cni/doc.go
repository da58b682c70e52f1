// Package cni is the CNI plugin (https://www.cni.dev/docs/spec/, versions 0.4.0 to 1.1.0) and what it sends to the
// agent of its node: it parses what the runtime calls it with, calls the agent over a socket, and prints the result. It
// imports the standard library alone, so that the plugin is small: the runtime starts it for every pod.
//
// The pod's network namespace travels as a file descriptor, so that the agent needs neither the host's PID namespace
// nor its mounts. ADD waits for the agent; DEL works without it.
package cni
