package agent

import (
	"testing"

	"fairlead.dev/fairlead/conformance"
)

// TestRandomClusters has SCTP spoken by raw sockets everywhere: worlds move addresses about, which real associations of
// many addresses follow in ways of their own.
func TestRandomClusters(t *testing.T) {
	rawSCTP(t)
	inTurn(t, func(t *testing.T, s conformance.Implementation) { conformance.Random(t, s, *clusters) })
}

func TestChangeUnderTraffic(t *testing.T) {
	here(t, func(t *testing.T, s conformance.Implementation) { conformance.Churn(t, s, *replacements) })
}
