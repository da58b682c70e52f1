package manifest

import (
	"bytes"
	"encoding/json"
	"iter"
	"slices"
)

// A chunk is the text of one document.
type chunk struct {
	text []byte // from its first line that says something
	line int    // that line's number in the file, from 1
	json bool   // begins like a JSON object
}

// split cuts a file at the lines that YAML marks documents with ("---", "..."), and JSON texts that follow one another.
// Documents of nothing but blanks and comments are left out. No quoting hides a marker: YAML forbids markers at the
// start of a line inside any scalar.
func split(text []byte) (out []chunk) {
	text = plainText(text)
	start, first := 0, 0 // of the document: offset and line, 0 before its first word
	flush := func(end int) {
		if first > 0 {
			out = append(out, chunks(text[start:end], first)...)
		}
		first = 0
	}
	for at, n := 0, 1; at < len(text); n++ {
		end := len(text)
		if i := bytes.IndexByte(text[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		from := at
		if marker(text[at:end]) {
			flush(at)
			from += 3
		}
		if first == 0 && says(text[from:end]) {
			start, first = from, n
		}
		at = end
	}
	flush(len(text))
	return out
}

// says reports whether a line is neither blank nor a comment nor a directive.
func says(line []byte) bool {
	i := space(line, 0)
	return i < len(line) && line[i] != '#' && line[0] != '%'
}

// marker reports whether a line begins or ends a document.
func marker(line []byte) bool {
	if len(line) < 3 || string(line[:3]) != "---" && string(line[:3]) != "..." {
		return false
	}
	return len(line) == 3 || bytes.IndexByte([]byte(" \t\r\n"), line[3]) >= 0
}

// chunks makes chunks of one document's text: one, or one for each JSON object where several stand in a row.
func chunks(text []byte, line int) (out []chunk) {
	whole := []chunk{{text: text, line: line, json: bytes.TrimLeft(text, " \t\r\n")[0] == '{'}}
	if !whole[0].json {
		return whole
	}
	for at := 0; ; {
		i := space(text, at)
		if i == len(text) {
			return out
		}
		end := value(text, i)
		if end < 0 || text[i] != '{' {
			return whole
		}
		line += bytes.Count(text[at:i], []byte("\n"))
		out = append(out, chunk{text: text[i:end], line: line, json: true})
		line += bytes.Count(text[i:end], []byte("\n"))
		at = end
	}
}

// space returns the offset of the first byte at or after i that is no JSON white space.
func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// value returns the offset behind the JSON value at i, or -1 where brackets or quotes don't close. It checks nothing
// else.
func value(b []byte, i int) int {
	for depth := 0; i < len(b); {
		switch b[i] {
		case '"':
			if i = quoted(b, i); i < 0 {
				return -1
			}
		case '{', '[':
			depth++
			i++
		case '}', ']':
			if depth--; depth < 0 {
				return -1
			}
			i++
		default:
			if i++; depth == 0 {
				for i < len(b) && bytes.IndexByte([]byte(" \t\r\n,:{}[]\""), b[i]) < 0 {
					i++
				}
			}
		}
		if depth == 0 {
			return i
		}
	}
	return -1
}

// quoted returns the offset behind the JSON string at i, or -1.
func quoted(b []byte, i int) int {
	for i++; i < len(b); {
		end := bytes.IndexByte(b[i:], '"')
		if end < 0 {
			return -1
		}
		escape := bytes.IndexByte(b[i:i+end], '\\')
		if escape < 0 {
			return i + end + 1
		}
		i += escape + 2
	}
	return -1
}

// members goes through the members of the JSON object b, with the names as they are quoted, as far as it can follow.
func members(b []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(name, val []byte) bool) {
		i := space(b, 0)
		if i == len(b) || b[i] != '{' {
			return
		}
		for i = space(b, i+1); i < len(b) && b[i] == '"'; i = space(b, i+1) {
			end := quoted(b, i)
			if end < 0 {
				return
			}
			name := b[i:end]
			if i = space(b, end); i == len(b) || b[i] != ':' {
				return
			}
			i = space(b, i+1)
			if end = value(b, i); end < 0 || !yield(name, b[i:end]) {
				return
			}
			if i = space(b, end); i == len(b) || b[i] != ',' {
				return
			}
		}
	}
}

// elements returns the elements of the JSON array b, which must be valid.
func elements(b []byte) (out [][]byte) {
	for i := space(b, 1); i < len(b) && b[i] != ']'; i = space(b, i) {
		end := value(b, i)
		if end < 0 {
			return out
		}
		out = append(out, b[i:end])
		if i = space(b, end); i < len(b) && b[i] == ',' {
			i++
		}
	}
	return out
}

// peek returns the apiVersion and kind of a JSON object, empty where it has none or they are no strings.
func peek(b []byte) (apiVersion, kind string) {
	for name, val := range members(b) {
		switch string(name) {
		case `"apiVersion"`:
			apiVersion = text(val)
		case `"kind"`:
			kind = text(val)
		default:
			continue
		}
		if apiVersion != "" && kind != "" {
			break
		}
	}
	return apiVersion, kind
}

// repeated returns the first of names that the JSON object b has more than once, or "".
func repeated(b []byte, names ...string) string {
	seen := map[string]bool{}
	for name := range members(b) {
		n := text(name)
		if seen[n] && slices.Contains(names, n) {
			return n
		}
		seen[n] = true
	}
	return ""
}

// text returns the JSON string val, or "" if it is none.
func text(val []byte) (s string) {
	if json.Unmarshal(val, &s) != nil {
		return ""
	}
	return s
}
