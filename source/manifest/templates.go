package manifest

import (
	"fmt"
	"maps"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// workloads reports how the kinds with a pod template are written.
var workloads = map[string]struct {
	version string
	make    func() source.Object
}{
	"Deployment":  {"apps/v1", func() source.Object { return new(appsv1.Deployment) }},
	"StatefulSet": {"apps/v1", func() source.Object { return new(appsv1.StatefulSet) }},
	"DaemonSet":   {"apps/v1", func() source.Object { return new(appsv1.DaemonSet) }},
	"ReplicaSet":  {"apps/v1", func() source.Object { return new(appsv1.ReplicaSet) }},
	"Job":         {"batch/v1", func() source.Object { return new(batchv1.Job) }},
	"CronJob":     {"batch/v1", func() source.Object { return new(batchv1.CronJob) }},
}

// How many Pods stand for a pod template: enough that one connects to another, and of a StatefulSet, whose pods
// policies can tell apart, as many as it has replicas.
const (
	leastPods = 2
	mostPods  = 16
)

// LoadTemplates reads path once as Load does, with Pods that stand for the pods of workloads (source.Template). They
// have no addresses.
func LoadTemplates(path string) ([]source.Object, []source.Problem, error) {
	return New(path).loadWith(true)
}

// mark marks a Pod without a status: it stands for the pod that a cluster makes of it.
func mark(o source.Object) {
	if p, ok := o.(*corev1.Pod); ok && p.Status.Phase == "" && len(p.Status.PodIPs) == 0 {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: string(source.Pod), Name: p.Name}}
	}
}

// podsOf returns the Pods that stand for the pod template of a workload, which the JSON object j is.
func podsOf(j []byte, version, kind string, words *strip.Words) (out []item) {
	k := workloads[kind]
	if version != k.version {
		return []item{{bad: refuse(identity(j, kind), []source.Problem{{Field: "apiVersion", Reason: WrongVersion,
			Message: fmt.Sprintf("%s of %s is not read: write apiVersion %s", kind, orNone(version), k.version)}})}}
	}
	o := k.make()
	if bad := unmarshal(j, o, kind); bad != nil {
		return []item{{bad: bad}}
	}
	t, field, first, n := template(o)
	for i := first; i < first+n; i++ {
		p := &corev1.Pod{Spec: t.Spec, ObjectMeta: metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(),
			GenerateName: o.GetGenerateName(), Labels: maps.Clone(t.Labels)}}
		setDefaults(p)
		if problems := validate(p); problems != nil {
			for n := range problems {
				if at := &problems[n]; at.Field != "metadata.name" && at.Field != "metadata.namespace" {
					at.Field = field + "." + at.Field
				}
			}
			key := source.Key{Kind: source.Kind(kind), Namespace: p.Namespace, Name: p.Name}
			return []item{{bad: refuse(key, problems)}}
		}
		maps.Copy(labels(p), ownLabels(o, i))
		words.Strip(p)
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: p.Name}}
		p.Name = fmt.Sprintf("%s/%s-%d", strings.ToLower(kind), p.Name, i)
		out = append(out, item{obj: p})
	}
	return out
}

// labels returns the labels of a pod, to be changed.
func labels(p *corev1.Pod) map[string]string {
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	return p.Labels
}

// template returns the pod template of a workload, the field where it is, and how many Pods stand for it, with the
// number of the first.
func template(o source.Object) (t *corev1.PodTemplateSpec, field string, first, n int) {
	field, n = "spec.template", leastPods
	switch o := o.(type) {
	case *appsv1.Deployment:
		t = &o.Spec.Template
	case *appsv1.StatefulSet:
		t = &o.Spec.Template
		if o.Spec.Ordinals != nil {
			first = int(o.Spec.Ordinals.Start)
		}
		if o.Spec.Replicas != nil {
			n = min(max(n, int(*o.Spec.Replicas)), mostPods)
		}
	case *appsv1.DaemonSet:
		t = &o.Spec.Template
	case *appsv1.ReplicaSet:
		t = &o.Spec.Template
	case *batchv1.Job:
		t = &o.Spec.Template
	case *batchv1.CronJob:
		t, field = &o.Spec.JobTemplate.Spec.Template, "spec.jobTemplate.spec.template"
	}
	return t, field, first, n
}

// ownLabels returns the labels that a controller adds to pod i of a workload, as far as they are known.
func ownLabels(o source.Object, i int) map[string]string {
	switch o := o.(type) {
	case *appsv1.StatefulSet:
		index := strconv.Itoa(i)
		return map[string]string{appsv1.StatefulSetPodNameLabel: o.Name + "-" + index, appsv1.PodIndexLabel: index}
	case *batchv1.Job:
		return map[string]string{batchv1.JobNameLabel: o.Name, "job-name": o.Name}
	}
	return nil
}
