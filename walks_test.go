package fairlead_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestWalksNameWhatIsThere holds ARCHITECTURE.md's walks to the code: each function stands in the file named before it.
func TestWalksNameWhatIsThere(t *testing.T) {
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, walks, found := strings.Cut(string(text), "\n## Walks\n")
	walks, _, _ = strings.Cut(walks, "\n## ")
	if !found {
		t.Fatal("ARCHITECTURE.md has no section \"Walks\"")
	}
	file, names := "", 0
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(walks, -1) {
		switch name := m[1]; {
		case strings.Contains(name, "/"):
			file = name
		case strings.HasPrefix(name, "fl_") || strings.HasPrefix(name, "go "):
		case file == "":
			t.Errorf("%s: no file stands before it", name)
		default:
			names++
			if !declares(t, file, name) {
				t.Errorf("%s declares no function %s", file, name)
			}
		}
	}
	if names < 100 {
		t.Errorf("only %d functions are named", names)
	}
}

// declares reports whether a source file of Go or C declares a function of that name.
func declares(t *testing.T, file, name string) bool {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
		return false
	}
	if !strings.HasSuffix(file, ".go") {
		return regexp.MustCompile(`(?m)^[a-z_][\w *]*\b` + regexp.QuoteMeta(name) + `\(`).Match(text)
	}
	tree, err := parser.ParseFile(token.NewFileSet(), file, text, 0)
	if err != nil {
		t.Error(err)
		return false
	}
	for _, d := range tree.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == name {
			return true
		}
	}
	return false
}
