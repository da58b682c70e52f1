package manifest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/source"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

// Each archive in testdata holds a folder, and what is said of it: its problems and objects, a line each.
func TestGolden(t *testing.T) {
	names, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(names) == 0 {
		t.Fatal("no archives in testdata", err)
	}
	for _, name := range names {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) { golden(t, name) })
	}
}

func golden(t *testing.T, name string) {
	ar, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	dir, want := t.TempDir(), ""
	in := &txtar.Archive{Comment: ar.Comment}
	for _, f := range ar.Files {
		if f.Name == "want" {
			want = string(f.Data)
			continue
		}
		in.Files = append(in.Files, f)
		save(t, filepath.Join(dir, f.Name), string(f.Data))
	}
	objects, problems, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := said(dir, objects, problems)
	if got == want {
		return
	}
	if !*update {
		t.Errorf("got\n%s\nwant\n%s", got, want)
		return
	}
	in.Files = append(in.Files, txtar.File{Name: "want", Data: []byte(got)})
	if err := os.WriteFile(name, txtar.Format(in), 0o644); err != nil {
		t.Fatal(err)
	}
}

// said returns problems and the keys of objects, a line each, with paths relative to dir.
func said(dir string, objects []source.Object, problems []source.Problem) string {
	var b strings.Builder
	for _, p := range problems {
		p.File = strings.TrimPrefix(p.File, dir+"/")
		p.Message = strings.ReplaceAll(p.Message, dir+"/", "")
		fmt.Fprintln(&b, p)
	}
	for _, o := range objects {
		fmt.Fprintln(&b, "object", source.KeyOf(o))
	}
	return b.String()
}

// save writes a file as most programs do: open, write, close.
func save(t testing.TB, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
