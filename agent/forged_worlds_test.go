package agent

import (
	"flag"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/conformance"
)

var forgedPackets = flag.Int("forged", 60, "packets with drawn sources for each mode, pod network and policy engine")

// TestForgedSources has packets with drawn sources sent over the product's own network, of nodes on one link and apart,
// through its overlay, and beside another network, where the policy engines drop them.
func TestForgedSources(t *testing.T) {
	for i, name := range onHost {
		m, err := mode.Of(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			s := implementation(m.With(mode.Options{PodNetwork: true}))
			for _, apart := range []bool{false, true} {
				where := map[bool]string{false: "own", true: "own-apart"}[apart]
				if !*matrix && apart == (i%2 == 0) {
					continue
				}
				s.Network = &conformance.PodNetwork{Name: where, Apart: apart, Start: startNetwork(m, nil)}
				t.Run(where, func(t *testing.T) { conformance.Forged(t, s, *forgedPackets) })
			}
			s = implementation(m.With(mode.Options{Policies: true}))
			for j, e := range engines {
				if !*matrix && (i+j)%2 == 0 {
					continue
				}
				s.Engine = e
				t.Run("wires/"+e.Name, func(t *testing.T) { conformance.Forged(t, s, *forgedPackets) })
			}
		})
	}
}
