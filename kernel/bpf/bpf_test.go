package bpf

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

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
	folder := filepath.Join(Mount, "fl-bpf-"+rand.Text()[:8])
	m, err := CreateMaps(filepath.Join(folder, "maps"), small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), os.RemoveAll(folder)); err != nil {
			t.Error(err)
		}
	})
	if p, err = m.Load(Options{Node: 1, Cgroup: home}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return filepath.Join(folder, "links"), home, p
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
	if l := Others(home); len(l) != 1 || !strings.HasPrefix(l[0], "connect6: program ") {
		t.Errorf("others are %v", l)
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

// Maps of other sizes have another layout, and another digest of programs.
func TestLayout(t *testing.T) {
	a, err := Layout(small)
	if err != nil {
		t.Fatal(err)
	}
	more := small
	more.Slots++
	if b, err := Layout(more); a == b || err != nil {
		t.Errorf("layouts %q and %q, %v", a, b, err)
	}
	root, err := cgroup.Root()
	if err != nil {
		t.Fatal(err)
	}
	first, err := Digest(small, Options{Node: 1, Cgroup: root})
	if err != nil {
		t.Fatal(err)
	}
	if second, err := Digest(small, Options{Node: 2, Cgroup: root}); first == second || err != nil {
		t.Errorf("digests %q and %q, %v", first, second, err)
	}
}

// The objects are those of the sources: `go generate ./kernel/bpf` was run after the last change of bpf, and no one has
// changed an object since. That the sources make these objects is what `make generated` tests.
func TestGeneratedFromTheSources(t *testing.T) {
	const again = "run go generate ./kernel/bpf, which takes clang, llvm and libbpf-dev"
	sum, err := os.ReadFile("service.sum")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(sum)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, "clang version") {
		t.Errorf("service.sum says %q where it should name the compiler", last)
	}
	want := map[string]string{} // digests by name
	for _, l := range lines[:len(lines)-1] {
		digest, name, _ := strings.Cut(l, "  ")
		want[name] = digest
	}
	files := map[string][]string{}
	for name, pattern := range map[string]string{"sources": "../../bpf/*.[ch]", "": "*.o"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatal("no files ", pattern, err)
		}
		slices.Sort(found)
		if name != "" {
			files[name] = found
			continue
		}
		for _, f := range found {
			files[f] = []string{f}
		}
	}
	for name, parts := range files {
		h := sha256.New()
		for _, f := range parts {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			h.Write(b)
		}
		if now := fmt.Sprintf("%x", h.Sum(nil)); now != want[name] {
			t.Errorf("the digest of %s is %s, service.sum has %q: %s", name, now, want[name], again)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("service.sum has digests of what is not there: %v: %s", want, again)
	}
}

var lacks = flag.String("lacks", "", "what this kernel lacks, so that it can't run the programs")

func TestProbe(t *testing.T) {
	switch err := Probe(); {
	case err != nil && *lacks == "":
		t.Errorf("this kernel runs the programs, yet the probe says: %v", err)
	case err == nil && *lacks != "" || err != nil && !strings.Contains(err.Error(), *lacks):
		t.Errorf("this kernel lacks %s, yet the probe says: %v", *lacks, err)
	}
}
