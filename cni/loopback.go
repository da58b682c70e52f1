package cni

import (
	"net"
	"net/netip"
	"os"
)

// LoopbackName is the name under which the plugin brings up pods' loopback devices, as container runtimes call one.
const LoopbackName = "loopback"

// loopback serves a call of the plugin under LoopbackName and returns what to print: ADD brings the loopback device of
// the pod's network namespace up, CHECK reports whether it is. It ends with its namespace.
func (c *call) loopback() (any, error) {
	if c.Command != Add && c.Command != Check {
		return nil, nil
	}
	ns, err := os.Open(c.NetNS)
	if err != nil {
		return nil, Errorf(CodeEnvironment, "open the pod's network namespace: %s", err)
	}
	defer ns.Close()
	if err := enter(ns); err != nil {
		return nil, err
	}
	const lo = 1 // the loopback is always device 1
	if c.Command == Check {
		i, err := net.InterfaceByIndex(lo)
		if err == nil && i.Flags&net.FlagUp == 0 {
			err = Errorf(CodeCheck, "the pod's loopback device is down")
		}
		return nil, err
	}
	if err := setUp(lo); err != nil {
		return nil, Errorf(CodeFailed, "bring the pod's loopback device up: %s", err)
	}
	if c.Prev != nil {
		return c.Prev.in(c.config.Version), nil
	}
	i, err := net.InterfaceByIndex(lo)
	if err != nil {
		return nil, err
	}
	first := 0
	r := Result{Interfaces: []Interface{{Name: "lo", MAC: "00:00:00:00:00:00", MTU: i.MTU, Sandbox: c.NetNS}}}
	for _, a := range []string{"127.0.0.1/8", "::1/128"} {
		r.IPs = append(r.IPs, IP{Address: netip.MustParsePrefix(a), Interface: &first})
	}
	return r.in(c.config.Version), nil
}
