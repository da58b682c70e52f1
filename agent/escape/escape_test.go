package escape

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"
)

func TestString(t *testing.T) {
	for s, want := range map[string]string{
		"shop/web:http ä → 日本 🙂":   "shop/web:http ä → 日本 🙂",
		"\x1b[2J\x1b[31mX\nOK ":    `\u001b[2J\u001b[31mX\nOK `,
		"a\tb\rc\x00\x7f":          `a\tb\rc\u0000\u007f`,
		"C1 \u009b31m":             `C1 \u009b31m`,
		"\u202eevil\u2066":         `\u202eevil\u2066`,
		"\u2028\ufeff\u00ad\u200b": `\u2028\ufeff\u00ad\u200b`,
		"tag \U000e0041":           `tag \udb40\udc41`,
		"half \xe6\x97":            `half \xe6\x97`,
		"\x9b31m":                  `\x9b31m`,
		"\ufffd":                   "\ufffd",
	} {
		if got := String(s); got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}

func TestWriterPreservesLinesAndColumns(t *testing.T) {
	var b bytes.Buffer
	w := Writer(&b)
	for _, c := range []byte("one\ttwo\n\x1b[2J 日\xe6\n") { // byte by byte
		if n, err := w.Write([]byte{c}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if want := "one\ttwo\n" + `\u001b[2J 日\xe6` + "\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

// What comes out controls nothing, however it is cut, and is the same JSON.
func FuzzWriter(f *testing.F) {
	f.Add("\x1b[2J\u009b\u202e\U000e0041\xff日", 3)
	f.Fuzz(func(t *testing.T, s string, cut int) {
		if r := String(s); strings.ContainsFunc(r, func(r rune) bool { return !unicode.IsGraphic(r) }) {
			t.Errorf("%q becomes %q", s, r)
		}
		var whole, parts, text bytes.Buffer
		Writer(&whole).Write([]byte(s + "\n"))
		cut = min(max(cut, 0), len(s))
		w := Writer(&parts)
		w.Write([]byte(s[:cut]))
		w.Write([]byte(s[cut:] + "\n"))
		if whole.String() != parts.String() {
			t.Errorf("%q cut at %d becomes %q, whole %q", s, cut, parts.String(), whole.String())
		}
		if err := json.NewEncoder(Writer(&text)).Encode(s); err != nil {
			t.Fatal(err)
		}
		plain, _ := json.Marshal(s)
		var a, b string
		if err := json.Unmarshal(plain, &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text.Bytes(), &b); err != nil || a != b {
			t.Errorf("%q as JSON becomes %q, %v", a, b, err)
		}
	})
}
