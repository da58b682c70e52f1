// Command run runs one command under the second kernel, as package vm boots it, with this directory's files:
//
//	go run ./sandbox/vm/run [-kernel SERIES] [-share DIR]... [-cpus N] uname -a
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"fairlead.dev/fairlead/sandbox/vm"
)

func main() {
	var o vm.Options
	flag.StringVar((*string)(&o.Kernel), "kernel", string(vm.Default), "the kernel's `series`")
	flag.Func("share", "a `directory` (absolute path) that the command may write; nothing else that it writes stays",
		func(s string) error {
			o.Shared = append(o.Shared, s)
			return nil
		})
	flag.IntVar(&o.CPUs, "cpus", 2, "emulated processors, which share one of the host's")
	console := flag.Bool("console", false, "show what the kernel prints")
	flag.BoolVar(&o.Exact, "exact", false, "clocks that count instructions, on one processor")
	flag.Parse()
	if *console {
		o.Console = os.Stderr
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := run(ctx, o, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm/run:", err)
		code = 125
	}
	os.Exit(code)
}

func run(ctx context.Context, o vm.Options, args []string) (int, error) {
	dir, err := os.Getwd()
	if err != nil {
		return 0, err
	}
	m, err := vm.Open(ctx, o)
	if err != nil {
		return 0, err
	}
	code, err := m.Run(ctx, vm.Command{Args: args, Dir: dir, Stdout: os.Stdout, Stderr: os.Stderr})
	return code, errors.Join(err, m.Close())
}
