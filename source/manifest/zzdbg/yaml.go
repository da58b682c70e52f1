package manifest

import (
	"bytes"

	"sigs.k8s.io/yaml"
)

// toJSON gives one YAML document as JSON, appended to buf where that is possible. The errors are sigs.k8s.io/yaml's.
//
// That library builds a tree, sorts it and prints it: 130 µs for an EndpointSlice of ten endpoints that decodes from
// JSON in 20. So the plain YAML that people and kubectl write goes line by line into JSON, in 4 µs; whatever is not
// plain goes through the library. A repeated field stands in the JSON again, for its decoder to find.
func toJSON(buf, doc []byte) ([]byte, error) {
	p := plain{in: doc, out: buf}
	if p.document() {
		return p.out, nil
	}
	return yaml.YAMLToJSONStrict(doc)
}

// plain turns plain YAML into JSON: printable ASCII, block mappings and sequences, one-line flow collections, one-line
// scalars and "|" texts. It knows what it does not know: its methods say false at anything else, and at what is wrong.
type plain struct {
	in     []byte // lines behind the current one
	out    []byte
	indent int    // of the current line, in spaces; -1 at the end
	body   []byte // the current line without indentation and trailing spaces
	depth  int
}

const maxDepth = 64

func (p *plain) document() bool {
	for _, c := range p.in {
		if (c < ' ' || c > '~') && c != '\n' {
			return false
		}
	}
	p.next()
	return p.indent == 0 && !dash(p.body) && p.mapping() && p.indent < 0
}

// next goes to the next line that is neither blank nor a comment.
func (p *plain) next() {
	for len(p.in) > 0 {
		line := p.line()
		p.in = p.in[min(len(line)+1, len(p.in)):]
		n := spaces(line)
		if p.body = bytes.TrimRight(line[n:], " "); len(p.body) > 0 && p.body[0] != '#' {
			p.indent = n
			return
		}
	}
	p.indent, p.body = -1, nil
}

// line gives the first of the lines to come.
func (p *plain) line() []byte {
	if i := bytes.IndexByte(p.in, '\n'); i >= 0 {
		return p.in[:i]
	}
	return p.in
}

func spaces(b []byte) (n int) {
	for n < len(b) && b[n] == ' ' {
		n++
	}
	return n
}

// dash says whether a line is an item of a sequence.
func dash(b []byte) bool { return b[0] == '-' && (len(b) == 1 || b[1] == ' ') }

// block writes the mapping or sequence that begins on the current line.
func (p *plain) block() bool {
	if dash(p.body) {
		return p.sequence()
	}
	return p.mapping()
}

func (p *plain) mapping() bool {
	if p.depth++; p.depth > maxDepth {
		return false
	}
	indent, sep := p.indent, byte('{')
	for p.indent == indent && !dash(p.body) {
		name, rest, ok := key(p.body)
		if !ok {
			return false
		}
		p.out = append(quote(append(p.out, sep), name), ':')
		if !p.value(indent, rest) {
			return false
		}
		sep = ','
	}
	p.out = append(p.out, '}')
	p.depth--
	return p.indent < indent
}

// value writes what stands behind a key on its line, or on the lines below.
func (p *plain) value(indent int, rest []byte) bool {
	switch {
	case len(rest) == 0 || rest[0] == '#':
		p.next()
		if p.indent > indent || p.indent == indent && dash(p.body) {
			return p.block()
		}
		p.out = append(p.out, "null"...)
		return true
	case rest[0] == '|':
		return p.literal(indent, string(rest))
	}
	return p.inline(indent, rest)
}

func (p *plain) sequence() bool {
	if p.depth++; p.depth > maxDepth {
		return false
	}
	indent, sep := p.indent, byte('[')
	for p.indent == indent && dash(p.body) {
		p.out = append(p.out, sep)
		if !p.item(indent) {
			return false
		}
		sep = ','
	}
	p.out = append(p.out, ']')
	p.depth--
	return p.indent <= indent // a key may follow at the same indentation: the mapping around will know
}

func (p *plain) item(indent int) bool {
	n := 1 + spaces(p.body[1:])
	rest := p.body[n:]
	if len(rest) == 0 || rest[0] == '#' {
		p.next()
		if p.indent > indent {
			return p.block()
		}
		p.out = append(p.out, "null"...)
		return true
	}
	if _, _, ok := key(rest); ok {
		p.indent, p.body = indent+n, rest
		return p.mapping()
	}
	return !dash(rest) && p.inline(indent, rest)
}

// inline writes a value that must end on its line.
func (p *plain) inline(indent int, s []byte) bool {
	switch s[0] {
	case '"', '\'', '{', '[':
		n, ok := p.flow(s)
		if !ok || n < len(s) && (s[n] != ' ' || bytes.TrimLeft(s[n:], " ")[0] != '#') {
			return false
		}
	default:
		if i := bytes.Index(s, []byte(" #")); i >= 0 {
			s = bytes.TrimRight(s[:i], " ")
		}
		if s[len(s)-1] == ':' || bytes.Contains(s, []byte(": ")) || !p.scalar(s) {
			return false
		}
	}
	p.next()
	return p.indent <= indent // deeper would be a scalar of several lines
}

// literal writes a "|" text, whose lines are deeper than indent.
func (p *plain) literal(indent int, head string) bool {
	if head != "|" && head != "|-" || !bytes.HasSuffix(p.in, []byte("\n")) {
		return false
	}
	width, blank := 0, 0
	for p.out = append(p.out, '"'); len(p.in) > 0; {
		line := p.line()
		n := spaces(line)
		if n == len(line) && n <= max(width, indent) {
			blank++
		} else if n <= indent {
			break
		} else if n == len(line) || width == 0 && blank > 0 || n < width {
			return false
		} else {
			if width > 0 {
				blank++
			}
			for ; blank > 0; blank-- {
				p.out = append(p.out, `\n`...)
			}
			if width == 0 {
				width = n
			}
			p.out = escape(p.out, line[width:])
		}
		p.in = p.in[len(line)+1:]
	}
	if width == 0 {
		return false
	}
	if head == "|" {
		p.out = append(p.out, `\n`...)
	}
	p.out = append(p.out, '"')
	p.next()
	return p.indent <= indent
}

// flow writes the quoted string or the flow collection that s begins with, and gives its length.
func (p *plain) flow(s []byte) (n int, ok bool) {
	switch s[0] {
	case '"', '\'':
		str, n, ok := unquote(s)
		if ok {
			p.out = quote(p.out, str)
		}
		return n, ok
	case '{', '[':
		p.depth++
		n, ok = p.collection(s, s[0] == '{')
		p.depth--
		return n, ok && p.depth < maxDepth
	}
	for n < len(s) && word(s[n]) {
		n++
	}
	return n, n > 0 && p.scalar(s[:n])
}

func (p *plain) collection(s []byte, mapping bool) (int, bool) {
	end := s[0] + 2 // ] is two behind [ in ASCII, and } behind {
	p.out = append(p.out, s[0])
	n := 1 + spaces(s[1:])
	for first := true; n < len(s); first = false {
		if s[n] == end && first {
			p.out = append(p.out, end)
			return n + 1, true
		}
		if mapping {
			name, l, ok := flowKey(s[n:])
			if !ok {
				return 0, false
			}
			p.out = append(quote(p.out, name), ':')
			if n += l; n == len(s) {
				return 0, false
			}
		}
		l, ok := p.flow(s[n:])
		if !ok || p.depth > maxDepth {
			return 0, false
		}
		n += l
		if n += spaces(s[n:]); n == len(s) {
			return 0, false
		}
		switch p.out = append(p.out, s[n]); s[n] {
		case end:
			return n + 1, true
		case ',':
			n++
			n += spaces(s[n:])
		default:
			return 0, false
		}
	}
	return 0, false
}

// flowKey gives the name that s begins with, and the length up to its value.
func flowKey(s []byte) (name []byte, n int, ok bool) {
	name, rest, ok := key(s)
	if !ok || len(rest) == 0 {
		return nil, 0, false
	}
	return name, len(s) - len(rest), true
}

// word says whether c may stand anywhere in a name or in a scalar of a flow collection.
func word(c byte) bool {
	return letter(c) || digit(c) || c == '-' || c == '.' || c == '/' || c == '_'
}

func letter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }
func digit(c byte) bool  { return '0' <= c && c <= '9' }

// key gives the name that a line of a mapping begins with, and what stands behind its colon.
func key(s []byte) (name, rest []byte, ok bool) {
	n := 0
	if s[0] == '"' || s[0] == '\'' {
		if name, n, ok = unquote(s); !ok {
			return nil, nil, false
		}
	} else {
		for n < len(s) && word(s[n]) {
			n++
		}
		if name = s[:n]; n == 0 || !letter(s[0]) || reserved(name) {
			return nil, nil, false
		}
	}
	if n > 512 || n == len(s) || s[n] != ':' || n+1 < len(s) && s[n+1] != ' ' {
		return nil, nil, false
	}
	return name, bytes.TrimLeft(s[n+1:], " "), true
}

// unquote gives the content of the string in quotes that s begins with, and the length with quotes.
func unquote(s []byte) (str []byte, n int, ok bool) {
	i := bytes.IndexByte(s[1:], s[0])
	if i < 0 {
		return nil, 0, false
	}
	str, n = s[1:1+i], i+2
	if s[0] == '\'' {
		return str, n, n == len(s) || s[n] != '\''
	}
	return str, n, bytes.IndexByte(str, '\\') < 0
}

// scalar writes a scalar without quotes: a string, a whole number, true, false or null.
func (p *plain) scalar(s []byte) bool {
	switch {
	case string(s) == "true" || string(s) == "false" || string(s) == "null" || number(s):
		p.out = append(p.out, s...)
	case (letter(s[0]) || s[0] == '/' || s[0] == '_') && !reserved(s) || address(s):
		p.out = quote(p.out, s)
	default:
		return false
	}
	return true
}

// reserved says whether YAML 1.1 reads a word as something other than a string.
func reserved(s []byte) bool {
	if len(s) > 5 {
		return false
	}
	switch string(bytes.ToLower(s)) {
	case "y", "n", "yes", "no", "on", "off", "true", "false", "null":
		return true
	}
	return false
}

// number says whether s is a whole number that reads the same in YAML and JSON.
func number(s []byte) bool {
	if len(s) > 15 || s[0] == '0' && len(s) > 1 {
		return false
	}
	for _, c := range s {
		if !digit(c) {
			return false
		}
	}
	return true
}

// address says whether s looks like an IP address or prefix that begins with a digit, and like no number or time.
func address(s []byte) bool {
	dots, colons := 0, 0
	for i, c := range s {
		switch {
		case c == '.':
			dots++
		case c == ':':
			colons++
		case digit(c) || c == '/' && i > 0 || i > 0 && 'a' <= c && c <= 'f':
		default:
			return false
		}
	}
	return digit(s[0]) && (dots == 3 || colons > 1)
}

// quote appends printable ASCII as a JSON string.
func quote(out, s []byte) []byte {
	return append(escape(append(out, '"'), s), '"')
}

func escape(out, s []byte) []byte {
	for {
		i := bytes.IndexAny(s, `"\`)
		if i < 0 {
			return append(out, s...)
		}
		out = append(append(out, s[:i]...), '\\', s[i])
		s = s[i+1:]
	}
}
