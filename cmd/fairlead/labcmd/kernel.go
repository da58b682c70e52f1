package labcmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/vm"
)

// The kernels that a measurement can run in.
const (
	hostKernel   = "host"
	secondKernel = "vm"
)

// kernelVariable is the environment variable by which a command in a second kernel knows its series, for the command
// that repeats the run.
const kernelVariable = "FAIRLEAD_LAB_KERNEL"

// kernels returns the values of --kernel.
func kernels() []string {
	l := []string{hostKernel, secondKernel}
	for _, s := range vm.AllSeries() {
		l = append(l, string(s))
	}
	return l
}

// series returns the series of kernels that a value of --kernel names.
func series(kernel string) vm.Series {
	if kernel == hostKernel || kernel == secondKernel {
		return vm.Default
	}
	return vm.Series(kernel)
}

// kernelFlag adds the flag for the kernel of a run.
func kernelFlag(c *cobra.Command, kernel *string) {
	c.Flags().StringVar(kernel, "kernel", hostKernel, "host, or vm: Debian's backport kernel under emulation, for what "+
		"this kernel lacks; or another of Debian's by its series, one of "+strings.Join(kernels()[2:], ", ")+
		"; times there compare with nothing else")
	c.RegisterFlagCompletionFunc("kernel", cobra.FixedCompletions(kernels(), cobra.ShellCompDirectiveNoFileComp))
}

// exactFlag adds the flag for a run that counts instructions.
func exactFlag(c *cobra.Command, o *experiment.Options) {
	c.Flags().BoolVar(&o.Exact, "exact", false, "count instructions instead of time, in the second kernel: for one "+
		"program the same numbers on every machine, however busy")
}

// inOther runs this command in the kernel that the user wants, unless this is it, and reports whether it did.
func inOther(c *cobra.Command, o experiment.Options, kernel string) (did bool, err error) {
	if !slices.Contains(kernels(), kernel) {
		return false, fmt.Errorf("invalid --kernel %q: use one of %s", kernel, strings.Join(kernels(), ", "))
	}
	if exact := o.Exact && !testbed.InExact(); exact || kernel != hostKernel {
		return true, inSecondKernel(c, o.Out, series(kernel), exact)
	}
	return false, nil
}

// inSecondKernel runs this very command again, with the same arguments, in a second kernel; what it writes below out
// is the host's. An exact one counts instructions.
func inSecondKernel(c *cobra.Command, out string, kernel vm.Series, exact bool) (err error) {
	ctx := c.Context()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if out, err = filepath.Abs(out); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	fmt.Fprintln(c.ErrOrStderr(), "booting the second kernel; the first time, it is downloaded")
	m, err := vm.Open(ctx, vm.Options{Kernel: kernel, Shared: []string{out}, Exact: exact})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	fmt.Fprintf(c.ErrOrStderr(), "in Linux %s, emulated: its times are not to be compared with the host's\n", m.Release)
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	args := append([]string{self}, os.Args[1:]...)
	code, err := m.Run(ctx, vm.Command{Args: append(args, "--kernel="+hostKernel, "--out="+out), Dir: dir,
		Env:    []string{kernelVariable + "=" + string(kernel)},
		Stdout: c.OutOrStdout(), Stderr: c.ErrOrStderr()})
	if err == nil && code != 0 {
		err = fmt.Errorf("in the second kernel the command ended with code %d", code)
	}
	return err
}
