package service

import (
	"os"
	"strings"
	"testing"
)

// Operators read docs, not the package's comment: each difference from kube-proxy stands in both.
func TestDifferencesAreDocumented(t *testing.T) {
	src, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile("../../docs/reference/kube-proxy-differences.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(strings.ReplaceAll(string(src), "\n//", "\n"), "with these differences:")
	list, _, _ = strings.Cut(list, "\npackage ")
	_, section, _ := strings.Cut(string(docs), "\n## Differs from kube-proxy\n")
	section, _, _ = strings.Cut(section, "\n## ")
	differences := strings.Split(list, "\n   - ")[1:]
	if n := strings.Count(section, "\n- "); n != len(differences) || n == 0 {
		t.Errorf("docs/reference/kube-proxy-differences.md has %d differences, doc.go %d", n, len(differences))
	}
	for _, d := range differences {
		if d = strings.Join(strings.Fields(d), " "); !strings.Contains(section, "- "+d+"\n") {
			t.Errorf("docs/reference/kube-proxy-differences.md lacks: - %s", d)
		}
	}
}
