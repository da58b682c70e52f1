package fairlead_test

import (
	"crypto/sha256"
	"fmt"
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The objects are those of the sources: `go generate ./bpf/...` was run after the last change of bpf, and
// no one has changed an object since. That the sources make these objects is what `make generated` tests.
func TestGeneratedFromTheSources(t *testing.T) {
	const again = "run `go generate ./bpf/...`, which takes clang, llvm and libbpf-dev"
	sum, err := os.ReadFile("bpf/objects.sum")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(sum)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, "clang version") {
		t.Errorf("objects.sum says %q where it should name the compiler", last)
	}
	want := map[string]string{} // digests by name
	for _, l := range lines[:len(lines)-1] {
		digest, name, _ := strings.Cut(l, "  ")
		want[name] = digest
	}
	files := map[string][]string{}
	for _, pattern := range []string{"bpf/*.[ch]", "bpf/*/*.[ch]", "bpf/*/*.o"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatal("no files ", pattern, err)
		}
		slices.Sort(found)
		if strings.HasSuffix(pattern, "[ch]") {
			files["sources"] = append(files["sources"], found...)
			continue
		}
		for _, f := range found {
			files[strings.TrimPrefix(f, "bpf/")] = []string{f}
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
			t.Errorf("the digest of %s is %s, objects.sum has %q: %s", name, now, want[name], again)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("objects.sum has digests of what is not there: %v: %s", want, again)
	}
}

// programs are the rooms of bpf, and the others whose headers each includes besides those that all share.
var programs = map[string][]string{"device": {"service"}, "policy": nil, "service": nil}

// TestProgramsIncludeAsTheirPackagesImport: a header is in the room itself, is shared, or is named with its room.
func TestProgramsIncludeAsTheirPackagesImport(t *testing.T) {
	include := regexp.MustCompile(`(?m)^#include "([^"]*)"`)
	files, err := filepath.Glob("bpf/*/*.[ch]")
	if err != nil || len(files) == 0 {
		t.Fatal("no eBPF programs found ", err)
	}
	shared, _ := filepath.Glob("bpf/*.[ch]")
	for _, path := range append(files, shared...) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		folder, of := filepath.Dir(path), filepath.Base(filepath.Dir(path))
		allowed, is := programs[of]
		if !is && folder != "bpf" {
			t.Errorf("bpf/%s is no room: add it to programs", of)
		}
		for _, m := range include.FindAllStringSubmatch(string(text), -1) {
			if from, _ := filepath.Split(m[1]); from != "" && !slices.Contains(allowed, filepath.Clean(from)) {
				t.Errorf("%s includes %s: %s may include headers of %q", path, m[1], folder, allowed)
			}
		}
	}
}

// mostNames is how many names kernel/bpf may export, methods of its types included: what belongs to one program is in
// that program's room.
const mostNames = 120

func TestKernelBPFExportsFewNames(t *testing.T) {
	n := 0
	for _, f := range sourceFiles(t) {
		if filepath.Dir(f.path) != "kernel/bpf" || strings.HasSuffix(f.path, "_test.go") {
			continue
		}
		for _, d := range f.tree.Decls {
			n += exported(d)
		}
	}
	if n == 0 || n > mostNames {
		t.Errorf("kernel/bpf exports %d names, at most are %d", n, mostNames)
	}
}

// exported returns how many names a declaration exports.
func exported(d ast.Decl) (n int) {
	names := []*ast.Ident{}
	switch d := d.(type) {
	case *ast.FuncDecl:
		names = append(names, d.Name)
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				names = append(names, s.Name)
			case *ast.ValueSpec:
				names = append(names, s.Names...)
			}
		}
	}
	for _, i := range names {
		if i.IsExported() {
			n++
		}
	}
	return n
}
