package bpf

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// Modules returns which of these modules are loaded and described by the kernel (/sys/kernel/btf), separated by commas.
// What is built in isn't among them.
func Modules(names ...string) string {
	var l []string
	for _, name := range names {
		if _, err := os.Stat(filepath.Join("/sys/kernel/btf", name)); err == nil {
			l = append(l, name)
		}
	}
	return strings.Join(l, ",")
}

// TypesOf returns the types of modules, separated by commas.
func TypesOf(modules string) (l []*btf.Spec, err error) {
	for name := range strings.SplitSeq(modules, ",") {
		if name == "" {
			continue
		}
		s, err := btf.LoadKernelModuleSpec(name)
		if err != nil {
			return nil, fmt.Errorf("bpf: read the types of module %s: %w", name, err)
		}
		l = append(l, s)
	}
	return l, nil
}
