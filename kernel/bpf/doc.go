// Package bpf loads the programs of the folder bpf into the kernel, and reads and writes their maps.
//
// It knows how, not what for: what maps say is up to those who write them. It is the only importer of
// github.com/cilium/ebpf. The programs' objects and the Go types of their structs are generated from C and committed: to build
// Fairlead takes no compiler for C; bpf/README.md says what it takes to change a program.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package bpf -output-stem service -target bpfel,bpfeb -type event -type trace -type header -type backend -type load -type endpoint service ../../bpf/service.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package bpf -output-stem packets -target bpfel,bpfeb packets ../../bpf/packets.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate sh -c "{ cat ../../bpf/*.[ch] | sha256sum | sed s/-/sources/; sha256sum *.o; clang --version | head -n1; } > service.sum"
