package agent

import (
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/resolve/network"
)

// setAddresses passes the addresses of the node's interfaces down the line, once what there is is known.
func (a *Agent) setAddresses(l []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if slices.Equal(l, a.addresses) {
		return
	}
	a.options.Log.Info("the node's addresses changed", "addresses", l)
	a.addresses = l
	a.resolver.SetAddresses(l)
	a.policies.SetAddresses(l)
	a.applyNode()
}

// setPodDevices passes the devices by which pods are reached down the line, once what there is is known.
func (a *Agent) setPodDevices(devices map[netip.Addr]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.policies.resolver.SetDevices(devices)
	a.applyNode()
}

// applyNode hands on what follows from a change of the node's own, under the mutex.
func (a *Agent) applyNode() {
	if a.batches.count == 0 {
		return // the first batch tells
	}
	if delta := a.apply(nil); !delta.Empty() {
		a.hand(delta, time.Time{})
		a.progress.queue(queued{seen: []time.Time{{}}})
		a.notifyAll()
	}
}

// setDevices passes the node's devices, and whether there is no IPv6, down the line, once what there is is known.
func (a *Agent) setDevices(l []network.Device, noIPv6 bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.network.setDevices(l, noIPv6)
	if a.batches.count > 0 {
		a.network.Apply(nil)
		a.notifyAll()
	}
}
