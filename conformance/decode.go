package conformance

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/source"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"
)

// decode reads the objects of a section of YAML, as written: without an API server's defaults but the namespace, and
// without its checks, since what got past those is resolve's to judge.
func (m manifest) decode() (objects []source.Object, err error) {
	line, begin := m.Line, m.Line
	var doc strings.Builder
	flush := func() error {
		defer doc.Reset()
		if strings.TrimSpace(doc.String()) == "" {
			return nil
		}
		o, err := decodeObject(doc.String())
		if err != nil {
			return fmt.Errorf("the document that begins in line %d: %w", begin, err)
		}
		objects = append(objects, o)
		return nil
	}
	for l := range strings.Lines(m.Text) {
		if strings.TrimRight(l, " \r\n") == "---" {
			if err := flush(); err != nil {
				return nil, err
			}
			begin = line + 1
		} else {
			doc.WriteString(l)
		}
		line++
	}
	return objects, flush()
}

func decodeObject(text string) (source.Object, error) {
	var kind struct {
		Kind string `json:"kind"`
	}
	if err := yaml.Unmarshal([]byte(text), &kind); err != nil {
		return nil, err
	}
	objects := map[source.Kind]source.Object{
		source.Service: &corev1.Service{}, source.EndpointSlice: &discoveryv1.EndpointSlice{}, source.Node: &corev1.Node{},
		source.ServiceCIDR: &networkingv1.ServiceCIDR{},
	}
	o, ok := objects[source.Kind(kind.Kind)]
	if !ok {
		return nil, fmt.Errorf("a case has no use for the kind %q: Service, EndpointSlice, Node or ServiceCIDR", kind.Kind)
	}
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		return nil, err
	}
	if o.GetNamespace() == "" && source.Kind(kind.Kind).Namespaced() {
		o.SetNamespace("default")
	}
	return o, nil
}
