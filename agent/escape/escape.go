// Package escape makes text of others safe to print: names of processes and objects, messages of API servers. What
// would control a terminal, make a line of its own or change the order of what is read comes out as an escape sequence
// of Go and JSON, such as \u001b.
package escape

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// String returns s in one line, with everything escaped that is not a visible character or a space: control characters
// (also newline and tab), format characters such as those that change the direction of writing, and what is not UTF-8.
func String(s string) string {
	for _, r := range s {
		if !unicode.IsGraphic(r) || r == utf8.RuneError {
			return string(escaped(nil, []byte(s), unicode.IsGraphic))
		}
	}
	return s
}

// Writer returns a writer that passes text on to w as String has it, but for newlines and tabs. JSON stays the same
// JSON.
func Writer(w io.Writer) io.Writer { return &writer{to: w} }

type writer struct {
	to   io.Writer
	rest []byte // the begin of a character
	out  []byte
}

// Write implements io.Writer. The begin of a character waits for its end.
func (w *writer) Write(b []byte) (int, error) {
	text := b
	if len(w.rest) > 0 {
		text = append(w.rest, b...)
	}
	whole := len(text)
	for i := range min(utf8.UTFMax-1, whole) {
		if at := whole - 1 - i; utf8.RuneStart(text[at]) {
			if !utf8.FullRune(text[at:]) {
				whole = at
			}
			break
		}
	}
	w.out = escaped(w.out[:0], text[:whole],
		func(r rune) bool { return r == '\n' || r == '\t' || unicode.IsGraphic(r) })
	w.rest = bytes.Clone(text[whole:])
	if _, err := w.to.Write(w.out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// escaped appends text to out, with what does not pass escaped.
func escaped(out, text []byte, passes func(rune) bool) []byte {
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && n == 1:
			out = fmt.Appendf(out, `\x%02x`, text[0])
		case passes(r):
			out = append(out, text[:n]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			if i := strings.IndexRune("\n\r\t", r); i >= 0 {
				out = append(out, '\\', "nrt"[i])
				break
			}
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		text = text[n:]
	}
	return out
}
