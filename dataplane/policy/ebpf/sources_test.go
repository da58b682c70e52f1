package ebpf

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane/policy/policytest"
)

// TestFlowIsCheckedOnceItsDeviceIsKnown: a flow that a pod began from another's address, before its device was known as
// its own, ends there; by the device of that address it goes on.
func TestFlowIsCheckedOnceItsDeviceIsKnown(t *testing.T) {
	n := newNode(t)
	d := n.hold("audit.yaml")
	at := n.Listen(web[0], 9002)
	remote := n.Listen(policytest.Behind[4][0], 9002)
	far := policytest.Addresses("10.0.2.2", "fd00:2::4")
	send := func(i int, text string) {
		n.Inject(client[0], netip.AddrPortFrom(far[i], 9002), netip.AddrPortFrom(web[i], 9002), text)
	}
	for i := range web {
		send(i, "begins")
		remote.Send(web[i], "goes on")
		if !at.Before(web[i].Is6(), "begins", "goes on") {
			t.Fatalf("from %s by another device: it is dropped before that is known", far[i])
		}
	}
	d.Own()
	n.holdAll(d)
	for i := range web {
		before := n.count(policy.Forged)
		send(i, "forged")
		remote.Send(web[i], "stays")
		if at.Before(web[i].Is6(), "forged", "stays") || n.count(policy.Forged) != before+1 {
			t.Errorf("from %s by another device: it arrived, or %d packets count as forged", far[i],
				n.count(policy.Forged)-before)
		}
	}
}

// TestNewMapOfFlowsPicksConnectionsUp: where an upgrade has another form of flows, connections go on whichever end
// speaks first, as at the first start.
func TestNewMapOfFlowsPicksConnectionsUp(t *testing.T) {
	n := newNode(t)
	n.hold("deny-ingress.yaml")
	for i := range web {
		ends := n.connect(web[i], client[i])
		flows, err := filepath.Glob(n.folder + "/state/fl_flows-*")
		if n.Must(err); len(flows) != 1 {
			t.Fatalf("pins of flows: %q", flows)
		}
		n.Must(os.Remove(flows[0]))
		n.Plane = n.reopen(Options{Sizes: small.Sizes})
		put, del := policytest.Read(t, n.Plane, n.held)
		n.Must(n.Write(t.Context(), put, del))
		if !arrives(ends[1], ends[0], true) {
			t.Errorf("what %s answers no longer arrives", client[i])
		}
	}
}
