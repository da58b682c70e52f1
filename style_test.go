package fairlead_test

import (
	"bytes"
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// The bounds of one piece of source, so that each is seen whole.
const (
	maxColumns    = 120
	maxLines      = 60 // of a function
	maxCyclomatic = 20
	maxFields     = 16 // of a struct
)

// sourceFile is one Go file that people wrote.
type sourceFile struct {
	path string
	text []byte
	set  *token.FileSet
	tree *ast.File
}

func (f *sourceFile) line(p token.Pos) int { return f.set.Position(p).Line }

// sourceFiles returns the Go files of the whole repository, generated ones left out.
func sourceFiles(t *testing.T) (l []*sourceFile) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			return cmp.Or(err, fs.SkipDir)
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, path, text, parser.ParseComments|parser.SkipObjectResolution)
		if err == nil && !ast.IsGenerated(tree) {
			l = append(l, &sourceFile{path, text, set, tree})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// rawLines returns the lines that a raw string stands in: other languages' text, which is not broken.
func (f *sourceFile) rawLines() map[int]bool {
	lines := map[int]bool{}
	ast.Inspect(f.tree, func(n ast.Node) bool {
		if s, ok := n.(*ast.BasicLit); ok && s.Kind == token.STRING && s.Value[0] == '`' {
			for i := f.line(s.Pos()); i <= f.line(s.End()); i++ {
				lines[i] = true
			}
		}
		return true
	})
	return lines
}

func TestLinesFitTheScreen(t *testing.T) {
	for _, f := range sourceFiles(t) {
		raw := f.rawLines()
		for i, line := range bytes.Split(f.text, []byte("\n")) {
			if n := utf8.RuneCount(line); n > maxColumns && !raw[i+1] && !bytes.HasPrefix(line, []byte("//go:generate ")) {
				t.Errorf("%s:%d has %d columns, at most are %d", f.path, i+1, n, maxColumns)
			}
		}
	}
	shared, _ := filepath.Glob("bpf/*.[ch]")
	programs, _ := filepath.Glob("bpf/*/*.[ch]")
	if len(shared) == 0 || len(programs) == 0 {
		t.Fatal("no eBPF programs found")
	}
	for _, path := range slices.Concat(shared, programs) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range bytes.Split(text, []byte("\n")) {
			if n := utf8.RuneCount(line); n > maxColumns {
				t.Errorf("%s:%d has %d columns, at most are %d", path, i+1, n, maxColumns)
			}
		}
	}
}

// cyclomatic returns the number of independent paths through a function and the functions in it (McCabe, 1976).
func cyclomatic(body ast.Node) int {
	n := 1
	ast.Inspect(body, func(x ast.Node) bool {
		switch x := x.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if x.List != nil {
				n++
			}
		case *ast.CommClause:
			if x.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if x.Op == token.LAND || x.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

// isDocument reports whether the fields of s that others see are tagged: such a struct is the form of a file or an
// answer.
func isDocument(s *ast.StructType) bool {
	tagged := 0
	for _, f := range s.Fields.List {
		switch {
		case f.Tag != nil:
			tagged++
		case len(f.Names) == 0 || f.Names[0].IsExported():
			return false
		}
	}
	return tagged > 0
}

// inProduct reports whether a file is of the line that an agent runs, and not of what tries or measures it.
func inProduct(path string) bool {
	folder, _, _ := strings.Cut(path, "/")
	return slices.Contains([]string{"agent", "cmd", "cni", "dataplane", "ipam", "kernel", "model", "reconcile", "resolve",
		"source",
		"verdict"},
		folder)
}

// TestFunctionsAndStructsAreSmall is about what isn't a test: tables of cases are long.
func TestFunctionsAndStructsAreSmall(t *testing.T) {
	for _, f := range sourceFiles(t) {
		if strings.HasSuffix(f.path, "_test.go") {
			continue
		}
		ast.Inspect(f.tree, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Body == nil {
					return true
				}
				if lines := f.line(n.End()) - f.line(n.Pos()) + 1; lines > maxLines {
					t.Errorf("%s:%d: function %s has %d lines, at most are %d", f.path, f.line(n.Pos()), n.Name, lines, maxLines)
				}
				if c := cyclomatic(n.Body); c > maxCyclomatic {
					t.Errorf("%s:%d: function %s has %d paths, at most are %d: name its parts", f.path, f.line(n.Pos()), n.Name,
						c, maxCyclomatic)
				}
			case *ast.TypeSpec:
				if s, ok := n.Type.(*ast.StructType); ok && inProduct(f.path) && s.Fields.NumFields() > maxFields &&
					!isDocument(s) {
					t.Errorf("%s:%d: struct %s has %d fields, at most are %d: group those that go together", f.path,
						f.line(n.Pos()), n.Name, s.Fields.NumFields(), maxFields)
				}
			}
			return true
		})
	}
}
