package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"fairlead.dev/fairlead/source"
)

const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// resource is a kind of object, and which of them are asked for.
type resource struct {
	schema.GroupVersionResource
	kind         source.Kind
	object       runtime.Object
	list         func() runtime.Object
	label, field string
	needed       bool // nothing begins without it
}

// resources are those that a node needs. What is left out by selectors is what resolve would leave out by the same labels.
func resources(node, proxyName string) []resource {
	services, slices := "!"+proxyNameLabel, "!"+corev1.IsHeadlessService
	if proxyName != "" {
		services = proxyNameLabel + "=" + proxyName
	}
	return []resource{
		{
			GroupVersionResource: corev1.SchemeGroupVersion.WithResource("services"), kind: source.Service, needed: true,
			object: &corev1.Service{}, list: func() runtime.Object { return &corev1.ServiceList{} },
			label: services, field: fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String(),
		}, {
			GroupVersionResource: discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), kind: source.EndpointSlice, needed: true,
			object: &discoveryv1.EndpointSlice{}, list: func() runtime.Object { return &discoveryv1.EndpointSliceList{} }, label: slices,
		}, {
			GroupVersionResource: corev1.SchemeGroupVersion.WithResource("nodes"), kind: source.Node,
			object: &corev1.Node{}, list: func() runtime.Object { return &corev1.NodeList{} },
			field: fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(),
		},
	}
}

// pods are asked for by those who name them to people.
func pods() resource {
	return resource{
		GroupVersionResource: corev1.SchemeGroupVersion.WithResource("pods"), kind: source.Pod,
		object: &corev1.Pod{}, list: func() runtime.Object { return &corev1.PodList{} },
	}
}

// lists gives what is there.
func (c *client) lists(ctx context.Context, r resource, o metav1.ListOptions) (runtime.Object, error) {
	o.LabelSelector, o.FieldSelector = r.label, r.field
	into := r.list()
	err := c.request(r).VersionedParams(&o, parameters).Do(ctx).Into(into)
	return into, err
}

// watches follows what changes.
func (c *client) watches(ctx context.Context, r resource, o metav1.ListOptions) (watch.Interface, error) {
	o.LabelSelector, o.FieldSelector, o.Watch = r.label, r.field, true
	return c.request(r).VersionedParams(&o, parameters).Watch(ctx)
}
