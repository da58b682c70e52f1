package agent

import (
	"testing"

	"fairlead.dev/fairlead/dataplane/conformance"
)

func TestRandomWorlds(t *testing.T) { conformance.Random(t, subject(), 200) }

func TestChangeUnderTraffic(t *testing.T) { conformance.Churn(t, subject()) }
