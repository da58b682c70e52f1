package policytest

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// forged has pods' devices known, then one of them wrongly: that pod's packets have a forged source, and so have those
// that others send with a pod's address. What the node itself sends with a pod's address comes in by no device: it is
// evaluated as the pod's. The node's own address exempts nothing that comes in by a device.
func (s Suite[K]) forged(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	r := rand.New(rand.NewPCG(7, 8))
	d := Decide(objects["deny-ingress.yaml"])
	client, db, web := Behind[2], Behind[1], Behind[0]
	for _, device := range []string{Device(db[0]), "", Device(client[0])} {
		for a, s := range d.Now.Subjects {
			known := *s
			if known.Device = Device(a); slices.Contains(client, a) {
				known.Device = device
			}
			d.Now.Subjects[a] = &known
		}
		e.hold(d)
		packets := e.Packets(r, 60)
		for i := range client {
			packets = append(packets, e.Packet(client[i], db[i], Served[0]), e.Packet(db[i], client[i], Served[0]))
		}
		e.judge("client by device "+device, d.Now, packets)
	}
	since, got := s.log(e)
	since() // what the packets above had logged
	for i, out := range Addresses("198.51.100.7", "2001:db8::7") {
		e.Forge(db[i], client[i], out)
		if l := got(); !slices.Equal(l, []string{s.PrefixForged}) {
			t.Errorf("%s from another pod's namespace: logged %q", client[i], l)
		}
	}
	for i := range client {
		e.Forge(Own[i], client[i], db[i])
		if l := got(); !slices.Equal(l, []string{s.PrefixDeny}) {
			t.Errorf("%s from the node itself: logged %q", client[i], l)
		}
	}
	// The kernel itself drops IPv4's.
	e.Forge(db[1], Own[1], web[1])
	if l := got(); !slices.Equal(l, []string{s.PrefixDeny}) {
		t.Errorf("the node's address from a pod's namespace: logged %q", l)
	}
}
