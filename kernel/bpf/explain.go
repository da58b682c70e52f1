package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Explain adds the advice to an error of the kernel.
func Explain(err error) error {
	var refused *ebpf.VerifierError
	switch {
	case errors.As(err, &refused):
		return fmt.Errorf("%w: this kernel's verifier refuses the program; use another mode, and report this with "+
			"the output of `uname -r`", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf(
			"%w: that takes root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, and a kernel that is not locked down",
			err,
		)
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: this kernel lacks it; use another mode", err)
	}
	return err
}
