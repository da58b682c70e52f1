package ebpf_test

import (
	"testing"

	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// TestSecondKernel has packets redirected by another kernel, whose structs have another layout.
func TestSecondKernel(t *testing.T) {
	vmtest.Run(
		t,
		"fairlead.dev/fairlead/dataplane/service/ebpf",
		"^Test(Redirect|FastPathBesideIdle|NoRedirectWhen|NoRedirectPast(Program|Replaced)|Masquerade)",
	)
}

// TestSlowSecondKernel has packets of that kernel bypass no hook.
func TestSlowSecondKernel(t *testing.T) {
	vmtest.Run(t, "fairlead.dev/fairlead/dataplane/service/ebpf",
		"^Test(NoRedirectPastHooks|RulesSeeTheirPackets|HooksAreNamed)$")
}
