package service

import (
	"crypto/rand"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
)

var small = Sizes{Frontends: 16, Pools: 16, Slots: 64}

// made makes maps and programs for a cgroup of the test's own.
func made(t *testing.T) (links, home string, p *Programs) {
	t.Helper()
	home, err := cgroup.New("fl-bpf-" + rand.Text()[:8])
	if err != nil {
		t.Fatalf("this test needs root and cgroups of version 2: %v", err)
	}
	t.Cleanup(func() { cgroup.Delete(home) })
	folder, m := madeMaps(t)
	if p, err = m.Load(Options{Node: 1, Cgroup: home}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return filepath.Join(filepath.Dir(folder), "links"), home, p
}

func TestAttachAndDetach(t *testing.T) {
	links, home, p := made(t)
	for range 2 {
		if err := p.Attach(links, home); err != nil {
			t.Fatal(err)
		}
		if d, err := Attached(links, nil); d != p.digest || err != nil {
			t.Errorf("attached is %q, %v", d, err)
		}
	}
	if err := os.Remove(filepath.Join(links, "sendmsg6")); err != nil {
		t.Fatal(err)
	}
	if d, err := Attached(links, nil); d != "1 hooks are missing" || err != nil {
		t.Errorf("attached is %q, %v", d, err)
	}
	if err := Detach(links); err != nil {
		t.Fatal(err)
	}
	if d, err := Attached(links, nil); d != "" || err != nil {
		t.Errorf("attached is %q, %v", d, err)
	}
}

// Where another's program allows none beside it, nothing of ours is attached, and the error names it.
func TestAnotherAgentsProgram(t *testing.T) {
	links, home, p := made(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "stranger", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet6Connect, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	f, err := os.Open(home)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attach := link.RawAttachProgramOptions{Target: int(f.Fd()), Program: other, Attach: ebpf.AttachCGroupInet6Connect}
	if err := link.RawAttachProgram(attach); err != nil {
		t.Fatal(err)
	}
	err = p.Attach(links, home)
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "(stranger)") ||
		!strings.Contains(err.Error(), "attach connect6") {
		t.Errorf("the error is %v", err)
	}
	if left, _ := filepath.Glob(links + "/*"); len(left) > 0 {
		t.Errorf("half attached: %v", left)
	}
	err = link.RawDetachProgram(
		link.RawDetachProgramOptions{Target: int(f.Fd()), Program: other, Attach: ebpf.AttachCGroupInet6Connect},
	)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Attach(links, home); err != nil {
		t.Errorf("once it is gone: %v", err)
	}
}

// Programs with other constants have another digest.
func TestDigest(t *testing.T) {
	root, err := cgroup.Root()
	if err != nil {
		t.Fatal(err)
	}
	first, err := Digest("maps-1", Options{Node: 1, Cgroup: root})
	if err != nil {
		t.Fatal(err)
	}
	if second, err := Digest("maps-1", Options{Node: 2, Cgroup: root}); first == second || err != nil {
		t.Errorf("digests %q and %q, %v", first, second, err)
	}
	if other, err := Digest("maps-2", Options{Node: 1, Cgroup: root}); first == other || err != nil {
		t.Errorf("on other maps: digests %q and %q, %v", first, other, err)
	}
}

var lacks = flag.String("lacks", "", "what this kernel lacks, so that it can't run the programs")

func TestProbe(t *testing.T) {
	switch err := bpf.Probe(); {
	case err != nil && *lacks == "":
		t.Errorf("this kernel runs the programs, yet the probe says: %v", err)
	case err == nil && *lacks != "" || err != nil && !strings.Contains(err.Error(), *lacks):
		t.Errorf("this kernel lacks %s, yet the probe says: %v", *lacks, err)
	}
}
