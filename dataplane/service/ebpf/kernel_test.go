package ebpf_test

import (
	"testing"

	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// TestSecondKernel has packets handed over by another kernel, whose structs lie otherwise.
func TestSecondKernel(t *testing.T) {
	vmtest.Run(t, "fairlead.dev/fairlead/dataplane/service/ebpf", "^Test(HandedOver|WhatIsAnswered|NoProgram)")
}

// TestSlowSecondKernel has that kernel pass nobody over.
func TestSlowSecondKernel(t *testing.T) {
	vmtest.Run(t, "fairlead.dev/fairlead/dataplane/service/ebpf", "^TestNobodyIsPassedOver$")
}
