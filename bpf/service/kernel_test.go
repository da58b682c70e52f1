package service

import (
	"testing"

	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// TestSecondKernel has the verifier of an old kernel judge the programs for sockets: it takes fewer loops than later
// ones.
func TestSecondKernel(t *testing.T) {
	tests := vmtest.Build(t, "fairlead.dev/fairlead/bpf/service")
	tests.Kernel = "6.1"
	tests.Run(t, "^Test(Probe|AttachAndDetach|AnotherAgentsProgram)$")
}
