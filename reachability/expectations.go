package reachability

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"fairlead.dev/fairlead/source/manifest"
)

// The apiVersion and kind of a document of expectations.
const (
	APIVersion = "fairlead.dev/v1alpha1"
	Kind       = "PolicyExpectations"
)

// The bounds of a file of expectations.
const (
	maxBytes        = 1 << 20
	maxExpectations = 10000
	maxFaults       = 20 // that are named
)

// Expectation is what should become of connections.
type Expectation struct {
	File     string
	Line     int    // from 1
	Name     string // "" where it has none
	From, To []string
	Ports    []string
	Expect   Fate   // Allowed or Denied
	By       string // the policy that is to decide it: namespace/name, or the name of a ClusterNetworkPolicy; "": any
}

// String returns its name, or what it says in a line.
func (e Expectation) String() string {
	if e.Name != "" {
		return e.Name
	}
	s := fmt.Sprintf("%s → %s:%s %s", strings.Join(e.From, ", "), strings.Join(e.To, ", "), strings.Join(e.Ports, ", "),
		e.Expect)
	if e.By != "" {
		s += " by " + e.By
	}
	return s
}

// ReadExpectations returns the expectations in text, which is the content of file: YAML documents of apiVersion
// fairlead.dev/v1alpha1 and kind PolicyExpectations. What can't be taken as it stands is an error that names the file,
// the line and the way out.
func ReadExpectations(file string, text []byte) ([]Expectation, error) {
	r := reader{file: file}
	if len(text) > maxBytes {
		return nil, fmt.Errorf("%s: %d bytes, %d are the limit: split it", file, len(text), maxBytes)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var doc yaml.Node
		err := d.Decode(&doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			r.faults = append(r.faults, fmt.Errorf("%s: %s", file, strings.TrimPrefix(err.Error(), "yaml: ")))
			break
		}
		if len(doc.Content) == 1 && doc.Content[0].Tag != "!!null" {
			r.document(doc.Content[0])
		}
	}
	if len(r.faults) == 0 && len(r.list) == 0 {
		return nil, fmt.Errorf("%s: no expectation: list them below \"expectations:\"", file)
	}
	if n := len(r.faults); n > maxFaults {
		r.faults = append(r.faults[:maxFaults], fmt.Errorf("%s: %d more errors; correct those that are named first", file,
			n-maxFaults))
	}
	return r.list, errors.Join(r.faults...)
}

// reader reads one file.
type reader struct {
	file   string
	list   []Expectation
	faults []error
}

func (r *reader) fault(n *yaml.Node, format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf("%s:%d: %s", r.file, n.Line, fmt.Sprintf(format, args...)))
}

// fields calls read for each field of a mapping, which may have those that are known, each once.
func (r *reader) fields(n *yaml.Node, known []string, read func(name string, v *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		r.fault(n, "a mapping is missing: write fields such as %s: VALUE", known[0])
		return
	}
	var seen []string
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		switch {
		case !slices.Contains(known, k.Value) || k.Kind != yaml.ScalarNode:
			if like := manifest.Nearest(k.Value, known); like != "" {
				r.fault(k, "unknown field %q: did you mean %q?", k.Value, like)
			} else {
				r.fault(k, "unknown field %q: use %s", k.Value, strings.Join(known, ", "))
			}
		case slices.Contains(seen, k.Value):
			r.fault(k, "field %q stands twice: keep one", k.Value)
		default:
			seen = append(seen, k.Value)
			read(k.Value, v)
		}
	}
}

func (r *reader) document(n *yaml.Node) {
	version, kind, there := "", "", false
	r.fields(n, []string{"apiVersion", "kind", "metadata", "expectations"}, func(name string, v *yaml.Node) {
		switch name {
		case "apiVersion":
			version = r.text(v)
		case "kind":
			kind = r.text(v)
		case "expectations":
			there = true
			if v.Kind != yaml.SequenceNode {
				r.fault(v, "expectations: a list is missing: begin each item with a dash")
				return
			}
			for _, item := range v.Content {
				r.expectation(item)
			}
		}
	})
	if n.Kind == yaml.MappingNode && (version != APIVersion || kind != Kind) {
		r.fault(n, "apiVersion %q and kind %q: use apiVersion: %s and kind: %s", version, kind, APIVersion, Kind)
	}
	if n.Kind == yaml.MappingNode && !there {
		r.fault(n, "field \"expectations\" is missing: add a list")
	}
}

func (r *reader) expectation(n *yaml.Node) {
	e, before := Expectation{File: r.file, Line: n.Line}, len(r.faults)
	r.fields(n, []string{"name", "from", "to", "port", "expect", "by"}, func(name string, v *yaml.Node) {
		switch name {
		case "name":
			e.Name = r.text(v)
		case "from":
			e.From = r.texts(v)
		case "to":
			e.To = r.texts(v)
		case "port":
			e.Ports = r.texts(v)
		case "by":
			e.By = r.text(v)
		case "expect":
			e.Expect = Fate(r.text(v))
			if e.Expect != Allowed && e.Expect != Denied {
				r.fault(v, "invalid expect %q: use %s or %s", e.Expect, Allowed, Denied)
			}
		}
	})
	if len(r.faults) > before {
		return
	}
	for name, missing := range map[string]bool{"from": len(e.From) == 0, "to": len(e.To) == 0, "port": len(e.Ports) == 0,
		"expect": e.Expect == ""} {
		if missing {
			r.fault(n, "field %q is missing%s", name, map[string]string{
				"port": `: use a number, the name of a port, or "*" for every port`}[name])
		}
	}
	if len(r.list) == maxExpectations {
		r.fault(n, "more than %d expectations: split the file", maxExpectations)
		return
	}
	if len(r.faults) == before {
		r.list = append(r.list, e)
	}
}

// text returns a scalar's text.
func (r *reader) text(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.AliasNode:
		r.fault(n, "alias *%s: write the text out", n.Value)
	case n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Value == "":
		r.fault(n, "text is missing here")
	default:
		return n.Value
	}
	return ""
}

// texts returns the text of a scalar, or of each of a list.
func (r *reader) texts(n *yaml.Node) (out []string) {
	if n.Kind != yaml.SequenceNode {
		return []string{r.text(n)}
	}
	if len(n.Content) == 0 {
		r.fault(n, "the list is empty: write one item at least")
	}
	for _, item := range n.Content {
		out = append(out, r.text(item))
	}
	return out
}
