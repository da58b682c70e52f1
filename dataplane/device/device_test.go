package device

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
	kernellink "fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
)

// opened runs f with a plane of a network namespace that has a loopback device and bridges of these names.
func opened(t *testing.T, names []string, f func(p *Plane, links map[string]*model.Link)) {
	t.Helper()
	ns := netnstest.New(t)
	c, err := kernellink.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	links := map[string]*model.Link{"lo": {Index: 1, Name: "lo", Loopback: true}}
	for _, name := range names {
		index, err := c.AddBridge(name)
		if err != nil {
			t.Fatal(err)
		}
		links[name] = &model.Link{Index: index, Name: name}
	}
	folder := filepath.Join(bpf.Mount, "fl-device-"+rand.Text()[:8])
	maps, err := device.CreateMaps(filepath.Join(folder, "maps"), service.Sizes{Frontends: 16, Pools: 16, Slots: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(maps.Close(), os.RemoveAll(folder)); err != nil {
			t.Error(err)
		}
	}()
	at := filepath.Join(folder, "devices")
	err = errors.Join(bpf.MakeFolder(at), ns.Do(func() error {
		p, err := Open(at)
		if err != nil {
			return err
		}
		defer p.Close()
		p.Programs = func([]device.Device) (*device.Programs, error) {
			return maps.LoadForDevices(device.Options{}, 14)
		}
		f(p, links)
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
}

// read returns the facts that the kernel holds, sorted.
func read(t *testing.T, p *Plane) []Fact {
	t.Helper()
	facts, err := p.Read(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return sorted(facts)
}

func sorted(facts []Fact) []Fact {
	slices.SortFunc(facts, func(a, b Fact) int {
		if a.Key.Index != b.Key.Index {
			return a.Key.Index - b.Key.Index
		}
		return a.Key.Rank() - b.Key.Rank()
	})
	return facts
}

// What is written is read, but for devices that are gone; what others detach is seen and can be repaired, and what no
// part needs any more is detached.
func TestWhatIsWrittenIsAttached(t *testing.T) {
	opened(t, []string{"a", "b"}, func(p *Plane, links map[string]*model.Link) {
		ctx := context.Background()
		want := sorted(slices.Concat(p.Render(links["lo"]), p.Render(links["a"]), p.Render(links["b"])))
		if len(want) != 5 {
			t.Errorf("facts are %v", want)
		}
		absent := p.Render(&model.Link{Index: 1000})
		if err := p.Write(ctx, slices.Concat(want, absent), nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, read(t, p)); diff != "" {
			t.Errorf("wanted less, read more:\n%s", diff)
		}
		held, err := link.LoadPinnedLink(filepath.Join(p.folder, fmt.Sprint("arrive-", links["a"].Index)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(held.Detach(), held.Close()); err != nil {
			t.Fatal(err)
		}
		lost := Fact{Key: Key{Index: links["a"].Index, Ingress: true}, Value: detached}
		if now := read(t, p); !slices.Contains(now, lost) {
			t.Errorf("after others detached, read %v", now)
		}
		if err := p.Write(ctx, []Fact{{Key: lost.Key, Value: attached}}, []Fact{lost}); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, read(t, p)); diff != "" {
			t.Errorf("after a repair, wanted less, read more:\n%s", diff)
		}
		if err := p.Write(ctx, nil, p.Render(links["b"])); err != nil {
			t.Fatal(err)
		}
		if now := read(t, p); len(now) != 3 {
			t.Errorf("after a device's facts went, read %v", now)
		}
		if err := p.Clean(ctx); err != nil {
			t.Fatal(err)
		}
		if now := read(t, p); len(now) > 0 {
			t.Errorf("after cleaning, read %v", now)
		}
	})
}
