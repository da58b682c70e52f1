// Package instructions says where the instructions of an operation go: from the addresses that a processor executed,
// in order, and where the kernel's functions are, to stacks of functions with the number of instructions of each, and
// to parts that a reader knows: a system call, TCP, connection tracking, a chain, a program.
//
//	addresses ──▶ Fold ──▶ stacks ──▶ Parts
//	(traces of an exact    (Brendan Gregg's folded format:   (of one operation)
//	 run, package result)   what flame graphs are drawn of)
//
// It is pure: it reads no kernel.
package instructions
