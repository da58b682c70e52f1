package cni

import (
	"os"
	"runtime"
	"syscall"
)

// enter has the calling goroutine be in a network namespace to its end.
func enter(ns *os.File) error {
	runtime.LockOSThread() // never unlocked: the thread ends in that namespace
	if _, _, errno := syscall.RawSyscall(sysSetns, ns.Fd(), syscall.CLONE_NEWNET, 0); errno != 0 {
		return Errorf(CodeFailed, "enter the pod's network namespace: %s", errno)
	}
	return nil
}

// inside runs f in a network namespace, and returns its error. Where the file is none any more, f doesn't run.
func inside(ns *os.File, f func() error) error {
	done := make(chan error)
	go func() {
		if enter(ns) != nil {
			done <- nil
			return
		}
		done <- f()
	}()
	return <-done
}
