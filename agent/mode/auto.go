package mode

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Auto stands for the best mode that the kernel at hand can.
const Auto = "auto"

// preference is the order of Auto. nftables costs the same at any number of Services and serves every client in one
// way; ebpf is faster for clients on the node but stands on nftables too, so it is chosen by name; userspace comes
// last, since its connections end with the agent.
var preference = []string{"nftables", "iptables", "ipvs", "userspace"}

// Choose returns the mode of that name, or for Auto the first of its order that the calling thread's network namespace
// can have, and says why it was chosen.
func Choose(ctx context.Context, name string) (m Mode, why string, err error) {
	if name != Auto {
		m, err = Of(name)
		return m, "asked for", err
	}
	var passed []error
	for _, name := range preference {
		if m, err = Of(name); err != nil {
			return m, "", err
		}
		if err = m.Probe(ctx); err == nil {
			return m, strings.Join(append([]string{"auto: the first of " + strings.Join(preference, ", ") +
				" that this kernel can"}, lines(passed)...), "; "), nil
		}
		passed = append(passed, fmt.Errorf("not %s: %w", name, err))
	}
	return Mode{}, "", fmt.Errorf("no mode is supported here: %w", errors.Join(passed...))
}

func lines(errs []error) (l []string) {
	for _, e := range errs {
		l = append(l, e.Error())
	}
	return l
}

// Check returns why an agent in this mode can't begin in the calling thread's network namespace, and which modes could.
func (m Mode) Check(ctx context.Context) error {
	if err := m.Probe(ctx); err != nil {
		return Unsupported(ctx, fmt.Errorf("mode %s: %w", m.Name, err))
	}
	return nil
}

// Unsupported returns the error of a mode that can't be opened with the names of those that can.
func Unsupported(ctx context.Context, err error) error {
	var can []string
	for _, m := range All() {
		if m.Probe(ctx) == nil {
			can = append(can, m.Name)
		}
	}
	if len(can) == 0 {
		return fmt.Errorf("%w; no other mode is supported here: run as root, with CAP_NET_ADMIN", err)
	}
	return fmt.Errorf("%w; supported here: %s, and %s for the first of those", err, strings.Join(can, ", "), Auto)
}
