// Package netnstest runs tests in network namespaces of their own.
package netnstest

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
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
