package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

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
	needed       bool          // nothing begins without it, or no policies do
	policies     bool          // what policies decide waits for it, and nothing else does
	optional     bool          // a server may not know it
	custom       bool          // a CustomResourceDefinition makes a server know it
	older        string        // a version with the same fields, for a server that doesn't serve the newer; "": none
	retry        time.Duration // how long to wait at most before a server that doesn't know it is asked for it again
}

// resources are those that a node needs. What is left out by selectors is what resolve would leave out by the same
// labels. Without a proxyName, Services of other proxies count: their ClusterIPs are allocated.
func resources(node, proxyName string) []resource {
	services, slices := "", "!"+corev1.IsHeadlessService
	if proxyName != "" {
		services = proxyNameLabel + "=" + proxyName
	}
	list := []resource{
		{
			GroupVersionResource: corev1.SchemeGroupVersion.WithResource("services"), kind: source.Service, needed: true,
			object: &corev1.Service{}, list: func() runtime.Object { return &corev1.ServiceList{} },
			label: services, field: fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String(),
		}, {
			GroupVersionResource: discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), kind: source.EndpointSlice,
			needed: true,
			object: &discoveryv1.EndpointSlice{}, list: func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
			label: slices,
		}, {
			GroupVersionResource: corev1.SchemeGroupVersion.WithResource("nodes"), kind: source.Node,
			object: &corev1.Node{}, list: func() runtime.Object { return &corev1.NodeList{} },
			field: fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(),
		},
	}
	if proxyName != "" {
		return list
	}
	return append(list, resource{
		GroupVersionResource: networkingv1.SchemeGroupVersion.WithResource("servicecidrs"), kind: source.ServiceCIDR,
		object: &networkingv1.ServiceCIDR{}, list: func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		optional: true, retry: unserved,
	})
}

// policyResources are what network policies need besides. ClusterNetworkPolicies may come to a server at any time:
// their CustomResourceDefinition is installed then, and followed.
func policyResources() []resource {
	r := pods()
	r.needed = true
	return []resource{
		{
			GroupVersionResource: corev1.SchemeGroupVersion.WithResource("namespaces"), kind: source.Namespace, needed: true,
			object: &corev1.Namespace{}, list: func() runtime.Object { return &corev1.NamespaceList{} },
		}, r, {
			GroupVersionResource: networkingv1.SchemeGroupVersion.WithResource("networkpolicies"), kind: source.NetworkPolicy,
			needed: true,
			object: &networkingv1.NetworkPolicy{}, list: func() runtime.Object { return &networkingv1.NetworkPolicyList{} },
		}, {
			GroupVersionResource: cnpv1.Resource("clusternetworkpolicies").WithVersion(cnpv1.GroupVersion.Version),
			kind:                 source.ClusterNetworkPolicy,
			needed:               true, optional: true, custom: true, retry: time.Minute,
			older:  v1alpha2.GroupVersion.Version,
			object: &cnpv1.ClusterNetworkPolicy{}, list: func() runtime.Object { return &cnpv1.ClusterNetworkPolicyList{} },
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

// largest is how many bytes a list may have in one answer, and pageSize how many objects a page has at first, where a
// list is larger than that.
const (
	largest  = 16 << 20
	pageSize = 100
)

// byVersion calls do for the newest version of r that the server serves, and returns that and the error of do.
func (r resource) byVersion(do func(resource) error) (version string, err error) {
	version = r.Version
	if err = do(r); r.older != "" && reasonOf(err) == NotServed {
		r.Version = r.older
		if failed := do(r); reasonOf(failed) != NotServed {
			return r.older, failed
		}
	}
	return version, err
}

// each lists, of one namespace or of all, and calls visit for each object.
func (c *client) each(ctx context.Context, r resource, namespace string, o metav1.ListOptions,
	visit func(source.Object)) (version string, err error) {
	_, err = r.byVersion(func(r resource) error {
		version, err = c.pages(ctx, r, namespace, o, visit)
		return err
	})
	return version, err
}

// pages lists one version of a kind. A list that is too large for one answer comes in pages, so that no more of it is
// in memory at a time than visit keeps and one page.
func (c *client) pages(ctx context.Context, r resource, namespace string, o metav1.ListOptions,
	visit func(source.Object)) (version string, err error) {
	o.LabelSelector, o.FieldSelector = r.label, r.field
	ctx = klog.NewContext(ctx, logr.Discard()) // errors are returned
	paged := false
	for {
		list := r.list()
		err := c.request(r).NamespaceIfScoped(namespace, namespace != "").VersionedParams(&o,
			parameters).Do(ctx).Into(list)
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) && (!paged || o.Limit > 1) {
			if o.Limit = max(1, o.Limit/4); !paged {
				o.Limit = pageSize
				o.ResourceVersion, o.ResourceVersionMatch = "", "" // a server's cache gives no pages of version 0
			}
			paged = true
			continue
		}
		if err == nil && list.(metav1.ListInterface).GetResourceVersion() == "" { // client-go accepts any known kind
			err = fmt.Errorf("the answer is not a list of %s", r.Resource)
		}
		if err != nil {
			return "", err
		}
		// With copies: an item of the list itself would keep all of the page in memory.
		if err := meta.EachListItemWithAlloc(list, func(item runtime.Object) error {
			visit(item.(source.Object))
			return nil
		}); err != nil {
			return "", err
		}
		m := list.(metav1.ListInterface)
		if o.Continue = m.GetContinue(); o.Continue == "" {
			return m.GetResourceVersion(), nil
		}
		o.ResourceVersion, o.ResourceVersionMatch = "", ""
	}
}

// watches follows what changes, of the version that is returned.
func (c *client) watches(ctx context.Context, r resource, o metav1.ListOptions) (w watch.Interface, version string,
	err error) {
	o.LabelSelector, o.FieldSelector, o.Watch = r.label, r.field, true
	version, err = r.byVersion(func(r resource) error {
		w, err = c.request(r).VersionedParams(&o, parameters).Watch(ctx)
		return err
	})
	return w, version, err
}
