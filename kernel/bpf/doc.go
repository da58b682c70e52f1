// Package bpf is what any program of the folder bpf needs of the kernel: maps that are opened, created, pinned and read
// in batches, programs that are told apart, folders of pins, probes, statistics and the programs' clocks. Programs,
// their typed maps and their attachments are in bpf/service, bpf/policy and bpf/device, beside their C.
//
// It doesn't know the meaning of the maps' contents. Packages other than these rooms and lab/floor
// don't import github.com/cilium/ebpf.
package bpf
