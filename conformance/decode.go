package conformance

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/source"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
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
		source.ServiceCIDR: &networkingv1.ServiceCIDR{}, source.Pod: &corev1.Pod{}, source.Namespace: &corev1.Namespace{},
		source.NetworkPolicy:        &networkingv1.NetworkPolicy{},
		source.ClusterNetworkPolicy: &cnpv1.ClusterNetworkPolicy{},
	}
	o, ok := objects[source.Kind(kind.Kind)]
	if !ok {
		return nil, fmt.Errorf("invalid kind %q: use one of %v", kind.Kind, source.Kinds())
	}
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		return nil, err
	}
	if o.GetNamespace() == "" && source.Kind(kind.Kind).Namespaced() {
		o.SetNamespace("default")
	}
	if p, ok := o.(*corev1.Pod); ok {
		complete(p)
	}
	return o, nil
}

// complete sets what a Pod of the cast's namespace and name doesn't say of its node, containers and status.
func complete(p *corev1.Pod) {
	m := memberNamed(p.Name)
	if m == nil || m.Node == "" || m.isNode() || m.namespaceOf() != p.Namespace {
		return
	}
	full := m.podObject()
	if p.Spec.NodeName == "" {
		p.Spec.NodeName, p.Spec.HostNetwork = full.Spec.NodeName, full.Spec.HostNetwork
	}
	if p.Spec.Containers == nil {
		p.Spec.Containers = full.Spec.Containers
	}
	if p.Status.Phase == "" && p.Status.PodIPs == nil {
		p.Status = full.Status
	}
}
