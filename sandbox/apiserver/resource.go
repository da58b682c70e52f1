package apiserver

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// resource is where a kind of object is served.
type resource struct {
	schema.GroupVersionResource
	kind       source.Kind
	namespaced bool
}

// resources are all there are.
func resources() []resource {
	core, discovery, networking := schema.GroupVersion{Version: "v1"},
		schema.GroupVersion{Group: "discovery.k8s.io", Version: "v1"},
		schema.GroupVersion{Group: "networking.k8s.io", Version: "v1"}
	return []resource{
		{core.WithResource("namespaces"), source.Namespace, false},
		{core.WithResource("nodes"), source.Node, false},
		{core.WithResource("pods"), source.Pod, true},
		{core.WithResource("services"), source.Service, true},
		{core.WithResource("endpoints"), "Endpoints", true}, // none: older clients wait until they have listed them
		{discovery.WithResource("endpointslices"), source.EndpointSlice, true},
		{networking.WithResource("networkpolicies"), source.NetworkPolicy, true},
		{networking.WithResource("servicecidrs"), source.ServiceCIDR, false},
		{cnpv1.Resource("clusternetworkpolicies").WithVersion(cnpv1.GroupVersion.Version), source.ClusterNetworkPolicy,
			false},
	}
}

// custom reports whether r is a custom resource: those have no protobuf form.
func (r resource) custom() bool { return r.kind == source.ClusterNetworkPolicy }

// typeMeta names the kind in objects, or with "List" behind it, that of its lists.
func (r resource) typeMeta(suffix string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: r.GroupVersion().String(), Kind: string(r.kind) + suffix}
}

// fieldsOf returns what a field selector may ask about an object, as an API server has it
// (kubernetes/pkg/registry/core/*/strategy.go).
func fieldsOf(o source.Object) fields.Set {
	set := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
	switch o := o.(type) {
	case *corev1.Service:
		set["spec.clusterIP"], set["spec.type"] = o.Spec.ClusterIP, string(o.Spec.Type)
	case *corev1.Pod:
		set["spec.nodeName"], set["status.phase"] = o.Spec.NodeName, string(o.Status.Phase)
		set["status.podIP"] = o.Status.PodIP
		if ips := o.Status.PodIPs; len(ips) > 0 {
			set["status.podIP"] = ips[0].IP
		}
	}
	return set
}

// selectable reports whether a field selector may ask for a field of this kind.
func (r resource) selectable(field string) bool {
	switch field {
	case "metadata.name", "metadata.namespace":
		return true
	case "spec.clusterIP", "spec.type":
		return r.kind == source.Service
	case "spec.nodeName", "status.phase", "status.podIP":
		return r.kind == source.Pod
	}
	return false
}
