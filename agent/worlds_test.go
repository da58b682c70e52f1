package agent

import (
	"testing"

	"fairlead.dev/fairlead/dataplane/conformance"
)

func TestRandomWorlds(t *testing.T) {
	here(t, func(t *testing.T, s conformance.Subject) { conformance.Random(t, s, *worlds) })
}

func TestChangeUnderTraffic(t *testing.T) { here(t, conformance.Churn) }
