package config

import (
	"bufio"
	"bytes"
	gojson "encoding/json"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// content is what a file holds: nil for what it has no document of.
type content struct {
	proxy    *v1alpha1.KubeProxyConfiguration
	own      *FairleadConfiguration
	warnings []string
}

// read reads a file's documents: one KubeProxyConfiguration and one FairleadConfiguration at most, in any order.
func read(text []byte) (c content, err error) {
	var errs []error
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for n := 1; ; n++ {
		doc, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return c, fmt.Errorf("document %d: %w", n, err)
		}
		if err := c.apply(doc); err != nil {
			errs = append(errs, fmt.Errorf("document %d: %w", n, err))
		}
	}
	if len(errs) == 0 && c.proxy == nil && c.own == nil {
		errs = append(errs, fmt.Errorf("no configuration found: use a KubeProxyConfiguration (%s), a %s (%s), or both",
			v1alpha1.SchemeGroupVersion, Kind, APIVersion))
	}
	return c, errors.Join(errs...)
}

// formerFields are fields of FairleadConfiguration by their former names. They are accepted with a warning.
var formerFields = []struct{ in, name, now string }{
	{"", "takeOver", "migrateFromKubeProxy"}, {"ebpf", "room", "mapEntries"}, {"ebpf", "shortcut", "fastPath"},
}

// rename returns a document with the present names of fields, and warns of the former ones. A field under both names is
// an error.
func (c *content) rename(text []byte) ([]byte, error) {
	var document map[string]any
	if err := json.UnmarshalCaseSensitivePreserveInts(text, &document); err != nil {
		return nil, err
	}
	found := false
	for _, f := range formerFields {
		in, path := document, f.name
		if f.in != "" {
			in, _ = document[f.in].(map[string]any)
			path = f.in + "." + f.name
		}
		value, used := in[f.name]
		if !used {
			continue
		}
		if _, both := in[f.now]; both {
			return nil, fmt.Errorf("%s is the former name of %s: set one", path, f.now)
		}
		delete(in, f.name)
		in[f.now], found = value, true
		c.warnings = append(c.warnings, fmt.Sprintf("%s is deprecated: use %s", path, f.now))
	}
	if !found {
		return text, nil
	}
	return gojson.Marshal(document)
}

// apply reads one document. kube-proxy's is read leniently where it can't be read strictly, with a warning, as
// kube-proxy does; ours only strictly.
func (c *content) apply(doc []byte) error {
	text, duplicate := yaml.YAMLToJSONStrict(doc)
	if duplicate != nil {
		var err error
		if text, err = yaml.YAMLToJSON(doc); err != nil {
			return fmt.Errorf("invalid YAML: %w", err)
		}
	}
	if text = bytes.TrimSpace(text); bytes.Equal(text, []byte("null")) {
		return nil
	}
	var kind struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(text, &kind); err != nil {
		return fmt.Errorf("invalid configuration: %w", err)
	}
	var into any
	var err error
	switch id := schema.FromAPIVersionAndKind(kind.APIVersion, kind.Kind); id {
	case v1alpha1.SchemeGroupVersion.WithKind("KubeProxyConfiguration"):
		if c.proxy != nil {
			return errors.New("duplicate KubeProxyConfiguration: use one")
		}
		c.proxy = &v1alpha1.KubeProxyConfiguration{}
		into = c.proxy
	case schema.FromAPIVersionAndKind(APIVersion, Kind):
		if c.own != nil {
			return fmt.Errorf("duplicate %s: use one", Kind)
		}
		c.own = &FairleadConfiguration{}
		into = c.own
	default:
		return fmt.Errorf("unsupported type %s: use KubeProxyConfiguration (%s) or %s (%s)", id, v1alpha1.SchemeGroupVersion,
			Kind, APIVersion)
	}
	if kind.Kind == Kind {
		if text, err = c.rename(text); err != nil {
			return fmt.Errorf("read %s: %w", kind.Kind, err)
		}
	}
	strict, err := json.UnmarshalStrict(text, into)
	if err != nil {
		return fmt.Errorf("read %s: %w", kind.Kind, err)
	}
	if duplicate != nil {
		strict = append([]error{duplicate}, strict...)
	}
	if len(strict) > 0 && kind.Kind == Kind {
		return fmt.Errorf("%s: %w", Kind, errors.Join(strict...))
	}
	for _, e := range strict {
		c.warnings = append(c.warnings, fmt.Sprintf("%s: %v: ignored", kind.Kind, e))
	}
	return nil
}
