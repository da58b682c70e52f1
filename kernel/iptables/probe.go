package iptables

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/netns"
)

// hints are chains that a kubelet makes in the table mangle, so that others see which variant the host uses (KEP-3178).
var hints = []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}

// Probe finds the variant that the calling thread's network namespace uses, like Kubernetes' iptables-wrappers: the
// only one that is installed, or is for more families; that which has our chains already; that which has a kubelet's;
// that which has more rules; nft.
func Probe(ctx context.Context, prefix string) (Variant, error) {
	there, err := mostInstalled()
	if err != nil {
		return "", err
	}
	if len(there) == 1 {
		return there[0], nil
	}
	found := map[Variant]traces{}
	for _, v := range there {
		t, err := trace(ctx, v, prefix)
		if err != nil && v == NFT {
			return Legacy, nil // this kernel has no nf_tables
		}
		if err != nil {
			return "", err
		}
		found[v] = t
	}
	return choose(found[NFT], found[Legacy]), nil
}

// mostInstalled returns the variants that are installed for most families; an error where none is for any.
func mostInstalled() (there []Variant, err error) {
	most := 1
	var errs []error
	for _, v := range []Variant{NFT, Legacy} {
		families, err := Installed(v)
		if errs = append(errs, err); len(families) > most {
			most, there = len(families), nil
		}
		if len(families) == most {
			there = append(there, v)
		}
	}
	if len(there) == 0 {
		return nil, errors.Join(errs...)
	}
	return there, nil
}

// Lacks returns the command that none of the variants has for a family, "" where one has all.
func Lacks(f Family, variants ...Variant) (command string) {
	for _, v := range variants {
		if families, _ := Installed(v); slices.Contains(families, f) {
			return ""
		}
	}
	return f.tool()
}

// traces are what is seen of a variant's use.
type traces struct {
	ours, kubelet bool
	rules         int
}

// choose decides between the variants.
func choose(nft, legacy traces) Variant {
	for _, is := range []func(traces) bool{func(t traces) bool { return t.ours },
		func(t traces) bool { return t.kubelet }} {
		switch {
		case is(nft):
			return NFT
		case is(legacy):
			return Legacy
		}
	}
	if legacy.rules > nft.rules {
		return Legacy
	}
	return NFT
}

// trace searches for a variant's use, and makes no table by looking.
func trace(ctx context.Context, v Variant, prefix string) (t traces, err error) {
	ns, err := netns.Current()
	if err != nil {
		return t, err
	}
	defer ns.Close()
	families, _ := Installed(v)
	c := &Conn{Variant: v, ns: ns}
	for _, f := range families {
		names := "\nmangle\n"
		if v == Legacy {
			if names, err = c.used(f); err != nil {
				return t, err
			}
		}
		if strings.TrimSpace(names) == "" {
			continue
		}
		name := f.command(v, "save")
		out, err := exec.CommandContext(ctx, name).Output() // of the calling thread's namespace
		if err != nil {
			return t, fmt.Errorf("iptables: %s: %w", name, err)
		}
		for line := range strings.Lines(string(out)) {
			t.rules += count(strings.HasPrefix(line, "-A "))
			if _, is := foreign(line); is && !t.ours {
				if t.ours, err = c.Chains(prefix); err != nil {
					return t, err
				}
			}
			chain, _, _ := strings.Cut(strings.TrimPrefix(line, ":"), " ")
			t.ours = t.ours || line[0] == ':' && strings.HasPrefix(chain, prefix)
			for _, h := range hints {
				t.kubelet = t.kubelet || line[0] == ':' && chain == h
			}
		}
	}
	return t, nil
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
