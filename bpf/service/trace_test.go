package service

import (
	"context"
	"crypto/rand"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// pinnedMaps opens or makes maps in a folder, until the test ends.
func pinnedMaps(t *testing.T, folder string, open func(string, *ebpf.MapSpec) (*ebpf.Map, error)) *Maps {
	t.Helper()
	specs, err := Specs(small)
	if err != nil {
		t.Fatal(err)
	}
	named, err := bpf.OpenSet(folder, specs, Pin, open)
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMaps(named, folder, bpf.LayoutName(specs), small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// madeMaps makes maps in a folder of the test's own.
func madeMaps(t *testing.T) (folder string, m *Maps) {
	t.Helper()
	above := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	folder = filepath.Join(above, "maps")
	t.Cleanup(func() {
		if err := os.RemoveAll(above); err != nil {
			t.Error(err)
		}
	})
	if err := bpf.MakeFolders(folder); err != nil {
		t.Fatal(err)
	}
	return folder, pinnedMaps(t, folder, bpf.CreateMap)
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
	folder, m := madeMaps(t)
	lock, err := m.lock()
	if err != nil {
		t.Fatal(err)
	}
	over, stop := context.WithCancel(t.Context())
	stop()
	other := pinnedMaps(t, folder, bpf.OpenMap)
	if _, err := other.Trace(over, Filter{}, func(Event) {}); err == nil || !strings.Contains(err.Error(),
		"one listener at a time") {
		t.Errorf("a second listener: %v", err)
	}
	lock.Close()
	if _, err := other.Trace(over, Filter{}, func(Event) {}); err != nil {
		t.Errorf("after the first: %v", err)
	}
}
