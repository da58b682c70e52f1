package manifest

import (
	"strings"

	kjson "sigs.k8s.io/json"

	"fairlead.dev/fairlead/source"
)

// A Document is an object of a text that is not decoded yet.
type Document struct {
	Version, Kind string
	Line          int // of the text, from 1
	json          []byte
}

// Documents returns the objects of a text in YAML or JSON, those of lists one by one, and what of it can't be read.
func Documents(text []byte) (out []Document, problems []source.Problem) {
	for _, c := range split(text) {
		j, bad := c.toJSON(true)
		switch {
		case bad != nil:
			for _, p := range bad.problems {
				p.Object, p.Line = bad.key, c.line
				problems = append(problems, p)
			}
		case j[space(j, 0)] == '{':
			version, kind := peek(j)
			out = append(out, Document{version, kind, c.line, j}.items()...)
		case string(j) != "null":
			problems = append(problems, source.Problem{Line: c.line, Reason: Syntax,
				Message: "a document must be an object with apiVersion, kind and metadata"})
		}
	}
	return out, problems
}

// items returns the objects of a list, or the one that d is.
func (d Document) items() (out []Document) {
	of, isList := strings.CutSuffix(d.Kind, "List")
	if !isList {
		return []Document{d}
	}
	for name, val := range members(d.json) {
		if text(name) != "items" || val[0] != '[' {
			continue
		}
		for _, e := range elements(val) {
			version, kind := peek(e)
			if version == "" && kind == "" {
				version, kind = d.Version, of
			}
			out = append(out, Document{version, kind, d.Line, e}.items()...)
		}
	}
	return out
}

// Key names the object, with an empty name where it has none that is text.
func (d Document) Key() source.Key { return identity(d.json, d.Kind) }

// Decode reads the document into o, and returns what o has no field for, and what is of the wrong type.
func (d Document) Decode(o source.Object) []source.Problem {
	strict, err := kjson.UnmarshalStrict(d.json, o)
	if err == nil && strict == nil {
		return nil
	}
	return explain(d.json, o, d.Kind, strict, err).problems
}

// Complete sets the defaults of an object that Fairlead reads, and returns what an API server would refuse of it.
func Complete(o source.Object) []source.Problem {
	setDefaults(o)
	return validate(o)
}
