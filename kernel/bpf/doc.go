// Package bpf loads the programs of the folder bpf into the kernel, and reads and writes their maps.
//
// It doesn't know the meaning of the maps' contents. It is the only importer of github.com/cilium/ebpf. The programs'
// objects and the Go types of their structs are generated from C and committed: no C compiler is needed to build
// Fairlead; bpf/README.md says how to change a program.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package bpf -output-stem service -target bpfel,bpfeb -type event -type trace -type header -type backend -type load -type endpoint service ../../bpf/service.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package bpf -output-stem device -target bpfel,bpfeb device ../../bpf/device.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package bpf -output-stem policy -target bpfel,bpfeb -type side -type subject -type policy_port -type port_range -type peer_net -type peer_verdict -type peer_table -type policy_state -type policy_flow -type denial policy ../../bpf/policy.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate sh -c "{ cat ../../bpf/*.[ch] | sha256sum | sed s/-/sources/; sha256sum *.o; clang --version | head -n1; } > service.sum"
