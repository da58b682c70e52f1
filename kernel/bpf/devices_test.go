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
