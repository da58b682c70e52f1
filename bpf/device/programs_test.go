package device

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/kernel/bpf"
	kernellink "fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// maxVerified bounds how many instructions the verifier processes of a program, of 1,000,000 that the kernel allows:
// half more than the largest took when this was written. Other kernels process some more, and further ones are to come.
const maxVerified = 120_000

// Every program for packets passes this kernel's verifier, far from its limit.
func TestLoadForDevices(t *testing.T) {
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	m, err := CreateMaps(filepath.Join(folder, "maps"), small)
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	defer m.Close()
	for _, o := range []Options{{}, {PodNetwork: true}, {DSR: true, ReversePath: true, PodNetwork: true}} {
		p, err := m.LoadForDevices(o, headers...)
		if refused, ok := errors.AsType[*ebpf.VerifierError](err); ok {
			err = fmt.Errorf("%+v", refused) // the whole log
		}
		if err != nil {
			t.Fatal(err)
		}
		for name, program := range p.by {
			verified(t, fmt.Sprintf("%s, %+v", name, o), program)
		}
		p.Close()
	}
	for _, name := range []string{fastPathName, hookProgram} {
		p, err := reporterOf(filepath.Join(folder, "maps"), name)
		if err != nil {
			t.Fatal(err)
		}
		verified(t, name, p)
		p.Close()
	}
}

// verified checks how many instructions of a program the kernel's verifier has processed.
func verified(t *testing.T, name string, p *ebpf.Program) {
	t.Helper()
	i, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	n, ok := i.VerifiedInstructions()
	if !ok {
		t.Fatalf("%s: the kernel doesn't report what it verified", name)
	}
	t.Logf("%s: %d", name, n)
	if n > maxVerified {
		t.Errorf("%s: the verifier processes %d instructions, more than %d", name, n, maxVerified)
	}
}

// Of more pods than fit, some are left out, and are added as others go.
func TestMorePodsThanCapacity(t *testing.T) {
	folder := filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	maps, links := filepath.Join(folder, "maps"), filepath.Join(folder, "links")
	m, err := CreateMaps(maps, small)
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	defer m.Close()
	p, err := m.LoadForDevices(Options{}, headers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Pin(links); err != nil {
		t.Fatal(err)
	}
	held, err := bpf.Pinned[uint32, uint32](filepath.Join(maps, pinNames[deviceMapFlPods]))
	if err != nil || held == nil {
		t.Fatalf("no map of pods: %v", err)
	}
	defer held.Close()
	leave, err := bpf.ProgramID(filepath.Join(links, bpf.ProgramPrefix+directions[0].program(headers[0])))
	if err != nil || leave == 0 {
		t.Fatalf("no program: %v", err)
	}
	var list []Device
	for i := range 5000 {
		list = append(list, Device{Index: i + 1, Header: headers[0], Pod: true})
	}
	for _, c := range []struct {
		of   []Device
		want int
	}{
		{list[:10], 10},
		{list, 4096},
		{list[4990:], 10},
		{append(list[4990:4995:4995], Device{Index: 1, Header: headers[0]}), 5},
		{nil, 0},
	} {
		if err := WritePods(maps, links, c.of); err != nil {
			t.Fatal(err)
		}
		pods, n := map[uint32]bool{}, 0
		for _, d := range c.of {
			pods[uint32(d.Index)] = d.Pod
		}
		err := bpf.ReadAll(held, func(index, id uint32) {
			if n++; !pods[index] || id != leave {
				t.Errorf("of %d devices, %d is kept, with program %d, not %d", len(c.of), index, id, leave)
			}
		})
		if err != nil || n != c.want {
			t.Errorf("of %d devices %d are kept, want %d: %v", len(c.of), n, c.want, err)
		}
	}
}

// countingProgram returns a program that passes packets and counts them.
func countingProgram(t *testing.T) (*ebpf.Program, *ebpf.Map) {
	t.Helper()
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { counter.Close() })
	code := asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word), asm.LoadMapPtr(asm.R1, counter.FD()), asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(), asm.JEq.Imm(asm.R0, 0, "out"), asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord), asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return(),
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "other", Type: ebpf.SchedCLS, License: "GPL", Instructions: code})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, counter
}

// Another program at the same device is called after ours, as it was before.
func TestAnotherProgramAtTheDevice(t *testing.T) {
	ns := netnstest.New(t)
	c, err := kernellink.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Up(1); err != nil {
		t.Fatal(err)
	}
	other, counter := countingProgram(t)
	w, links := newWorld(t), filepath.Join(bpf.Mount, "fl-bpf-"+rand.Text()[:8])
	if err := bpf.MakeFolder(links); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(links)
	err = ns.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: 1, Program: other, Attach: ebpf.AttachTCXEgress})
		if err != nil {
			return err
		}
		defer l.Close()
		if err := w.programs.Attach(links, Device{Index: 1, Header: 14, Own: true}); err != nil {
			return err
		}
		to, err := net.Dial("udp", "127.0.0.1:9")
		if err != nil {
			return err
		}
		defer to.Close()
		_, err = to.Write([]byte("hello"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var n uint64
	if err := counter.Lookup(uint32(0), &n); err != nil || n == 0 {
		t.Errorf("the other program saw %d packets, %v", n, err)
	}
}
