package bpf

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

	kernellink "fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
)

// Every program for packets passes this kernel's verifier.
func TestLoadForDevices(t *testing.T) {
	folder := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	m, err := CreateMaps(filepath.Join(folder, "maps"), small)
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	defer m.Close()
	p, err := m.LoadForDevices(DeviceOptions{}, headers...)
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) {
		err = fmt.Errorf("%+v", refused) // the whole log
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
}

// Of more pods than there is room for, those that find none are passed over, and find some as others go.
func TestMorePodsThanRoom(t *testing.T) {
	folder := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	maps, links := filepath.Join(folder, "maps"), filepath.Join(folder, "links")
	m, err := CreateMaps(maps, small)
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	defer m.Close()
	p, err := m.LoadForDevices(DeviceOptions{}, headers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Pin(links); err != nil {
		t.Fatal(err)
	}
	kept, err := pinned[uint32, uint32](filepath.Join(maps, packetsMapPods))
	if err != nil || kept == nil {
		t.Fatalf("no map of pods: %v", err)
	}
	defer kept.Close()
	leave, err := programID(filepath.Join(links, programPrefix+directions[0].program(headers[0])))
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
	}{{list[:10], 10}, {list, 4096}, {list[4990:], 10}, {append(list[4990:4995:4995], Device{Index: 1, Header: headers[0]}), 5}, {nil, 0}} {
		if err := KeepPods(maps, links, c.of); err != nil {
			t.Fatal(err)
		}
		pods, n := map[uint32]bool{}, 0
		for _, d := range c.of {
			pods[uint32(d.Index)] = d.Pod
		}
		err := all(kept, func(index, id uint32) {
			if n++; !pods[index] || id != leave {
				t.Errorf("of %d devices, %d is kept, with program %d, not %d", len(c.of), index, id, leave)
			}
		})
		if err != nil || n != c.want {
			t.Errorf("of %d devices %d are kept, want %d: %v", len(c.of), n, c.want, err)
		}
	}
}

// A stranger's program at the same device is called after ours, as it was before.
func TestAnotherProgramAtTheDevice(t *testing.T) {
	ns, err := netns.New("fl-tcx-" + rand.Text()[:8])
	if err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	defer func() { ns.Close(); netns.Delete(ns.Name) }()
	c, err := kernellink.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Up(1); err != nil {
		t.Fatal(err)
	}
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer counter.Close()
	stranger, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "stranger", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word), asm.LoadMapPtr(asm.R1, counter.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(), asm.JEq.Imm(asm.R0, 0, "out"), asm.Mov.Imm(asm.R1, 1), asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	w, links := newWorld(t), filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	if err := MakeFolder(links); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(links)
	err = ns.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: 1, Program: stranger, Attach: ebpf.AttachTCXEgress})
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
		t.Errorf("the stranger's program saw %d packets, %v", n, err)
	}
}
