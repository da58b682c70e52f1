package policytest

import (
	"slices"
	"testing"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// proxied has a pod without any allowed egress send to destinations that are evaluated after their translation: what is
// forwarded to the node's proxy is accepted, and what is forwarded elsewhere is not, nor what the node itself sends
// there with the pod's address.
func (s Suite[K]) proxied(t *testing.T) {
	e := s.open(t)
	c, err := link.Dial(e.Node)
	e.Must(err)
	defer c.Close()
	_, objects := Worlds(t)
	d := Decide(objects["deny-egress.yaml"])
	e.hold(d)
	since, logged := s.log(e)
	for device, addresses := range map[string][]string{model.ProxyDevice: {"10.96.0.2", "fd96::2"},
		"elsewhere": {"10.96.0.3", "fd96::3"}} {
		l := Addresses(addresses...)
		e.join(c, device, e.namespace(l), l)
		e.serve(e.Of[l[0]])
		for i, client := range Behind[2] {
			since()
			e.Forge(Own[i], client, l[i])
			if got := logged(); !slices.Equal(got, []string{s.PrefixDeny}) {
				t.Errorf("%s from the node itself by device %s: logged %q", client, device, got)
			}
			for _, to := range Served[2:4] { // TCP and UDP
				p, expected := e.Packet(client, l[i], to), device == model.ProxyDevice
				if o := verdict.Policy(d.Now, p); o.Verdict != model.VerdictDrop {
					t.Fatalf("%v: %s: the test needs it denied", p, o.Reason)
				}
				if e.Passes(p, expected) != expected {
					t.Errorf("%v by device %s: expected %v", p, device, expected)
				}
			}
		}
	}
}
