package main

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// named reports whether an object in a namespace goes by name: namespace/name, name.namespace, or name alone in the
// namespace default.
func named(o source.Object, name string) bool {
	k := source.KeyOf(o)
	return name == k.Namespace+"/"+k.Name || name == k.Name+"."+k.Namespace ||
		name == k.Name && k.Namespace == corev1.NamespaceDefault
}

// service returns the Service that goes by a name: as named has it, as cluster DNS does (web.shop.svc,
// web.shop.svc.cluster.local), or by its name alone where no other namespace has a Service or pod of that name. It is
// nil where there is none.
func (w *snapshot) service(name string) *corev1.Service {
	dns, rest, is := strings.Cut(name, ".svc")
	is = is && (rest == "" || strings.HasPrefix(rest, "."))
	var alone []source.Object
	for _, o := range w.objects {
		s, isService := o.(*corev1.Service)
		if isService && (named(s, name) || is && named(s, dns)) {
			return s
		}
		if k := source.KeyOf(o); k.Name == name && (isService || k.Kind == source.Pod || k.Kind == source.Node) {
			alone = append(alone, o)
		}
	}
	if len(alone) != 1 {
		return nil
	}
	s, _ := alone[0].(*corev1.Service)
	return s
}

// unknown returns the error for a name that nothing in the source has, with the nearest name that something has.
func (w *snapshot) unknown(name string) error {
	names := []string{"outside"}
	for _, o := range w.objects {
		k := source.KeyOf(o)
		whole := k.Namespace + "/" + k.Name
		if isPod := k.Kind == source.Pod; (isPod || k.Kind == source.Service) && (name == k.Name || isPod && name == whole) {
			return fmt.Errorf("%q alone doesn't name one Service: there is %s %s", name, k.Kind, whole)
		}
	}
	for _, o := range w.objects {
		switch k := source.KeyOf(o); k.Kind {
		case source.Service, source.Pod:
			names = append(names, k.Namespace+"/"+k.Name)
			if !strings.Contains(name, "/") {
				names = append(names, k.Name)
			}
		case source.Node:
			names = append(names, k.Name)
		}
	}
	if like := manifest.Nearest(name, names); like != "" {
		return fmt.Errorf("no address, pod, Service or node is named %q: did you mean %q?", name, like)
	}
	return fmt.Errorf("no address, pod, Service or node is named %q: use an address, namespace/name or a node's name",
		name)
}
