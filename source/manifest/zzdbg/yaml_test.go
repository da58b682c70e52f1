package manifest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"
)

// plainJSON converts doc by the fast way alone.
func plainJSON(doc string) (string, bool) {
	p := plain{in: []byte(doc)}
	if !p.document() {
		return "", false
	}
	return string(p.out), true
}

func decoded(t rapid.TB, j []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(j)))
	d.UseNumber()
	if err := d.Decode(&v); err != nil || d.More() {
		t.Fatalf("no JSON: %s: %v", j, err)
	}
	return v
}

// agree compares the fast way with the library, where the fast way gives an answer.
func agree(t rapid.TB, doc string) {
	t.Helper()
	got, ok := plainJSON(doc)
	if !ok {
		return
	}
	want, err := yaml.YAMLToJSONStrict([]byte(doc))
	if err != nil && strings.Contains(err.Error(), "already set in map") {
		decoded(t, []byte(got))
		return // the decoder names repeated fields
	}
	if err != nil {
		t.Fatalf("the library refuses %q (%v), the fast way says %s", doc, err, got)
	}
	if d := cmp.Diff(decoded(t, want), decoded(t, []byte(got))); d != "" {
		t.Fatalf("%q: library -, fast way +:\n%s", doc, d)
	}
}

func TestPlainYAML(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"mapping", "a: b\nc: 1\nd: true\ne:\n", `{"a":"b","c":1,"d":true,"e":null}`},
		{"nested", "a:\n  b:\n    c: d\ne: f\n", `{"a":{"b":{"c":"d"}},"e":"f"}`},
		{"sequence", "a:\n- 1\n- b\nc:\n  - d: 1\n    e: 2\n  - f: 3\n", `{"a":[1,"b"],"c":[{"d":1,"e":2},{"f":3}]}`},
		{"sequence in sequence's mapping", "a:\n- b:\n  - c\n  d: e\n", `{"a":[{"b":["c"],"d":"e"}]}`},
		{"empty items", "a:\n-\n- # no\n-\n  b: c\n", `{"a":[null,null,{"b":"c"}]}`},
		{"comments", "# one\na: b # two\n  # three\nc: d#e\n", `{"a":"b","c":"d#e"}`},
		{"quotes", `a: "b: c"` + "\nb: 'say \"hi\"'\n'c d': \"10\"\n", `{"a":"b: c","b":"say \"hi\"","c d":"10"}`},
		{"flow", `a: {ready: true, "x y": [10.0.0.1, "fd00::1", -]}`, ""},
		{"flow, plain", `a: {ready: true, "x y": [10.0.0.1, "fd00::1", {}]}`, `{"a":{"ready":true,"x y":["10.0.0.1","fd00::1",{}]}}`},
		{"addresses", "a: 10.0.0.1\nb: fd00::1\nc: 2001:db8::/32\nd: 10.0.0.0/8\n", `{"a":"10.0.0.1","b":"fd00::1","c":"2001:db8::/32","d":"10.0.0.0/8"}`},
		{"literal", "a: |\n  {\"b\":\n\n   1}\nc: |-\n  x\n  y\n\nd: e\n", `{"a":"{\"b\":\n\n 1}\n","c":"x\ny","d":"e"}`},
		{"port names", "a: http-8080\nb: k8s.io/x\n", `{"a":"http-8080","b":"k8s.io/x"}`},
		// What must be left to the library.
		{"old booleans", "a: yes\n", ""},
		{"octal", "a: 010\n", ""},
		{"float", "a: 1.5\n", ""},
		{"negative", "a: -1\n", ""},
		{"time", "a: 2026-01-01\n", ""},
		{"anchor", "a: &x b\nc: *x\n", ""},
		{"folded", "a: >\n  b\n", ""},
		{"two lines", "a: b\n  c\n", ""},
		{"escapes", `a: "b\n"`, ""},
		{"two quotes", "a: 'it''s'\n", ""},
		{"tab", "a:\tb\n", ""},
		{"letters", "a: ü\n", ""},
		{"no mapping", "- a\n", ""},
		{"nothing", "", ""},
		{"bad indentation", "a:\n    b: 1\n  c: 2\n", ""},
		{"colon twice", "a: b: c\n", ""},
		{"open bracket", "a: [b\n", ""},
		{"behind the quote", "a: \"b\" c\n", ""},
		{"item without sequence", "a: b\n- c\n", ""},
		{"boolean key", "on: x\n", ""},
		{"deep", strings.Repeat("a: {", 80) + "a" + strings.Repeat("}", 80), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := plainJSON(tt.in)
			if ok != (tt.want != "") || got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			agree(t, tt.in)
		})
	}
}

// The fast way must take what it is for: else all is slow, and no test tells.
func TestPlainTakesKubernetesYAML(t *testing.T) {
	for _, doc := range []string{serviceYAML(7), sliceYAML(7, 10)} {
		if _, ok := plainJSON(doc); !ok {
			t.Errorf("not taken:\n%s", doc)
		}
		// As kubectl get -o yaml writes it.
		j, err := yaml.YAMLToJSON([]byte(doc))
		if err != nil {
			t.Fatal(err)
		}
		y, err := yaml.JSONToYAML(j)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := plainJSON(string(y)); !ok || !reflect.DeepEqual(decoded(t, []byte(got)), decoded(t, j)) {
			t.Errorf("not taken:\n%s", y)
		}
	}
}

func FuzzPlainYAML(f *testing.F) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for _, c := range split(b) {
			f.Add(string(c.text))
		}
	}
	f.Add(sliceYAML(1, 2))
	f.Add("a: |\n  b\n\n  c\nd: {e: [f, 1], g: \"h\"}\n")
	f.Add("a:\n- b: 1\n  c:\n  - d\n  -\n- e\n")
	f.Fuzz(func(t *testing.T, doc string) { agree(t, doc) })
}

// Documents drawn from pieces that matter reach further than bytes do.
func TestPlainYAMLDrawn(t *testing.T) {
	piece := rapid.SampledFrom([]string{
		"a:", "b:", "c: ", "a: ", "\"q\": ", "'q':", "- ", "-", "- a: ", "- - ", "x", "10.0.0.1", "fd00::1", "::1", "2001:db8::",
		"80", "080", "0x1f", "1e3", "1.5", "1_000", "123456789012345", "12345678901234567890", "true", "False", "y", "no", "null", "Null", "~",
		"\"s\"", "'s'", "\"a: b\"", "'a #b'", "'it''s'", "\"\\n\"", "#c", " #c", ",", "[a, 1]", "[]", "[ ]", "{}", "{ }", "{a: b}", "{a: [b, {c: d}]}",
		"{a: b,c: 1}", "[a,b]", "{\"a\": 1}", "{'a':1}", "{a}", "{a: }", "[a, ]", "|", "|-", "|+", ">", "  ", " ", "a b", "a:b", "a/b", "a_b", "_a", "/a", "%x", "@x", "&x a", "*x", "!t a",
		"<<: ", "=", "? ", "2026-01-01", "10:30:00", "1.2.3.4/24", "a\\b", "a\"b", ":", ": ", "...", "http://x:80/y", "k8s.io/a: ",
	})
	rapid.Check(t, func(r *rapid.T) {
		var b strings.Builder
		for range rapid.IntRange(1, 8).Draw(r, "lines") {
			b.WriteString(strings.Repeat(" ", rapid.SampledFrom([]int{0, 0, 0, 2, 2, 4, 1, 3}).Draw(r, "indent")))
			for range rapid.IntRange(0, 3).Draw(r, "pieces") {
				b.WriteString(piece.Draw(r, "piece"))
			}
			b.WriteString("\n")
		}
		doc := b.String()
		if rapid.Bool().Draw(r, "cut") {
			doc = strings.TrimSuffix(doc, "\n")
		}
		agree(r, doc)
	})
}
