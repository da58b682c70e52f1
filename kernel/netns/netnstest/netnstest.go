// Package netnstest runs tests in network namespaces of their own.
package netnstest

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// Do runs a test's body in a new network namespace, on a thread that is thrown away with it. The body must not call
// t.FailNow or what does so. Without the right to make a namespace the test fails.
func Do(t testing.TB, body func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("new network namespace: %v: run as root", err)
			return
		}
		body()
	}()
	<-done
}

// With runs a test's body as Do does, with what open opens in that network namespace.
func With[C io.Closer](t testing.TB, open func() (C, error), body func(C)) {
	t.Helper()
	Do(t, func() {
		c, err := open()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		body(c)
	})
}

var made atomic.Int32

// New makes a namespace with its loopback down that goes with the test.
func New(t testing.TB) *netns.Namespace {
	t.Helper()
	ns, err := netns.New(fmt.Sprintf("fltest%d-%d", os.Getpid(), made.Add(1)))
	if err != nil {
		t.Fatalf("this test needs root, to make network namespaces: %v", err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := netns.Delete(ns.Name); err != nil {
			t.Error(err)
		}
	})
	return ns
}
