package bpf

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// pinnedMaps makes maps in a folder of the test's own.
func pinnedMaps(t *testing.T) (folder string, m *Maps) {
	t.Helper()
	above := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	folder = filepath.Join(above, "maps")
	m, err := CreateMaps(folder, small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), os.RemoveAll(above)); err != nil {
			t.Error(err)
		}
	})
	return folder, m
}

// One process listens at a time, and none that can't open the maps keeps it from that.
func TestListenerIsLockedByTheMapsFolder(t *testing.T) {
	squatter, err := net.Listen(
		"unix",
		"@fairlead-trace",
	) // the lock of earlier versions, which any process of the network namespace may have
	if err != nil {
		t.Fatal(err)
	}
	defer squatter.Close()
	folder, m := pinnedMaps(t)
	lock, err := m.lock()
	if err != nil {
		t.Fatal(err)
	}
	over, stop := context.WithCancel(t.Context())
	stop()
	other, err := OpenMaps(folder, small)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.Trace(over, Filter{}, func(Event) {}); err == nil || !strings.Contains(err.Error(),
		"one listener at a time") {
		t.Errorf("a second listener: %v", err)
	}
	lock.Close()
	if _, err := other.Trace(over, Filter{}, func(Event) {}); err != nil {
		t.Errorf("after the first: %v", err)
	}
}
