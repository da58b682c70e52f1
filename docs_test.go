package fairlead_test

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// The bounds of a document, so that each page answers one question and a table is read at a glance.
const (
	maxPage   = 150
	maxReadme = 90
	maxCell   = 160 // two lines of a table with three columns
)

// longPages are pages beyond maxPage, and why.
var longPages = map[string]string{
	"docs/reference/configuration.md": "its tables are generated: all fields and flags are searched in one page",
	"docs/measurements/exact.md":      "it is generated: kernels and modes are compared in one page",
}

// rootDocuments are the documents beside docs.
var rootDocuments = []string{"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"}

// docPages returns the paths of all pages below docs.
func docPages(t *testing.T) (l []string) {
	t.Helper()
	err := filepath.WalkDir("docs", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ".md" {
			l = append(l, name)
		}
		return err
	})
	if err != nil || len(l) < 50 {
		t.Fatalf("%d pages: %v", len(l), err)
	}
	return l
}

// documents returns the texts of all documents, by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, name := range slices.Concat(rootDocuments, docPages(t)) {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = string(b)
	}
	return texts
}

var (
	fences    = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	codeSpans = regexp.MustCompile("`[^`\n]*`")
	generated = regexp.MustCompile(`(?s)<!-- begin.*?<!-- end`)
	headings  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	links     = regexp.MustCompile(`\]\(([^)\s]*)\)`)
	targets   = regexp.MustCompile(`\]\([^)]*\)`)
)

// anchors returns the anchors of a document's headings, as code hosts and the site make them.
func anchors(text string) map[string]bool {
	l := map[string]bool{}
	for _, m := range headings.FindAllStringSubmatch(fences.ReplaceAllString(text, ""), -1) {
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, targets.ReplaceAllString(m[1], ""))
		first := anchor
		for i := 1; l[anchor]; i++ {
			anchor = fmt.Sprintf("%s-%d", first, i)
		}
		l[anchor] = true
	}
	return l
}

// deadLinks returns the relative links of a document that lead to no file or to no heading.
func deadLinks(name string, texts map[string]string) (dead []string) {
	text := codeSpans.ReplaceAllString(fences.ReplaceAllString(texts[name], ""), "")
	for _, m := range links.FindAllStringSubmatch(text, -1) {
		to, err := url.Parse(m[1])
		if err != nil || to.IsAbs() {
			continue
		}
		file := name
		if to.Path != "" {
			file = path.Join(path.Dir(name), to.Path)
		}
		target, known := texts[file]
		if !known {
			if b, err := os.ReadFile(file); err == nil {
				target, known = string(b), true
			} else if _, err := os.Stat(file); err == nil {
				known = true // a folder
			}
		}
		if !known || to.Fragment != "" && !anchors(target)[to.Fragment] {
			dead = append(dead, m[1])
		}
	}
	return dead
}

// longCells returns the cells of a document's tables, generated ones aside, that need more than two lines.
func longCells(text string) (long []string) {
	text = generated.ReplaceAllString(fences.ReplaceAllString(text, ""), "")
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "|") {
			continue
		}
		for cell := range strings.SplitSeq(strings.ReplaceAll(line, `\|`, ""), "|") {
			if cell = targets.ReplaceAllString(strings.TrimSpace(cell), "]"); utf8.RuneCountInString(cell) > maxCell {
				long = append(long, cell)
			}
		}
	}
	return long
}

// maxLinesOf returns how many lines a document may have; 0: any number.
func maxLinesOf(name string) int {
	switch {
	case name == "README.md":
		return maxReadme
	case !below(name, "docs") || longPages[name] != "":
		return 0
	}
	return maxPage
}

// tooLong reports whether a document has more lines than it may.
func tooLong(name, text string) bool {
	most := maxLinesOf(name)
	return most > 0 && strings.Count(text, "\n") > most
}

func TestLinksOfDocumentsLeadSomewhere(t *testing.T) {
	texts := documents(t)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		for _, link := range deadLinks(name, texts) {
			t.Errorf("%s: link to %s leads nowhere", name, link)
		}
	}
}

func TestPagesAreShort(t *testing.T) {
	for name, text := range documents(t) {
		if tooLong(name, text) {
			t.Errorf("%s has %d lines, at most are %d: split it by the questions that it answers", name,
				strings.Count(text, "\n"), maxLinesOf(name))
		}
	}
	for name, why := range longPages {
		if b, err := os.ReadFile(name); err != nil || strings.Count(string(b), "\n") <= maxPage {
			t.Errorf("%s is no exception any more (%s): %v", name, why, cmp.Or(err, fmt.Errorf("it is short")))
		}
	}
}

// Decisions argue in their tables, and are read as a whole.
func TestTableCellsAreShort(t *testing.T) {
	for _, name := range docPages(t) {
		if below(name, "docs/adr") {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, cell := range longCells(string(text)) {
			t.Errorf("%s: a cell has %d characters, at most are %d: %s", name, utf8.RuneCountInString(cell), maxCell, cell)
		}
	}
}

// unlisted returns the pages that an index doesn't link to. Decisions are listed by their folder.
func unlisted(index string, pages []string) (missing []string) {
	for _, name := range pages {
		link := strings.TrimPrefix(name, "docs/")
		if !below(name, "docs/adr") && name != "docs/README.md" && !strings.Contains(index, "]("+link+")") {
			missing = append(missing, name)
		}
	}
	return missing
}

func TestIndexListsAllPages(t *testing.T) {
	index, err := os.ReadFile("docs/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range unlisted(string(index), docPages(t)) {
		t.Errorf("docs/README.md doesn't list %s", name)
	}
}

// Each check of documents finds what it is there for.
func TestChecksOfDocumentsFind(t *testing.T) {
	texts := map[string]string{
		"docs/a/x.md": "# X\n[y](y.md#one-two) [up](../../go.mod) [self](#x) [folder](../adr)\n" +
			"[web](https://example.com/none) `[no](link)`\n```\n[no](link)\n```\n" +
			"[gone](z.md) [wrong](y.md#three) [here](#y)\n",
		"docs/a/y.md": "# Y\n## One *two*!\n",
	}
	if got, want := deadLinks("docs/a/x.md", texts), []string{"z.md", "y.md#three", "#y"}; !slices.Equal(got, want) {
		t.Errorf("dead links %q, want %q", got, want)
	}
	if got := anchors("# A `b` (c)\n## [d](e)\n## d\n```\n# f\n```\n"); !maps.Equal(got,
		map[string]bool{"a-b-c": true, "d": true, "d-1": true}) {
		t.Errorf("anchors %v", got)
	}
	cell := strings.Repeat("x", maxCell)
	table := "| " + cell + " | [y](" + cell + ") |\n<!-- begin z -->\n| " + cell + "x |\n<!-- end z -->\n" +
		"| " + cell + "z |\n"
	if got, want := longCells(table), []string{cell + "z"}; !slices.Equal(got, want) {
		t.Errorf("long cells %q, want %q", got, want)
	}
	lines := strings.Repeat("\n", maxReadme+1)
	for name, want := range map[string]bool{"README.md": true, "docs/x.md": false, "SECURITY.md": false} {
		if tooLong(name, lines) != want {
			t.Errorf("%s with %d lines is too long: %t", name, maxReadme+1, !want)
		}
	}
	if !tooLong("docs/x.md", lines+lines) {
		t.Errorf("a page of %d lines is not too long", 2*(maxReadme+1))
	}
	got, want := unlisted("[x](a/x.md)", []string{"docs/a/x.md", "docs/a/y.md"}), []string{"docs/a/y.md"}
	if !slices.Equal(got, want) {
		t.Errorf("unlisted %q, want %q", got, want)
	}
}
