// Package vm boots a second Linux kernel on this machine and runs programs under it: for what this host's kernel can't
// do (IPVS, ipvlan, IPIP, SCTP sockets), and to see a data plane on another kernel than one's own.
//
//	host                                              guest (Debian's kernel, emulated, no hardware help needed)
//	Open ── qemu ── kernel image from Prepare         this same binary is process 1: see guest.go
//	  │      ├────── virtiofsd of / ───────────────── /, with a memory file system on top that takes all writes
//	  │      ├────── virtiofsd of each Options.Shared the same path, writable for both
//	Run ─────┴────── virtio serial port ───────────── one command at a time: its output, as it comes, and its exit code
//
// The second kernel is Debian's 6.12, which finds the host's files by itself. Older ones, for what has to work there
// too, need an initramfs with the modules for that: see initrd.go.
//
// A guest has the host's files as they were when it first looked (it copies those that it opens into its memory, see
// keep.go), its own everything else, no network but its loopback, and nothing that it does reaches the host except
// below Options.Shared. Nothing is left behind when it ends, also when it ends because its host process was killed.
//
// Any binary that imports this package can be the guest's first process: vm's init function takes over when it finds
// itself process 1 with the argument that Open passes. So there's nothing to build or install for the guest.
//
// Not here: speed. Every instruction is emulated; times measured inside a guest are worth nothing but as ratios among
// themselves.
package vm
