package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"unicode/utf16"

	"go.yaml.in/yaml/v2"
	yaml3 "go.yaml.in/yaml/v3"
)

var errMore = errors.New(`more text follows behind the end of the document: ` +
	`indent it like the rest, or put a line "---" between`)

// yamlToJSON returns the document in text as JSON, read as kubectl reads it, and an error if more than one document is
// there. A key that is repeated is repeated in the JSON too, so that what decodes the object names it.
func yamlToJSON(text []byte) ([]byte, error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.SetStrict(true)
	var v any
	var n *yaml3.Node
	err := d.Decode(&v)
	if _, ok := errors.AsType[*yaml.TypeError](err); ok {
		// A key is repeated, or overrides one of a merge: this parser can't tell which.
		var root yaml3.Node
		if err := yaml3.Unmarshal(text, &root); err != nil {
			return nil, err
		}
		n, v, d = root.Content[0], nil, yaml.NewDecoder(bytes.NewReader(text))
		err = d.Decode(&v)
	}
	if err == nil {
		if more := d.Decode(new(struct{})); more != io.EOF {
			err = errMore
		}
	}
	if err != nil && err != io.EOF {
		return nil, err
	}
	if v, err = jsonable(v, n); err != nil {
		return nil, err
	}
	return json.Marshal(v)
}

// jsonable returns v, which was read from n, as json.Marshal takes it. Without n, no key in v is repeated.
func jsonable(v any, n *yaml3.Node) (_ any, err error) {
	switch v := v.(type) {
	case map[any]any:
		nodes, repeated := keys(n)
		out := make(map[string]any, len(v))
		for k, val := range v {
			name, ok := keyName(k)
			if !ok {
				return nil, fmt.Errorf("invalid key %v: use text", k)
			}
			if out[name], err = jsonable(val, nodes[name]); err != nil {
				return nil, err
			}
		}
		if repeated != nil {
			return repeating{out, repeated}, nil
		}
		return out, nil
	case []any:
		out := make([]any, len(v))
		for i := range v {
			var item *yaml3.Node
			if n != nil && i < len(n.Content) {
				item = n.Content[i]
			}
			if out[i], err = jsonable(v[i], item); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	return v, nil
}

// keys returns the values of a mapping's own keys, and the names of those that are repeated.
func keys(n *yaml3.Node) (nodes map[string]*yaml3.Node, repeated []string) {
	for n != nil && n.Kind == yaml3.AliasNode {
		n = n.Alias
	}
	if n == nil || n.Kind != yaml3.MappingNode {
		return nil, nil
	}
	nodes = map[string]*yaml3.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Tag == "!!merge" {
			continue
		}
		var k any = key.Value
		if key.Style == 0 {
			_ = yaml.Unmarshal([]byte(key.Value), &k) // as the other parser takes it
		}
		name, _ := keyName(k)
		if nodes[name] != nil && !slices.Contains(repeated, name) {
			repeated = append(repeated, name)
		}
		nodes[name] = n.Content[i+1]
	}
	return nodes, repeated
}

// keyName returns a key of YAML as a key of JSON, and whether it can be one.
func keyName(k any) (string, bool) {
	switch k := k.(type) {
	case string:
		return k, true
	case int, int64, uint64, bool:
		return fmt.Sprint(k), true
	case float64:
		return strconv.FormatFloat(k, 'g', -1, 32), true
	}
	return "", false
}

// repeating is an object of JSON in which some keys are repeated.
type repeating struct {
	members  map[string]any
	repeated []string
}

func (r repeating) MarshalJSON() ([]byte, error) {
	out, err := json.Marshal(r.members)
	for _, name := range r.repeated {
		again, e := json.Marshal(map[string]any{name: r.members[name]})
		if err = errors.Join(err, e); err != nil {
			return nil, err
		}
		out = append(append(out[:len(out)-1], ','), again[1:]...)
	}
	return out, err
}

// plainText returns text in UTF-8 without byte order mark, and with lines that end with LF. UTF-16 is known by its
// byte order mark, as Windows PowerShell writes it; half a character at its end makes the last document invalid.
func plainText(text []byte) []byte {
	little := bytes.HasPrefix(text, []byte("\xff\xfe"))
	if little || bytes.HasPrefix(text, []byte("\xfe\xff")) {
		units := make([]uint16, 0, len(text)/2)
		for i := 2; i+1 < len(text); i += 2 {
			low, high := text[i+1], text[i]
			if little {
				low, high = high, low
			}
			units = append(units, uint16(high)<<8|uint16(low))
		}
		odd := text[len(text)-len(text)%2:]
		if text = []byte(string(utf16.Decode(units))); len(odd) > 0 {
			text = append(text, 0xff)
		}
	}
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf"))
	if bytes.IndexByte(text, '\r') >= 0 {
		text = bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("\r\n"), []byte("\n")), []byte("\r"), []byte("\n"))
	}
	return text
}
