package bpf

import "github.com/cilium/ebpf/btf"

// NetfilterTypes returns the types of netfilter's modules that have chains and tables, as far as they are loaded and
// the kernel describes them (/sys/kernel/btf). Those of the kernel itself aren't among them.
func NetfilterTypes() (l []*btf.Spec) {
	for _, module := range []string{"nf_tables", "x_tables"} {
		if s, err := btf.LoadKernelModuleSpec(module); err == nil {
			l = append(l, s)
		}
	}
	return l
}
