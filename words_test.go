package fairlead_test

import (
	"go/ast"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// banned are words that named six things each, or for which the field has a term (docs/reference/glossary.md).
var banned = strings.Fields(`
	take takes taken took tell tells told give gives given ask asks asked way ways place places placed thing things
	room rooms keep keeps kept note notes look looks looked
	hide hides permit permits permitted shortcut lane lanes retire retires stranger strangers nobody whom abilities
	hand hands handed handing existing carried standing remains predecessor predecessors refusal refusals stranded`)

// allowed are identifiers with a banned word that are others' names, or mean what the field means.
var allowed = map[string]string{
	"LookPath":          "os/exec",
	"KeepAlive":         "runtime, net",
	"DisableKeepAlives": "net/http",
	"Note":              "the field of events.k8s.io",
	"Permitted":         "golang.org/x/sys/unix, of capabilities",
	"nobody":            "the user of that name",
	"nobody4":           "the user of that name",
	"nobody6":           "the user of that name",
}

// camelWords returns the words of an identifier, in lower case: "ToDSRMore" has "to", "dsr", "more".
func camelWords(name string) (words []string) {
	runes, start := []rune(name), 0
	for i := 1; i <= len(runes); i++ {
		ends := i == len(runes) || runes[i] == '_' || runes[i-1] == '_' || unicode.IsUpper(runes[i]) &&
			(!unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1]))
		if ends {
			words, start = append(words, strings.ToLower(string(runes[start:i]))), i
		}
	}
	return words
}

func TestCamelWords(t *testing.T) {
	for name, want := range map[string]string{"": "", "lookup": "lookup", "toDSRMore": "to dsr more", "IPv4": "i pv4",
		"packetsWayStateACKED": "packets way state acked", "USE_TAKEN": "use _ taken", "Keep": "keep"} {
		if got := strings.Join(camelWords(name), " "); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestNamesAreTheFieldsWords(t *testing.T) {
	found := map[string]string{} // where an identifier stands first
	for _, f := range sourceFiles(t) {
		ast.Inspect(f.tree, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && allowed[id.Name] == "" && found[id.Name] == "" {
				if slices.ContainsFunc(camelWords(id.Name), func(w string) bool { return slices.Contains(banned, w) }) {
					found[id.Name] = f.set.Position(id.Pos()).String()
				}
			}
			return true
		})
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		t.Errorf("%s: %s: use the field's word (docs/reference/glossary.md)", found[name], name)
	}
}

// vague are verbs that say less than "returns", "reports whether" and the like.
var vague = regexp.MustCompile(`^[A-Za-z_]\w*(\.\w+)? (gives|says|tells|asks|notes) `)

// persons are words for people, where programs and packets act.
var persons = regexp.MustCompile(`(?i)\b(nobody|somebody|whom)\b`)

func TestCommentsNameWhatActs(t *testing.T) {
	for _, f := range sourceFiles(t) {
		for _, c := range f.tree.Comments {
			if word := persons.FindString(c.Text()); word != "" {
				t.Errorf("%s: %q: name the program, the host or the packet", f.set.Position(c.Pos()), word)
			}
		}
	}
}

func TestGodocSaysWhatIsReturned(t *testing.T) {
	for _, f := range sourceFiles(t) {
		for _, c := range f.tree.Comments {
			if text := c.Text(); vague.MatchString(text) {
				t.Errorf("%s: %q: say what it returns, reports or sends", f.set.Position(c.Pos()),
					strings.Join(strings.Fields(text)[:2], " "))
			}
		}
	}
}
