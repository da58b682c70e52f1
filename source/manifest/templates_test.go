package manifest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

const podTemplate = `{metadata: {labels: {app: x}}, spec: {serviceAccountName: s, hostNetwork: true, containers: ` +
	`[{name: c, image: i, ports: [{name: http, containerPort: 80}]}]}}`

// workload returns a workload as YAML.
func workload(version, kind, name, spec string) string {
	return fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata: {name: %s}\nspec: %s\n", version, kind, name, spec)
}

// loadText returns what a file with that text says.
func loadText(t *testing.T, text string) ([]source.Object, []source.Problem) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "f.yaml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	objects, problems, err := LoadTemplates(file)
	must(t, err)
	return objects, problems
}

func TestLoadTemplates(t *testing.T) {
	selector := "selector: {matchLabels: {app: x}}, template: " + podTemplate
	for _, w := range []struct{ text, names, labels string }{
		{workload("apps/v1", "Deployment", "x", "{"+selector+"}"), "deployment/x-0 deployment/x-1", "app=x"},
		{workload("apps/v1", "DaemonSet", "x", "{"+selector+"}"), "daemonset/x-0 daemonset/x-1", "app=x"},
		{workload("apps/v1", "ReplicaSet", "x", "{"+selector+"}"), "replicaset/x-0 replicaset/x-1", "app=x"},
		{workload("apps/v1", "StatefulSet", "x", "{serviceName: x, ordinals: {start: 4}, replicas: 3, "+selector+"}"),
			"statefulset/x-4 statefulset/x-5 statefulset/x-6",
			"app=x apps.kubernetes.io/pod-index=4 statefulset.kubernetes.io/pod-name=x-4"},
		{workload("batch/v1", "Job", "x", "{template: "+podTemplate+"}"), "job/x-0 job/x-1",
			"app=x batch.kubernetes.io/job-name=x job-name=x"},
		{workload("batch/v1", "CronJob", "x", "{schedule: '@daily', jobTemplate: {spec: {template: "+podTemplate+"}}}"),
			"cronjob/x-0 cronjob/x-1", "app=x"},
		{workload("example.com/v1", "Deployment", "x", "{}"), "", ""},
	} {
		for _, text := range []string{w.text,
			"apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(strings.TrimSpace(w.text), "\n", "\n  ")} {
			objects, problems := loadText(t, text)
			if w.names != "" && problems != nil {
				t.Errorf("%s: %v", text, problems)
			}
			var names []string
			for _, o := range objects {
				p := o.(*corev1.Pod)
				if of, is := source.Template(p); !is || of.Name != "x" || of.Namespace != "default" ||
					!p.Spec.HostNetwork || p.Spec.Containers[0].Ports[0].Protocol != corev1.ProtocolTCP {
					t.Errorf("%s: %+v", text, p)
				}
				names = append(names, p.Name)
			}
			if got := strings.Join(names, " "); got != w.names {
				t.Errorf("%s: Pods %q, want %q", text, got, w.names)
			} else if got != "" && labelText(objects[0]) != w.labels {
				t.Errorf("%s: labels %q, want %q", text, labelText(objects[0]), w.labels)
			}
		}
	}
}

// labelText returns an object's labels, sorted.
func labelText(o source.Object) string {
	var l []string
	for k, v := range o.GetLabels() {
		l = append(l, k+"="+v)
	}
	slices.Sort(l)
	return strings.Join(l, " ")
}

// What is wrong with a workload is named with its field, and keeps it from being read.
func TestFaultsOfTemplates(t *testing.T) {
	for _, w := range []struct{ text, reason, want string }{
		{workload("apps/v1", "Deployment", "x", "{template: {metadata: {lables: {}}}}"), UnknownField,
			"spec.template.metadata.lables: there is no such field: did you mean labels?"},
		{workload("apps/v1", "Deployment", "x", "{template: {spec: {containers: [{name: c, ports: [{containerPort: 0}]}]}}}"),
			Invalid, "Deployment default/x: spec.template.spec.containers[0].ports[0].containerPort"},
		{workload("batch/v1", "CronJob", "x", "{jobTemplate: {spec: {template: {metadata: {labels: {a: '-'}}}}}}"), Invalid,
			"CronJob default/x: spec.jobTemplate.spec.template.metadata.labels[a]"},
		{workload("extensions/v1beta1", "Deployment", "x", "{}"), WrongVersion, "write apiVersion apps/v1"},
		{workload("apps/v1", "Deployment", "x", "{") + "a: [", Syntax, "f.yaml:1"},
	} {
		objects, problems := loadText(t, w.text)
		if len(objects) > 0 || len(problems) == 0 || problems[0].Reason != w.reason ||
			!strings.Contains(problems[0].String(), w.want) {
			t.Errorf("%s: %v, %v; want %q", w.text, objects, problems, w.want)
		}
	}
}

// Only who asks for pod templates gets them: an agent follows what a cluster runs.
func TestLoadIgnoresTemplates(t *testing.T) {
	text := workload("apps/v1", "Deployment", "x", "{template: "+podTemplate+"}") + "---\napiVersion: v1\nkind: Pod\n" +
		"metadata: {name: p}\nspec: {containers: [{name: c}]}\n"
	file := filepath.Join(t.TempDir(), "f.yaml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	objects, problems, err := Load(file)
	must(t, err)
	if len(objects) != 1 || len(problems) != 1 || problems[0].Reason != KindNotRead {
		t.Fatalf("%v, %v", objects, problems)
	}
	if of, is := source.Template(objects[0].(*corev1.Pod)); is {
		t.Errorf("Pod p stands for %s", of)
	}
	objects, _ = loadText(t, text)
	if of, is := source.Template(objects[2].(*corev1.Pod)); !is || of.String() != "Pod default/p" {
		t.Errorf("Pod p stands for %s, %v", of, is)
	}
}
