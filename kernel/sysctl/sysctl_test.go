package sysctl

import (
	"errors"
	"io/fs"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

const localnet = "net/ipv4/conf/all/route_localnet"

// TestStaysItsNamespaces: a setting opened in one namespace is that one's, whoever uses it.
func TestStaysItsNamespaces(t *testing.T) {
	before, err := Number(localnet)
	if err != nil {
		t.Fatal(err)
	}
	opened := make(chan *File)
	go func() {
		defer close(opened)
		runtime.LockOSThread() // thrown away with its namespace
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("new network namespace: %v: run as root", err)
			return
		}
		if was, changed, err := Ensure(localnet, "1"); was != "0" || !changed || err != nil {
			t.Errorf("ensure 1: was %q, changed %t, %v", was, changed, err)
		}
		if was, changed, err := Ensure(localnet, "1"); was != "1" || changed || err != nil {
			t.Errorf("ensure 1 again: was %q, changed %t, %v", was, changed, err)
		}
		s, err := Open(localnet)
		if err != nil {
			t.Error(err)
			return
		}
		opened <- s
	}()
	s, ok := <-opened
	if !ok {
		return
	}
	defer s.Close()
	if v, err := s.Get(); v != "1" || err != nil {
		t.Errorf("from another thread: %q, %v", v, err)
	}
	if err := s.Set("0"); err != nil {
		t.Error(err)
	}
	if v, err := s.Get(); v != "0" || err != nil {
		t.Errorf("after it was set: %q, %v", v, err)
	}
	if after, err := Number(localnet); after != before || err != nil {
		t.Errorf("the host's own is %d, %v; it was %d", after, err, before)
	}
}

func TestMissing(t *testing.T) {
	if _, err := Open("net/ipv4/no_such_setting"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
