package ebpf_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	kernel "github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// An agent that starts where others have pinned a smaller map in the place of one of ours says so and serves.
func TestStartsWhereAPinIsAnothersMap(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		v := poolOf(1, false, model.TCP, 1)
		parts := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		p := opened(t, o)
		change(t, p, nil, parts)
		folder, _, err := bpf.Folder()
		if err := errors.Join(err, p.Close()); err != nil {
			t.Fatal(err)
		}
		pins, _ := filepath.Glob(filepath.Join(folder, "maps-*", "pools"))
		if len(pins) != 1 {
			t.Fatalf("pins of the pools: %q", pins)
		}
		held, err := kernel.LoadPinnedMap(pins[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		other, err := kernel.NewMap(&kernel.MapSpec{Name: "pools", Type: held.Type(), KeySize: held.KeySize(),
			ValueSize: held.ValueSize(), MaxEntries: 1, Flags: held.Flags()})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(held.Close(), os.Remove(pins[0]), other.Pin(pins[0]), other.Close()); err != nil {
			t.Fatal(err)
		}

		p = opened(t, o)
		defer clean(t, p)
		var warnings []string
		p.OnWarning(func(text string) { warnings = append(warnings, text) })
		facts, err := p.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(warnings) != 1 || !strings.Contains(warnings[0], pins[0]) || !strings.Contains(warnings[0],
			"MaxEntries") {
			t.Errorf("it says %q", warnings)
		}
		write(t, p, render(p, parts...), facts)
		if who, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); err != nil || who != "10.244.0.1" {
			t.Errorf("%s answers, %v", who, err)
		}
		want := len(render(p, parts...))
		if facts, err := p.Read(t.Context()); err != nil || len(facts) != want {
			t.Errorf("%d facts, want %d, %v", len(facts), want, err)
		}
	}, endpoints...)
}
