package agent

import (
	"testing"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/sandbox/echo"
)

// TestRandomWorlds has SCTP spoken by raw sockets everywhere: worlds move addresses about, which real associations of many
// addresses follow in ways of their own.
func TestRandomWorlds(t *testing.T) {
	t.Setenv(echo.RawSCTP, "1")
	here(t, func(t *testing.T, s conformance.Subject) { conformance.Random(t, s, *worlds) })
}

func TestChangeUnderTraffic(t *testing.T) { here(t, conformance.Churn) }
