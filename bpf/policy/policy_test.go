package policy

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// TestPortEntriesCoverTheirSpanAlone has every port looked up among the prefixes of a span.
func TestPortEntriesCoverTheirSpanAlone(t *testing.T) {
	for _, span := range [][2]uint16{{0, 65535}, {1, 65535}, {0, 65534}, {1, 65534}, {79, 80}, {80, 81}, {32768, 65535},
		{0, 32767}, {1000, 2047}, {7, 7}, {65535, 65535}, {0, 1}} {
		in := make([]int, 1<<16)
		l := PortEntries(1, 6, span[0], span[1], PeerTable{})
		for _, e := range l {
			if e.Table == Ports {
				in[span[0]]++
				continue
			}
			var k policyPortRange
			copy(bytesOf(&k), e.Key)
			for p := uint32(bpf.Port(k.Port)); p < uint32(bpf.Port(k.Port))+1<<(96-k.Length); p++ {
				in[p]++
			}
		}
		for p, n := range in {
			if inside := p >= int(span[0]) && p <= int(span[1]); inside != (n == 1) || n > 1 {
				t.Fatalf("%v: port %d is in %d of %d entries", span, p, n, len(l))
			}
		}
		if len(l) > 30 {
			t.Errorf("%v: %d entries", span, len(l))
		}
	}
}

// TestPolicyBesideAnotherProgram: another owner's program at the same hook and priority stays, also when ours is
// replaced and detached.
func TestPolicyBesideAnotherProgram(t *testing.T) {
	ns := netnstest.New(t)
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	var other link.Link
	err := ns.Do(func() error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "stranger", Type: ebpf.Netfilter, License: "GPL",
			AttachType: ebpf.AttachNetfilter, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
		if err != nil {
			return err
		}
		defer p.Close()
		other, err = link.AttachNetfilter(link.NetfilterOptions{Program: p, ProtocolFamily: link.NetfilterProtoIPv4,
			Hook: link.NetfilterInetForward, Priority: firstPriority})
		return err
	})
	if err != nil {
		t.Fatalf("this test needs root and programs at hooks of netfilter: %v", err)
	}
	defer other.Close()
	sizes := Sizes{Subjects: 16, Ports: 16, Ranges: 16, Peers: 16, Nets: 16, Verdicts: 16, Flows: 64}
	m, err := CreateMaps(filepath.Join(folder, bpf.LayoutPrefix+"1"), sizes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), os.RemoveAll(folder)); err != nil {
			t.Error(err)
		}
	})
	digest, err := Digest(sizes)
	if err != nil {
		t.Fatal(err)
	}
	links := filepath.Join(folder, "hooks")
	for range 3 {
		p, err := m.Load()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(ns.Do(func() error { return p.Attach(links) }), p.Close()); err != nil {
			t.Fatal(err)
		}
		if d, err := Attached(links, m); d != digest || err != nil {
			t.Errorf("attached is %q, %v", d, err)
		}
	}
	l, err := link.LoadPinnedLink(filepath.Join(links, "forward4"), nil)
	if err != nil {
		t.Fatal(err)
	}
	i, err := l.Info()
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	if p := i.Netfilter().Priority; p == firstPriority {
		t.Errorf("both have priority %d", p)
	}
	if err := os.Remove(filepath.Join(links, "input6")); err != nil {
		t.Fatal(err)
	}
	if d, err := Attached(links, m); d != "1 hooks are missing" || err != nil {
		t.Errorf("attached is %q, %v", d, err)
	}
	if err := Detach(links); err != nil {
		t.Fatal(err)
	}
	if d, err := Attached(links, m); d != "" || err != nil {
		t.Errorf("attached is %q, %v", d, err)
	}
	if i, err := other.Info(); err != nil || bpf.ProgramName(i.Program) != "stranger" {
		t.Errorf("the other program: %+v, %v", i, err)
	}
}

// TestFlowsOutlivePolicyMapsOfAnotherSize: an agent with other sizes goes on with the flows there are.
func TestFlowsOutlivePolicyMapsOfAnotherSize(t *testing.T) {
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	t.Cleanup(func() { os.RemoveAll(folder) })
	sizes := Sizes{Subjects: 16, Ports: 16, Ranges: 16, Peers: 16, Nets: 16, Verdicts: 16, Flows: 64}
	for i, flows := range []uint32{64, 4096} {
		sizes.Flows, sizes.Peers = flows, uint32(16+i)
		layout, err := Layout(sizes)
		if err != nil {
			t.Fatal(err)
		}
		m, err := CreateMaps(filepath.Join(folder, layout), sizes)
		if err != nil {
			t.Fatal(err)
		}
		if m.Flows() != 64 {
			t.Errorf("%d flows fit, want those of the first", m.Flows())
		}
		if _, err := m.Load(); err != nil {
			t.Error(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	pins, err := os.ReadDir(filepath.Join(folder, bpf.StateFolder))
	if err != nil {
		t.Fatal(err)
	}
	if n := slices.IndexFunc(pins, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), "fl_flows") }); n < 0 ||
		len(pins) != len(state) {
		t.Errorf("state has %v", pins)
	}
}
