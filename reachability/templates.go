package reachability

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// templateRange is where pods that stand for templates have addresses if no range of pods is known: a private one, as
// pods mostly have, so that policies for the internet, which except these, don't match them.
var templateRange = netip.MustParsePrefix("10.244.0.0/16")

// isTemplate reports whether o is a Pod that stands for a pod template.
func isTemplate(o source.Object) bool {
	v, ok := o.(*corev1.Pod)
	if !ok {
		return false
	}
	_, is := source.Template(v)
	return is
}

// withTemplates returns objects as they are, or, if there are pod templates among them, as a cluster would have them.
// ranges are those of its pods, in addition to the Nodes'.
func withTemplates(objects []source.Object, ranges []netip.Prefix) []source.Object {
	if !slices.ContainsFunc(objects, isTemplate) {
		return objects
	}
	running, used, hosts := map[string]bool{}, map[netip.Addr]bool{}, outside[:]
	for _, o := range objects {
		switch v := o.(type) {
		case *corev1.Pod:
			running[workloadKey(v)] = running[workloadKey(v)] || !isTemplate(v) && !ended(v)
			for _, a := range podAddresses(v) {
				used[a] = true
			}
		case *corev1.Node:
			hosts = nodeAddresses(v)
			for _, text := range v.Spec.PodCIDRs {
				if p, err := service.ParsePrefix(text); err == nil {
					ranges = append(slices.Clip(ranges), p)
				}
			}
		}
	}
	free := &vacancies{used: used}
	free.add(ranges)
	var out []source.Object
	var pods []*corev1.Pod
	for _, o := range objects {
		v, ok := o.(*corev1.Pod)
		switch {
		case !ok:
			out = append(out, o)
			continue
		case templateNames(v) != nil && running[workloadKey(v)]:
			continue
		case isTemplate(v):
			v = addressed(v, free, hosts)
		}
		out, pods = append(out, v), append(pods, v)
	}
	for _, s := range unsliced(objects) {
		out = append(out, endpointSlices(s, pods)...)
	}
	return out
}

// workloadKey returns a text that pods of a workload have in common.
func workloadKey(v *corev1.Pod) string { return v.Namespace + "/" + fmt.Sprint(workload(v.Labels)) }

// vacancies are addresses that nothing has.
type vacancies struct {
	used map[netip.Addr]bool
	next []netip.Addr // of each family
}

// add adds the first range of each family, templateRange if there is none.
func (f *vacancies) add(ranges []netip.Prefix) {
	for _, r := range append(slices.Clip(ranges), templateRange) {
		of := func(a netip.Addr) bool { return a.Is4() == r.Addr().Is4() }
		if r == templateRange && len(f.next) > 0 || slices.ContainsFunc(f.next, of) {
			continue
		}
		f.next = append(f.next, r.Masked().Addr().Next().Next()) // others may be the node's
	}
}

// addressed returns a pod with an address of each family; in the host's network, with those of a host.
func addressed(v *corev1.Pod, free *vacancies, hosts []netip.Addr) *corev1.Pod {
	of := *v
	for i, a := range free.next {
		if v.Spec.HostNetwork {
			if n := slices.IndexFunc(hosts, func(h netip.Addr) bool { return h.Is4() == a.Is4() }); n >= 0 {
				of.Status.PodIPs = append(of.Status.PodIPs, corev1.PodIP{IP: hosts[n].String()})
			}
			continue
		}
		for free.used[a] {
			a = a.Next()
		}
		free.next[i], free.used[a] = a, true
		of.Status.PodIPs = append(of.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	return &of
}

// unsliced returns the Services with a selector that have no EndpointSlice.
func unsliced(objects []source.Object) (out []*corev1.Service) {
	sliced := map[string]bool{}
	for _, o := range objects {
		if v, ok := o.(*discoveryv1.EndpointSlice); ok {
			sliced[v.Namespace+"/"+v.Labels[discoveryv1.LabelServiceName]] = true
		}
	}
	for _, o := range objects {
		if v, ok := o.(*corev1.Service); ok && len(v.Spec.Selector) > 0 && v.Spec.Type != corev1.ServiceTypeExternalName &&
			!sliced[v.Namespace+"/"+v.Name] {
			out = append(out, v)
		}
	}
	return out
}

// selectedBy reports whether a Service leads to a pod.
func selectedBy(s *corev1.Service, v *corev1.Pod) bool {
	for key, label := range s.Spec.Selector {
		if own, has := v.Labels[key]; !has || own != label {
			return false
		}
	}
	return v.Namespace == s.Namespace && !ended(v)
}

// targetOf returns the number of a Service's port at a pod, 0 if the pod has none of that name.
func targetOf(p *corev1.ServicePort, v *corev1.Pod) int32 {
	if p.TargetPort.Type == intstr.Int {
		return p.TargetPort.IntVal
	}
	for _, c := range containerPorts(v) {
		if c.Name == p.TargetPort.StrVal && c.Protocol == p.Protocol {
			return c.ContainerPort
		}
	}
	return 0
}

// endpointSlices returns what a cluster would have for a Service: one for each address of the pods that it selects.
func endpointSlices(s *corev1.Service, pods []*corev1.Pod) (out []source.Object) {
	ready := true
	for _, v := range pods {
		if !selectedBy(s, v) {
			continue
		}
		var ports []discoveryv1.EndpointPort
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			if target := targetOf(p, v); target != 0 {
				ports = append(ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &target})
			}
		}
		for _, a := range podAddresses(v) {
			e := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv6, Ports: ports}
			if a.Is4() {
				e.AddressType = discoveryv1.AddressTypeIPv4
			}
			e.Namespace, e.Name = s.Namespace, fmt.Sprintf("%s-%d", s.Name, len(out))
			e.Labels = map[string]string{discoveryv1.LabelServiceName: s.Name}
			e.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{a.String()}, NodeName: &v.Spec.NodeName,
				Conditions: discoveryv1.EndpointConditions{Ready: &ready},
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: v.Namespace, Name: v.Name}}}
			out = append(out, e)
		}
	}
	return out
}

// Unmatched returns what matches nothing that is known: selectors of policies, and of Services without EndpointSlices,
// and names of Services' ports. It is for sources that may not hold all of a cluster.
func (c *Cluster) Unmatched() []source.Problem {
	out, services := c.resolver.Unmatched(), unsliced(c.Names)
	for _, o := range c.Names {
		s, ok := o.(*corev1.Service)
		if !ok || len(s.Spec.Selector) == 0 {
			continue
		}
		add := func(field, format string, args ...any) {
			out = append(out, source.Problem{Object: source.KeyOf(s), Reason: policy.MatchesNothing, Field: field,
				Message: fmt.Sprintf(format, args...)})
		}
		pods := c.selectedBy(s)
		if len(pods) == 0 && slices.Contains(services, s) {
			add("spec.selector", "the source has no pod that it matches: nothing is behind the Service")
		}
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			if slices.ContainsFunc(pods, isTemplate) && !slices.ContainsFunc(pods, func(o source.Object) bool {
				return targetOf(p, o.(*corev1.Pod)) != 0
			}) {
				add(fmt.Sprintf("spec.ports[%d].targetPort", i), "no container of its pods has a port named %q of %s: nothing "+
					"is behind the Service's port", p.TargetPort.StrVal, p.Protocol)
			}
		}
	}
	return out
}

// selectedBy returns the pods that a Service leads to.
func (c *Cluster) selectedBy(s *corev1.Service) (out []source.Object) {
	for _, o := range c.Names {
		if v, ok := o.(*corev1.Pod); ok && selectedBy(s, v) {
			out = append(out, v)
		}
	}
	return out
}

// templateNames returns the names of the workload whose pod template a pod stands for, such as shop/deployment/web, and
// shop/web; one of a StatefulSet also goes by shop/db-0. There are none of other pods.
func templateNames(v *corev1.Pod) []string {
	k, is := source.Template(v)
	if !is || k.Kind == source.Pod {
		return nil
	}
	kind := strings.ToLower(string(k.Kind)) + "/"
	names := []string{k.Namespace + "/" + kind + k.Name, k.Namespace + "/" + k.Name}
	if kind == statefulSet {
		names = append(names, k.Namespace+"/"+strings.TrimPrefix(v.Name, kind))
	}
	return names
}

// statefulSet begins the names of Pods that stand for the template of a StatefulSet.
const statefulSet = "statefulset/"

// memberName returns a pod's name; of one that stands for a pod template that of its workload, unless policies may tell
// the workload's pods apart.
func memberName(v *corev1.Pod) string {
	if names := templateNames(v); names != nil && !strings.HasPrefix(v.Name, statefulSet) {
		return names[0]
	}
	return v.Namespace + "/" + v.Name
}

// templateOf returns the workload of a member of a group, and whether a pod template is what stands for its pods.
func templateOf(member string) (string, bool) {
	if strings.Contains(member, "/"+statefulSet) {
		member = member[:strings.LastIndex(member, "-")]
	}
	return member, strings.Count(member, "/") > 1
}
